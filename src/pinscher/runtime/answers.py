"""What models' outputs mean: labels and probabilities, named spans of a text, the answer to a question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
MOST_WORDS = 30  # tokens of an answer, as in the evaluation of SQuAD


@dataclass(frozen=True)
class Label:
    """The class of a text."""

    label: str
    score: float  # its probability; the number itself, if the model was trained on numbers
    scores: dict[str, float] = field(repr=False)  # of every class


@dataclass(frozen=True)
class Span:
    """A named part of a text."""

    label: str
    score: float  # the mean probability of its words' labels
    text: str
    start: int  # text[start:end]
    end: int


@dataclass(frozen=True)
class Answer:
    """A part of a context that answers a question."""

    text: str
    score: float  # its probability among all parts of the context
    start: int  # context[start:end]
    end: int


@dataclass(frozen=True)
class Rank:
    """A text's place in a list that was ranked."""

    index: int  # its number in the list
    score: float


def softmax(logits: Array) -> Array:
    """Over the last axis, in double precision."""
    wide = logits.astype(np.float64)
    wide = np.exp(wide - wide.max(-1, keepdims=True))
    found: Array = wide / wide.sum(-1, keepdims=True)
    return found


def sigmoid(logits: Array) -> Array:
    """Of each number, in double precision."""
    found: Array = 0.5 * (1 + np.tanh(0.5 * logits.astype(np.float64)))
    return found


def labels(logits: Array, names: Sequence[str], problem: str | None) -> list[Label]:
    """The best class of each row; `problem` is the config's problem_type."""
    if problem == "regression":
        scores = logits.astype(np.float64)
    elif problem == "multi_label_classification" or len(names) == 1:
        scores = sigmoid(logits)
    else:
        scores = softmax(logits)
    best = scores.argmax(1)
    return [
        Label(names[number], float(row[number]), dict(zip(names, map(float, row), strict=True)))
        for number, row in zip(best, scores, strict=True)
    ]


def spans(text: str, encodings: Sequence[Any], probabilities: Sequence[Array], names: Sequence[str]) -> list[Span]:
    """The named parts of a text.

    A word has the label of its first token, which is what models are trained for, and of the window in which it stands
    farthest from an end. Neighbours with labels of one kind are one span, unless the second begins anew (B-).

    Args:
        text: the text.
        encodings: the tokenizer's, of each window.
        probabilities: of each window, [tokens, labels].
        names: of the labels.
    """
    words: dict[tuple[int, int], tuple[int, Array]] = {}  # by place: how far from an end, and what is known
    for encoding, rows in zip(encodings, probabilities, strict=True):
        for (start, end), at in _words(encoding).items():
            apart = min(at, len(rows) - 1 - at)
            if (start, end) not in words or apart > words[start, end][0]:
                words[start, end] = apart, rows[at]
    found: list[list[Any]] = []  # kind, start, end, scores
    last = ""
    for (start, end), (_, row) in sorted(words.items()):
        name = names[int(row.argmax())]
        begin, kind = name[:2] == "B-", name[2:] if name[:2] in ("B-", "I-") else name
        if name != "O":
            if found and last == kind and not begin:
                found[-1][2] = end
                found[-1][3].append(float(row.max()))
            else:
                found.append([kind, start, end, [float(row.max())]])
        last = "" if name == "O" else kind
    return [Span(kind, sum(scores) / len(scores), text[start:end], start, end) for kind, start, end, scores in found]


def _words(encoding: Any) -> dict[tuple[int, int], int]:
    """Where each word of a window is in the text, and the place of its first token; a word may lack its start."""
    found: dict[int, list[int]] = {}
    for at, (word, (start, end)) in enumerate(zip(encoding.word_ids, encoding.offsets, strict=True)):
        if word is None or start == end:
            continue
        known = found.setdefault(word, [start, end, at])
        known[1] = max(known[1], end)
    return {(start, end): at for start, end, at in found.values()}


def answer(context: str, encodings: Sequence[Any], logits: Sequence[Array]) -> Answer:
    """The best part of a context.

    Args:
        context: of the question.
        encodings: of each window of the pair.
        logits: of each window, [tokens, 2]: for the start and the end of the answer.
    """
    best, place, starts, ends = -np.inf, (0, 0), [], []
    for encoding, rows in zip(encodings, logits, strict=True):
        inside = np.array([part == 1 and begin < end for part, (begin, end) in _parts(encoding)], bool)
        if not inside.any():
            continue
        start, end = (np.where(inside, column, -np.inf) for column in rows.astype(np.float64).T)
        starts.append(start[inside])
        ends.append(end[inside])
        sums = np.triu(start[:, None] + end[None, :])
        apart = np.subtract.outer(np.arange(len(rows)), np.arange(len(rows)))
        sums[(apart > 0) | (apart <= -MOST_WORDS)] = -np.inf
        first, last = np.unravel_index(sums.argmax(), sums.shape)
        if sums[first, last] > best:
            best, place = float(sums[first, last]), (encoding.offsets[first][0], encoding.offsets[last][1])
    if not starts:
        return Answer("", 0.0, 0, 0)
    score = float(np.exp(best - _log_sum(np.concatenate(starts)) - _log_sum(np.concatenate(ends))))
    return Answer(context[place[0] : place[1]], score, *place)


def _parts(encoding: Any) -> Any:
    """Of each token which text it is of, and where it is in that."""
    return zip(encoding.sequence_ids, encoding.offsets, strict=True)


def _log_sum(values: Array) -> float:
    return float(values.max() + np.log(np.exp(values - values.max()).sum()))
