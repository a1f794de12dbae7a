"""What a teacher's terms add up to: hardness, hidden states and embeddings, for every kind of output."""

from __future__ import annotations

import pytest
import torch

from pinscher import Teacher
from pinscher.errors import InputError
from pinscher.prune import hidden
from tiny_teachers import STUDENTS, batch_for, bert

KINDS = [name for name in STUDENTS if name != "encoder"]
ALL = {"hidden_weight": 0.5, "embeddings_weight": 0.25}


def pair(kind: str, **settings):
    torch.manual_seed(0)
    student, fixed = STUDENTS[kind]().eval(), STUDENTS[kind]()
    return student, Teacher(student, "knowledge-distillation", fixed=fixed, kind=kind, **settings)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_the_weighted_sum_of_labels_logits_hidden_states_and_embeddings(kind):
    batch = batch_for(kind)
    student, teacher = pair(kind, hardness=0.75, temperature=2.0, **ALL)
    assert teacher.reads_hidden
    outputs = student(**batch, output_hidden_states=True)
    terms = teacher.terms(batch, outputs)
    alone = pair(kind, temperature=2.0)[1].loss(batch, outputs)
    assert torch.allclose(terms["logits"], alone)
    inputs = {name: value for name, value in batch.items() if "label" not in name and "positions" not in name}
    if kind == "seq2seq-lm":
        inputs = batch
    with torch.no_grad():
        its = hidden.streams_of(teacher._fixed[0](**inputs, output_hidden_states=True), batch)
    mine = hidden.streams_of(outputs, batch)
    assert torch.allclose(terms["hidden"], hidden.layers_term(mine, its))
    assert torch.allclose(terms["embeddings"], hidden.embeddings_term(mine, its))
    whole = 0.25 * outputs.loss + 0.75 * alone + 0.5 * terms["hidden"] + 0.25 * terms["embeddings"]
    assert torch.allclose(teacher.joined(outputs.loss, terms), whole)


def test_with_a_hardness_of_one_labels_are_ignored():
    batch = batch_for("classes")
    grads = []
    for labels in (batch["labels"], 1 - batch["labels"].clamp(max=1)):
        student, teacher = pair("classes", hardness=1.0)
        outputs = student(**{**batch, "labels": labels})
        teacher.joined(outputs.loss, teacher.terms(batch, outputs)).backward()
        grads.append(student.classifier.weight.grad.clone())
    assert torch.equal(*grads)
    assert grads[0].abs().sum() > 0


def test_a_student_is_compared_with_its_own_best_self():
    student = bert()
    teacher = Teacher(student, hidden_weight=1.0)
    batch = batch_for("classes")
    assert not teacher.reads_hidden
    assert teacher.terms(batch, student(**batch)) == {}
    teacher.consider(1.0)
    assert teacher.reads_hidden
    student.eval()
    terms = teacher.terms(batch, student(**batch, output_hidden_states=True))
    assert float(terms["hidden"].detach()) == pytest.approx(0.0, abs=1e-6)
    with torch.no_grad():
        student.bert.encoder.layer[0].output.dense.weight[0].add_(1.0)
    moved = teacher.terms(batch, student(**batch, output_hidden_states=True))["hidden"]
    assert float(moved.detach()) > 1e-3


def test_students_with_fewer_layers_learn_too():
    student = bert(num_hidden_layers=1)
    teacher = Teacher(student, "knowledge-distillation", fixed=bert(num_hidden_layers=3), hidden_weight=1.0)
    batch = batch_for("classes")
    outputs = student(**batch, output_hidden_states=True)
    teacher.terms(batch, outputs)["hidden"].backward()
    assert student.bert.encoder.layer[0].output.dense.weight.grad.abs().sum() > 0


def test_small_outputs_are_remembered_only_where_they_are_all_that_is_compared():
    batch = batch_for("classes")
    for settings, remembered in (({}, True), (ALL, False)):
        student, teacher = pair("classes", **settings)
        teacher.terms(batch, student(**batch, output_hidden_states=True))
        assert bool(teacher._cache) is remembered


def test_what_does_not_go_together_is_named():
    student = bert()
    with pytest.raises(InputError, match="goes with mix sum"):
        Teacher(student, mix="entropy", hardness=0.5)
    _, teacher = pair("classes", hardness=0.5)
    with pytest.raises(ValueError, match="use joined"):
        teacher.loss(batch_for("classes"), torch.zeros(2, 2))
    _, teacher = pair("classes", hidden_weight=1.0)
    with pytest.raises(ValueError, match="output_hidden_states=True"):
        teacher.terms(batch_for("classes"), student(**batch_for("classes")))
