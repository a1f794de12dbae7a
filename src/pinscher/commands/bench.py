"""`pinscher bench`: time any model in every engine; a run is also scored in each."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pinscher import settings
from pinscher.commands import export
from pinscher.commands.console import complaints, console, hush, megabytes, say, shown, table, text
from pinscher.commands.flags import FRACTIONAL, WHOLE, number
from pinscher.errors import InputError
from pinscher.runfolder import RunFolder, check_writable, holding
from pinscher.settings import COUNT, SECONDS, Number

if TYPE_CHECKING:
    from pinscher.runtime.engines import Worker

CALIBRATION = 256  # rows on which the INT8 scales of other engines are measured
PROBE = 8  # tokens of an engine's first call
THREADS = Number(0, 4096)
SAMPLE = (16, 64)  # rows and tokens on which engines are compared if there is no task


def command(
    source: Annotated[str, typer.Argument(help="Run folder, model folder or hub id.", show_default=False)],
    batch: Annotated[str, shown("Batch sizes, separated by commas.")] = "1,8",
    length: Annotated[str, shown("Sequence lengths in tokens, separated by commas.")] = "32,128,384",
    engine: Annotated[list[str] | None, typer.Option(help="Engine to time; by default all that are installed.")] = None,
    threads: Annotated[str, shown("Threads of each engine; 0 means one for each core.", WHOLE)] = "0",
    seconds: Annotated[str, shown("Approximate time to spend on each batch size and length.", FRACTIONAL)] = "15",
    output: Annotated[str | None, text("Folder for bench.json and bench.png; by default that of the run.")] = None,
) -> None:
    """Time a model in every installed engine, and recommend one."""
    sizes, lengths = (
        settings.numbers_in(COUNT, text.split(","), f"--{name}", whole=True)
        for name, text in (("batch", batch), ("length", length))
    )
    cores = number(THREADS, threads, "--threads") or os.cpu_count() or 1
    time = number(SECONDS, seconds, "--seconds", FRACTIONAL)
    hush()
    shapes = tuple((rows, tokens) for rows in sizes for tokens in lengths)
    folder = Path(output or (source if RunFolder(source).is_run else "."))
    check_writable(folder)
    with holding(folder):
        report = run(source, shapes, engine, cores, folder, time, lambda line: say(line, complaints))
    _show(report)
    say(f"\n{report['advice']}\n\n{folder / 'bench.json'}, bench.png")


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
    from pinscher.models.families import max_positions
    from pinscher.runtime import bench
    from pinscher.train import scoring

    source = export.load(place)
    engines = bench.available(names)
    longest = max_positions(source.model.config)
    if "For" not in (kind := type(source.model).__name__) and "LMHead" not in kind:
        raise InputError(f"{kind} has no head, so there are no answers to compare: bench a model that has one.")
    shapes = tuple((batch, length) for batch, length in shapes if length <= longest)
    if not shapes:
        raise InputError(f"the model takes {longest} tokens: give a smaller --length.")
    run_folder = scoring.run_of(place)
    batches = export.calibration(source, CALIBRATION) if run_folder else None
    report: dict[str, Any] = {"model": place, "threads": threads, "latency": {}, "scores": {}}
    if not names and (missing := bench.left_out()):
        say(missing)
    with tempfile.TemporaryDirectory() as scratch:
        say(f"preparing {', '.join(engines)}")
        report["bytes"] = bench.prepare(source.model.eval(), source.tokenizer, Path(scratch), engines, say, batches)
        probe = bench.inputs_of(source.model, 1, min(PROBE, longest))
        with bench.workers(list(report["bytes"]), Path(scratch), threads, probe, say) as ready:
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
    RunFolder(output).write_bench(report)
    bench.draw(report, output / "bench.png")
    return report


def _score(place: str, ready: dict[str, Worker], report: dict[str, Any], say: Callable[[str], None]) -> None:
    """Scores each engine on the run's test set; agreement is then measured on the answers."""
    from pinscher.runtime import bench
    from pinscher.train import scoring
    from pinscher.train.evaluation import evaluate

    asked = scoring.exam(place, {})
    if asked.task.generates:
        return
    answers = {}
    for name, worker in ready.items():
        say(f"scoring {name}")
        found = evaluate(as_model(worker), asked.task, asked.tokenizer, asked.tests, asked.labels, asked.batch_size)
        report["scores"][name] = found.scores
        answers[name] = [answer for rows in found.answers.values() for answer in rows]
    for name, said in answers.items():
        wanted = answers["torch"]
        if asked.task.kind == "regression":
            same = list(bench.are_close(said, wanted))
        else:
            same = [a == b for a, b in zip(said, wanted, strict=True)]
        report["agreement"][name]["same"] = float(sum(same)) / max(1, len(same))


def as_model(worker: Worker) -> Any:
    """Wraps an engine as a torch model, so that tasks can score it."""
    import torch
    from torch import Tensor, nn

    class Remote(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.device_of = nn.Parameter(torch.zeros(1), requires_grad=False)

        def forward(self, **inputs: Tensor) -> Any:
            found = worker.run({name: value.numpy() for name, value in inputs.items()}, outputs=True)[1]
            return SimpleNamespace(**{name: torch.from_numpy(value) for name, value in found.items()})

    return Remote()


def _show(report: dict[str, Any]) -> None:
    """Prints what was measured."""
    for title, found in report["latency"].items():
        times = table(title, "p50", "p95", "rows/s", "× torch")
        for name, one in found.items():
            gain = found["torch"]["p50_ms"] / one["p50_ms"]
            cells = f"{one['p50_ms']:.1f} ms", f"{one['p95_ms']:.1f} ms", f"{one['rows_per_second']:.0f}", f"{gain:.2f}"
            times.add_row(name, *cells)
        console.print(times, "")
    main = next(iter(next(iter(report["scores"].values()), {})), None)
    costs = table("", "on disk", "peak memory", "same answers", *([main] if main else []))
    for name, memory in report["memory"].items():
        row = [megabytes(report["bytes"][name]), f"{memory / 1e6:.0f} MB", f"{report['agreement'][name]['same']:.2%}"]
        costs.add_row(name, *row, *([f"{report['scores'][name][main]:.2f}"] if main else []))
    console.print(costs)
