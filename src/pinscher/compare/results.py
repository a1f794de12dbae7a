"""The table of all runs of a comparison, one row each: results.csv and results.parquet."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pinscher import files
from pinscher.compare.grid import FIELDS, Cell, Trial
from pinscher.errors import InputError
from pinscher.runfolder import RunFolder
from pinscher.train import folder as runfolder
from pinscher.train import plan as planning
from pinscher.train.tasks import TASKS

# Settings that are the same for every method unless the user changes them; rows have the resolved values.
SHOWN = ("objective", "batch_size", "learning_rate", "schedule", "warmup", "cooldown", "interval")


@dataclass(frozen=True)
class Row:
    """One finished run."""

    task: str
    method: str
    variant: str
    sparsity_asked: float
    sparsity: float
    seed: int
    metric: str
    score: float | None  # on the test set; None for runs that tuning did not pick: nothing is selected by it
    validation_metric: str
    validation: float | None
    tuned: str  # NAME=VALUE, with spaces between them
    candidates: int  # number of runs from which the cell was picked
    picked: bool
    steps: int
    seconds: float
    threads: int
    objective: str
    batch_size: int
    learning_rate: float
    schedule: str
    warmup: float
    cooldown: float
    interval: int | None
    data: str  # the fingerprint of its rows: equal in all rows of a task
    model: str
    folder: str


def rows(cells: Sequence[Cell], output: Path) -> list[Row]:
    """A row for each finished run, cell by cell."""
    found = []
    for cell in cells:
        best = picked(cell)
        done = [trial for trial in cell.trials if RunFolder(folder_of(trial)).is_finished]
        found += [_row(cell, trial, trial is best, output) for trial in done]
    _check_data(found)
    return found


def folder_of(trial: Trial) -> Path:
    return trial.config.folder


def is_done(cell: Cell) -> bool:
    """Whether every candidate of the cell is finished."""
    return all(RunFolder(folder_of(trial)).is_finished for trial in cell.trials)


def picked(cell: Cell) -> Trial | None:
    """The candidate with the best validation score, the first of equals; None until all candidates are finished."""
    if not is_done(cell):
        return None
    if len(cell.trials) == 1:
        return cell.trials[0]
    name, sign = _judged(cell)

    def worth(trial: Trial) -> float:
        scores = runfolder.read_result(folder_of(trial)).validation
        if name not in scores:
            raise InputError(f"{folder_of(trial)} has no validation score to tune by: remove it, and it is run again.")
        return -math.inf if math.isnan(scores[name]) else sign * scores[name]

    return max(cell.trials, key=worth)


def _judged(cell: Cell) -> tuple[str, float]:
    """The validation score that decides, and its sign: 1 if higher is better, -1 if lower is."""
    task = planning.task_of(cell.config)
    return ("loss", -1.0) if task.judged_by_loss else (task.main, 1.0)


def _row(cell: Cell, trial: Trial, is_picked: bool, output: Path) -> Row:
    result = runfolder.read_result(folder_of(trial))
    told = RunFolder(folder_of(trial)).read_config()
    settings, by = told["run"], _judged(cell)[0]
    return Row(
        task=cell.task,
        method=trial.config.method,
        variant=cell.variant,
        sparsity_asked=cell.sparsity,
        sparsity=result.sparsity,
        seed=cell.seed,
        metric=result.main,
        score=result.score if is_picked else None,
        validation_metric=by,
        validation=result.validation.get(by),
        tuned=" ".join(f"{name}={value}" for name, value in trial.tuned.items()),
        candidates=len(cell.trials),
        picked=is_picked,
        steps=result.steps,
        seconds=result.seconds,
        threads=told["versions"]["threads"],
        data=told["data"]["fingerprint"],
        model=Path(settings["model"]).name,
        folder=str(folder_of(trial).relative_to(output)),
        **{name: settings[name] for name in SHOWN},
    )


def earlier(found: Sequence[Row], output: Path) -> list[Row]:
    """The rows of finished runs that are only in an earlier comparison in the same folder."""
    if not (output / "results.parquet").exists():
        return []
    names, known = {field.name for field in dataclasses.fields(Row)}, {row.folder for row in found}
    told = [row for row in pq.read_table(output / "results.parquet").to_pylist() if row.keys() == names]
    left = [row for row in told if row["folder"] not in known and RunFolder(output / row["folder"]).is_finished]
    return [Row(**row) for row in left]


def _check_data(found: Sequence[Row]) -> None:
    """Rejects runs of one task that were trained on different data."""
    first: dict[str, Row] = {}
    for row in found:
        known = first.setdefault(row.task, row)
        if known.data != row.data:
            raise InputError(
                f"{known.folder} and {row.folder} were run on different data: remove one of them, and it is run again."
            )


def write(found: Sequence[Row], output: Path) -> None:
    """Writes results.csv and results.parquet, each completely or not at all."""
    names = [field.name for field in dataclasses.fields(Row)]
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([getattr(row, name) for name in names] for row in found)
    files.write_text(output / "results.csv", text.getvalue())
    columns = {name: pa.array([getattr(row, name) for row in found], kind) for name, kind in _kinds().items()}
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    files.write_bytes(output / "results.parquet", sink.getvalue())


def _kinds() -> dict[str, Any]:
    arrow = {"str": pa.string(), "int": pa.int64(), "float": pa.float64(), "bool": pa.bool_()}
    return {field.name: arrow[str(field.type).removesuffix(" | None")] for field in dataclasses.fields(Row)}


# ------------------------------------------------------------ what was asked for, then and now


def check_unchanged(cells: Sequence[Cell]) -> None:
    """Rejects a comparison in which a run was started with settings that differ from its present ones."""
    for trial in (trial for cell in cells for trial in cell.trials):
        folder = folder_of(trial)
        if not RunFolder(folder).is_run:
            continue
        told = RunFolder(folder).read_config()
        then = told.get("asked") or {name: value for name, value in told["run"].items() if value is not None}
        later = FIELDS.keys() - told["run"].keys()  # settings that did not exist then, and had no other value
        for name, now in trial.config.to_dict().items():
            if name in ("output", "overwrite") or (name == "teacher" and now is None):
                continue
            if name not in then and name not in later:
                continue
            before = then[name] if name in then else FIELDS[name].default
            if _comparable(name, now) != _comparable(name, before):
                raise InputError(
                    f"{folder} was run with {name} {_shown(before)}, now it is {_shown(now)}: remove that folder "
                    "to run it again, restore the setting, or give another --output."
                )


def _comparable(name: str, value: Any) -> Any:
    """A value for comparison; of paths only the last part, because machines differ and data has a fingerprint."""
    return Path(value).name if name in planning.PLACES and isinstance(value, str) else value


def _shown(value: Any) -> str:
    return "the default" if value is None else value if isinstance(value, str) else json.dumps(value)


def metric_of(cell: Cell) -> str:
    return TASKS[cell.config.task].main
