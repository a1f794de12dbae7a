"""What a person sees of a run: the plan before it, the comparison after it."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

from pinscher.train import models, runfolder
from pinscher.train import plan as planning
from pinscher.train.config import DENSE, RunConfig
from pinscher.train.runfolder import Result
from pinscher.train.tasks import TASKS

TIMINGS = 41


def plan(console: Console, config: RunConfig) -> None:
    """Prints what a run would do."""
    made = planning.make(config)
    model = models.load_model(config.model, made.task, made.labels, made.tokenizer, config.new_head)
    costs = planning.costs(made, model)
    settings, splits = made.config, made.splits
    rows = {"train": splits.train, "validation": splits.validation} | splits.tests
    say = [
        f"model      {settings.model}, {costs.parameters / 1e6:.1f} M parameters",
        f"prunable   {costs.matrices} matrices, {costs.prunable:,} weights",
        f"task       {made.task.name}, scored by {made.task.main}",
        "rows       " + ", ".join(f"{name} {len(some):,}" for name, some in rows.items() if some is not None),
        f"steps      {made.steps:,} of {settings.batch_size * settings.gradient_accumulation} examples, "
        f"learning rate {settings.learning_rate:g}, evaluated every {settings.eval_every}",
    ]
    pruning = made.pruning
    if pruning is not None and made.steps == 0:
        say.append(f"pruning    {pruning.method} to {pruning.sparsity:.0%}, once, without training")
    elif pruning is not None:
        schedule = pruning.make_schedule()
        say += [
            f"pruning    {pruning.method} to {pruning.sparsity:.0%} by {settings.objective}: {schedule.warmup} steps "
            f"of warm-up, {schedule.cooldown} of cool-down, ranked every {schedule.interval}",
        ]
    say += [
        f"memory     about {costs.memory / 1e9:.1f} GB for weights, optimiser, scores and teacher; activations on top",
        f"time       about {duration(costs.seconds)} on this machine" + (", twice with --baseline" * config.baseline),
        f"output     {settings.folder}",
    ]
    for line in [*say, *splits.notes, "", *planning.schedule_sketch(made)]:
        console.print(line, highlight=False, soft_wrap=True)


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(2, round(seconds))} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def recipes(console: Console, table: dict[str, dict[str, Any]]) -> None:
    """Prints the recipes, one a line, however long."""
    columns = "epochs", "batch_size", "learning_rate", "warmup", "cooldown"
    lines = [("recipe", "model", "epochs", "batch", "lr", "warm-up", "cool-down")]
    lines += [(name, s["model"], *(f"{s[key]:g}" for key in columns)) for name, s in table.items()]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        text = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        console.print(text.rstrip(), highlight=False, soft_wrap=True)


def scores(console: Console, found: Any) -> None:
    """Prints a checkpoint's scores."""
    zeros = "" if found.sparsity is None else f", {found.sparsity:.1%} of its prunable weights are zero"
    console.print(f"{found.model} on {found.rows:,} rows of {found.task}{zeros}", highlight=False, soft_wrap=True)
    for name, value in found.scores.items():
        console.print(f"  {name:14} {value:7.2f}", highlight=False)
    if not found.scores:
        console.print("  no scores: these rows have no labels")
    for path in found.files:
        console.print(f"  predictions in {path}", highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Stored:
    """The small file of a run: its folder, its scores where it was scored, and the model as the runtime loads it."""

    folder: Path
    scores: dict[str, float]
    model: Any = None


def result(console: Console, done: Result, stored: Stored | None = None) -> None:
    """Prints how the run ended; beside the dense run and the small file where there are such."""
    config = runfolder.config_of(done.folder)
    pruned = done.folder / "model"
    dense = done.folder / DENSE / "model"
    before = done.dense if dense.exists() else None
    small = stored.scores if stored else {}
    table = Table("", box=None, pad_edge=False)
    for title, shown in {"dense": before, "dense " if config.is_dense else "pruned": done, "stored": stored}.items():
        if shown is not None:
            table.add_column(title.strip(), justify="right")

    def row(name: str, *cells: str | None) -> None:
        wanted = (before is not None, True, stored is not None)
        table.add_row(name, *(cell or "" for cell, is_wanted in zip(cells, wanted, strict=True) if is_wanted))

    for name in done.scores:
        cells = [None if scores is None else scores.get(name) for scores in (before, done.scores, small)]
        row(f"{name.replace('_', ' ')} (test)", *(None if cell is None else f"{cell:.2f}" for cell in cells))
    zeros = f"{done.sparsity:.1%}".replace("%", " %")
    row("zeros in the blocks", "0.0 %", zeros, zeros)
    folders = [dense if before is not None else None, pruned, stored.folder if stored else None]
    row("size on disk", *(None if folder is None else f"{_bytes(folder) / 1e6:.1f} MB" for folder in folders))
    times = _latencies([*folders[:2], stored.model if stored else None], config)
    row("one sentence", *(None if seconds is None else f"{1e3 * seconds:.1f} ms" for seconds in times))
    console.print()
    console.print(table)
    gain = times[1] / times[2] if times[1] and times[2] else None
    console.print(_closing(done, before, stored, gain), highlight=False)


def _closing(done: Result, before: dict[str, float] | None, stored: Stored | None, gain: float | None) -> str:
    kept = ""
    if before is not None and before[done.main]:
        kept = f"The pruned model keeps {done.score / before[done.main]:.1%} of the dense {done.main}. "
    small = f"make it small with: pinscher export {done.folder}."
    if stored is not None:
        ratio = _bytes(done.folder / "model") / _bytes(stored.folder)
        small = (
            f"{stored.folder} is the same model in INT8, {ratio:.1f} times smaller: after `import pinscher`, "
            "from_pretrained loads it."
        )
    speed = "PyTorch still multiplies by zeros, so equal times are as expected."
    if gain and stored:
        speed = (
            f'pinscher.load("{stored.folder}") runs it, {gain:.1f} times as fast as PyTorch, which multiplies by zeros.'
        )
    return (
        f"\n{kept}It is in {done.folder / 'model'}, an ordinary model folder; {small} {speed} "
        f"{duration(done.seconds)}, {done.steps:,} steps."
    )


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _latencies(models: list[Any], config: RunConfig) -> list[float | None]:
    """Median seconds of one example, the models (or folders of such, or None) taking turns."""
    kind = getattr(transformers, TASKS[config.task].architecture)
    loaded = [kind.from_pretrained(some).eval() if isinstance(some, Path) else some for some in models]
    known = [model for model in loaded if model is not None]
    ids = torch.randint(5, known[0].config.vocab_size, (1, 32), generator=torch.Generator().manual_seed(0))
    took: list[list[float]] = [[] for _ in loaded]
    with torch.inference_mode():
        for turn in range(TIMINGS):
            for model, times in zip(loaded, took, strict=True):
                if model is not None:
                    started = time.perf_counter()
                    model(input_ids=ids)
                    if turn:  # the first one warms up
                        times.append(time.perf_counter() - started)
    return [statistics.median(times) if times else None for times in took]
