"""The report's figures as PNG and SVG for a paper: small, plain, in colours that everyone can distinguish."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pinscher import files
from pinscher.errors import InputError
from pinscher.report import analysis, bitmaps
from pinscher.report.bitmaps import Pattern
from pinscher.report.facts import Facts, Table

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#444b54")  # Okabe and Ito
DENSE = "#7a828c"
WIDE, HIGH = 3.4, 2.3  # inches: a column of a two-column paper
STYLE: dict[Any, Any] = {
    "font.family": "serif",
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "grid.linewidth": 0.4,
    "grid.color": "#e6e6e6",
    "lines.linewidth": 1.2,
    "lines.markersize": 3,
    "legend.frameon": False,
    "legend.fontsize": 7,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "pinscher",  # reproducible files
    "mathtext.fontset": "dejavuserif",
}
MEASURES = {
    "density": "surviving weights",
    "rank": "rank",
    "dead_rows": "dead rows",
    "dead_columns": "dead columns",
    "gini_rows": "concentration on rows (Gini)",
    "gini_columns": "concentration on columns (Gini)",
}
OBJECTIVES = {"loss": "learning objective", "loss_er": "task loss", "loss_sr": "teacher's term"}

Runs = list[tuple[str, Table]]  # colour, run


def write(facts: Facts, folder: str | Path, matrix: str | None = None) -> list[Path]:
    """Writes every figure that has data, as PNG and SVG; returns the files.

    Args:
        facts: the runs.
        folder: where to write; it is created if needed.
        matrix: the ending of the name of the matrix whose pattern is drawn; by default one of the middle layer.
    """
    import matplotlib as mpl

    shown = [(COLOURS[i % len(COLOURS)], table) for i, table in enumerate(facts.data["runs"])]
    written = []
    with mpl.rc_context(STYLE):
        for name, figure in figures(facts, shown, matrix):
            for ending, how in (("png", {"dpi": 300}), ("svg", {"metadata": {"Date": None}})):
                drawn = io.BytesIO()
                figure.savefig(drawn, format=ending, **how)
                written.append(files.write_bytes(Path(folder, f"{name}.{ending}"), drawn.getvalue()))
    return written


def check(facts: Facts, matrix: str | None) -> None:
    """Rejects the name of a matrix that no run has, before anything is written."""
    _place_of(facts, matrix)


def figures(facts: Facts, shown: Runs, matrix: str | None) -> Iterator[tuple[str, Any]]:
    """Each figure with its name; one without data is left out."""
    place = _place_of(facts, matrix)
    for name, label in OBJECTIVES.items():
        yield from _over_steps(name.replace("_", "-"), shown, partial(_curve, name), label)
    yield from _over_steps("score", shown, lambda run: run["scores"].get(run["main"]), "validation score", dense=True)
    yield from _sparsity(shown)
    yield from _over_steps("churn", shown, lambda run: run["churn"], "weights returning, %", factor=100)
    for name, label in MEASURES.items():
        yield from _per_layer(name, label, shown)
    yield from _values(facts.data["limit"], shown)
    if place is not None:
        yield from _pattern(facts, shown, *place)
    yield from _size(shown)
    yield from _latency(shown)


def _curve(name: str, run: Table) -> Any:
    return run["curves"].get(name)


def _figure(width: float = WIDE, height: float = HIGH, columns: int = 1) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(1, columns)


def _from_zero(axes: Any) -> None:
    """Starts the axis at zero and leaves some space above."""
    top = max((float(np.max(line.get_ydata())) for line in axes.lines), default=0.0)
    axes.set_ylim(0, 1.08 * top or 1.0)


def _legend(axes: Any, shown: Runs, force: bool = False) -> None:
    if len(shown) > 1 or force:
        axes.legend()


# ------------------------------------------------------------ curves


def _over_steps(
    name: str, shown: Runs, curve: Callable[[Table], Any], label: str, factor: float = 1, dense: bool = False
) -> Iterator[tuple[str, Any]]:
    found = [(colour, run, curve(run)) for colour, run in shown if curve(run) and curve(run)["x"]]
    if not found:
        return
    figure, axes = _figure()
    for colour, run, points in found:
        axes.plot(points["x"], factor * np.array(points["y"]), color=colour, label=run["name"])
        if name != "churn":
            at = [step for step in run["teachers"]["x"] if step <= points["x"][-1]]
            axes.plot(at, [0.015] * len(at), "^", color=colour, transform=axes.get_xaxis_transform(), clip_on=False)
    twin = next((run["dense"] for _, run, _ in found if run["dense"]), None) if dense else None
    points = twin["scores"].get(twin["main"]) if twin else None
    if points:
        axes.plot(points["x"], points["y"], ":", color=DENSE, label="dense")
    axes.set(xlabel="step", ylabel=label)
    if name == "churn":
        _from_zero(axes)
    _legend(axes, shown, bool(points))
    yield name, figure


def _sparsity(shown: Runs) -> Iterator[tuple[str, Any]]:
    found = [(colour, run) for colour, run in shown if "reached" in run["curves"]]
    if not found:
        return
    figure, axes = _figure()
    for colour, run in found:
        for name, line in (("reached", "-"), ("asked", "--")):
            points = run["curves"][name]
            label = f"{run['name']}, {name}" if len(shown) > 1 else name
            axes.plot(points["x"], 100 * np.array(points["y"]), line, color=colour, label=label)
    axes.set(xlabel="step", ylabel="sparsity, %", ylim=(0, 102))
    _legend(axes, shown, True)
    yield "sparsity", figure


# ------------------------------------------------------------ matrices


def _per_layer(name: str, label: str, shown: Runs) -> Iterator[tuple[str, Any]]:
    """Means over each layer's matrices, weighted by size."""
    found = [(colour, run) for colour, run in shown if run["matrices"]]
    if not found:
        return
    layers = list(dict.fromkeys(m["layer"] for _, run in found for m in run["matrices"]))
    figure, axes = _figure()
    for colour, run in found:
        axes.plot(*_means(run["matrices"], name, layers), "o-", color=colour, label=run["name"])
    twin = next((run["dense"] for _, run in found if run["dense"] and run["dense"]["matrices"]), None)
    if name == "rank" and twin:
        axes.plot(*_means(twin["matrices"], name, layers), ":", color=DENSE, label="dense")
    axes.set_xticks(range(len(layers)), layers)
    gini = name.startswith("gini")
    axes.set(xlabel="layer", ylabel=label if gini else f"{label}, %")
    _from_zero(axes)
    if not gini:
        axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g}")
    _legend(axes, shown, name == "rank" and twin is not None)
    yield name.replace("_", "-"), figure


