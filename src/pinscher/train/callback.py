"""PruningCallback: adds pruning to any Trainer. What a callback cannot reach is in trainer.py."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from pinscher import checkpoint, sharded
from pinscher.errors import InputError
from pinscher.prune import Pruner, PruningConfig
from pinscher.prune.gates import Gated
from pinscher.train.batches import calibration_batches


def calibration(loader: Any, pruner: Pruner | None, args: Any) -> list[Any]:
    """The calibration batches of a Trainer: some of its training rows."""
    assert pruner is not None
    rows = loader.dataset
    if not hasattr(rows, "__len__"):
        raise InputError(
            f"{pruner.config.method} draws its calibration data from the training rows: they must have a length."
        )
    number = getattr(pruner.criterion, "calibration", 0)
    return calibration_batches(rows, loader.collate_fn, number, args.train_batch_size, args.seed, args.device)


class PruningCallback(TrainerCallback):
    """Adds pruning to any Trainer, without a teacher: a callback cannot add a term to the loss (use PinsTrainer).

    Args:
        config: what to prune and how far; `total_steps` may be left out.

    Its state is saved in each checkpoint's folder, and found again when the Trainer resumes.
    """

    def __init__(self, config: PruningConfig) -> None:
        if isinstance(config.make_criterion(), Gated):
            raise InputError(
                f"method {config.method!r} learns its masks, so they must be in the optimiser before the Trainer makes "
                "it: use PinsTrainer instead of PruningCallback."
            )
        self.config = config
        self.pruner: Pruner | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if args.load_best_model_at_end:
            raise InputError("load_best_model_at_end would bring back an early, denser model: switch it off.")
        model = getattr(model, "module", model)
        if self.config.total_steps not in (None, state.max_steps):
            raise InputError(
                f"the schedule is made for {self.config.total_steps} steps but this run has {state.max_steps}: leave "
                "total_steps out of the PruningConfig."
            )
        loader = kwargs.get("train_dataloader")
        config = dataclasses.replace(self.config, total_steps=state.max_steps)
        self.pruner = Pruner(model, config, calibration=lambda: calibration(loader, self.pruner, args))
        if state.global_step > 0:
            folder = self._folder(args, state)
            if not checkpoint.exists(folder):
                raise InputError(f"cannot resume pruning: {folder} is missing. Resume from a checkpoint in output_dir.")
            saved = sharded.load(folder, model) if self.pruner.sharded else checkpoint.load(folder)
            self.pruner.load_state_dict(saved["pruner"])
        self.pruner.attach(kwargs["optimizer"])

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self.pruner is not None and logs is not None and "loss" in logs:
            logs["density"] = self.pruner.stats()["density"]

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.pruner is not None and self.pruner.sharded:  # each process holds a part
            sharded.save(self._folder(args, state), pruner=self.pruner.state_dict())
        elif self.pruner is not None and state.is_world_process_zero:
            checkpoint.save(self._folder(args, state), pruner=self.pruner.state_dict())

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.pruner is not None and state.global_step >= state.max_steps:
            self.pruner.finish()

    @staticmethod
    def _folder(args: Any, state: Any) -> Path:
        return Path(args.output_dir) / f"checkpoint-{state.global_step}" / "pruner"
