"""The entropy mix: the surer the student, the more it listens to the teacher."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tiny_distillation import IGNORED, LABELS, counted, logits, near, pairs, probabilities, quick, term, weighed


@quick
@given(
    rows=st.integers(1, 6),
    classes=st.integers(2, 7),
    seed=st.integers(0, 10_000),
    temperature=st.one_of(st.none(), st.floats(0.5, 6.0)),
)
def test_entropy_mix_of_classes(rows, classes, seed, temperature):
    student, teacher = logits(rows, classes, seed=seed), logits(rows, classes, seed=seed + 1)
    labels = torch.arange(rows) % classes
    value = F.cross_entropy(student, labels) + term(
        student, teacher, {"labels": labels}, mix="entropy", temperature=temperature
    )
    rows_by_hand = zip(student, teacher, labels.tolist(), strict=True)
    expected = np.mean([weighed(s, t, y, temperature or 2.0) for s, t, y in rows_by_hand])
    assert value.item() == near(expected, temperature or 2.0)


@pytest.mark.parametrize("kind", ["tokens", "causal-lm", "seq2seq-lm"])
def test_entropy_mix_of_words(kind):
    student, teacher = logits(2, 5, 4), logits(2, 5, 4, seed=1)
    ahead = 1 if kind == "causal-lm" else 0
    own = F.cross_entropy(student[:, : 5 - ahead].flatten(0, 1), LABELS[:, ahead:].flatten(), ignore_index=IGNORED)
    value = own + term(student, teacher, {"labels": LABELS}, kind=kind, mix="entropy")
    by_hand = [
        weighed(student[i, j], teacher[i, j], int(LABELS[i, j + ahead])) for i, j in counted(kind, {"labels": LABELS})
    ]
    assert value.item() == near(np.mean(by_hand))


def test_entropy_mix_of_spans():
    student, teacher = pairs(3, 6)
    places = [torch.tensor([0, 5, 2]), torch.tensor([1, 5, 4])]
    own = (F.cross_entropy(student[0], places[0]) + F.cross_entropy(student[1], places[1])) / 2
    batch = {"start_positions": places[0], "end_positions": places[1], "attention_mask": torch.ones(3, 6)}
    value = own + term(student, teacher, batch, mix="entropy")
    by_hand = [weighed(student[side][i], teacher[side][i], int(places[side][i])) for side in range(2) for i in range(3)]
    assert value.item() == near(np.mean(by_hand))


def test_entropy_mix_passes_over_ignored_labels():
    student, teacher = logits(4, 3), logits(4, 3, seed=1)
    labels = torch.tensor([0, IGNORED, 2, IGNORED])
    value = F.cross_entropy(student, labels) + term(student, teacher, {"labels": labels}, mix="entropy")
    by_hand = [weighed(student[i], teacher[i], int(labels[i])) for i in (0, 2)]
    assert value.item() == near(np.mean(by_hand))


def test_entropy_mix_passes_over_answers_outside_of_the_text():
    """An answer that was cut off is labelled with the length of the text."""
    student, teacher = pairs(2, 6)
    places = torch.tensor([3, 6])
    own = F.cross_entropy(student[0], places, ignore_index=6)
    value = own + term(student, teacher, {"start_positions": places, "end_positions": places}, mix="entropy")
    by_hand = np.mean([weighed(student[side][0], teacher[side][0], 3) for side in range(2)])
    own_of_end = F.cross_entropy(student[1], places, ignore_index=6)
    assert (value + (own_of_end - own) / 2).item() == near(by_hand)


def test_an_unsure_student_listens_to_the_labels_alone():
    student, labels = torch.zeros(3, 4), torch.tensor([0, 1, 2])
    assert term(student, logits(3, 4), {"labels": labels}, mix="entropy").item() == near(0.0)


def test_a_sure_student_listens_to_the_teacher_alone():
    student, teacher = torch.tensor([[200.0, 0.0, 0.0]]), logits(1, 3)
    labels = torch.tensor([2])
    value = F.cross_entropy(student, labels) + term(student, teacher, {"labels": labels}, mix="entropy")
    p = probabilities(teacher[0], 2.0)
    assert value.item() == pytest.approx(4 * (p[1] + p[2]) * 100.0, rel=1e-4)


def test_the_weights_of_the_entropy_mix_are_not_trained():
    """The gradient is that of alpha * KD + (1 - alpha) * CE with alpha held still."""
    student, teacher, labels = logits(4, 3).requires_grad_(), logits(4, 3, seed=1), torch.tensor([0, 2, 1, 1])
    (F.cross_entropy(student, labels) + term(student, teacher, {"labels": labels}, mix="entropy")).backward()
    expected = torch.zeros(4, 3, dtype=torch.float64)
    for i in range(4):
        q, soft, its = (torch.tensor(probabilities(*x)) for x in ((student[i],), (student[i], 2.0), (teacher[i], 2.0)))
        alpha = 1 + (q * q.log()).sum() / math.log(3)
        expected[i] = (alpha * 2 * (soft - its) + (1 - alpha) * (q - F.one_hot(labels[i], 3))) / 4
    torch.testing.assert_close(student.grad.double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["classes", "tokens", "causal-lm", "seq2seq-lm", "spans"])
def test_entropy_mix_without_labels_is_an_error(kind):
    student, teacher = pairs(2, 5) if kind == "spans" else (logits(2, 3), logits(2, 3, seed=1))
    if kind not in ("classes", "spans"):
        student, teacher = logits(2, 5, 3), logits(2, 5, 3, seed=1)
    with pytest.raises(ValueError, match="labels"):
        term(student, teacher, {"attention_mask": torch.ones(2, 5)}, kind=kind, mix="entropy")
