"""What a checkpoint holds beside the weights and the random numbers, for whole models and sharded ones alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pinscher.train.trainer import PinsTrainer


def states_of(trainer: PinsTrainer) -> dict[str, Any]:
    """The states of optimiser, scheduler, pruner and teacher, and the best score so far."""
    assert trainer.optimizer is not None
    assert trainer.lr_scheduler is not None
    return {
        "optimizer": trainer.optimizer.state_dict(),
        "scheduler": trainer.lr_scheduler.state_dict(),
        "pruner": None if trainer.pruner is None else trainer.pruner.state_dict(),
        "teacher": None if trainer.teacher is None else trainer.teacher.state_dict(),
        "best": trainer.best,
    }


def restore_(trainer: PinsTrainer, state: dict[str, Any]) -> None:
    """Puts a trainer back where `states_of` was taken."""
    assert trainer.optimizer is not None
    assert trainer.lr_scheduler is not None
    trainer.optimizer.load_state_dict(state["optimizer"])
    trainer.lr_scheduler.load_state_dict(state["scheduler"])
    if trainer.pruner is not None:
        trainer.pruner.load_state_dict(state["pruner"])
    if trainer.teacher is not None:
        trainer.teacher.load_state_dict(state["teacher"])
    trainer.best = state["best"]
