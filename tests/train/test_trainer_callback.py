"""PruningCallback in any Trainer."""

from __future__ import annotations

import pytest
from transformers import Trainer

import tiny_models
from pinscher.errors import InputError
from pinscher.prune import CRITERIA
from pinscher.train import checkpoint
from pinscher.train.trainer import PruningCallback
from tiny_models import DROPOUT, HEADS
from tiny_trainer import EVALUATING, LEARNED, SAVING, copied, pruning, same, trainer_for, wanted_zeros, zeros


def with_callback(folder, method="pins", args=None, seed=0, config=None):
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 15}
    return trainer_for(
        folder,
        cls=Trainer,
        model=HEADS["bert"].make(seed, **DROPOUT),
        data=tiny_models.rows("classes", 22),
        args=sizes | (args or {}),
        callbacks=[PruningCallback(config or pruning(method))],
    )


@pytest.mark.parametrize("method", [name for name in CRITERIA if name not in LEARNED])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_callback_prunes_in_any_trainer(method, accumulation, tmp_path):
    trainer = with_callback(tmp_path, method, {"gradient_accumulation_steps": accumulation, "max_steps": 12})
    trainer.train()
    assert zeros(trainer.model) == wanted_zeros(trainer.model)
    callback = next(c for c in trainer.callback_handler.callbacks if isinstance(c, PruningCallback))
    assert callback.pruner.finished
    assert callback.pruner.t == 12  # optimiser steps, not micro-batches


@pytest.mark.parametrize("method", ["pins", "magnitude"])
def test_the_callback_resumes_bit_identically(method, tmp_path):
    whole = with_callback(tmp_path / "run", method, SAVING)
    whole.train()
    wanted = copied(whole.model.state_dict())
    pruned = checkpoint.load(tmp_path / "run" / "checkpoint-15" / "pruner")
    for step in (6, 9):
        resumed = with_callback(tmp_path / "run", method, SAVING, seed=5)
        resumed.train(str(tmp_path / "run" / f"checkpoint-{step}"))
        assert same(resumed.model.state_dict(), wanted)
        again = checkpoint.load(tmp_path / "run" / "checkpoint-15" / "pruner")
        assert repr(again) == repr(pruned)


def test_the_callback_resumes_from_output_dir_only(tmp_path):
    with_callback(tmp_path / "one", args=SAVING).train()
    elsewhere = with_callback(tmp_path / "two", args=SAVING)
    with pytest.raises(InputError, match="Resume from a checkpoint in output_dir"):
        elsewhere.train(str(tmp_path / "one" / "checkpoint-6"))


@pytest.mark.parametrize("method", LEARNED)
def test_the_callback_refuses_learned_masks(method):
    with pytest.raises(InputError, match=rf"'{method}' learns its masks.*use PinsTrainer"):
        PruningCallback(pruning(method))


def test_the_callback_refuses_load_best_model_at_end(tmp_path):
    trainer = with_callback(tmp_path, args=EVALUATING | SAVING | {"load_best_model_at_end": True})
    with pytest.raises(InputError, match="load_best_model_at_end"):
        trainer.train()
