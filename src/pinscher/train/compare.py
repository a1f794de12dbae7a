"""Runs a comparison: what is done already, what is to do, in turn or side by side; then the results and the table.

A comparison's folder holds comparison.yaml (what is compared, as it was resolved), cells/CELL (an ordinary run folder
each), errors/CELL.txt (why a run failed, until it succeeds), results.csv, results.parquet and table.md, .tex, .html.
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
from typing import Any, TextIO

import torch
from rich.console import Console

from pinscher import checkpoint
from pinscher.errors import InputError
from pinscher.train import experiment, grid, results, runfolder, scoreboard, tables, worker
from pinscher.train.config import RunConfig
from pinscher.train.grid import Cell, Comparison, Trial
from pinscher.train.tables import Table

CELLS, ERRORS, CLAIMS, RECORD = "cells", "errors", ".claims", "comparison.yaml"
LOOK = 0.2  # seconds between two looks at the processes
PATIENCE = 10.0  # seconds to wait for processes of a comparison that was killed


@dataclass
class Session:
    """One sitting at a comparison: its cells, those that are this machine's, and what failed.

    Args:
        comparison: what is compared.
        output: the comparison's folder; what is finished in it is not run again.
        shard: the i-th of n parts, counted from 1.
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
        """The runs that this machine still has to make, in order."""
        mine = [trial for cell in self.mine for trial in cell.trials]
        return [trial for trial in mine if not runfolder.is_finished(trial.config.folder)]

    def trouble(self, trial: Trial) -> Path:
        return self.output / ERRORS / f"{trial.name}.txt"

    def claim(self, trial: Trial) -> contextlib.AbstractContextManager[TextIO]:
        """Nobody else makes this run meanwhile; another comparison in the folder may have it, too."""
        remedy = f"another comparison in {self.output} is making it: the same command, when that has ended"
        return claimed(self.output / CLAIMS / trial.name, remedy)

    def is_ready(self, trial: Trial) -> bool:
        """Whether what it learns from is there, or never will be."""
        teacher = self._teacher(trial)
        return teacher is None or results.is_done(teacher) or any(t.name in self.failed for t in teacher.trials)

    def config(self, trial: Trial) -> RunConfig | None:
        """The run as it is started; None, and it has failed, where its teacher has."""
        teacher = self._teacher(trial)
        if teacher is None:
            return trial.config
        best = results.picked(teacher)
        if best is None:
            self.failed[trial.name] = f"its teacher {teacher.name} is not there"
            return None
        model = best.config.folder / "model"
        if not model.is_dir():
            again = f"remove {best.config.folder} and start again: it is then made anew"
            self.failed[trial.name] = f"its teacher {teacher.name} has no model any more; {again}"
            return None
        return dataclasses.replace(trial.config, teacher=str(model))

    def _teacher(self, trial: Trial) -> Cell | None:
        name = self.owner[trial.name].teacher
        return None if name is None else self.by_name[name]

    def record(self, trial: Trial, status: str) -> None:
        """Notes how a run ended, and brings the results up to date."""
        if status == worker.INTERRUPTED:
            self.interrupted = True
        elif status == worker.FAILED:
            self.failed[trial.name] = worker.told(self.trouble(trial))
            self.say(f"failed: {trial.name}: {self.failed[trial.name]}")
        else:
            result = runfolder.read_result(trial.config.folder)
            scores = result.validation if trial.tuned else result.scores  # nobody is to pick by the test
            said = ", ".join(f"{name} {value:.2f}" for name, value in scores.items() if name in (result.main, "loss"))
            self.say(f"finished: {trial.name}, {'validation ' * bool(trial.tuned)}{said}, {result.seconds:.0f} s")
            self.write()

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def write(self) -> Table:
        """The results and the table of everything that is finished, on any machine that shares the folder."""
        with claimed(self.output / ".results", f"somebody else is writing the results in {self.output}"):
            rows = results.rows(self.cells, self.output)
            table = scoreboard.make(self.comparison, self.cells, rows)
            results.write([*rows, *results.earlier(rows, self.output)], self.output)
            for end, written in (("md", tables.markdown), ("tex", tables.latex), ("html", tables.page)):
                checkpoint.write_text(self.output / f"table.{end}", written(table))
        return table


