"""Estimates how long a comparison will take, and finds runs that cannot start."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from pinscher.compare import results
from pinscher.compare.grid import Trial
from pinscher.compare.scoreboard import displayed
from pinscher.compare.session import Session
from pinscher.errors import InputError
from pinscher.train import plan as planning
from pinscher.train import pretrained
from pinscher.train.config import RunConfig


@dataclass(frozen=True)
class Forecast:
    """Seconds left, None if unknown; and why some runs cannot start (task and method -> reason)."""

    seconds: float | None
    stuck: dict[str, str] = field(default_factory=dict)


def forecast(session: Session, todo: Sequence[Trial], jobs: int = 1) -> Forecast:
    """Estimates from finished runs of the same task (and method, if there are any), else from a few timed steps.

    Time is counted in thread-seconds, so that runs side by side and runs alone can be added. The estimate is the
    median: a run that was suspended once, or ran beside another program, says little about the next one.

    Args:
        session: the comparison.
        todo: the runs to make.
        jobs: how many of them run side by side.

    Raises:
        InputError: if none of the runs can start.
    """
    took: dict[tuple[str, ...], list[float]] = {}
    for row in results.rows(session.cells, session.output):
        for key in ((row.task,), (row.task, row.variant)):
            took.setdefault(key, []).append(row.seconds * row.threads)
    threads = torch.get_num_threads()
    stuck: dict[str, str] = {}
    total: float | None = None
    for trial in todo:
        cell = session.owner[trial.name]
        name = f"{cell.task}, {displayed(cell.variant)}"
        known = took.get((cell.task, cell.variant), took.get((cell.task,)))
        if known is None and name not in stuck:
            try:
                known = took[cell.task,] = [threads * _timed(trial.config)]
            except (InputError, ValueError) as error:
                stuck[name] = str(error)
        total = (total or 0.0) + statistics.median(known) if known else total
    if stuck and total is None:
        raise InputError(next(iter(stuck.values())))
    return Forecast(None if total is None else total / (jobs * max(1, threads // jobs)), stuck)


def _timed(config: RunConfig) -> float:
    plan = planning.make(config)
    model = pretrained.load_model(config.model, plan.task, plan.labels, plan.tokenizer, config.new_head)
    return planning.costs(plan, model).seconds
