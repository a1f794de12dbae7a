"""Logits of students and teachers, and the terms of distillation by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import settings
from torch import Tensor, nn

from pinscher.prune.teacher import Teacher

IGNORED = -100
quick = settings(deadline=None, max_examples=40)


class Says(nn.Module):
    """A fixed teacher that always gives the same logits."""

    def __init__(self, *logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.ParameterList(logits)

    def forward(self, **batch: object) -> dict[str, Tensor]:
        return named(*self.logits)


def named(*logits: Tensor) -> dict[str, Tensor]:
    names = ("logits",) if len(logits) == 1 else ("start_logits", "end_logits")
    return dict(zip(names, logits, strict=True))


def term(student, teacher, batch=None, kind=None, **options) -> Tensor:
    """What is added to the student's loss; student and teacher are logits, or a pair of them."""
    student, teacher = ((x,) if isinstance(x, Tensor) else x for x in (student, teacher))
    judge = Teacher(nn.Identity(), "knowledge-distillation", fixed=Says(*teacher), kind=kind, cache_bytes=0, **options)
    return judge.loss(batch or {}, named(*student))


def logits(*shape: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


# ---------------------------------------------------------------- by hand


def probabilities(row, temperature: float = 1.0) -> list[float]:
    row = [float(x) / temperature for x in row]
    top = max(row)
    terms = [math.exp(x - top) for x in row]
    return [x / sum(terms) for x in terms]


def kl(student_row, teacher_row, temperature: float = 1.0) -> float:
    p, q = probabilities(teacher_row, temperature), probabilities(student_row, temperature)
    return temperature**2 * sum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True) if a > 0)


def cross_entropy(student_row, label: int) -> float:
    return -math.log(probabilities(student_row)[label])


def weighed(student_row, teacher_row, label: int, temperature: float = 2.0) -> float:
    """alpha * KD + (1 - alpha) * CE of one row."""
    q = probabilities(student_row)
    alpha = 1 + sum(x * math.log(x) for x in q) / math.log(len(q))
    p_soft, q_soft = probabilities(teacher_row, temperature), probabilities(student_row, temperature)
    soft = -(temperature**2) * sum(a * math.log(b) for a, b in zip(p_soft, q_soft, strict=True))
    return alpha * soft + (1 - alpha) * cross_entropy(student_row, label)


def near(expected: float, temperature: float = 1.0):
    """Single precision, times what the square of the temperature makes of its rounding."""
    return pytest.approx(expected, rel=1e-4, abs=1e-6 * max(1.0, temperature**2))


# ---------------------------------------------------------------- tokens

LABELS = torch.tensor([[IGNORED, 2, 0, IGNORED, 1], [IGNORED, 1, IGNORED, IGNORED, IGNORED]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


def over(places, student: Tensor, teacher: Tensor) -> float:
    return float(np.mean([kl(student[i, j], teacher[i, j]) for i, j in places]))


def counted(kind: str, batch: dict[str, Tensor], rows: int = 2, length: int = 5) -> list[tuple[int, int]]:
    """The positions whose logits count, spelt out."""
    ahead = 1 if kind == "causal-lm" else 0
    mask = batch.get("decoder_attention_mask" if kind == "seq2seq-lm" else "attention_mask")
    places = []
    for i in range(rows):
        for j in range(length - ahead):
            token = j + ahead
            if "labels" in batch:
                counts = int(batch["labels"][i, token]) != IGNORED
            else:
                counts = mask is None or int(mask[i, token]) != 0
            if counts:
                places.append((i, j))
    return places


WORDS = [
    pytest.param("tokens", {"labels": LABELS, "attention_mask": MASK}, id="tokens-labels"),
    pytest.param("tokens", {"attention_mask": MASK}, id="tokens-mask"),
    pytest.param("tokens", {}, id="tokens-neither"),
    pytest.param("causal-lm", {"labels": LABELS, "attention_mask": MASK}, id="causal-labels"),
    pytest.param("causal-lm", {"attention_mask": MASK}, id="causal-mask"),
    pytest.param("causal-lm", {}, id="causal-neither"),
    pytest.param("seq2seq-lm", {"labels": LABELS, "attention_mask": MASK[:, :3]}, id="seq2seq-labels"),
    pytest.param("seq2seq-lm", {"decoder_attention_mask": MASK, "attention_mask": MASK[:, :3]}, id="seq2seq-mask"),
    pytest.param("seq2seq-lm", {"attention_mask": MASK[:, :3]}, id="seq2seq-neither"),
]


# ---------------------------------------------------------------- spans


def spans_by_hand(student, teacher, lengths, temperature: float = 1.0) -> float:
    sides = []
    for mine, its in zip(student, teacher, strict=True):
        sides.append(np.mean([kl(mine[i, :n], its[i, :n], temperature) for i, n in enumerate(lengths)]))
    return float(np.mean(sides))


def pairs(*shape: int):
    return (logits(*shape), logits(*shape, seed=1)), (logits(*shape, seed=2), logits(*shape, seed=3))


def mask_of(lengths, width: int) -> Tensor:
    return (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
