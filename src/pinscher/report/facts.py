"""Everything that a report shows, as plain data for the page and the figures."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pinscher import __version__
from pinscher.report import analysis, bitmaps, runs
from pinscher.report.analysis import Array
from pinscher.report.bitmaps import Pattern
from pinscher.report.runs import Log, Run, Series

TEACHERS = 1000  # marks at most
CURVES = ("loss", "loss_er", "loss_sr", "lr")
HIDDEN = ("output", "overwrite", "report_to")  # settings that do not affect the result

Table = dict[str, Any]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Facts:
    """The runs as plain data for JSON, and the patterns of their matrices beside it."""

    data: Table
    patterns: list[list[Pattern]]  # of each run, in the order of its matrices


@dataclass
class _Weights:
    """The matrices of a run's model: tables, packed patterns and ranges."""

    tables: list[Table]
    packed: list[tuple[bytes, int, int]]
    reaches: list[tuple[float, int]]  # of each matrix: a bound of its values, and their number


def gather(folders: Sequence[str | Path], *, watching: bool = False, say: Say = lambda _: None) -> Facts:
    """Reads and analyses runs.

    Args:
        folders: run folders, also those of a comparison's cells.
        watching: whether the page reloads itself until the runs have finished.
        say: called with what is being read.
    """
    read = runs.named([runs.read(folder) for folder in folders])
    dense = [run.dense for run in read]
    found = [_weights(run, say) for run in read]
    twins = [None if run is None else _weights(run, say, patterned=False) for run in dense]
    limit = max((_limit(weights) for weights in [*found, *twins] if weights is not None), default=0.0) or 1.0
    tables = []
    for run, weights, twin, twin_weights in zip(read, found, dense, twins, strict=True):
        table = _head(run) | _curves(run) | {"matrices": weights.tables, "values": _values(run, weights, limit)}
        table["files"] = _files(run)
        table["bench"] = run.files.read_bench() or None
        table["dense"] = None if twin is None or twin_weights is None else _twin(twin, twin_weights, limit)
        tables.append(table)
    made = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    running = any(not run.finished for run in read)
    data = {"version": __version__, "made": made, "watching": watching and running, "limit": limit, "runs": tables}
    budget = bitmaps.BUDGET // len(read)
    return Facts(_plain(data), [bitmaps.embed(weights.packed, budget) for weights in found])


# ------------------------------------------------------------ parts


def _head(run: Run) -> Table:
    result, settings = run.result, run.settings
    metrics = result.get("metrics") or {}
    density = run.log.train.get("density")
    reached = result.get("sparsity") if run.finished else (1 - density.values[-1] if density else None)
    return {
        "name": run.name,
        "folder": str(run.folder),
        "status": run.status,
        "task": settings.get("task"),
        "model": settings.get("model"),
        "method": result.get("method") or settings.get("method"),
        "objective": settings.get("objective"),
        "main": _main(run),
        "pruned": metrics.get("pruned") or {},
        "dense_scores": metrics.get("dense"),
        "sparsity": reached,
        "target": result.get("target_sparsity", settings.get("sparsity")),
        "weights": sum(site.size for site in run.sites),
        "steps": int(result["steps"] if run.finished else run.log.step),
        "total_steps": result.get("total_steps"),
        "seconds": result.get("seconds"),
        "settings": {name: value for name, value in settings.items() if name not in HIDDEN},
        "versions": run.versions,
        "rows": run.data.get("rows") or {},
        "notes": run.data.get("notes") or [],
        "remarks": _remarks(run),
    }


def _main(run: Run) -> str | None:
    """The task's main score; for a run that neither names it nor has a result, the first score in its log."""
    found: str | None = run.result.get("main") or run.data.get("score") or next(iter(run.log.scores), None)
    return found


def _remarks(run: Run) -> list[str]:
    """Remarks about the run folder itself."""
    said = []
    if run.log.unread > 1:  # one may be partly written
        said.append(f"{run.log.unread} lines of log.jsonl could not be read.")
    if not run.sites:
        said.append("This run does not say which matrices are prunable: it was made by an older pinscher.")
    elif not runs.has_model(run):
        said.append("There is no model yet: patterns, ranks and values come when the run has finished.")
    return said


