"""A teacher remembers its outputs, within bounds, and never takes one example for another."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import (
    GPT2ForSequenceClassification,
)

from pinscher import Teacher
from tiny_snapshots import sparsify
from tiny_teachers import STUDENTS, at_test_time, batch_for, bert, gpt2, inputs_of, learn, remembered, watch


@pytest.fixture(scope="module")
def pair():
    """A teacher that remembers and one that does not, of the same student."""
    torch.manual_seed(0)
    student = sparsify(bert(num_labels=3))
    with torch.no_grad():
        student.classifier.weight.normal_()
    pair = Teacher(student), Teacher(student, cache_bytes=0)
    for teacher in pair:
        teacher.consider(0.0)
    return pair


LENGTHS = (3, 8, 5, 1, 6, 4)


@settings(deadline=None, max_examples=40)
@given(
    rows=st.lists(st.integers(0, 5), min_size=1, max_size=8),
    extra=st.integers(0, 6),
    filler=st.integers(0, 39),
    seed=st.integers(0, 2),
)
def test_remembered_outputs_are_those_of_a_new_run(pair, rows, extra, filler, seed):
    whole = inputs_of(batch_for("classes", LENGTHS, width=14, seed=seed), "classes")
    width = max(LENGTHS[row] for row in rows) + extra
    batch = {name: tensor[rows, :width].clone() for name, tensor in whole.items()}
    batch["input_ids"][batch["attention_mask"] == 0] = filler
    (mine,), (its,) = (teacher._outputs(batch, "classes") for teacher in pair)
    torch.testing.assert_close(mine, its, rtol=0, atol=1e-5)


def test_remembered_outputs_of_a_regression(runs):
    student = bert(num_labels=1)
    teacher, forgetful = Teacher(student), Teacher(student, cache_bytes=0)
    for one in (teacher, forgetful):
        one.consider(0.0)
    calls = runs(teacher)
    batch = batch_for("regression")
    for _ in range(2):
        outputs = student(**batch)
        torch.testing.assert_close(teacher.loss(batch, outputs), forgetful.loss(batch, outputs), rtol=0, atol=1e-5)
    assert calls == [4]


def test_only_unknown_examples_are_run(runs):
    student = bert()
    teacher = Teacher(student)
    teacher.consider(0.0)
    calls = runs(teacher)
    batch = batch_for("classes", LENGTHS, width=8)
    for rows, run in (([0, 1, 2], 3), ([2, 0, 1], 0), ([1, 3, 2, 4], 2), ([0], 0), ([5, 5, 5], None), ([5, 4, 3], 0)):
        calls.clear()
        some = {name: tensor[rows] for name, tensor in batch.items()}
        teacher.loss(some, student(**some))
        assert sum(calls) == run or (run is None and 1 <= sum(calls) <= 3)


def test_an_example_is_known_again_however_far_it_is_padded(runs):
    student = bert()
    teacher = Teacher(student)
    teacher.consider(0.0)
    calls = runs(teacher)
    for width in (8, 11, 14):
        batch = batch_for("classes", LENGTHS, width=width)
        batch["input_ids"][batch["attention_mask"] == 0] = width  # whatever stands there
        teacher.loss(batch, student(**batch))
    assert calls == [len(LENGTHS)]


def test_rows_come_back_in_the_order_of_the_batch():
    student = bert()
    with torch.no_grad():
        student.classifier.weight.normal_()
    teacher = Teacher(student)
    teacher.consider(0.0)
    batch = inputs_of(batch_for("classes", LENGTHS, width=8), "classes")
    expected = at_test_time(student, batch)[0]
    assert (expected[:, None] - expected[None]).abs().amax(-1).fill_diagonal_(1).min() > 1e-3
    teacher._outputs({name: tensor[[4, 1]] for name, tensor in batch.items()}, "classes")
    for rows in ([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [2, 2, 0]):
        (found,) = teacher._outputs({name: tensor[rows] for name, tensor in batch.items()}, "classes")
        torch.testing.assert_close(found, expected[rows], rtol=0, atol=1e-5)


def test_a_new_teacher_forgets(runs):
    student = bert()
    batch = batch_for("classes")
    teacher = Teacher(student)
    teacher.consider(0.0)
    calls = runs(teacher)
    learn(student, teacher, batch, steps=2)
    assert calls == [4]
    before = remembered(teacher)
    assert before > 0
    assert not teacher.consider(-1.0)
    assert remembered(teacher) == before
    teacher.loss(batch, student(**batch))
    assert calls == [4]
    assert teacher.consider(1.0)
    assert remembered(teacher) == 0
    now = at_test_time(student, inputs_of(batch, "classes"))[0]
    outputs = student(**batch)
    expected = F.kl_div(
        outputs.logits.log_softmax(-1), now.log_softmax(-1), reduction="batchmean", log_target=True
    ).item()
    assert teacher.loss(batch, outputs).item() == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert calls == [4, 4]


@pytest.mark.parametrize("limit", [0, 1, 24, 60, 100, 10_000])
def test_the_memory_is_bounded(limit, runs):
    student = bert(num_labels=3)
    teacher, free = Teacher(student, cache_bytes=limit), Teacher(student)
    for one in (teacher, free):
        one.consider(0.0)
    calls = runs(teacher)
    batch = batch_for("classes", LENGTHS, width=8)
    for _ in range(3):
        outputs = student(**batch)
        torch.testing.assert_close(teacher.loss(batch, outputs), free.loss(batch, outputs), rtol=0, atol=1e-5)
        assert remembered(teacher) <= limit
    each = remembered(free) // len(LENGTHS)
    kept = min(limit // each, len(LENGTHS))
    assert remembered(teacher) == kept * each
    assert sum(calls) == 3 * 6 - 2 * kept


@pytest.mark.parametrize("name", ["tokens", "spans", "causal-lm", "seq2seq-lm"])
def test_long_outputs_are_not_remembered(name, runs):
    student = STUDENTS[name]()
    batch = batch_for(name)
    teacher = Teacher(student, kind=name)
    teacher.consider(0.0)
    calls = runs(teacher)
    for _ in range(2):
        teacher.loss(batch, student(**batch))
    assert calls == [4, 4]
    assert remembered(teacher) == 0


def test_a_fixed_teacher_is_remembered_too():
    student, fixed = bert(), bert()
    teacher = Teacher(student, "knowledge-distillation", fixed=fixed)
    calls = watch(fixed)
    batch = batch_for("classes")
    learn(student, teacher, batch, steps=3)
    assert calls == [4]
    assert teacher.nbytes == remembered(teacher) > 0


def compare(student: nn.Module, *batches: dict) -> None:
    """Shows a teacher several batches and checks each answer against one that remembers nothing."""
    with torch.no_grad():
        for parameter in student.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.5)
    teacher, forgetful = Teacher(student), Teacher(student, cache_bytes=0)
    for one in (teacher, forgetful):
        one.consider(0.0)
    answers = []
    for batch in batches:
        (mine,), (its,) = (one._outputs(batch, "classes") for one in (teacher, forgetful))
        torch.testing.assert_close(mine, its, rtol=0, atol=1e-5)
        answers.append(its)
    assert any(a.shape != answers[0].shape or not torch.allclose(a, answers[0], atol=1e-3) for a in answers[1:])


@pytest.mark.parametrize(
    "student", [bert, lambda: gpt2(GPT2ForSequenceClassification, pad_token_id=0)], ids=["bert", "gpt2"]
)
def test_padding_on_the_left_moves_positions(student):
    """The same words further to the right are other inputs to a model with absolute positions."""
    words = torch.tensor([[5, 6, 7, 8]])
    batches = []
    for ahead in (0, 3):
        ids = F.pad(words, (ahead, 0))
        batches.append({"input_ids": ids, "attention_mask": (ids != 0).long()})
    compare(student(), *batches)


def test_a_hole_in_the_mask_moves_positions():
    whole = {"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    holed = {"input_ids": torch.tensor([[5, 6, 9, 7]]), "attention_mask": torch.tensor([[1, 1, 0, 1]])}
    compare(bert(), whole, holed)


def test_token_types_tell_examples_apart():
    ids = torch.tensor([[5, 6, 7, 8]])
    mask = torch.ones_like(ids)
    types = torch.tensor([[0, 0, 1, 1]])
    compare(
        bert(),
        {"input_ids": ids, "attention_mask": mask, "token_type_ids": types},
        {"input_ids": ids, "attention_mask": mask, "token_type_ids": 1 - types},
        {"input_ids": ids, "attention_mask": mask},
    )


class WithFeatures(nn.Module):
    """Tokens, and as many further numbers of an example as there happen to be tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 4)
        self.head = nn.Linear(8, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, features: Tensor) -> dict[str, Tensor]:
        weight = attention_mask[..., None].float()
        words = (self.embedding(input_ids) * weight).sum(1) / weight.sum(1)
        return {"logits": self.head(torch.cat([words, features], -1))}


