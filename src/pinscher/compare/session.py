"""Runs a comparison: makes the missing runs, one after another or side by side, and writes the table.

The folder of a comparison holds comparison.yaml (what is compared, as it was resolved), cells/CELL (an ordinary run
folder each), errors/CELL.txt (why a run failed, until it succeeds), results.csv, results.parquet, table.md, table.tex
and table.html.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO

import torch
from rich.console import Console

from pinscher import files, locks
from pinscher.compare import grid, results, scoreboard, tables, worker
from pinscher.compare.grid import Cell, Comparison, Trial
from pinscher.compare.tables import Table
from pinscher.errors import InputError
from pinscher.runfolder import RunFolder
from pinscher.train import folder as runfolder
from pinscher.train import run as experiment
from pinscher.train.config import RunConfig

CELLS, ERRORS, CLAIMS, RECORD = "cells", "errors", ".claims", "comparison.yaml"
LOOK = 0.2  # seconds between two looks at the processes
PATIENCE = 10.0  # seconds to wait for the processes of a comparison that was killed


@dataclass
class Session:
    """One session of a comparison: all its cells, those of this machine, and failures.

    Args:
        comparison: what is compared.
        output: the comparison's folder; finished runs in it are not repeated.
        shard: (i, n) for the i-th of n parts, counted from 1.
        console: where progress is shown; nowhere by default.
    """

    comparison: Comparison
    output: Path
    shard: tuple[int, int] = (1, 1)
    console: Console = experiment.QUIET
    failed: dict[str, str] = field(default_factory=dict)  # name of a run -> one line
    interrupted: bool = False

    def __post_init__(self) -> None:
        self.cells = self.comparison.cells(self.output / CELLS)
        results.check_unchanged(self.cells)
        self.mine = share(self.cells, self.shard)
        self.owner = {trial.name: cell for cell in self.cells for trial in cell.trials}
        self.by_name = {cell.name: cell for cell in self.cells}

    def todo(self) -> list[Trial]:
        """The runs of this machine that are not finished, in order."""
        mine = [trial for cell in self.mine for trial in cell.trials]
        return [trial for trial in mine if not RunFolder(trial.config.folder).is_finished]

    def planned(self) -> list[RunConfig]:
        """The settings of all runs, of those with a teacher as they will be when it is finished."""
        return [
            trial.config if cell.teacher is None else dataclasses.replace(trial.config, teacher=cell.teacher)
            for cell in self.cells
            for trial in cell.trials
        ]

    def trouble(self, trial: Trial) -> Path:
        return self.output / ERRORS / f"{trial.name}.txt"

    def claim_of(self, trial: Trial) -> tuple[Path, str]:
        """The lock of a run, which another comparison in the folder may share, and the message if it is held."""
        remedy = f"another comparison in {self.output} is making it: the same command, when that has ended"
        return self.output / CLAIMS / trial.name, remedy

    def is_ready(self, trial: Trial) -> bool:
        """Whether its teacher is finished, or has failed."""
        teacher = self._teacher(trial)
        return teacher is None or results.is_done(teacher) or any(t.name in self.failed for t in teacher.trials)

    def config(self, trial: Trial) -> RunConfig | None:
        """The settings that the run starts with; None if it has no teacher, which is recorded as a failure."""
        teacher = self._teacher(trial)
        if teacher is None:
            return trial.config
        best = results.picked(teacher)
        if best is None:
            self.failed[trial.name] = f"its teacher {teacher.name} is not there"
            return None
        model = RunFolder(best.config.folder).model
        if not model.is_dir():
            again = f"remove {best.config.folder} and start again: it will be made again"
            self.failed[trial.name] = f"its teacher {teacher.name} has no model any more; {again}"
            return None
        return dataclasses.replace(trial.config, teacher=str(model.resolve()))

    def _teacher(self, trial: Trial) -> Cell | None:
        name = self.owner[trial.name].teacher
        return None if name is None else self.by_name[name]

    def record(self, trial: Trial, status: str) -> None:
        """Records the status of a run that has ended, and updates the results."""
        if status == worker.INTERRUPTED:
            self.interrupted = True
        elif status == worker.FAILED:
            self.failed[trial.name] = worker.told(self.trouble(trial))
            self.say(f"failed: {trial.name}: {self.failed[trial.name]}")
        else:
            result = runfolder.read_result(trial.config.folder)
            scores = result.validation if trial.tuned else result.scores  # the test set must not be used for selection
            said = ", ".join(f"{name} {value:.2f}" for name, value in scores.items() if name in (result.main, "loss"))
            self.say(f"finished: {trial.name}, {'validation ' * bool(trial.tuned)}{said}, {result.seconds:.0f} s")
            self.write()

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def write(self) -> Table:
        """Writes results and table of all finished runs, of any machine that shares the folder."""
        with claimed(self.output / ".results", f"another process is writing the results in {self.output}"):
            rows = results.rows(self.cells, self.output)
            table = scoreboard.make(self.comparison, self.cells, rows)
            results.write([*rows, *results.earlier(rows, self.output)], self.output)
            for end, written in (("md", tables.markdown), ("tex", tables.latex), ("html", tables.page)):
                files.write_text(self.output / f"table.{end}", written(table))
        return table


def share(cells: Sequence[Cell], shard: tuple[int, int]) -> list[Cell]:
    """Every n-th cell from the i-th on; a cell is in the same part as its teacher."""
    part, parts = shard
    place = {cell.name: i for i, cell in enumerate(cell for cell in cells if cell.teacher is None)}
    return [cell for cell in cells if place[cell.teacher or cell.name] % parts == part - 1]


def run(session: Session, jobs: int = 1, cluster: Place | None = None) -> Table:
    """Makes every run of the session that is not finished; returns the table of the whole comparison.

    Runs are made here, `jobs` side by side, or on a cluster. A run that fails is recorded in `session.failed`; Ctrl-C
    and SIGTERM set `session.interrupted`. Another session of the same comparison continues after both.
    """
    output, (part, parts) = session.output, session.shard
    remedy = f"a comparison is running in {output} already: wait for it, or give another --output or --shard"
    with claimed(output / f".running-{part}-of-{parts}", remedy) as claim:
        files.write_text(output / RECORD, grid.dump(session.comparison))
        for cell in session.mine:
            for trial in cell.trials:
                if RunFolder(trial.config.folder).is_finished:
                    RunFolder(trial.config.folder).remove_checkpoints()  # killed after its result was written
        todo = session.todo()
        if cluster is not None:
            _side_by_side(session, todo, cluster)
        elif jobs > 1:
            _side_by_side(session, todo, _Here(jobs, claim.fileno()))
        else:
            _in_turn(session, todo)
    return session.write()


def _in_turn(session: Session, todo: Sequence[Trial]) -> None:
    with _stoppable():  # between runs and while testing; a run in training stops at its next step
        try:
            for i, trial in enumerate(todo, 1):
                config = session.config(trial)
                if config is None:
                    continue
                with contextlib.ExitStack() as held:
                    if _claim(session, trial, held) is None:
                        continue
                    session.say(f"{i} of {len(todo)}: {trial.name}")
                    session.record(trial, worker.perform(config, session.trouble(trial), session.console))
                if session.interrupted:
                    return
        except KeyboardInterrupt:
            session.interrupted = True


def _claim(session: Session, trial: Trial, held: contextlib.ExitStack) -> TextIO | None:
    """The lock of a run; None if another session is making it, or has just finished it."""
    try:
        file = held.enter_context(claimed(*session.claim_of(trial)))
    except InputError as error:
        session.failed[trial.name] = str(error)
        return None
    return None if RunFolder(trial.config.folder).is_finished else file


class Going(Protocol):
    """A run in progress in another process."""

    def status(self) -> str | None:
        """How it ended; None while it runs."""

    def stop(self) -> None:
        """Asks the run to save and stop."""

    def end(self) -> None:
        """Ends the run at once, and releases what it holds."""


class Place(Protocol):
    """Where runs are made side by side."""

    def room(self) -> int:
        """How many runs fit at once."""

    def start(self, session: Session, trial: Trial) -> Going | None:
        """Starts a run; None if it cannot or need not be made."""


@dataclass(frozen=True)
class _Process:
    """A run in a process of this machine, and its lock."""

    process: worker.Process
    held: contextlib.ExitStack

    def status(self) -> str | None:
        return self.process.status()

    def stop(self) -> None:
        self.process.stop()

    def end(self) -> None:
        self.process.end()
        self.held.close()


@dataclass(frozen=True)
class _Here:
    """Processes of this machine, which share its cores."""

    jobs: int
    claim: int  # a run's process holds the comparison's lock too, because it may outlive this one for a moment

    def room(self) -> int:
        return self.jobs

    def start(self, session: Session, trial: Trial) -> _Process | None:
        config, held = session.config(trial), contextlib.ExitStack()
        mine = None if config is None else _claim(session, trial, held)
        if config is None or mine is None:
            held.close()
            return None
        threads = max(1, torch.get_num_threads() // self.jobs)
        keep = (self.claim, mine.fileno())
        return _Process(worker.start(config, session.trouble(trial), threads, keep), held)


def _side_by_side(session: Session, todo: Sequence[Trial], place: Place) -> None:
    waiting, going = list(todo), dict[str, tuple[Trial, Going]]()
    with _stoppable():
        try:
            while waiting or going:
                free = place.room() - len(going) if waiting else 0
                for trial in [trial for trial in waiting if session.is_ready(trial)][: max(0, free)]:
                    waiting.remove(trial)
                    started = place.start(session, trial)
                    if started is not None:
                        session.say(f"{len(todo) - len(waiting)} of {len(todo)}: {trial.name}")
                        going[trial.name] = trial, started
                _collect(session, going)
                if session.interrupted:  # a run received the signal
                    raise KeyboardInterrupt
                time.sleep(LOOK)
        except KeyboardInterrupt:
            session.interrupted = True
            for _, one in going.values():
                one.stop()
            while going:  # a second Ctrl-C ends this process and the runs
                _collect(session, going)
                time.sleep(LOOK)
        finally:
            for _, one in going.values():
                one.end()


def _collect(session: Session, going: dict[str, tuple[Trial, Going]]) -> None:
    for name, (trial, one) in list(going.items()):
        status = one.status()
        if status is not None:
            del going[name]
            one.end()
            session.record(trial, status)


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Makes SIGTERM work like Ctrl-C inside the block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def claimed(path: Path, remedy: str) -> Iterator[TextIO]:
    """Holds a file lock, which ends with the processes that hold it, however they end.

    Raises:
        InputError: if another process keeps holding it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(locks.locked(path, PATIENCE))
        except locks.HeldError as held:
            raise InputError(f"{remedy} ({held.holder}).") from None
        yield file
