"""What a comparison will do, before it does it: the plan, and how long it will take."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
from rich.table import Table

from pinscher.errors import InputError
from pinscher.train import models, results, runfolder
from pinscher.train import plan as planning
from pinscher.train.compare import Session
from pinscher.train.config import RunConfig
from pinscher.train.grid import Cell, Trial
from pinscher.train.scoreboard import displayed
from pinscher.train.showing import duration


def show(session: Session, jobs: int = 1) -> None:
    """Prints one line for each method, task and sparsity, and what is left to do."""
    kinds: dict[tuple[str, float, str], list[Cell]] = {}
    for cell in session.mine:
        kinds.setdefault((cell.task, cell.sparsity, cell.variant), []).append(cell)
    table = Table("task", "sparsity", box=None, pad_edge=False)
    table.add_column("method", no_wrap=True, min_width=max([0, *(len(displayed(variant)) for *_, variant in kinds)]))
    table.add_column("objective", min_width=len("regularization"))
    table.add_column("done", no_wrap=True)
    table.add_column("seeds")
    for (task, sparsity, variant), cells in kinds.items():
        trials = [trial for cell in cells for trial in cell.trials]
        done = sum(runfolder.is_finished(trial.config.folder) for trial in trials)
        seeds = ", ".join(str(cell.seed) for cell in cells)
        objective = cells[0].config.objective.replace("-", " ")  # a narrow terminal breaks it there
        table.add_row(task, f"{100 * sparsity:g} %", displayed(variant), objective, f"{done} of {len(trials)}", seeds)
    session.console.print(table)
    todo = session.todo()
    left = len({session.owner[trial.name].name for trial in todo})
    part, parts = session.shard
    share = f"shard {part} of {parts} of {len(session.cells)} cells: " if parts > 1 else ""
    count = len(session.mine)
    say = f"\n{share}{count} cell{'s' if count != 1 else ''}, {count - left} done, {left} to do"
    stuck: dict[str, str] = {}
    if todo:
        runs = f" in {len(todo)} runs" if len(todo) != left else ""
        seconds = estimate(session, todo, jobs, stuck)
        say += f"{runs}, about {duration(seconds)} on this machine" if seconds else f"{runs}, time unknown"
    session.say(f"{say}.")
    for what, why in stuck.items():
        session.say(f"cannot start: {what}: {why}")


def estimate(
    session: Session, todo: Sequence[Trial], jobs: int = 1, stuck: dict[str, str] | None = None
) -> float | None:
    """Seconds: what finished runs of the same task (and method, where there are such) took, else a few timed steps.

    What a run takes is counted in seconds of a thread, so that runs side by side and alone can be added. The median
    counts: a run that was once put to sleep, or ran beside another program, says little of the next one.

    Args:
        session: the comparison.
        todo: the runs.
        jobs: how many of them go on side by side.
        stuck: gets what cannot start as it is, and why, as far as that was looked at.

    Raises:
        InputError: if nothing that is to do can start.
    """
    took: dict[tuple[str, ...], list[float]] = {}
    for row in results.rows(session.cells, session.output):
        for key in ((row.task,), (row.task, row.variant)):
            took.setdefault(key, []).append(row.seconds * row.threads)
    threads = torch.get_num_threads()
    stuck = {} if stuck is None else stuck
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
    return None if total is None else total / (jobs * max(1, threads // jobs))


def _timed(config: RunConfig) -> float:
    plan = planning.make(config)
    model = models.load_model(config.model, plan.task, plan.labels, plan.tokenizer, config.new_head)
    return planning.costs(plan, model).seconds
