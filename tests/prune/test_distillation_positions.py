"""The term of distillation for tokens and spans: which positions count."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tiny_distillation import (
    IGNORED,
    LABELS,
    WORDS,
    counted,
    kl,
    logits,
    mask_of,
    near,
    over,
    pairs,
    quick,
    spans_by_hand,
    term,
)

# ---------------------------------------------------------------- tokens


@pytest.mark.parametrize(("kind", "batch"), WORDS)
def test_words_equal_the_mean_over_counted_positions(kind, batch):
    student, teacher = logits(2, 5, 4), logits(2, 5, 4, seed=1)
    assert term(student, teacher, batch, kind=kind).item() == near(over(counted(kind, batch), student, teacher))


@pytest.mark.parametrize("mix", ["sum", "entropy"])
@pytest.mark.parametrize(("kind", "batch"), WORDS)
def test_uncounted_positions_change_nothing(kind, batch, mix):
    if mix == "entropy":
        batch = {**batch, "labels": LABELS}
    student, teacher = logits(2, 5, 4).requires_grad_(), logits(2, 5, 4, seed=1)
    value = term(student, teacher, batch, kind=kind, mix=mix)
    value.backward()
    places = counted(kind, batch)
    away = torch.ones(2, 5, dtype=torch.bool)
    away[tuple(torch.tensor(places).T)] = False
    other_student, other_teacher = student.detach().clone(), teacher.clone()
    other_student[away] = 50 * logits(int(away.sum()), 4, seed=2)
    other_teacher[away] = 50 * logits(int(away.sum()), 4, seed=3)
    assert torch.equal(term(other_student, other_teacher, batch, kind=kind, mix=mix), value)
    assert torch.count_nonzero(student.grad[away]) == 0
    assert (student.grad[~away].abs().sum(-1) > 0).all()


@pytest.mark.parametrize("token", [1, 2, 3, 4])
def test_a_causal_model_speaks_of_the_next_token(token):
    student, teacher = logits(1, 5, 6), logits(1, 5, 6, seed=1)
    labels = torch.full((1, 5), IGNORED)
    labels[0, token] = 3
    value = term(student, teacher, {"labels": labels}, kind="causal-lm").item()
    assert value == near(kl(student[0, token - 1], teacher[0, token - 1]))


def test_a_causal_model_is_not_asked_for_the_first_token():
    labels = torch.tensor([[2, IGNORED, IGNORED]])
    assert term(logits(1, 3, 4), logits(1, 3, 4, seed=1), {"labels": labels}, kind="causal-lm").item() == 0


def test_long_and_short_examples_weigh_by_their_tokens():
    """The mean runs over counted positions, as that of the cross-entropy does, not over examples."""
    student, teacher = logits(2, 4, 3), logits(2, 4, 3, seed=1)
    labels = torch.tensor([[1, 1, 1, 1], [1, IGNORED, IGNORED, IGNORED]])
    expected = over([(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)], student, teacher)
    assert term(student, teacher, {"labels": labels}, kind="tokens").item() == near(expected)


@quick
@given(data=st.data(), kind=st.sampled_from(["tokens", "causal-lm", "seq2seq-lm"]))
def test_words_of_any_shape(data, kind):
    rows, length, classes = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(2, 5)))
    cells = st.lists(st.integers(-1, classes - 1), min_size=rows * length, max_size=rows * length)
    labels = torch.tensor(data.draw(cells)).view(rows, length)
    labels[labels < 0] = IGNORED
    student, teacher = logits(rows, length, classes, seed=data.draw(st.integers(0, 99))), logits(rows, length, classes)
    places = counted(kind, {"labels": labels}, rows, length)
    expected = over(places, student, teacher) if places else 0.0
    assert term(student, teacher, {"labels": labels}, kind=kind).item() == near(expected)


# ---------------------------------------------------------------- spans


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_spans_are_the_mean_of_start_and_end_without_padding(temperature):
    student, teacher = pairs(3, 6)
    for lengths in ((6, 6, 6), (6, 2, 4)):
        batch = {"attention_mask": mask_of(lengths, 6)}
        value = term(student, teacher, batch, temperature=temperature).item()
        assert value == near(spans_by_hand(student, teacher, lengths, temperature), temperature)


def test_spans_without_a_mask_count_every_place():
    student, teacher = pairs(2, 5)
    assert term(student, teacher).item() == near(spans_by_hand(student, teacher, (5, 5)))


@pytest.mark.parametrize("mix", ["sum", "entropy"])
def test_padded_places_of_spans_change_nothing(mix):
    student, teacher = pairs(2, 6)
    student = tuple(x.requires_grad_() for x in student)
    mask = mask_of((3, 5), 6)
    batch = {"attention_mask": mask, "start_positions": torch.tensor([0, 4]), "end_positions": torch.tensor([2, 4])}
    value = term(student, teacher, batch, mix=mix)
    value.backward()
    other = [tuple(torch.where(mask == 0, 9.0, x.detach()) for x in side) for side in (student, teacher)]
    assert torch.equal(term(*other, batch, mix=mix), value)
    for side in student:
        assert torch.count_nonzero(side.grad[mask == 0]) == 0
        assert torch.count_nonzero(side.grad[mask == 1]) > 0


@pytest.mark.parametrize("temperature", [0.1, 0.5, 0.9])
def test_padded_spans_at_a_low_temperature(temperature):
    student, teacher = pairs(2, 5)
    batch = {"attention_mask": mask_of((3, 5), 5)}
    expected = spans_by_hand(student, teacher, (3, 5), temperature)
    assert term(student, teacher, batch, temperature=temperature).item() == near(expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_padded_spans_of_a_teacher_in_low_precision(dtype):
    student, teacher = pairs(2, 5)
    teacher = tuple(x.to(dtype) for x in teacher)
    expected = spans_by_hand(student, teacher, (3, 5))
    value = term(student, teacher, {"attention_mask": mask_of((3, 5), 5)}).item()
    assert value == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_padded_spans_of_a_student_in_low_precision(dtype):
    student, teacher = pairs(2, 5)
    student = tuple(x.to(dtype) for x in student)
    expected = spans_by_hand(student, teacher, (3, 5))
    value = term(student, teacher, {"attention_mask": mask_of((3, 5), 5)}).item()
    assert value == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("mix", ["sum", "entropy"])
def test_spans_do_not_depend_on_how_far_a_batch_is_padded(mix):
    student, teacher = pairs(2, 9)
    values = []
    for width in (4, 6, 9):
        cut = [tuple(x[:, :width] for x in side) for side in (student, teacher)]
        batch = {
            "attention_mask": mask_of((4, 3), width),
            "start_positions": torch.tensor([0, 1]),
            "end_positions": torch.tensor([3, 2]),
        }
        values.append(term(*cut, batch, mix=mix).item())
    assert values == [near(values[0])] * 3


# ---------------------------------------------------------------- nothing to count


@pytest.mark.parametrize("mix", ["sum", "entropy"])
@pytest.mark.parametrize("kind", ["tokens", "causal-lm", "seq2seq-lm"])
def test_no_counted_word_is_a_zero_with_a_gradient(kind, mix):
    student = logits(2, 4, 3).requires_grad_()
    batch = {"labels": torch.full((2, 4), IGNORED)}
    value = term(student, logits(2, 4, 3, seed=1), batch, kind=kind, mix=mix)
    value.backward()
    assert value.item() == 0
    assert torch.equal(student.grad, torch.zeros_like(student))


def test_a_causal_model_with_a_single_token_has_nothing_to_say():
    student = logits(2, 1, 3).requires_grad_()
    value = term(student, logits(2, 1, 3, seed=1), {"attention_mask": torch.ones(2, 1)}, kind="causal-lm")
    value.backward()
    assert value.item() == 0
    assert torch.equal(student.grad, torch.zeros_like(student))


def test_no_counted_class_in_the_entropy_mix():
    student = logits(2, 3).requires_grad_()
    value = term(student, logits(2, 3, seed=1), {"labels": torch.full((2,), IGNORED)}, mix="entropy")
    value.backward()
    assert value.item() == 0
    assert torch.equal(student.grad, torch.zeros_like(student))


@pytest.mark.parametrize("lengths", [(6, 6), (2, 3)])
def test_no_counted_answer_in_the_entropy_mix(lengths):
    student, teacher = pairs(2, 6)
    student = tuple(x.requires_grad_() for x in student)
    gone = torch.tensor([6, 6])
    batch = {"attention_mask": mask_of(lengths, 6), "start_positions": gone, "end_positions": gone}
    value = term(student, teacher, batch, mix="entropy")
    value.backward()
    assert value.item() == 0
    assert all(torch.equal(side.grad, torch.zeros_like(side)) for side in student)
