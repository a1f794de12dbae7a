"""Tasks that tag every word: named entities of CoNLL 2003, and a user's own.

Tags are in IOB2: B-PER begins an entity, I-PER continues it, O is outside. A word is classified at its first token.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from datasets import ClassLabel, Dataset
from tokenizers.pre_tokenizers import ByteLevel

from pinscher.errors import InputError
from pinscher.train import formats, metrics
from pinscher.train.batches import IGNORED
from pinscher.train.tasks.task import Outputs, Reader, Task, add, write_lines

OUTSIDE = "O"
TAG = re.compile(r"O|[BI]-.+")
CONLL = (OUTSIDE, "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC", "B-MISC", "I-MISC")


@dataclass(frozen=True, kw_only=True)
class Tokens(Task):
    """Tags words with entities.

    Args:
        tokens_column: a list of words.
        tags_column: a tag for each word, by name or by id.

    Entities cannot be read from ids alone: a column of ids needs `names`, or its own list of names.
    """

    tokens_column: str = "tokens"
    tags_column: str = "ner_tags"
    max_length: int = 256  # CoNLL's longest sentences have more than 128 tokens
    main: str = "f1"

    kind: ClassVar[str] = "tokens"
    architecture: ClassVar[str] = "AutoModelForTokenClassification"
    text_fields: ClassVar[tuple[str, ...]] = ("tokens_column",)
    label_field: ClassVar[str] = "tags_column"

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.tokens_column, self.tags_column)

    def reader(self, suffix: str) -> Reader | None:
        return _conll if suffix in (".txt", ".conll") else None

    def check(self, rows: Dataset, where: str) -> None:
        super().check(rows, where)
        for column in self.columns:
            if not hasattr(rows.features[column], "feature"):
                raise InputError(f"{where}: column {column!r} does not hold lists, one entry for each word.")
        tags = self._tags(rows, where)
        for i, (words, given) in enumerate(zip(rows[self.tokens_column][:], tags, strict=True), start=1):
            if words is None or not all(isinstance(word, str) for word in words):
                raise InputError(f"{where}: row {i} has something other than words in column {self.tokens_column!r}.")
            if len(words) != len(given):
                raise InputError(f"{where}: row {i} has {len(words)} words but {len(given)} tags.")
        if not any(tags):
            raise InputError(f"{where} has no words.")

    def labels(self, rows: Dataset) -> tuple[str, ...]:
        known = self.names or self._class_names(rows)
        if known:
            return known
        found = {tag for given in self._tags(rows, "the training data") for tag in given}
        return (OUTSIDE, *sorted(found - {OUTSIDE}))

    def features(self, rows: Dataset, tokenizer: Any, labels: Sequence[str], training: bool) -> Dataset:
        """One for each row; `words` holds the number of a word at its first token.

        Sets add_prefix_space of a byte-level tokenizer (RoBERTa), so that the stored model reads words in the same way.
        """
        split_(tokenizer)
        words = [list(row) for row in rows[self.tokens_column][:]]
        encoded = tokenizer(words, is_split_into_words=True, truncation=True, max_length=self.max_length)
        columns = {name: encoded[name] for name in tokenizer.model_input_names if name in encoded}
        columns["words"] = [_firsts(encoded.word_ids(i)) for i in range(len(words))]
        ids = {name: i for i, name in enumerate(labels)}
        columns["labels"] = []
        for i, (given, firsts) in enumerate(zip(self._tags(rows, "the data"), columns["words"], strict=True), start=1):
            unknown = next((tag for tag in given if tag not in ids), None)
            if unknown is not None:
                raise InputError(
                    f"row {i} has the tag {unknown!r}, which is none of the {len(labels)} to be learnt "
                    f"({', '.join(labels[:10])}): the training rows must show every tag."
                )
            columns["labels"].append([IGNORED if word is None else ids[given[word]] for word in firsts])
        features = Dataset.from_dict({**columns, "row": list(range(len(words)))})
        if not training:
            return features
        # The loss of a batch without any word would be NaN.
        return features.select([i for i, firsts in enumerate(columns["words"]) if any(w is not None for w in firsts)])

    def collator(self, tokenizer: Any) -> Any:
        return Sentences(tokenizer)

    def answers(self, outputs: Outputs, features: Dataset, rows: Dataset, labels: Sequence[str]) -> list[Any]:
        """A tag for each word; O for words that max_length cut off or that have no token."""
        said = [[OUTSIDE] * len(words) for words in rows[self.tokens_column][:]]
        for (logits,), feature in zip(outputs, features.select_columns(["row", "words"]), strict=True):
            best = logits.argmax(-1)
            for place, word in enumerate(feature["words"]):
                if word is not None:
                    said[feature["row"]][word] = labels[int(best[place])]
        return said

    def scores(self, answers: Sequence[Any], rows: Dataset) -> dict[str, float]:
        return metrics.entities(answers, self._tags(rows, "the data"))

    def write(self, answers: Sequence[Any], rows: Dataset, folder: Path, split: str) -> Path:
        """Writes the columns that conlleval reads: word, true tag, predicted tag; an empty line between sentences."""
        lines: list[str] = []
        for words, true, said in zip(rows[self.tokens_column][:], self._tags(rows, split), answers, strict=True):
            lines += [""] if lines else []
            # A blank inside a word would be read as the end of a column.
            lines += [f"{'_'.join(w.split()) or '_'} {t} {s}" for w, t, s in zip(words, true, said, strict=True)]
        return write_lines(folder / f"predictions_{split}.txt", lines)

    def _class_names(self, rows: Dataset) -> tuple[str, ...]:
        """The names of the ids, if the column stores them."""
        entry = getattr(rows.features[self.tags_column], "feature", None)
        return tuple(entry.names) if isinstance(entry, ClassLabel) else ()

    def _tags(self, rows: Dataset, where: str) -> list[list[str]]:
        """Each row's tags by name."""
        by_id = dict(enumerate(self._class_names(rows) or self.names))
        found: dict[Any, str] = {}
        tags = [list(given or []) for given in rows[self.tags_column][:]]
        for i, given in enumerate(tags, start=1):
            for tag in given:
                if tag not in found:
                    found[tag] = self._name(tag, by_id, f"{where}: row {i}")
        return [[found[tag] for tag in given] for given in tags]

    def _name(self, tag: Any, by_id: dict[int, str], where: str) -> str:
        if isinstance(tag, int) and not by_id:
            raise InputError(
                f"{where} has the tag {tag}, an id without a name: entities cannot be told from ids. Store the names "
                "(O, B-PER, I-PER, …) instead."
            )
        name = by_id.get(tag) if isinstance(tag, int) else tag
        if name is None:
            raise InputError(f"{where} has the tag {tag}: the ids of {len(by_id)} tags are 0 to {len(by_id) - 1}.")
        if not isinstance(name, str) or not TAG.fullmatch(name):
            raise InputError(
                f"{where} has the tag {name!r}: tags must be O, or B- or I- with the kind of entity (IOB2)."
            )
        return name