def _means(matrices: list[Table], name: str, layers: list[str]) -> tuple[list[int], list[float]]:
    places, means = [], []
    for place, layer in enumerate(layers):
        mine = [matrix for matrix in matrices if matrix["layer"] == layer]
        if mine:
            sizes = [matrix["rows"] * matrix["columns"] for matrix in mine]
            places.append(place)
            means.append(float(np.average([matrix[name] for matrix in mine], weights=sizes)))
    return places, means


def _values(limit: float, shown: Runs) -> Iterator[tuple[str, Any]]:
    found = [(colour, run) for colour, run in shown if run["values"]]
    if not found:
        return
    figure, axes = _figure()
    edges = np.linspace(-limit, limit, analysis.BINS + 1)
    for colour, run in found:
        axes.stairs(100 * np.array(run["values"]["shares"]), edges, color=colour, label=run["name"])
    twin = next((run["dense"] for _, run in found if run["dense"] and run["dense"]["values"]), None)
    if twin:
        axes.stairs(100 * np.array(twin["values"]["shares"]), edges, color=DENSE, linestyle=":", label="dense")
    axes.set(xlabel="value of a surviving weight", ylabel="share of weights, %")
    _legend(axes, shown, twin is not None)
    yield "values", figure


def _place_of(facts: Facts, name: str | None) -> tuple[str, str] | None:
    """Layer and kind of the matrix to draw."""
    tables = [matrix for run in facts.data["runs"] for matrix in run["matrices"]]
    if name is not None:
        ending = name.removesuffix(".weight")
        tables = [m for m in tables if f".{m['tensor'].removesuffix('.weight')}".endswith(f".{ending}")]
        if not tables:
            raise InputError(f"no matrix is named {name!r}: use the end of a name such as layer.3.output.dense.")
    if not tables:
        return None
    layers = list(dict.fromkeys(matrix["layer"] for matrix in tables))
    middle = layers[len(layers) // 2]
    return middle, next(matrix["kind"] for matrix in tables if matrix["layer"] == middle)


def _pattern(facts: Facts, shown: Runs, layer: str, kind: str) -> Iterator[tuple[str, Any]]:
    """One matrix of every run side by side: a dot for each weight that survived."""
    found: list[tuple[str, Table, Pattern]] = []
    for (_, run), held in zip(shown, facts.patterns, strict=True):
        for matrix, pattern in zip(run["matrices"], held, strict=False):
            if (matrix["layer"], matrix["kind"]) == (layer, kind):
                found.append((run["name"], matrix, pattern))
    if not found:
        return
    figure, axes = _figure(2.3 * len(found), 2.6, len(found))
    for axis, (name, matrix, pattern) in zip(np.atleast_1d(axes), found, strict=True):
        axis.imshow(bitmaps.cells(pattern), cmap="Greys", vmin=0, vmax=255, aspect="auto", interpolation="antialiased")
        axis.set_title(f"{name}\nlayer {layer} {kind}, {matrix['density']:.1%} kept")
        axis.set(xticks=[], yticks=[], xlabel="inputs", ylabel="outputs")
        for side in ("top", "right"):
            axis.spines[side].set_visible(True)
    yield "pattern", figure


# ------------------------------------------------------------ what came of it


def _size(shown: Runs) -> Iterator[tuple[str, Any]]:
    found = [(colour, run) for colour, run in shown if run["files"]["model"] and run["files"]["export"]]
    if found:
        figure, axes = _figure(height=0.8 + 0.45 * len(found))
        bars = [("model", max(run["files"]["model"] for _, run in found) / 1e6, DENSE)]
        bars += [(f"{run['name']}, stored", run["files"]["export"] / 1e6, colour) for colour, run in found]
        _bars(axes, bars, "MB")
        yield "size", figure


def _latency(shown: Runs) -> Iterator[tuple[str, Any]]:
    for colour, run in shown:
        timed = (run["bench"] or {}).get("latency") or {}
        if not timed:
            continue
        figure, axes = _figure(WIDE * min(2, len(timed)), 0.7 + 0.24 * max(map(len, timed.values())), len(timed))
        for axis, (shape, engines) in zip(np.atleast_1d(axes), timed.items(), strict=True):
            ours = [(n, e["p50_ms"], colour if n.startswith("pinscher") else DENSE) for n, e in engines.items()]
            _bars(axis, ours, "ms, median")
            axis.set_title(shape)
        yield "latency" if len(shown) == 1 else f"latency-{run['name'].replace('/', '-')}", figure


def _bars(axes: Any, bars: list[tuple[str, float, str]], unit: str) -> None:
    names, amounts, colours = zip(*bars[::-1], strict=True)
    drawn = axes.barh(names, amounts, color=colours, height=0.65)
    axes.bar_label(drawn, [f"{amount:.1f}" for amount in amounts], padding=2, fontsize=7)
    axes.set(xlabel=unit, xlim=(0, 1.18 * max(amounts)))
    axes.grid(visible=False)
