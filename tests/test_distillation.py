"""The divergence between student and teacher, against sums written out by hand in double precision."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pinscher.prune.distillation import infer_kind, logits_of
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


def spans_by_hand(student, teacher, lengths, temperature: float = 1.0) -> float:
    sides = []
    for mine, its in zip(student, teacher, strict=True):
        sides.append(np.mean([kl(mine[i, :n], its[i, :n], temperature) for i, n in enumerate(lengths)]))
    return float(np.mean(sides))


def pairs(*shape: int):
    return (logits(*shape), logits(*shape, seed=1)), (logits(*shape, seed=2), logits(*shape, seed=3))


def mask_of(lengths, width: int) -> Tensor:
    return (torch.arange(width) < torch.tensor(lengths)[:, None]).long()


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


# ---------------------------------------------------------------- the entropy mix


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