class Sentences:
    """Pads a batch to its longest sentence, on the right, without columns that the model does not take."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __call__(self, features: list[dict[str, Any]]) -> Any:
        names = [name for name in self.tokenizer.model_input_names if name in features[0]]
        sentences = [{name: feature[name] for name in names} for feature in features]
        batch = self.tokenizer.pad(sentences, padding=True, padding_side="right", return_tensors="pt")
        length = batch["input_ids"].shape[1]
        labels = [[*f["labels"], *[IGNORED] * (length - len(f["labels"]))] for f in features]
        batch["labels"] = torch.tensor(labels)
        return batch


def split_(tokenizer: Any) -> None:
    """Ensures that words given one by one are tokenised like those of a text; changes the tokenizer if necessary.

    Raises:
        InputError: if the tokenizer cannot do that.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(f"tags of words need a fast tokenizer, and {type(tokenizer).__name__} is not one.")
    if _keeps_words(tokenizer):
        return
    before = tokenizer.backend_tokenizer.pre_tokenizer
    if isinstance(before, ByteLevel):
        before.add_prefix_space = True
        after = tokenizer.backend_tokenizer.post_processor
        if hasattr(after, "add_prefix_space"):
            after.add_prefix_space = True  # otherwise it would count the added space as a part of the word
        tokenizer.add_prefix_space = tokenizer.init_kwargs["add_prefix_space"] = True  # in the stored copy too
    if not _keeps_words(tokenizer):
        raise InputError(
            f"{type(tokenizer).__name__} reads words that are given one by one as if no space stood between them. Load "
            "it with AutoTokenizer.from_pretrained(…, add_prefix_space=True), or use a model with another tokenizer."
        )


def _keeps_words(tokenizer: Any) -> bool:
    apart, text = (tokenizer(x, is_split_into_words=isinstance(x, list))["input_ids"] for x in (["a", "b"], "a b"))
    return bool(apart == text)


def _firsts(words: Sequence[int | None]) -> list[int | None]:
    """The number of the word at its first token, None elsewhere."""
    return [word if i == 0 or words[i - 1] != word else None for i, word in enumerate(words)]


# ------------------------------------------------------------ CoNLL's files


def _conll(text: str, where: str) -> formats.Columns:
    columns: formats.Columns = {"tokens": [], "ner_tags": []}
    tokens: list[str] = []
    tags: list[str] = []
    for number, line in enumerate([*formats.lines_of(text), ""], 1):
        fields = [field for field in re.split("[ \t]+", line) if field]  # str.split would cut at any Unicode space
        if fields and not fields[0].startswith("-DOCSTART-"):
            if len(fields) < 2 or not re.fullmatch(r"O|[A-Z]-\S+", fields[-1]):
                raise InputError(
                    f"{where}, line {number}: no CoNLL line; give a token, its columns and last a tag such as B-PER."
                )
            tokens.append(fields[0])
            tags.append(fields[-1])
        elif tokens:
            columns["tokens"].append(tokens)
            columns["ner_tags"].append(_iob2(tags))
            tokens, tags = [], []
    return columns


def _iob2(tags: Sequence[str]) -> list[str]:
    """IOB1 (an entity begins with I- unless it follows one of its kind) to IOB2 (with B- always), which stays as is."""
    pairs = zip(["O", *tags], tags, strict=False)
    return [f"B-{tag[2:]}" if tag[:2] == "I-" and last[1:] != tag[1:] else tag for last, tag in pairs]


# ------------------------------------------------------------ tasks

# A copy of eriktks/conll2003, which is a script, and `datasets` no longer runs scripts.
add(Tokens(name="conll2003", hub=("lhoestq/conll2003",), test_splits=("test",), names=CONLL))
add(Tokens(name="tokens", test_splits=("test",)))
