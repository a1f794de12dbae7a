"""The teacher: when it changes, when there is none, and when it is another model."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pinscher import Teacher
from tiny_teachers import STUDENTS, at_test_time, batch_for, bert, inputs_of, kind_of, learn, sides

# ---------------------------------------------------------------- when it changes

scores = st.lists(st.one_of(st.floats(-5, 5), st.just(math.nan), st.sampled_from([0.0, 1.0])), max_size=12)


@settings(deadline=None, max_examples=60)
@given(scores=scores, greater=st.booleans())
def test_only_a_strictly_better_score_makes_a_teacher(scores, greater):
    student = nn.Linear(2, 2)
    teacher = Teacher(student, greater_is_better=greater)
    best = None
    changes = 0
    for score in scores:
        better = not math.isnan(score) and (best is None or (score > best if greater else score < best))
        assert teacher.consider(score) is better
        if better:
            best, changes = score, changes + 1
        assert (teacher.best, teacher.changes, teacher.ready) == (best, changes, best is not None)


@settings(deadline=None, max_examples=60)
@given(
    seen=st.lists(st.tuples(st.sampled_from([0.0, 1.0, 2.0, math.nan]), st.floats(0.1, 1)), max_size=12),
    lag=st.none() | st.sampled_from([1.0, 1.25, 2.0]),
)
def test_a_teacher_that_lags_behind_gives_way_whatever_its_score(seen, lag):
    teacher = Teacher(nn.Linear(2, 2), lag=lag)
    best = then = None
    for score, density in seen:
        taken = not math.isnan(score) and (best is None or score > best or (lag is not None and then > lag * density))
        assert teacher.consider(score, density) is taken
        if taken:
            best, then = score, density
        assert teacher.best == best
    again = Teacher(nn.Linear(2, 2), lag=lag)
    again.load_state_dict(teacher.state_dict())
    assert again.density == teacher.density == (then or 1.0)
    older = teacher.state_dict()
    del older["density"]
    again.load_state_dict(older)
    assert again.density == 1.0


def test_a_lag_needs_the_students_density():
    teacher = Teacher(nn.Linear(2, 2), lag=1.25)
    with pytest.raises(ValueError, match="must be told the student's density"):
        teacher.consider(0.5)
    assert not teacher.ready


@pytest.mark.parametrize("greater", [True, False])
def test_the_weights_are_those_of_the_best_score(greater):
    student = nn.Linear(2, 2, bias=False)
    teacher = Teacher(student, greater_is_better=greater)
    sign = 1 if greater else -1
    kept = {1.0: 1.0, 0.5: 1.0, 1.0 + 1e-9: 3.0, math.nan: 3.0, 2.0: 5.0, -3.0: 5.0}
    for step, (score, expected) in enumerate(kept.items()):
        with torch.no_grad():
            student.weight.fill_(step + 1)
        teacher.consider(sign * score)
        assert teacher.snapshot({"input": torch.eye(2)}).unique().tolist() == [expected]
        assert student.weight.unique().tolist() == [step + 1]


@pytest.mark.parametrize("score", [0.0, -1e9, torch.tensor(0.25), 3])
@pytest.mark.parametrize("greater", [True, False])
def test_the_first_evaluation_at_step_zero_makes_a_teacher(score, greater):
    student = bert()
    batch = batch_for("classes")
    teacher = Teacher(student, greater_is_better=greater)
    assert teacher.consider(score)
    assert teacher.best == float(score)
    assert isinstance(teacher.best, float)
    outputs = student(**batch)
    expected = F.kl_div(
        outputs.logits.log_softmax(-1),
        at_test_time(student, inputs_of(batch, "classes"))[0].log_softmax(-1),
        reduction="batchmean",
        log_target=True,
    )
    assert teacher.loss(batch, outputs).item() == pytest.approx(expected.item(), abs=1e-6)


def test_a_score_that_is_no_number_never_makes_a_teacher():
    teacher = Teacher(bert())
    assert not teacher.consider(math.nan)
    assert not teacher.ready
    assert teacher.consider(0.1)
    assert not teacher.consider(math.nan)
    assert teacher.best == 0.1


# ---------------------------------------------------------------- no teacher, no term


@pytest.mark.parametrize("name", STUDENTS)
@pytest.mark.parametrize("mix", ["sum", "entropy"])
def test_zero_before_there_is_a_teacher(name, mix):
    student = STUDENTS[name]()
    batch = batch_for(name)
    teacher = Teacher(student, kind=kind_of(name), mix=mix)
    for _ in range(2):
        term = teacher.loss(batch, student(**batch))
        assert term.shape == ()
        assert term.item() == 0.0
        teacher.consider(math.nan)


@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
@pytest.mark.parametrize("name", STUDENTS)
def test_empirical_risk_has_no_second_term(name, named):
    student = STUDENTS[name]()
    batch = batch_for(name)
    teacher = Teacher(student, "empirical-risk", kind=kind_of(name) if named else None)
    assert not teacher.consider(1.0)
    assert not teacher.ready
    term = teacher.loss(batch, student(**batch))
    assert term.shape == ()
    assert term.item() == 0.0
    assert teacher.nbytes == 0


def test_the_zero_adds_to_a_loss():
    student = bert()
    batch = batch_for("classes")
    outputs = student(**batch)
    total = outputs.loss + Teacher(student).loss(batch, outputs)
    assert torch.equal(total, outputs.loss)
    total.backward()
    assert student.classifier.weight.grad is not None


# ---------------------------------------------------------------- knowledge distillation


@pytest.mark.parametrize("name", STUDENTS)
def test_a_fixed_teacher_stays_what_it_is(name):
    student, fixed = STUDENTS[name](), STUDENTS[name]()
    batch = batch_for(name)
    before = {n: t.clone() for n, t in fixed.state_dict().items()}
    outputs = at_test_time(fixed, inputs_of(batch, name))
    teacher = Teacher(student, "knowledge-distillation", fixed=fixed, kind=kind_of(name), cache_bytes=0)
    assert teacher.ready
    assert not any(module.training for module in fixed.modules())
    terms = learn(student, teacher, batch, steps=3, lr=0.1)
    assert all(term.item() > 0 for term in terms)
    assert not teacher.consider(1.0)
    student.train()
    assert not any(module.training for module in fixed.modules())
    for n, tensor in fixed.state_dict().items():
        assert torch.equal(tensor, before[n]), n
    assert all(p.grad is None for p in fixed.parameters())
    with torch.no_grad():
        again = sides(fixed(**inputs_of(batch, name)))
    for mine, its in zip(again, outputs, strict=True):
        assert torch.equal(mine, its)


def test_a_fixed_teacher_is_in_no_tree_of_the_student():
    student, fixed = bert(), bert(num_hidden_layers=3)
    names = [n for n, _ in student.named_parameters()]
    teacher = Teacher(student, "knowledge-distillation", fixed=fixed)
    student.teacher = teacher
    assert [n for n, _ in student.named_parameters()] == names
    assert not {id(p) for p in student.parameters()} & {id(p) for p in fixed.parameters()}
    assert not isinstance(teacher, nn.Module)
    del student.teacher


def test_a_copied_teacher_is_in_no_tree_of_the_student():
    student = bert()
    names = list(student.state_dict())
    teacher = Teacher(student)
    teacher.consider(1.0)
    student.teacher = teacher
    assert list(student.state_dict()) == names
    assert len(list(student.modules())) == len(list(bert().modules()))
    del student.teacher


def test_the_term_is_the_divergence_from_the_fixed_teacher():
    student, fixed = bert(), bert(num_hidden_layers=3)
    batch = batch_for("classes")
    teacher = Teacher(student, "knowledge-distillation", fixed=fixed, temperature=2.0)
    outputs = student(**batch)
    its = at_test_time(fixed, inputs_of(batch, "classes"))[0].double()
    p, q = (its / 2).softmax(-1), (outputs.logits.double() / 2).softmax(-1)
    expected = 4 * (p * (p.log() - q.log())).sum(-1).mean()
    fixed.eval()
    assert teacher.loss(batch, outputs).item() == pytest.approx(expected.item(), rel=1e-3, abs=1e-6)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"objective": "knowledge-distillation"}, "fixed"),
        ({"objective": "self-regularization", "fixed": nn.Identity()}, "fixed"),
        ({"objective": "empirical-risk", "fixed": nn.Identity()}, "fixed"),
        ({"objective": "distillation"}, "objective must be one of self-regularization"),
        ({"kind": "class"}, "kind must be one of .*classes"),
        ({"mix": "both"}, "mix must be one of sum, entropy"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"temperature": -1.0}, "temperature must be positive"),
        ({"temperature": math.nan}, "temperature must be positive"),
        ({"lag": 0.9}, "lag must be at least 1"),
        ({"lag": math.nan}, "lag must be at least 1"),
    ],
)
def test_wrong_combinations_are_errors(options, says):
    with pytest.raises(ValueError, match=says):
        Teacher(nn.Identity(), **options)


def test_the_student_cannot_be_its_own_fixed_teacher():
    """It would be frozen and left in evaluation mode."""
    student = bert()
    with pytest.raises(ValueError, match="fixed"):
        Teacher(student, "knowledge-distillation", fixed=student)
    assert student.training
    assert all(p.requires_grad for p in student.parameters())