def test_numbers_that_are_no_tokens_are_not_cut_like_padding():
    batch = {"input_ids": torch.tensor([[5, 6, 0, 0]]), "attention_mask": torch.tensor([[1, 1, 0, 0]])}
    compare(
        WithFeatures(),
        {**batch, "features": torch.tensor([[1.0, 2.0, 3.0, 4.0]])},
        {**batch, "features": torch.tensor([[1.0, 2.0, -3.0, -4.0]])},
    )


class WithTask(nn.Module):
    """A model with a head for each task; the task is named in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 4)
        self.heads = nn.ModuleDict({"a": nn.Linear(4, 3), "b": nn.Linear(4, 3)})

    def forward(self, input_ids: Tensor, task: str) -> dict[str, Tensor]:
        return {"logits": self.heads[task](self.embedding(input_ids).mean(1))}


def test_inputs_that_are_no_tensors_tell_batches_apart():
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    compare(WithTask(), {"input_ids": ids, "task": "a"}, {"input_ids": ids, "task": "b"})


class WithMask(nn.Module):
    """A model that is given one attention mask for all examples."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, input_ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(self.layer(self.embedding(input_ids), src_mask=mask)[:, 0])}


def test_an_input_that_is_shared_by_all_examples():
    causal = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
    batches = [{"input_ids": torch.randint(0, 40, (rows, 5)), "mask": causal} for rows in (3, 5, 7)]
    compare(WithMask(), *batches)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_embedded_inputs_are_remembered_too(dtype, runs):
    student = bert().to(dtype)
    teacher = Teacher(student)
    teacher.consider(0.0)
    calls = runs(teacher)
    batch = {"inputs_embeds": torch.randn(3, 5, 16, dtype=dtype)}
    for _ in range(2):
        teacher.loss(batch, student(**batch))
    assert calls == [3]


def test_inputs_with_a_gradient():
    student = bert()
    teacher = Teacher(student)
    teacher.consider(0.0)
    batch = {"inputs_embeds": torch.randn(3, 5, 16, requires_grad=True)}
    teacher.loss(batch, student(**batch)).backward()
    assert torch.count_nonzero(batch["inputs_embeds"].grad) > 0


def test_outputs_handed_out_are_not_the_remembered_ones(pair):
    teacher, _ = pair
    batch = inputs_of(batch_for("classes", seed=7), "classes")
    for _ in range(2):
        (first,) = teacher._outputs(batch, "classes")
        expected = first.clone()
        first.zero_()
        assert torch.equal(teacher._outputs(batch, "classes")[0], expected)