def share(cells: Sequence[Cell], shard: tuple[int, int]) -> list[Cell]:
    """Every n-th cell, from the i-th; a taught cell goes where its teacher goes."""
    part, parts = shard
    place = {cell.name: i for i, cell in enumerate(cell for cell in cells if cell.teacher is None)}
    return [cell for cell in cells if place[cell.teacher or cell.name] % parts == part - 1]


def run(session: Session, jobs: int = 1) -> Table:
    """Makes every run of the session that is not finished, and gives the table of all.

    A run that fails is noted in `session.failed`; Ctrl-C or SIGTERM leave `session.interrupted`. Another session of the
    same comparison makes up for both.
    """
    output, (part, parts) = session.output, session.shard
    remedy = f"a comparison is running in {output} already: wait for it, or give another --output or --shard"
    with claimed(output / f".running-{part}-of-{parts}", remedy) as claim:
        checkpoint.write_text(output / RECORD, grid.dump(session.comparison))
        for cell in session.mine:
            for trial in cell.trials:
                if runfolder.is_finished(trial.config.folder):
                    runfolder.remove_checkpoints(trial.config.folder)  # killed after its result was written
        todo = session.todo()
        if jobs > 1:
            _side_by_side(session, todo, jobs, claim.fileno())
        else:
            _in_turn(session, todo)
    return session.write()


def _in_turn(session: Session, todo: Sequence[Trial]) -> None:
    with _stoppable():  # between two runs and while one is tested; in training it stops at the next step
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
    """None if somebody else makes the run, or has finished it since this session looked."""
    try:
        file = held.enter_context(session.claim(trial))
    except InputError as error:
        session.failed[trial.name] = str(error)
        return None
    return None if runfolder.is_finished(trial.config.folder) else file


@dataclass
class _Going:
    """A run in a process of its own, and its claim."""

    trial: Trial
    process: worker.Process
    held: contextlib.ExitStack

    def end(self) -> None:
        self.process.end()
        self.held.close()


def _start(session: Session, trial: Trial, threads: int, claim: int) -> _Going | None:
    config, held = session.config(trial), contextlib.ExitStack()
    mine = None if config is None else _claim(session, trial, held)
    if config is None or mine is None:
        held.close()
        return None
    return _Going(trial, worker.start(config, session.trouble(trial), threads, (claim, mine.fileno())), held)


def _side_by_side(session: Session, todo: Sequence[Trial], jobs: int, claim: int) -> None:
    """Each run in a process of its own, which holds the claims too: it may outlive us for a moment."""
    threads = max(1, torch.get_num_threads() // jobs)
    waiting, going = list(todo), dict[str, _Going]()
    with _stoppable():
        try:
            while waiting or going:
                for trial in [trial for trial in waiting if session.is_ready(trial)][: jobs - len(going)]:
                    waiting.remove(trial)
                    started = _start(session, trial, threads, claim)
                    if started is not None:
                        session.say(f"{len(todo) - len(waiting)} of {len(todo)}: {trial.name}")
                        going[trial.name] = started
                _collect(session, going)
                if session.interrupted:  # somebody asked one of them to stop
                    raise KeyboardInterrupt
                time.sleep(LOOK)
        except KeyboardInterrupt:
            session.interrupted = True
            for one in going.values():
                one.process.stop()
            while going:  # a second Ctrl-C ends this, and them
                _collect(session, going)
                time.sleep(LOOK)
        finally:
            for one in going.values():
                one.end()


def _collect(session: Session, going: dict[str, _Going]) -> None:
    for name, one in list(going.items()):
        status = one.process.status()
        if status is not None:
            del going[name]
            one.end()
            session.record(one.trial, status)


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM is as Ctrl-C while the block runs."""
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
    """Holds a lock that ends with its holders, however they end.

    Raises:
        InputError: if somebody else keeps holding it.
    """
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        until = time.monotonic() + PATIENCE
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise InputError(f"{remedy}.") from None
                time.sleep(LOOK)
        yield file
