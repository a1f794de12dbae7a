"""What `pinscher bench` does: times a run or any model in every engine, and scores it where a run knows its task."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from pinscher import checkpoint, export
from pinscher.errors import InputError
from pinscher.runtime import bench
from pinscher.runtime.engines import Worker
from pinscher.train import models, scoring
from pinscher.train.evaluation import evaluate

CALIBRATION = 256  # rows that the INT8 scales of other engines are measured on
PROBE = 8  # tokens of an engine's first call
SAMPLE = (16, 64)  # rows and tokens on which engines are compared if there is no task


class Remote(nn.Module):
    """An engine in the shape of a model."""

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self.worker = worker
        self.device_of = nn.Parameter(torch.zeros(1), requires_grad=False)

    def forward(self, **inputs: Tensor) -> Any:
        found = self.worker.run({name: value.numpy() for name, value in inputs.items()}, outputs=True)[1]
        return SimpleNamespace(**{name: torch.from_numpy(value) for name, value in found.items()})


def numbers(name: str, text: str) -> list[int]:
    """The numbers that a flag gives, with commas between them."""
    found = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) for word in found):
        raise InputError(f"--{name} takes whole numbers with commas between them, not {text!r}.")
    return [int(word) for word in found]


def run(
    place: str,
    shapes: tuple[tuple[int, int], ...],
    names: list[str] | None,
    threads: int,
    output: Path,
    seconds: float,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Measures, and writes OUTPUT/bench.json and bench.png; returns what the JSON holds."""
    source = export.load(place)
    engines = bench.available(names)
    longest = models.max_positions(source.model.config)
    if "For" not in (kind := type(source.model).__name__) and "LMHead" not in kind:
        raise InputError(f"{kind} has no head, so there are no answers to compare: bench a model that has one.")
    shapes = tuple((batch, length) for batch, length in shapes if length <= longest)
    if not shapes:
        raise InputError(f"the model takes {longest} tokens: give a smaller --length.")
    run_folder = scoring.run_of(place)
    batches = export.calibration(source, CALIBRATION) if run_folder else None
    report: dict[str, Any] = {"model": place, "threads": threads, "latency": {}, "scores": {}}
    with tempfile.TemporaryDirectory() as files:
        say(f"preparing {', '.join(engines)}")
        report["bytes"] = bench.prepare(source.model.eval(), source.tokenizer, Path(files), engines, say, batches)
        probe = bench.inputs_of(source.model, 1, min(PROBE, longest))
        with bench.workers(list(report["bytes"]), Path(files), threads, probe, say) as ready:
            for batch, length in shapes:
                title = f"batch {batch}, {length} tokens"
                say(title)
                inputs = bench.inputs_of(source.model, batch, length)
                report["latency"][title] = bench.measure(ready, inputs, seconds)
            report["memory"] = {name: worker.memory for name, worker in ready.items()}
            sample = bench.inputs_of(source.model, SAMPLE[0], min(SAMPLE[1], longest))
            report["agreement"] = bench.agreement(ready, [sample])
            if run_folder:
                _score(place, ready, report, say)
    report["advice"] = bench.advice(report)
    output.mkdir(parents=True, exist_ok=True)
    checkpoint.write_text(output / "bench.json", json.dumps(report, indent=1) + "\n")
    bench.draw(report, output / "bench.png")
    return report


def _score(place: str, ready: dict[str, Worker], report: dict[str, Any], say: Callable[[str], None]) -> None:
    """Scores each engine on the run's test set; agreement is then that of the answers."""
    asked = scoring.exam(place, {})
    if hasattr(asked.task, "generate"):
        return
    answers = {}
    for name, worker in ready.items():
        say(f"scoring {name}")
        found = evaluate(Remote(worker), asked.task, asked.tokenizer, asked.tests, asked.labels, asked.batch_size)
        report["scores"][name] = found.scores
        answers[name] = [answer for rows in found.answers.values() for answer in rows]
    for name, said in answers.items():
        wanted = answers["torch"]
        if asked.task.kind == "regression":
            same = list(bench.are_close(said, wanted))
        else:
            same = [a == b for a, b in zip(said, wanted, strict=True)]
        report["agreement"][name]["same"] = float(sum(same)) / max(1, len(same))


def show(report: dict[str, Any], console: Console) -> None:
    """Prints what was measured."""
    for title, found in report["latency"].items():
        table = Table(title, *("p50", "p95", "rows/s", "× torch"), box=None, pad_edge=False)
        for column in table.columns[1:]:
            column.justify = "right"
        for name, one in found.items():
            gain = found["torch"]["p50_ms"] / one["p50_ms"]
            cells = f"{one['p50_ms']:.1f} ms", f"{one['p95_ms']:.1f} ms", f"{one['rows_per_second']:.0f}", f"{gain:.2f}"
            table.add_row(name, *cells)
        console.print(table, "")
    main = next(iter(next(iter(report["scores"].values()), {})), None)
    table = Table("", "on disk", "peak memory", "same answers", box=None, pad_edge=False)
    if main:
        table.add_column(main)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, memory in report["memory"].items():
        row = [f"{report['bytes'][name] / 1e6:.1f} MB", f"{memory / 1e6:.0f} MB"]
        row.append(f"{report['agreement'][name]['same']:.2%}")
        table.add_row(name, *row, *([f"{report['scores'][name][main]:.2f}"] if main else []))
    console.print(table)
