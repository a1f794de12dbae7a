"""Tasks whose answer is a span of a given text: SQuAD v1.1, and a user's own questions.

A long context is cut into overlapping windows. The model gives each token of a window a logit for being the first token
of the answer, and one for being the last; the answer is the span with the highest sum over all windows of a row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

import numpy as np
from datasets import Dataset

from pinscher import settings
from pinscher.errors import InputError
from pinscher.settings import COUNT, NOT_NEGATIVE
from pinscher.train import formats, metrics
from pinscher.train.tasks.task import Outputs, Reader, Task, add, write_lines

POSITIONS = ("start_positions", "end_positions")
Place = tuple[int, int]  # characters of the context: the first, and one past the last
Offsets = Sequence[Place | None]  # the characters of each token; None outside of the context


@dataclass(frozen=True, kw_only=True)
class Spans(Task):
    """Answers a question with a span of the context. Every question must have an answer.

    Args:
        answers_column: {"text": [...], "answer_start": [...]}, or [{"text": ..., "answer_start": ...}, ...]. The first
            answer that occurs in the context is trained on; the starts are hints and may be wrong or missing.
        id_column: the ids of the rows in the submission; if missing or not unique, rows are numbered from 0.
        stride: tokens that a window shares with the one before.
        n_best: number of first and of last tokens that are combined.
        max_answer: maximum number of tokens of an answer.
    """

    question_column: str = "question"
    context_column: str = "context"
    answers_column: str = "answers"
    id_column: str = "id"
    max_length: int = 384
    stride: int = 128
    n_best: int = 20
    max_answer: int = 30
    main: str = "f1"

    kind: ClassVar[str] = "spans"
    architecture: ClassVar[str] = "AutoModelForQuestionAnswering"
    text_fields: ClassVar[tuple[str, ...]] = ("question_column", "context_column")
    label_field: ClassVar[str] = "answers_column"

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.question_column, self.context_column, self.answers_column)

    def __post_init__(self) -> None:
        for name, takes in (("stride", NOT_NEGATIVE), ("n_best", COUNT), ("max_answer", COUNT)):
            settings.number(takes, getattr(self, name), name, whole=True)

    def reader(self, suffix: str) -> Reader | None:
        plain = formats.PLAIN[suffix] if suffix in (".json", ".jsonl") else None
        return None if plain is None else lambda text, where: _flat(plain(text, where), where)

    def check(self, rows: Dataset, where: str) -> None:
        super().check(rows, where)
        lost: list[tuple[int, str]] = []
        for i, row in enumerate(rows.select_columns(list(self.columns)), start=1):
            for column in (self.question_column, self.context_column):
                if not isinstance(row[column], str) or not row[column].strip():
                    raise InputError(f"{where}: row {i} has no text in column {column!r}.")
            gold = self._gold(row, f"{where}: row {i}")
            if not gold:
                raise InputError(f"{where}: row {i} is unanswerable (SQuAD v2): not supported, remove such questions.")
            if self._place(row) is None:
                lost.append((i, gold[0][0]))
        if lost:
            i, text = lost[0]
            raise InputError(
                f"{where}: in {len(lost)} of {len(rows)} rows no answer occurs in the context, first in row {i} "
                f"({text!r}). Correct or remove them: an answer must be a stretch of its context."
            )

    def features(self, rows: Dataset, tokenizer: Any, labels: Sequence[str], training: bool) -> Dataset:
        """Windows, for training with the first and the last token of the answer, else with `offsets`.

        A training row whose answer does not occur in its context is left out (`check` refuses such rows).
        """
        if not getattr(tokenizer, "is_fast", False):
            raise InputError(f"task {self.name!r} needs a fast tokenizer, and {type(tokenizer).__name__} is not one.")
        # The tokens left for a question: a window must hold more of the context than it shares.
        room = self.max_length - tokenizer.num_special_tokens_to_add(pair=True) - self.stride - 1
        if room < 1:
            raise InputError(
                f"windows of {self.max_length} tokens that share {self.stride} leave no room for a question: "
                "use a greater max_length or a smaller stride."
            )
        known: list[tuple[int, Place | None]] = [(i, None) for i in range(len(rows))]
        if training:
            places = (self._place(row) for row in rows.select_columns(list(self.columns)))
            known = [(i, place) for i, place in enumerate(places) if place is not None]
            rows = rows.select([i for i, _ in known])
        # Not cached on disk, because changes of this file would not be noticed; not hashed, because that is slow.
        return rows.map(
            partial(self._windows, known=known, tokenizer=tokenizer, room=room, training=training),
            batched=True,
            with_indices=True,
            remove_columns=rows.column_names,
            keep_in_memory=True,
            load_from_cache_file=False,
            new_fingerprint=uuid4().hex,
            desc="cutting into windows",
        )

    def _windows(
        self, batch: Any, indices: list[int], known: Sequence[Any], tokenizer: Any, room: int, training: bool
    ) -> dict[str, Any]:
        encoded = tokenizer(
            _cut([question.strip() for question in batch[self.question_column]], room, tokenizer),
            batch[self.context_column],
            truncation="only_second",
            max_length=self.max_length,
            stride=self.stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        made = {name: encoded[name] for name in tokenizer.model_input_names if name in encoded}
        sources = [known[indices[source]] for source in encoded["overflow_to_sample_mapping"]]
        made["row"] = [number for number, _ in sources]
        offsets = [_context(pairs, encoded.sequence_ids(i)) for i, pairs in enumerate(encoded["offset_mapping"])]
        if not training:
            return {**made, "offsets": offsets}
        spans = [_tokens(window, place) for window, (_, place) in zip(offsets, sources, strict=True)]
        return {**made, **{name: [span[side] for span in spans] for side, name in enumerate(POSITIONS)}}

    def collator(self, tokenizer: Any) -> Any:
        return Windows(tokenizer)

    def answers(self, outputs: Outputs, features: Dataset, rows: Dataset, labels: Sequence[str]) -> list[Any]:
        found: dict[int, tuple[float, int, int]] = {}  # for each row: the sum of logits, its place in the context
        for (start, end), window in zip(outputs, features.select_columns(["row", "offsets"]), strict=True):
            offsets, row = window["offsets"], window["row"]
            inside = np.array([pair is not None for pair in offsets])
            best = best_span(start[: len(inside)], end[: len(inside)], inside, self.n_best, self.max_answer)
            if best is not None and (row not in found or best[0] > found[row][0]):
                found[row] = best[0], offsets[best[1]][0], offsets[best[2]][1]
        places = [found.get(row, (0.0, 0, 0))[1:] for row in range(len(rows))]
        contexts = rows[self.context_column][:]
        return [context[start:end].strip() for context, (start, end) in zip(contexts, places, strict=True)]

    def scores(self, answers: Sequence[Any], rows: Dataset) -> dict[str, float]:
        names = self._names(rows)
        gold = [[text for text, _ in self._gold(row)] for row in rows.select_columns([self.answers_column])]
        return metrics.spans(dict(zip(names, answers, strict=True)), dict(zip(names, gold, strict=True)))

    def write(self, answers: Sequence[Any], rows: Dataset, folder: Path, split: str) -> Path:
        said = dict(zip(self._names(rows), answers, strict=True))
        return write_lines(folder / f"predictions_{split}.json", [json.dumps(said, ensure_ascii=False, indent=1)])

    def _names(self, rows: Dataset) -> list[str]:
        names = [str(name) for name in rows[self.id_column][:]] if self.id_column in rows.column_names else []
        return names if len(set(names)) == len(rows) else [str(i) for i in range(len(rows))]

    def _gold(self, row: Mapping[str, Any], where: str = "a row") -> list[tuple[str, int]]:
        """The answers, with the character where each should start; 0 if that is not given."""
        given = row[self.answers_column]
        try:
            if not isinstance(given, Mapping):
                given = {"text": [a["text"] for a in given], "answer_start": [a.get("answer_start") for a in given]}
            pairs = zip_longest(given["text"], given.get("answer_start") or [])
            return [(text.strip(), start or 0) for text, start in pairs if text.strip()]
        except (AttributeError, KeyError, TypeError):
            raise InputError(
                f"{where} has {given!r:.80} in column {self.answers_column!r}, not answers of the form "
                "{'text': ['Paris'], 'answer_start': [41]}."
            ) from None

    def _place(self, row: Mapping[str, Any]) -> Place | None:
        """The place of the first answer that occurs in the context."""
        places = (nearest(text, row[self.context_column], start) for text, start in self._gold(row))
        return next((place for place in places if place is not None), None)


def _flat(columns: formats.Columns, where: str) -> formats.Columns:
    """SQuAD's articles and paragraphs as one row for each question; other columns unchanged."""
    if "paragraphs" not in columns:
        return columns
    titles = columns.get("title") or [None] * len(columns["paragraphs"])
    found: formats.Columns = {"id": [], "title": [], "context": [], "question": [], "answers": []}
    try:
        for title, paragraphs in zip(titles, columns["paragraphs"], strict=True):
            for paragraph in paragraphs:
                for qa in paragraph["qas"]:
                    given = qa.get("answers") or []
                    answers = {key: [answer[key] for answer in given] for key in ("text", "answer_start")}
                    row = (qa["id"], title or "", paragraph["context"], qa["question"], answers)
                    for values, value in zip(found.values(), row, strict=True):
                        values.append(value)
    except (KeyError, TypeError, AttributeError) as error:
        at = len(found["id"]) + 1
        raise InputError(f"{where}: question {at} is not in SQuAD's form ({error}); fetch the file again.") from None
    return found


