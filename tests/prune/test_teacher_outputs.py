"""What a teacher says is what the student said then, and training listens to it alone."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pinscher import Pruner, PruningConfig, Teacher
from tiny_snapshots import sparsify
from tiny_teachers import STUDENTS, at_test_time, batch_for, bert, inputs_of, kind_of, learn, sides


@pytest.mark.parametrize("zeros", [0.0, 0.8])
@pytest.mark.parametrize("name", STUDENTS)
def test_the_teacher_says_what_the_student_said_then(name, zeros):
    student = sparsify(STUDENTS[name](), zeros)
    batch = batch_for(name)
    inputs = inputs_of(batch, name)
    teacher = Teacher(student, kind=kind_of(name))
    assert teacher.consider(0.5)
    assert bool(teacher.snapshot.packed) or not zeros
    then = at_test_time(student, inputs)
    for round_ in range(2):
        for mine, its in zip(sides(teacher.snapshot(inputs)), then, strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)
        if not round_:
            learn(student, teacher, batch, steps=3)
            teacher.consider(0.4)
    now = at_test_time(student, inputs)
    assert not all(torch.allclose(a, b, atol=1e-3) for a, b in zip(now, then, strict=True))
    assert teacher.consider(0.6)
    for mine, its in zip(sides(teacher.snapshot(inputs)), now, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mix", ["sum", "entropy"])
@pytest.mark.parametrize("name", STUDENTS)
def test_the_term_is_that_of_a_whole_copy(name, mix):
    """A snapshot against a deep copy of the student, used as a fixed teacher."""
    student = sparsify(STUDENTS[name]())
    batch = batch_for(name)
    options = {"kind": kind_of(name), "mix": mix}
    teacher = Teacher(student, **options)
    teacher.consider(0.0)
    whole = Teacher(student, "knowledge-distillation", fixed=copy.deepcopy(student), **options)
    learn(student, teacher, batch, steps=2, lr=0.2)
    outputs = student(**batch)
    expected = whole.loss(batch, outputs)
    assert expected.item() != 0 or (name, mix) == ("regression", "entropy")
    torch.testing.assert_close(teacher.loss(batch, outputs), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", STUDENTS)
def test_a_student_that_equals_its_teacher_pays_nothing(name):
    student = STUDENTS[name]()
    batch = batch_for(name)
    teacher = Teacher(student, kind=kind_of(name))
    teacher.consider(0.0)
    student.eval()
    term = teacher.loss(batch, student(**batch))
    term.backward()
    assert term.item() == pytest.approx(0.0, abs=1e-6)
    assert all(p.grad is None or p.grad.abs().max() < 1e-4 for p in student.parameters())


@pytest.mark.parametrize("name", STUDENTS)
def test_the_gradient_reaches_the_student_only(name):
    student = STUDENTS[name]()
    batch = batch_for(name)
    teacher = Teacher(student, kind=kind_of(name))
    teacher.consider(0.0)
    learn(student, teacher, batch)
    student.zero_grad()
    teacher.consider(1.0)
    lent: list[Tensor] = []

    def note(module: nn.Module, args: tuple) -> None:
        if not torch.is_grad_enabled():
            lent.extend(module.parameters())

    student.register_forward_pre_hook(note)
    teacher.loss(batch, student(**batch)).backward()
    assert any(torch.count_nonzero(p.grad) for p in student.parameters() if p.grad is not None)
    assert len(lent) >= len(list(student.parameters()))
    assert not {id(p) for p in lent} & {id(p) for p in student.parameters()}
    kept = teacher.snapshot
    its = [*lent, *kept.plain.values(), *(t for p in kept.packed.values() for t in (p.gaps, p.values))]
    assert all(t.grad is None and t.grad_fn is None and not t.requires_grad for t in its)
    assert all(p.requires_grad for p in student.parameters())


@pytest.mark.parametrize("mix", ["sum", "entropy"])
@pytest.mark.parametrize("name", STUDENTS)
def test_the_gradients_are_those_of_a_teacher_of_its_own(name, mix):
    """The teacher runs in the student's modules between the student's forward and backward pass, and leaves no trace.

    Against a deep copy of the student, used as a fixed teacher.
    """
    student = sparsify(STUDENTS[name]())
    batch = batch_for(name)
    options = {"kind": kind_of(name), "mix": mix, "cache_bytes": 0}
    teacher = Teacher(student, **options)
    teacher.consider(0.0)
    whole = Teacher(student, "knowledge-distillation", fixed=copy.deepcopy(student), **options)
    learn(student, teacher, batch, lr=0.2)
    found = []
    for one in (teacher, whole):
        torch.manual_seed(3)
        student.zero_grad()
        outputs = student(**batch)
        own = outputs["loss"] if "loss" in outputs else F.cross_entropy(outputs["logits"], batch["labels"])
        (own + one.loss(batch, outputs)).backward()
        found.append({n: p.grad.clone() for n, p in student.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    assert any(torch.count_nonzero(grad) for grad in found[0].values())
    for n, grad in found[0].items():
        torch.testing.assert_close(grad, found[1][n], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", STUDENTS)
def test_the_students_random_numbers_are_left_alone(name):
    """Dropout of a student goes on as if there were no teacher."""
    student = STUDENTS[name]()
    batch = batch_for(name)
    teacher = Teacher(student, kind=kind_of(name))
    outputs = student(**batch)
    before = torch.get_rng_state()
    teacher.consider(0.0)
    teacher.loss(batch, outputs)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(module.training for module in student.modules())


def test_a_student_that_fails_in_the_teachers_run_is_whole_again():
    student = bert()
    batch = batch_for("classes")
    teacher = Teacher(student)
    teacher.consider(0.0)
    learn(student, teacher, batch)
    before = dict(student.named_parameters())
    values = {n: t.clone() for n, t in student.state_dict().items()}
    outputs = student(**batch)
    with pytest.raises(IndexError):
        teacher.loss({**batch, "input_ids": torch.full((4, 7), 1000)}, outputs)
    assert all(p is before[n] and p.requires_grad for n, p in student.named_parameters())
    assert all(torch.equal(t, values[n]) for n, t in student.state_dict().items())
    assert all(module.training for module in student.modules())
    outputs.loss.backward()
    assert student.classifier.weight.grad is not None
    assert learn(student, teacher, batch, steps=2)[-1].isfinite()


@pytest.mark.parametrize("known", [False, True])
def test_what_was_frozen_trains_on_without_moving_the_teacher(known):
    """Gradual unfreezing, whether or not the teacher had to be run between the thaw and the first step."""
    student = bert()
    student.bert.embeddings.requires_grad_(False)
    batch, other = batch_for("classes"), inputs_of(batch_for("classes", seed=1), "classes")
    teacher = Teacher(student)
    teacher.consider(0.0)
    expected = at_test_time(student, other)[0]
    if known:
        teacher.loss(batch, student(**batch))
    student.requires_grad_(True)
    learn(student, teacher, batch, steps=3)
    assert not torch.allclose(at_test_time(student, other)[0], expected, atol=1e-3)
    torch.testing.assert_close(teacher.snapshot(other)["logits"], expected, rtol=1e-5, atol=1e-6)


def test_labels_do_not_reach_the_teacher(runs):
    """The teacher needs no loss of its own, and its memory does not depend on labels."""
    student = bert()
    batch = batch_for("classes")
    teacher = Teacher(student)
    teacher.consider(0.0)
    calls = runs(teacher)
    seen: list[set[str]] = []
    outputs = student(**batch)
    student.register_forward_pre_hook(lambda m, a, k: seen.append(set(k)), with_kwargs=True)
    teacher.loss(batch, outputs)
    teacher.loss({**batch, "labels": 1 - batch["labels"]}, outputs)
    assert seen == [{"input_ids", "attention_mask"}]
    assert calls == [4]


def test_the_teacher_may_be_taken_inside_inference_mode():
    student = sparsify(bert())
    batch = batch_for("classes")
    teacher = Teacher(student)
    with torch.inference_mode():
        assert teacher.consider(0.0)
        teacher.loss(batch, student(**batch))
    student.eval()
    assert teacher.loss(batch, student(**batch)).item() == pytest.approx(0.0, abs=1e-6)
    assert all(math.isfinite(term) for term in learn(student.train(), teacher, batch, steps=2))


@pytest.mark.parametrize("method", ["pins", "magnitude", "movement", "smvp", "l0", "pst"])
def test_a_whole_run_of_pruning_with_self_regularisation(method):
    student = bert()
    pruner = Pruner(student, PruningConfig(method=method, sparsity=0.8, total_steps=8, interval=1, cooldown=2))
    optimizer = torch.optim.AdamW(pruner.param_groups(), lr=1e-2)
    pruner.attach(optimizer)
    teacher = Teacher(student)
    batch = batch_for("classes")
    inputs = inputs_of(batch, "classes")
    for step in range(8):
        if step % 3 == 0:
            assert teacher.consider(step)
            said = at_test_time(student, inputs)[0]
        outputs = student(**batch)
        term = teacher.loss(batch, outputs)
        assert term.isfinite()
        (outputs.loss + term).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(teacher.snapshot(inputs)["logits"], said, rtol=1e-5, atol=1e-6)
    pruner.finish()
    assert teacher.consider(100.0)
    torch.testing.assert_close(teacher.snapshot(inputs)["logits"], at_test_time(student, inputs)[0])
