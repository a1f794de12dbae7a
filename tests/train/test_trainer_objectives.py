"""The objectives of PinsTrainer: whom the student listens to, and from when on."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import tiny_models
from pinscher.errors import InputError
from tiny_models import DROPOUT, HEADS
from tiny_trainer import (
    EVALUATING,
    SCORED,
    contents,
    copied,
    logged,
    pruning,
    resumable,
    same,
    scripted,
    trainer_for,
    wanted_zeros,
    zeros,
)


def test_empirical_risk_has_no_teacher(tmp_path):
    trainer = trainer_for(tmp_path, args=EVALUATING, pruning=pruning(), objective="empirical-risk")
    trainer.train()
    assert not trainer.teacher.ready
    assert trainer.teacher.snapshot is None
    assert not logged(trainer, "loss_sr")
    assert not logged(trainer, "teacher_score")
    assert logged(trainer, "loss_er") == pytest.approx(logged(trainer, "loss"), rel=1e-5)


def test_distillation_listens_to_the_given_teacher_and_leaves_it_alone(tmp_path):
    teacher = HEADS["bert"].make(seed=7, **DROPOUT)
    before = copied(teacher.state_dict())
    data = tiny_models.rows("classes")
    batch = tiny_models.collate(data.to_list())
    student = HEADS["bert"].make()
    with torch.no_grad():
        mine, its = (F.log_softmax(model.eval()(**batch).logits, -1) for model in (student, teacher))
    expected = float(F.kl_div(mine, its, reduction="batchmean", log_target=True))
    trainer = trainer_for(
        *(tmp_path, "bert"),
        model=student,
        data=data,
        args=EVALUATING | {"per_device_train_batch_size": len(data)},
        pruning=pruning(),
        objective="knowledge-distillation",
        teacher=teacher.train(),
    )
    trainer.train()
    assert logged(trainer, "loss_sr")[1] == pytest.approx(expected, rel=1e-5)
    assert len(logged(trainer, "loss_sr")) == 12
    assert same(teacher.state_dict(), before)
    assert all(p.grad is None for p in teacher.parameters())
    assert not logged(trainer, "teacher_score")
    assert not [name for name, _ in trainer.model.named_parameters() if "teacher" in name]


def test_self_regularisation_takes_the_first_student_and_then_better_ones(tmp_path):
    trainer = trainer_for(
        tmp_path, args=EVALUATING | SCORED, pruning=pruning(), validate=scripted([0.5, 0.4, 0.6, 0.6, float("nan")])
    )
    trainer.train()
    assert logged(trainer, "teacher_score") == {0: 0.5, 6: 0.6}
    assert logged(trainer, "teacher_changes") == {0: 1, 6: 2}
    assert trainer.teacher.best == 0.6
    terms, errors, losses = (logged(trainer, name) for name in ("loss_sr", "loss_er", "loss"))
    assert terms.keys() == errors.keys() == losses.keys() == set(range(1, 13))
    assert terms[1] < 1e-6 < terms[2]  # at first student and teacher are one
    assert terms[7] < min(terms[6], terms[8])  # and again after the change
    for step in losses:
        assert losses[step] == pytest.approx(errors[step] + terms[step], rel=1e-5)


@pytest.mark.parametrize(("start", "first"), [(0.0, 0), (0.25, 3), (4, 6), (0.3, 6)])
def test_the_teacher_may_start_later(tmp_path, start, first):
    """Twelve steps, an evaluation every three."""
    falling = scripted([0.9, 0.8, 0.7, 0.6, 0.5])
    trainer = trainer_for(tmp_path, args=EVALUATING | SCORED, pruning=pruning(), validate=falling, teacher_start=start)
    trainer.train()
    assert list(logged(trainer, "teacher_score")) == [first]
    assert min(logged(trainer, "loss_sr")) == first + 1


def test_a_teacher_with_too_many_weights_gives_way(tmp_path):
    falling = scripted([0.9, 0.8, 0.7, 0.6, 0.5])
    trainer = trainer_for(tmp_path, args=EVALUATING | SCORED, pruning=pruning(), validate=falling, teacher_lag=1.2)
    trainer.train()
    found = logged(trainer, "teacher_score")
    density = {0: 1.0} | logged(trainer, "density")
    teacher, expected = 0, [0]
    for step in (3, 6, 9, 12):
        if density[teacher] > 1.2 * density[step]:
            teacher = step
            expected.append(step)
    assert list(found) == expected
    assert len(found) > 2


def test_a_run_with_a_lag_resumes_bit_by_bit(tmp_path):
    more = {"teacher_start": 0.2, "teacher_lag": 1.1}
    whole = resumable(tmp_path / "whole", **more)
    whole.train()
    resumed = resumable(tmp_path / "resumed", seed=5, **more)
    resumed.train(str(tmp_path / "whole" / "checkpoint-9"))
    assert contents(tmp_path / "resumed" / "checkpoint-15") == contents(tmp_path / "whole" / "checkpoint-15")
    assert resumed.teacher.density == whole.teacher.density < 1


@pytest.mark.parametrize("lag", [0.9, float("nan")])
def test_a_lag_below_one(tmp_path, lag):
    with pytest.raises(InputError, match="teacher_lag must be at least 1"):
        trainer_for(tmp_path, pruning=pruning(), teacher_lag=lag)


@pytest.mark.parametrize("start", [-1, float("nan")])
def test_a_start_that_is_no_number_of_steps(tmp_path, start):
    with pytest.raises(InputError, match="teacher_start must be a number of steps"):
        trainer_for(tmp_path, pruning=pruning(), teacher_start=start)


def test_a_lower_loss_is_better_by_default(tmp_path):
    trainer = trainer_for(tmp_path, args=EVALUATING, pruning=pruning())
    trainer.train()
    found = logged(trainer, "teacher_score")
    losses = list(logged(trainer, "eval_loss").values())
    assert list(found.values()) == [loss for i, loss in enumerate(losses) if loss < min(losses[:i], default=math.inf)]
    assert len(found) > 1


def test_without_an_evaluation_at_the_start_the_teacher_comes_later(tmp_path):
    trainer = trainer_for(tmp_path, args=EVALUATING | {"eval_on_start": False}, pruning=pruning())
    trainer.train()
    assert min(logged(trainer, "loss_sr")) == 4


@pytest.mark.parametrize("head", ["bert", "tokens", "spans", "gpt2-lm", "t5"])
def test_the_entropy_mix_runs(head, tmp_path):
    trainer = trainer_for(tmp_path, head, args=EVALUATING, pruning=pruning(), mix="entropy")
    trainer.train()
    assert trainer.teacher.temperature == 2.0
    assert all(math.isfinite(value) for value in logged(trainer, "loss_sr").values())
    assert zeros(trainer.model) == wanted_zeros(trainer.model)