def _curves(run: Run) -> Table:
    log = run.log
    curves = {name: _curve(log.train[name]) for name in CURVES if name in log.train}
    for name, key in (("reached", "density"), ("asked", "density_target")):
        if key in log.train:
            steps, values = log.train[key].arrays()
            curves[name] = _points(*analysis.thin(steps, 1 - values))
    steps, scores = log.teachers.arrays()
    every = math.ceil(len(steps) / TEACHERS) or 1
    return {
        "curves": curves,
        "scores": {name: _curve(series) for name, series in log.scores.items()},
        "teachers": _points(steps[::every], scores[::every]),
        "teacher_changes": len(steps),
        "churn": _churn(log, sum(site.size for site in run.sites)),
    }


def _churn(log: Log, total: int) -> Table | None:
    """Weights that return in a masking, as a share of all prunable ones, and the total number of returns."""
    if not total or not {"returned", "maskings"} <= set(log.train):
        return None
    steps, returned, maskings = analysis.joined(log.train["returned"].arrays(), log.train["maskings"].arrays())
    if not len(steps) or maskings[-1] < 1:
        return None
    at, back = analysis.churn(steps, returned, maskings)
    return {**_points(*analysis.thin(at, back / total)), "returned": int(returned[-1]), "maskings": int(maskings[-1])}


def _curve(series: Series) -> Table:
    return _points(*analysis.thin(*series.arrays()))


def _points(x: Array, y: Array) -> Table:
    return {"x": x.tolist(), "y": [float(f"{value:.6g}") for value in y]}


def _weights(run: Run, say: Say, patterned: bool = True) -> _Weights:
    """One pass over a run's matrices."""
    found: dict[str, tuple[Table, tuple[bytes, int, int]]] = {}
    reaches = []
    for site, weight in runs.matrices(run):
        say(f"{run.name}: {site.tensor}")
        rows, columns = weight.shape
        table = {"tensor": site.tensor, "layer": site.layer, "kind": site.kind, "rows": rows, "columns": columns}
        packed = bitmaps.pack(weight != 0) if patterned else b""
        found[site.tensor] = table | analysis.measures(weight), (packed, rows, columns)
        reaches.append((analysis.reach(weight), int(np.count_nonzero(weight))))
    ordered = [found[site.tensor] for site in run.sites if site.tensor in found]
    return _Weights([table for table, _ in ordered], [packed for _, packed in ordered], reaches)


def _limit(weights: _Weights) -> float:
    """The range of the histogram: slightly more than most matrices need, not that of the widest."""
    total = sum(count for _, count in weights.reaches)
    return 1.2 * sum(reach * count for reach, count in weights.reaches) / total if total else 0.0


def _values(run: Run, weights: _Weights, limit: float) -> Table | None:
    if not weights.tables:
        return None
    return analysis.histogram((weight for _, weight in runs.matrices(run)), limit)


def _twin(run: Run, weights: _Weights, limit: float) -> Table:
    """The parts of the dense run that are shown beside the pruned one."""
    kept = ("layer", "kind", "rows", "columns", "rank")
    return {
        "status": run.status,
        "main": _main(run),
        "curves": {name: _curve(run.log.train[name]) for name in CURVES[:1] if name in run.log.train},
        "scores": {name: _curve(series) for name, series in run.log.scores.items()},
        "matrices": [{name: table[name] for name in kept} for table in weights.tables],
        "values": _values(run, weights, limit),
    }


def _files(run: Run) -> Table:
    """Bytes of the weights, as trained and as stored; scores as stored."""
    stored = run.files.read_export_scores()
    return {"model": runs.size(run.files.model), "export": runs.size(run.files.export), "stored": stored}


def _plain(value: Any) -> Any:
    """Converts numpy values and NaN to what JSON can hold."""
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)
