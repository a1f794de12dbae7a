"""Which model is the result of a run: the last, or the best at the target sparsity."""

from __future__ import annotations

import pytest

from tiny_models import DROPOUT
from tiny_trainer import EVALUATING, SAVING, SCORED, copied, pruning, same, scripted, trainer_for, wanted_zeros, zeros

EVERY_STEP = EVALUATING | SCORED | {"eval_steps": 1, "max_steps": 20}
HALF = 1 - 818.5 / 4096  # keeps 818.5 weights of 4096: whether that is 818 or 819 must be one thing everywhere


def selected(folder, scores, method="pins", sparsity=0.8):
    """Runs with select="best"; gives the trainer and (score, zeros, weights) of every evaluation."""
    seen = []

    def look(score, model):
        state = copied(trainer.pruner.model_state_dict())
        number = sum(int((state[f"{site.name}.weight"] == 0).sum()) for site in trainer.pruner.sites)
        seen.append((score, number, state))

    trainer = trainer_for(
        folder,
        args=EVERY_STEP,
        options=DROPOUT,
        pruning=pruning(method, sparsity),
        validate=scripted(scores, look),
        select="best",
    )
    trainer.train()
    assert len(seen) == 21
    return trainer, seen


SCORES = {
    "falling": [100.0 - i for i in range(21)],
    "peak": [90.0] * 12 + [50.0, 51.0, 52.0, 57.0, 53.0, 52.0, 57.0, 51.0, 50.0],
    "rising": [float(i) for i in range(21)],
}


@pytest.mark.parametrize("sparsity", [0.8, HALF])
@pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES)
@pytest.mark.parametrize("method", ["pins", "magnitude", "movement"])
def test_best_is_the_best_of_those_at_the_target(method, scores, sparsity, tmp_path):
    trainer, seen = selected(tmp_path, scores, method, sparsity)
    target = wanted_zeros(trainer.model, sparsity)
    assert seen[0][1] == 0
    assert seen[0][0] > seen[-1][0] or scores == SCORES["rising"]  # the dense start would have been the better one
    there = [entry for entry in seen if entry[1] == target]
    assert len(there) == 8  # the cool-down is the last 35 %
    best = max(there, key=lambda entry: entry[0])  # the first of them, if there are several
    assert trainer.best == best[0]
    assert zeros(trainer.model) == target
    assert same(trainer.model.state_dict(), best[2])


@pytest.mark.parametrize("method", ["smvp", "l0", "pst", "snip", "magnitude-oneshot"])
def test_best_has_the_target_sparsity_for_every_method(method, tmp_path):
    trainer, seen = selected(tmp_path, SCORES["falling"], method)
    target = wanted_zeros(trainer.model)
    assert trainer.best == max(score for score, number, _ in seen if number == target)
    assert zeros(trainer.model) == target


def test_best_survives_a_resume(tmp_path):
    scores = SCORES["peak"]
    one, _ = selected(tmp_path / "whole", scores)
    args = EVERY_STEP | SAVING | {"save_steps": 17}
    more = {"options": DROPOUT, "pruning": pruning(), "select": "best"}
    first = trainer_for(tmp_path / "run", args=args, validate=scripted(scores), **more)
    first.train()
    second = trainer_for(tmp_path / "run", args=args, validate=scripted(scores[18:]), **more)
    second.train(True)
    assert first.best == second.best == one.best == 57.0
    assert same(second.model.state_dict(), one.model.state_dict())


def test_final_is_the_last_model(tmp_path):
    last = {}
    trainer = trainer_for(
        tmp_path,
        args=EVERY_STEP,
        pruning=pruning(),
        validate=scripted(SCORES["falling"], lambda score, model: last.update(copied(model.state_dict()))),
    )
    trainer.train()
    assert same(trainer.model.state_dict(), last)
    assert not (tmp_path / "best").exists()