class Windows:
    """Pads a batch to its longest window, on the right, without columns that the model does not take."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __call__(self, features: list[dict[str, Any]]) -> Any:
        names = [name for name in (*self.tokenizer.model_input_names, *POSITIONS) if name in features[0]]
        windows = [{name: feature[name] for name in names} for feature in features]
        return self.tokenizer.pad(windows, padding=True, padding_side="right", return_tensors="pt")


def best_span(
    start: np.ndarray, end: np.ndarray, inside: np.ndarray, n_best: int, max_answer: int
) -> tuple[float, int, int] | None:
    """The highest sum of logits with its first and last token, or None if no span is allowed.

    Both tokens are among the `n_best` of their side, counted over the whole window as BERT's own evaluation does, and
    `inside`; the span has at most `max_answer` tokens.
    """
    firsts, lasts = (np.argsort(-side, kind="stable")[:n_best] for side in (start, end))
    size = lasts[None, :] - firsts[:, None] + 1
    allowed = inside[firsts][:, None] & inside[lasts][None, :] & (size >= 1) & (size <= max_answer)
    i, j = np.nonzero(allowed)
    if len(i) == 0:
        return None
    sums = start[firsts[i]].astype(np.float64) + end[lasts[j]]
    best = np.argmax(sums)
    return float(sums[best]), int(firsts[i[best]]), int(lasts[j[best]])


def nearest(text: str, context: str, start: int) -> Place | None:
    """The occurrence of `text` in the context that is nearest to `start`."""
    start = max(start, 0)
    places = (context.rfind(text, 0, start + len(text)), context.find(text, start))
    place = min((place for place in places if place >= 0), key=lambda at: abs(at - start), default=None)
    return None if place is None else (place, place + len(text))


def _cut(questions: list[str], most: int, tokenizer: Any) -> list[str]:
    """Cuts questions to `most` tokens: without room for the context the tokenizer would crash the process."""
    encoded = tokenizer(questions, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    long = {i: offsets[most][0] for i, offsets in enumerate(encoded) if len(offsets) > most}
    if not long:
        return questions
    shorter = [q[: min(long[i], len(q) - 1)] if i in long else q for i, q in enumerate(questions)]
    return _cut(shorter, most, tokenizer)  # again, because the new end may be tokenised differently


def _context(pairs: Sequence[Place], sequences: Sequence[int | None]) -> Offsets:
    """Only the tokens of the context that stand for characters."""
    return [pair if side == 1 and pair[1] > pair[0] else None for pair, side in zip(pairs, sequences, strict=True)]


def _tokens(offsets: Offsets, place: Place) -> tuple[int, int]:
    """The first and the last token of the answer; twice the window's first token if the window lacks a part of it."""
    known = [(i, pair) for i, pair in enumerate(offsets) if pair is not None]
    if not known or known[0][1][0] > place[0] or known[-1][1][1] < place[1]:
        return 0, 0
    within = [i for i, pair in known if pair[0] < place[1] and pair[1] > place[0]]
    return (within[0], within[-1]) if within else (0, 0)


add(Spans(name="squad", hub=("rajpurkar/squad",)))
add(Spans(name="qa", test_splits=("test",)))
