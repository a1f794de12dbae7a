"""A teacher survives a restart to the bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GPT2ForSequenceClassification,
)

from pinscher import Pruner, PruningConfig, Teacher
from pinscher.train import checkpoint
from tiny_snapshots import sparsify
from tiny_teachers import STUDENTS, batch_for, bert, gpt2, kind_of, learn, remembered


def is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return type(value) is dict and all(type(k) is str and is_plain(v) for k, v in value.items())
    if isinstance(value, list):
        return type(value) is list and all(is_plain(v) for v in value)
    if isinstance(value, Tensor):
        return type(value) is Tensor and not value.requires_grad and not value.is_meta
    return value is None or type(value) in (bool, int, float, str)


def reload(state: dict, tmp_path) -> dict:
    checkpoint.save(tmp_path / "teacher", teacher=state)
    return checkpoint.load(tmp_path / "teacher")["teacher"]


@pytest.mark.parametrize("objective", ["self-regularization", "knowledge-distillation", "empirical-risk"])
@pytest.mark.parametrize("score", [None, 0.5, torch.tensor(0.5), 1])
def test_the_state_is_plain(objective, score, tmp_path):
    student = sparsify(bert())
    fixed = bert() if objective == "knowledge-distillation" else None
    teacher = Teacher(student, objective, fixed=fixed)
    if score is not None:
        teacher.consider(score)
        teacher.loss(batch_for("classes"), student(**batch_for("classes")))
    assert is_plain(teacher.state_dict())
    reload(teacher.state_dict(), tmp_path)


def follow(student: nn.Module, teacher: Teacher, name: str, runs) -> tuple[list[Tensor], list[int]]:
    """The rest of a run: the second terms of each step and how many examples the teacher had to be run for."""
    torch.manual_seed(5)
    calls = runs(teacher)
    terms = []
    for step, seed in enumerate((0, 1, 2, 0, 1)):
        if step == 3:
            assert not teacher.consider(0.25)
            assert teacher.consider(0.75)
        terms += learn(student, teacher, batch_for(name, seed=seed), lr=0.1)
    return terms, calls


@pytest.mark.parametrize("zeros", [0.0, 0.8])
@pytest.mark.parametrize("name", STUDENTS)
def test_a_resumed_run_goes_on_bit_by_bit(name, zeros, tmp_path, runs):
    student = sparsify(STUDENTS[name](), zeros)
    if name == "classes":
        student.bert.embeddings.requires_grad_(False)
    teacher = Teacher(student, kind=kind_of(name))
    teacher.consider(0.5)
    learn(student, teacher, batch_for(name, seed=0), steps=2, lr=0.1)
    # An example met first in another company: its remembered row may differ in the last bit from a new run.
    learn(student, teacher, batch_for(name, (7, 4), seed=1), lr=0.1)
    weights, state = copy.deepcopy(student.state_dict()), reload(teacher.state_dict(), tmp_path)
    expected, ran = follow(student, teacher, name, runs)

    torch.manual_seed(99)
    student = STUDENTS[name]()
    student.load_state_dict(weights)
    if name == "classes":
        student.bert.embeddings.requires_grad_(False)
    again = Teacher(student, kind=kind_of(name))
    again.load_state_dict(state)
    assert (again.best, again.changes, again.ready) == (0.5, 1, True)
    found, ran_again = follow(student, again, name, runs)
    assert ran_again == ran
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert again.nbytes == teacher.nbytes
    assert (again.best, again.changes) == (teacher.best, teacher.changes) == (0.75, 2)


def test_remembered_outputs_survive(runs):
    student = bert()
    batch = batch_for("classes")
    teacher = Teacher(student)
    teacher.consider(0.5)
    outputs = student(**batch)
    expected = teacher.loss(batch, outputs)
    twin = bert()
    twin.load_state_dict(student.state_dict())
    again = Teacher(twin)
    again.load_state_dict(teacher.state_dict())
    calls = runs(again)
    assert torch.equal(again.loss(batch, outputs), expected)
    assert calls == []
    assert remembered(again) == remembered(teacher) > 0


@pytest.mark.parametrize("limit", [0, 50])
def test_a_smaller_memory_holds_after_a_restart_too(limit):
    student = bert()
    batch = batch_for("classes")
    teacher = Teacher(student)
    teacher.consider(0.5)
    outputs = student(**batch)
    expected = teacher.loss(batch, outputs)
    again = Teacher(student, cache_bytes=limit)
    again.load_state_dict(teacher.state_dict())
    assert remembered(again) <= limit
    torch.testing.assert_close(again.loss(batch, outputs), expected, rtol=0, atol=1e-5)


def test_a_state_does_not_change_while_training_goes_on():
    student = bert()
    batch = batch_for("classes")
    teacher = Teacher(student)
    teacher.consider(0.5)
    outputs = student(**batch)
    expected = teacher.loss(batch, outputs)
    state = teacher.state_dict()
    learn(student, teacher, batch_for("classes", seed=1), steps=2)
    teacher.consider(0.9)
    learn(student, teacher, batch_for("classes", seed=2), steps=2)
    again = Teacher(bert())
    again.load_state_dict(state)
    assert torch.equal(again.loss(batch, outputs), expected)


@pytest.mark.parametrize("objective", ["self-regularization", "empirical-risk"])
def test_a_state_without_a_teacher(objective, tmp_path):
    again = Teacher(bert(), objective)
    again.load_state_dict(reload(Teacher(bert(), objective).state_dict(), tmp_path))
    batch = batch_for("classes")
    student = bert()
    assert not again.ready
    assert again.loss(batch, student(**batch)).item() == 0
    assert again.consider(0.0) is (objective == "self-regularization")


def test_the_state_of_a_fixed_teacher_leaves_its_weights_out(tmp_path):
    student, fixed = bert(), bert()
    batch = batch_for("classes")
    teacher = Teacher(student, "knowledge-distillation", fixed=fixed)
    outputs = student(**batch)
    expected = teacher.loss(batch, outputs)
    state = teacher.state_dict()
    assert state["snapshot"] is None
    assert sum(v.numel() * v.element_size() for v in state.values() if isinstance(v, Tensor)) < 1000
    again = Teacher(bert(), "knowledge-distillation", fixed=copy.deepcopy(fixed))
    again.load_state_dict(reload(state, tmp_path))
    assert torch.equal(again.loss(batch, outputs), expected)


def test_the_state_may_be_loaded_over_another_teacher():
    student, batch = bert(), batch_for("classes")
    teacher = Teacher(student)
    teacher.consider(0.5)
    outputs = student(**batch)
    expected = teacher.loss(batch, outputs)
    other = bert()
    again = Teacher(other)
    again.consider(0.9)
    again.loss(batch, other(**batch))
    again.load_state_dict(teacher.state_dict())
    assert torch.equal(again.loss(batch, outputs), expected)
    assert again.best == 0.5


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("self-regularization", "empirical-risk"),
        ("self-regularization", "knowledge-distillation"),
        ("empirical-risk", "self-regularization"),
        ("knowledge-distillation", "self-regularization"),
    ],
)
def test_the_state_of_another_objective_is_refused(saved, loaded):
    def make(objective: str) -> Teacher:
        return Teacher(bert(), objective, fixed=bert() if objective == "knowledge-distillation" else None)

    teacher, other = make(saved), make(loaded)
    teacher.consider(0.5)
    with pytest.raises(ValueError, match=f"objective.*{saved}.*{loaded}"):
        other.load_state_dict(teacher.state_dict())
    assert other.best is None


@pytest.mark.parametrize("zeros", [0.0, 0.8])
@pytest.mark.parametrize(
    "other",
    [
        lambda: bert(num_hidden_layers=3),
        lambda: bert(num_hidden_layers=1),
        lambda: bert(hidden_size=32),
        lambda: bert(num_labels=5),
        lambda: gpt2(GPT2ForSequenceClassification, pad_token_id=0),
    ],
    ids=["deeper", "shallower", "wider", "more-labels", "gpt2"],
)
def test_the_teacher_of_another_model_is_refused(other, zeros):
    teacher = Teacher(sparsify(bert(), zeros))
    teacher.consider(0.5)
    student = other()
    batch = batch_for("classes")
    mine = Teacher(student)
    mine.consider(0.25)
    outputs = student(**batch)
    expected = mine.loss(batch, outputs)
    with pytest.raises(ValueError, match="another model"):
        mine.load_state_dict(teacher.state_dict())
    assert (mine.best, mine.changes) == (0.25, 1)
    assert torch.equal(mine.loss(batch, outputs), expected)


def test_saving_leaves_the_random_numbers_of_training_alone():
    student = bert()
    Pruner(student, PruningConfig(method="l0", sparsity=0.5, total_steps=8, interval=1))
    student.train()
    teacher = Teacher(student)
    teacher.consider(0.5)
    before = torch.get_rng_state()
    teacher.state_dict()
    assert teacher.nbytes > 0
    assert torch.equal(torch.get_rng_state(), before)
