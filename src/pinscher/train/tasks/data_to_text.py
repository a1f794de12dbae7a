"""Tasks that describe facts in text: E2E, DART, WebNLG, and a user's own pairs of source and target.

A decoder reads `source separator` and writes `target end`:

    name : The Eagle | eatType : pub <bos> The Eagle is a pub. <eos>

Rows are grouped: one for each distinct source, with all its references. Training sees one example for each reference;
the test sees each source once. Settings follow PST's script (beam 10, length penalty 0.8, no 4-gram twice).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal
from xml.etree import ElementTree

import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, NoRepeatNGramLogitsProcessor

from pinscher.errors import InputError
from pinscher.models.inputs import evaluating
from pinscher.train import formats, metrics
from pinscher.train.batches import IGNORED
from pinscher.train.tasks.task import Reader, Task, add, write_lines

SOURCE, REFERENCES = "source", "references"  # the columns of grouped rows
VARIANTS = {"meaning_representation": "mr", "human_reference": "ref"}  # as E2E's own files have it


def of_text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not text")
    return value.strip()


def of_fields(value: Any) -> str:
    """`name[The Eagle], eatType[pub]` as `name : The Eagle | eatType : pub`.

    A value may contain anything, also commas and bars, and is not changed; only its brackets must match.
    """
    text = of_text(value)
    fields: list[tuple[str, str]] = []
    depth, start, key = 0, 0, ""
    for at, sign in enumerate(text):
        if sign == "[":
            if depth == 0:
                key, start = text[start:at].removeprefix("," if fields else "").strip(), at + 1
            depth += 1
        elif sign == "]":
            depth -= 1
            if depth == 0:
                fields.append((key, text[start:at].strip()))
                start = at + 1
    if depth or not fields or start < len(text) or any(not key or set(key) & set("[],") for key, _ in fields):
        raise ValueError(f"{text[:80]!r} is not of the form 'name[The Eagle], eatType[pub]'")
    return " | ".join(f"{key} : {value}".rstrip() for key, value in fields)


def of_triples(value: Any) -> str:
    """Triples as `s : p : o | s : p : o`, from lists [s, p, o] (DART) or texts "s | p | o" (WebNLG)."""
    return " | ".join(" : ".join(part.strip() for part in triple) for triple in _triples(value))


def _triples(value: Any) -> Iterator[Sequence[str]]:
    if isinstance(value, dict):  # {"mtriple_set": [[…]]}, or {"subject": s, "property": p, "object": o}
        value = list(value.values())
    if _is_triple(value):
        yield value.split(" | ", 2)  # further bars are part of the object
    elif not isinstance(value, list):
        raise ValueError(f"{value!r} is not a triple 's | p | o'")
    elif len(value) == 3 and all(isinstance(part, str) for part in value) and not all(map(_is_triple, value)):
        yield value
    else:
        for each in value:
            yield from _triples(each)


def _is_triple(value: Any) -> bool:
    return isinstance(value, str) and value.count(" | ") >= 2


def _texts(value: Any) -> list[str]:
    """References in any form: a text, a list, or {"text": …} (DART, WebNLG). None is skipped: DART's test has one."""
    if isinstance(value, dict):
        return _texts(value.get("text"))
    if isinstance(value, list):
        return [text for each in value for text in _texts(each)]
    return [] if value is None else [of_text(value)]


LINEAR: dict[str, Callable[[Any], str]] = {"plain": of_text, "e2e": of_fields, "triples": of_triples}


