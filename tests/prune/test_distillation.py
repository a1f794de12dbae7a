"""The term of distillation for classes and numbers, the kinds of outputs, and gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pinscher.prune.distillation import infer_kind, logits_of
from pinscher.prune.teacher import Teacher
from tiny_distillation import Says, kl, logits, mask_of, named, near, quick, term

# ---------------------------------------------------------------- classes


@quick
@given(
    rows=st.integers(1, 6),
    classes=st.integers(2, 7),
    temperature=st.floats(0.25, 8.0),
    seed=st.integers(0, 10_000),
)
def test_classes_equal_the_sum_by_hand(rows, classes, temperature, seed):
    student, teacher = logits(rows, classes, seed=seed), logits(rows, classes, seed=seed + 1)
    expected = np.mean([kl(s, t, temperature) for s, t in zip(student, teacher, strict=True)])
    assert term(student, teacher, temperature=temperature).item() == near(expected, temperature)


@pytest.mark.parametrize(("mix", "default"), [("sum", 1.0), ("entropy", 2.0)])
def test_default_temperature(mix, default):
    student, teacher, batch = logits(3, 4), logits(3, 4, seed=1), {"labels": torch.tensor([0, 3, 1])}
    assert torch.equal(
        term(student, teacher, batch, mix=mix), term(student, teacher, batch, mix=mix, temperature=default)
    )
    assert not torch.equal(
        term(student, teacher, batch, mix=mix), term(student, teacher, batch, mix=mix, temperature=3.0)
    )


def test_gradients_keep_their_size_at_high_temperature():
    teacher, sizes = logits(8, 5, seed=1, scale=0.5), []
    for temperature in (1.0, 10.0, 100.0):
        student = logits(8, 5, scale=0.5).requires_grad_()
        term(student, teacher, temperature=temperature).backward()
        sizes.append(student.grad.norm().item())
    assert max(sizes) < 2 * min(sizes)


@quick
@given(seed=st.integers(0, 10_000), shift=st.floats(-20, 20))
def test_divergence_is_not_negative_and_blind_to_shifted_logits(seed, shift):
    student, teacher = logits(4, 3, seed=seed), logits(4, 3, seed=seed + 1)
    value = term(student, teacher).item()
    assert value > -1e-6
    assert term(student + shift, teacher - shift).item() == pytest.approx(value, rel=1e-3, abs=1e-5)


def test_the_direction_is_teacher_to_student():
    sure, unsure = torch.tensor([[6.0, 0.0, 0.0]]), torch.tensor([[0.0, 0.0, 0.0]])
    assert term(unsure, sure).item() == near(kl(unsure[0], sure[0]))
    assert term(sure, unsure).item() == near(kl(sure[0], unsure[0]))
    assert term(unsure, sure).item() != pytest.approx(term(sure, unsure).item(), rel=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mix", ["sum", "entropy"])
def test_low_precision_logits_are_compared_in_single_precision(dtype, mix):
    student, teacher = logits(6, 5).to(dtype), logits(6, 5, seed=1).to(dtype)
    batch = {"labels": torch.arange(6) % 5}
    low = term(student, teacher, batch, mix=mix)
    assert low.dtype == torch.float32
    assert torch.equal(low, term(student.float(), teacher.float(), batch, mix=mix))


@pytest.mark.parametrize("kind", ["classes", "tokens", "causal-lm", "seq2seq-lm"])
def test_extreme_logits_stay_finite(kind):
    shape = (2, 3) if kind == "classes" else (2, 4, 3)
    student = (logits(*shape) * 1e4).requires_grad_()
    value = term(student, -student.detach(), kind=kind)
    value.backward()
    assert value.isfinite()
    assert student.grad.isfinite().all()


# ---------------------------------------------------------------- regression


def test_regression_is_the_mean_squared_error():
    student, teacher = logits(5, 1), logits(5, 1, seed=1)
    expected = np.mean([(float(s) - float(t)) ** 2 for s, t in zip(student, teacher, strict=True)])
    assert term(student, teacher, {"labels": torch.randn(5)}).item() == near(expected)


def test_regression_takes_flat_outputs_when_it_is_named():
    student, teacher = logits(5), logits(5, seed=1)
    expected = np.mean([(float(s) - float(t)) ** 2 for s, t in zip(student, teacher, strict=True)])
    assert term(student, teacher, kind="regression").item() == near(expected)


def test_the_entropy_mix_leaves_regression_to_the_labels():
    value = term(logits(5, 1), logits(5, 1, seed=1), {"labels": torch.randn(5)}, mix="entropy")
    assert value.shape == ()
    assert value.item() == 0


# ---------------------------------------------------------------- kinds


def test_kinds_beyond_doubt():
    assert infer_kind({"logits": logits(3, 4)}) == "classes"
    assert infer_kind(logits(3, 2)) == "classes"
    assert infer_kind({"logits": logits(3, 1)}) == "regression"
    assert infer_kind(named(logits(3, 4), logits(3, 4))) == "spans"


@pytest.mark.parametrize("outputs", [logits(2, 5, 4), {"logits": logits(2, 5, 4)}])
def test_ambiguous_logits_are_an_error_that_names_the_choices(outputs):
    judge = Teacher(nn.Identity(), "knowledge-distillation", fixed=Says(logits(2, 5, 4)))
    with pytest.raises(ValueError, match=r"kind='tokens'.*'causal-lm'.*'seq2seq-lm'"):
        judge.loss({}, outputs)


@pytest.mark.parametrize(
    ("kind", "outputs", "missing"),
    [
        ("classes", {"start_logits": logits(2, 3), "end_logits": logits(2, 3)}, "logits"),
        ("spans", {"logits": logits(2, 3)}, "start_logits"),
        ("spans", {"start_logits": logits(2, 3)}, "end_logits"),
    ],
)
def test_outputs_of_another_kind_are_an_error_that_names_what_is_missing(kind, outputs, missing):
    with pytest.raises(ValueError, match=f"needs {missing}.*{next(iter(outputs))}"):
        logits_of(outputs, kind)


def test_outputs_without_names_are_an_error_that_says_what_is_needed():
    with pytest.raises((TypeError, ValueError), match="logits"):
        logits_of((torch.tensor(0.5), logits(2, 3)), "classes")


def test_logits_may_come_bare_in_a_mapping_or_as_attributes():
    class Outputs:
        def __init__(self, values: Tensor) -> None:
            self.logits = values

    values = logits(2, 3)
    for outputs in (values, {"loss": 0.0, "logits": values}, Outputs(values)):
        assert logits_of(outputs, "classes")[0] is values


# ---------------------------------------------------------------- gradients

EVERY = ["classes", "regression", "tokens", "causal-lm", "seq2seq-lm", "spans"]


def example(kind: str, rows: int = 2, length: int = 5, classes: int = 4):
    """Student logits, teacher logits and a batch in which something counts."""
    shape = {"classes": (rows, classes), "regression": (rows, 1), "spans": (rows, length)}.get(
        kind, (rows, length, classes)
    )
    sides = 2 if kind == "spans" else 1
    student = tuple(logits(*shape, seed=i) for i in range(sides))
    teacher = tuple(logits(*shape, seed=10 + i) for i in range(sides))
    batch: dict[str, Tensor] = {"attention_mask": mask_of([length] * (rows - 1) + [max(1, length - 2)], length)}
    if kind == "spans":
        batch |= {name: torch.zeros(rows, dtype=torch.long) for name in ("start_positions", "end_positions")}
    elif kind == "classes":
        batch["labels"] = torch.arange(rows) % classes
    elif kind != "regression":
        batch["labels"] = (torch.arange(rows * length) % classes).view(rows, length)
    return student, teacher, batch


@pytest.mark.parametrize("mix", ["sum", "entropy"])
@pytest.mark.parametrize("kind", EVERY)
def test_gradient_reaches_the_student_and_never_the_teacher(kind, mix):
    student, teacher, batch = example(kind)
    student = tuple(x.requires_grad_() for x in student)
    fixed = Says(*teacher)
    judge = Teacher(nn.Identity(), "knowledge-distillation", fixed=fixed, kind=kind, mix=mix, cache_bytes=0)
    value = judge.loss(batch, named(*student)) + 0 * sum(x.sum() for x in student)
    value.backward()
    reached = [bool(torch.count_nonzero(x.grad)) for x in student]
    assert reached == [not (kind == "regression" and mix == "entropy")] * len(student)
    assert all(p.grad is None for p in fixed.parameters())


@pytest.mark.parametrize("kind", EVERY)
def test_gradient_of_the_sum_is_that_of_finite_differences(kind):
    student, teacher, batch = example(kind, rows=2, length=3, classes=3)
    student = tuple(x.requires_grad_() for x in student)
    term(student, teacher, batch, kind=kind).backward()
    for side, part in enumerate(student):
        for index in [(0,) * part.dim(), tuple(-1 for _ in part.shape)]:
            moved = []
            for step in (0.01, -0.01):
                other = [x.detach().clone() for x in student]
                other[side][index] += step
                moved.append(term(tuple(other), teacher, batch, kind=kind).item())
            assert part.grad[index].item() == pytest.approx((moved[0] - moved[1]) / 0.02, abs=2e-3)


@quick
@given(
    kind=st.sampled_from(EVERY),
    rows=st.integers(1, 4),
    length=st.integers(2, 6),
    classes=st.integers(2, 6),
    temperature=st.floats(1.0, 5.0),
)
def test_identical_student_and_teacher_diverge_by_nothing(kind, rows, length, classes, temperature):
    student, _, batch = example(kind, rows, length, classes)
    student = tuple(x.requires_grad_() for x in student)
    value = term(student, tuple(x.detach().clone() for x in student), batch, kind=kind, temperature=temperature)
    value.backward()
    assert value.item() == pytest.approx(0.0, abs=1e-6)
    assert all(x.grad.abs().max() < 1e-6 for x in student)


@quick
@given(
    kind=st.sampled_from(EVERY),
    mix=st.sampled_from(["sum", "entropy"]),
    rows=st.integers(1, 4),
    length=st.integers(2, 6),
    classes=st.integers(2, 6),
)
def test_the_term_is_a_finite_scalar_for_every_shape(kind, mix, rows, length, classes):
    value = term(*example(kind, rows, length, classes), kind=kind, mix=mix)
    assert value.shape == ()
    assert value.isfinite()


# ---------------------------------------------------------------- embeddings


def test_embeddings_equal_the_sum_by_hand():
    student, teacher = (logits(4, 6, seed=seed).double().numpy() for seed in (0, 1))
    mine, theirs = (v / np.linalg.norm(v, axis=1, keepdims=True) for v in (student, teacher))
    turned = np.mean([1 - a @ b for a, b in zip(mine, theirs, strict=True)])
    both = list(zip(mine, theirs, strict=True))
    likeness = np.mean([(a @ b - c @ d) ** 2 for a, c in both for b, d in both])
    value = term(torch.tensor(student), torch.tensor(teacher), kind="embeddings").item()
    assert value == pytest.approx(10 * turned + 10 * likeness, rel=1e-5)


def test_embeddings_count_by_their_direction_alone():
    student = logits(5, 6).requires_grad_()
    assert term(3 * student, 0.5 * student.detach(), kind="embeddings").item() == pytest.approx(0, abs=1e-5)
    term(student, -student.detach(), kind="embeddings").backward()
    assert torch.isfinite(student.grad).all()