@dataclass(frozen=True, kw_only=True)
class Text(Task):
    """Generates a text from a source of facts.

    Source and target share max_length tokens. Room for the generated target (max_new_tokens) is reserved, so a source
    that is too long is cut at its end, in training and test alike. A target may fill all tokens that its source leaves;
    a longer one is cut and has no <eos>, so that the model does not learn to stop mid-sentence. A warning counts both.

    Args:
        source_column: the facts.
        target_column: the reference texts: one for each row, or several.
        style: format of the source, and scoring of answers: plain, e2e or triples.
        beams: number of beams of the search.
        length_penalty: above 0, favours long texts.
        no_repeat_ngram: no sequence of this many tokens occurs twice in a text; 0 allows all.
        max_new_tokens: maximum number of tokens of an answer.
        bleurt: folder of a BLEURT checkpoint; without one, BLEURT is not computed.
    """

    main: str = "bleu"
    test_splits: tuple[str, ...] = ("test",)
    max_length: int = 512
    source_column: str = SOURCE
    target_column: str = "target"
    style: Literal["plain", "e2e", "triples"] = "plain"
    beams: int = 10
    length_penalty: float = 0.8
    no_repeat_ngram: int = 4
    max_new_tokens: int = 64
    bleurt: str | None = None

    kind: ClassVar[str] = "causal-lm"
    architecture: ClassVar[str] = "AutoModelForCausalLM"
    generates: ClassVar[bool] = True
    judged_by_loss: ClassVar[bool] = True
    text_fields: ClassVar[tuple[str, ...]] = ("source_column",)
    label_field: ClassVar[str] = "target_column"

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.source_column, self.target_column)

    def _is_grouped(self, rows: Dataset) -> bool:
        return set(rows.column_names) == {SOURCE, REFERENCES} != set(self.columns)

    def check(self, rows: Dataset, where: str) -> None:
        if not self._is_grouped(rows):
            super().check(rows, where)

    def reader(self, suffix: str) -> Reader | None:
        if suffix in (".json", ".jsonl"):
            return partial(_dart_json, suffix=suffix)
        return {".csv": _e2e_csv, ".xml": _dart_xml if self.name == "dart" else _webnlg}.get(suffix)

    def normalized(self, rows: Dataset) -> Dataset:
        """One row for each distinct source, linearised, with all its references, in order of first appearance.

        Rows without the columns stay as they are (`check` names what is missing); bad rows raise InputError.
        """
        old = {VARIANTS[name]: name for name in self.columns if name in VARIANTS and name not in rows.column_names}
        rows = rows.rename_columns({name: new for name, new in old.items() if name in rows.column_names})
        if self._is_grouped(rows) or not set(self.columns) <= set(rows.column_names) or len(rows) == 0:
            return rows
        groups: dict[str, tuple[int, list[str]]] = {}  # source: its first row, its references
        for number, (facts, said) in enumerate(zip(*(rows.with_format(None)[c] for c in self.columns), strict=True), 1):
            try:
                source, texts = LINEAR[self.style](facts), _texts(said)
            except ValueError as error:
                raise InputError(f"row {number}: {error}.") from None
            if not source or said is None or not all(texts):
                empty = self.target_column if source else self.source_column
                raise InputError(f"row {number} has nothing in column {empty!r}.")
            groups.setdefault(source, (number, []))[1].extend(texts)
        for number, texts in groups.values():  # only now: another row may have had a reference
            if not texts:
                raise InputError(f"row {number} has no text in column {self.target_column!r}.")
        return Dataset.from_dict({SOURCE: list(groups), REFERENCES: [texts for _, texts in groups.values()]})

    def features(self, rows: Dataset, tokenizer: Any, labels: Sequence[str], training: bool) -> Dataset:
        """Examples with labels, one for each reference; if training is False, one prompt for each row."""
        front, separator, end = _marks(tokenizer)
        room = self.max_length - self.max_new_tokens - len(front) - 1
        if room < 1:
            raise InputError(f"max_length {self.max_length} is too little: {self.max_new_tokens} new tokens need more.")
        sources = tokenizer(list(rows[SOURCE][:]), add_special_tokens=False)["input_ids"]
        prompts = [[*front, *source[:room], separator] for source in sources]
        _warn_of_cut("sources", [len(source) > room for source in sources])
        if not training:
            return Dataset.from_dict({"input_ids": prompts, "row": list(range(len(rows)))})
        pairs = [(row, text) for row, texts in enumerate(rows[REFERENCES][:]) for text in texts]
        targets = tokenizer([text for _, text in pairs], add_special_tokens=False)["input_ids"]
        prompts = [prompts[row] for row, _ in pairs]
        both = [(p, [*target, end][: self.max_length - len(p)]) for p, target in zip(prompts, targets, strict=True)]
        _warn_of_cut("targets", [said[-1] != end for _, said in both])
        columns = {
            "input_ids": [prompt + said for prompt, said in both],
            "attention_mask": [[1] * len(prompt + said) for prompt, said in both],
            "labels": [[IGNORED] * len(prompt) + said for prompt, said in both],
        }
        return Dataset.from_dict({**columns, "row": [row for row, _ in pairs]})

    def collator(self, tokenizer: Any) -> Any:
        return Padding(tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id)

    def generate(self, model: Any, tokenizer: Any, features: Dataset, batch_size: int) -> list[Any]:
        """The generated text for each prompt, in the order of the features. The model is not changed."""
        prompts = [list(ids) for ids in features["input_ids"]]
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))  # the most expensive batch first
        need = len(prompts[order[0]]) + self.max_new_tokens
        places = getattr(model.config, "max_position_embeddings", None)
        if places is not None and need > places:
            raise InputError(f"prompt and answer take {need} tokens, the model only {places}: lower max_length.")
        collate = self.collator(tokenizer)
        search: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "do_sample": False, "use_cache": True}
        if self.beams > 1:  # early stopping would return the first texts that end, however bad: worse than no beams
            search |= {"num_beams": self.beams, "length_penalty": self.length_penalty, "early_stopping": False}
        search |= {"pad_token_id": collate.pad, "eos_token_id": tokenizer.eos_token_id}
        settings = GenerationConfig(**search)  # type: ignore[no-untyped-call]
        said = [""] * len(prompts)
        own = model.generation_config
        model.generation_config = settings  # otherwise the checkpoint's own would fill in what these leave open
        try:
            with evaluating(model), torch.no_grad():
                for start in range(0, len(order), batch_size):
                    some = order[start : start + batch_size]
                    batch = collate([{"input_ids": prompts[i]} for i in some])
                    width = batch["input_ids"].shape[1]
                    tokens = model.generate(
                        **{name: value.to(model.device) for name, value in batch.items()},
                        generation_config=settings,
                        logits_processor=[NoRepeat(self.no_repeat_ngram, width)] if self.no_repeat_ngram else [],
                    )
                    for i, ids in zip(some, tokens[:, width:], strict=True):
                        text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
                        said[i] = text.strip()
        finally:
            model.generation_config = own
        return said

    def scores(self, answers: Sequence[Any], rows: Dataset) -> dict[str, float]:
        said, references = list(answers), list(rows[REFERENCES][:])
        if self.style == "e2e":
            return metrics.e2e_scores(said, references)
        if self.style == "triples":
            return metrics.triples_scores(said, references, self.bleurt)
        return {"bleu": metrics.bleu(said, references, lowercase=False), **metrics.rouge(said, references)}

    def write(self, answers: Sequence[Any], rows: Dataset, folder: Path, split: str) -> Path:
        return write_lines(folder / f"predictions_{split}.txt", [" ".join(text.splitlines()) for text in answers])


@dataclass(frozen=True)
class Padding:
    """Pads a batch to its longest example: on the right for training, on the left for generation."""

    pad: int

    def __call__(self, features: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        side = "right" if "labels" in features[0] else "left"

        def padded(values: list[Any], fill: int) -> Tensor:
            return pad_sequence([torch.as_tensor(v) for v in values], True, fill, side)

        ids = [feature["input_ids"] for feature in features]
        batch = {"input_ids": padded(ids, self.pad), "attention_mask": padded([[1] * len(i) for i in ids], 0)}
        if "labels" in features[0]:
            batch["labels"] = padded([feature["labels"] for feature in features], IGNORED)
        return batch


class NoRepeat(NoRepeatNGramLogitsProcessor):
    """Forbids n-grams that the text already contains. As in PST's script, those of the prompt do not count.

    In transformers' own setting they do: then no name of four tokens could be copied from the source, and if the
    separator is also the padding (GPT-2), a text would depend on the padding of its prompt.
    """

    def __init__(self, size: int, width: int) -> None:
        super().__init__(size)
        self.width = width

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return super().__call__(input_ids[:, self.width :], scores)


def _marks(tokenizer: Any) -> tuple[list[int], int, int]:
    """The tokens before a source, between source and target, and after a target."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if eos is None:
        raise InputError("the tokenizer has no end token (eos_token): a text could not end.")
    front = tokenizer("")["input_ids"][:1]
    return (front if front == [bos] else []), (eos if bos is None else bos), eos


def _warn_of_cut(what: str, cut: list[bool]) -> None:
    if any(cut):
        warnings.warn(f"{sum(cut)} of {len(cut)} {what} do not fit max_length and lose their end", stacklevel=3)


# ------------------------------------------------------------ files


def _e2e_csv(text: str, where: str) -> formats.Columns:
    columns = formats.PLAIN[".csv"](text, where)
    if [name.lower() for name in columns][:2] in (["mr", "ref"], ["mr"]):  # one of the test sets has no references
        names = dict(zip(columns, VARIANTS, strict=False))
        columns = {names.get(name, name): values for name, values in columns.items()}
    return columns


def _dart_json(text: str, where: str, suffix: str) -> formats.Columns:
    columns = formats.PLAIN[suffix](text, where)
    if {"tripleset", "annotations"} <= set(columns):
        columns["annotations"] = [_turned(notes) for notes in columns["annotations"]]
    return columns


def _turned(notes: Any) -> Any:
    """DART ships a list of {source, text}; `datasets` turns it round."""
    if not isinstance(notes, list) or not all(isinstance(note, dict) for note in notes):
        return notes
    return {key: [note.get(key) for note in notes] for key in ("source", "text")}


def _entries(text: str, where: str) -> list[ElementTree.Element]:
    try:
        entries = list(ElementTree.fromstring(text).iter("entry"))
    except ElementTree.ParseError as error:
        raise InputError(f"{where}, line {error.position[0]}: broken XML ({error}); fetch the file again.") from None
    if not entries:
        raise InputError(f"{where} has no <entry>: give XML as WebNLG or DART ship it.")
    return entries


def _spoken(element: ElementTree.Element, tag: str) -> list[str]:
    return [(found.findtext("text") or found.text or "").strip() for found in element.iter(tag)]


def _references(entry: ElementTree.Element, **attributes: str) -> dict[str, list[str]]:
    """The texts of an entry, beside some of their attributes: our name = the attribute."""
    found = {ours: [lex.get(name, "") for lex in entry.iter("lex")] for ours, name in attributes.items()}
    return {**found, "text": _spoken(entry, "lex")}


def _webnlg(text: str, where: str) -> formats.Columns:
    entries = _entries(text, where)
    triples = [[_spoken(each, "mtriple") for each in entry.iter("modifiedtripleset")] for entry in entries]
    return {
        "category": [entry.get("category", "") for entry in entries],
        "eid": [entry.get("eid", "") for entry in entries],
        "modified_triple_sets": [{"mtriple_set": sets} for sets in triples],
        "lex": [_references(entry, comment="comment", lid="lid") for entry in entries],
    }


def _dart_xml(text: str, where: str) -> formats.Columns:
    entries = _entries(text, where)
    return {
        "tripleset": [[triple.split(" | ", 2) for triple in _spoken(entry, "mtriple")] for entry in entries],
        "subtree_was_extended": [None] * len(entries),  # not in the XML
        "annotations": [_references(entry, source="comment") for entry in entries],
    }


# ------------------------------------------------------------ tasks


def _known(name: str, style: Literal["e2e", "triples"], source: str, target: str, *hub: str) -> None:
    add(Text(name=name, style=style, source_column=source, target_column=target, hub=hub))


_known("e2e", "e2e", "meaning_representation", "human_reference", "tuetschek/e2e_nlg")
_known("dart", "triples", "tripleset", "annotations", "Yale-LILY/dart")
_known("webnlg", "triples", "modified_triple_sets", "lex", "webnlg-challenge/web_nlg", "webnlg_challenge_2017")
add(Text(name="text"))
