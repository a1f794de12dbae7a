"""What a person sees of a run: the plan before it, the comparison after it."""

from __future__ import annotations

import gzip
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

from pinscher.train import experiment, models
from pinscher.train import plan as planning
from pinscher.train.config import DENSE, RunConfig
from pinscher.train.experiment import Result
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
    if pruning is not None:
        schedule = pruning.make_schedule()
        say += [
            f"pruning    {pruning.method} to {pruning.sparsity:.0%} by {settings.objective}: {schedule.warmup} steps "
            f"of warm-up, {schedule.cooldown} of cool-down, ranked every {schedule.interval}",
        ]
    say += [
        f"memory     about {costs.memory / 1e9:.1f} GB for weights, optimiser, scores and teacher; activations on top",
        f"time       about {_duration(costs.seconds)} on this machine" + (", twice with --baseline" * config.baseline),
        f"output     {settings.folder}",
    ]
    for line in [*say, *splits.notes, "", *planning.schedule_sketch(made)]:
        console.print(line, highlight=False, soft_wrap=True)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(2, round(seconds))} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def recipes(console: Console, table: dict[str, dict[str, Any]]) -> None:
    """Prints the recipes, one a line."""
    shown = Table("recipe", "model", "epochs", "batch", "lr", "warm-up", "cool-down", box=None)
    for name, s in table.items():
        numbers = [f"{s[key]:g}" for key in ("epochs", "batch_size", "learning_rate", "warmup", "cooldown")]
        shown.add_row(name, s["model"], *numbers)
    console.print(shown)


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


def result(console: Console, done: Result) -> None:
    """Prints how the run ended; beside the dense run where there is one."""
    config = experiment.config_of(done.folder)
    pruned = done.folder / "model"
    dense = done.folder / DENSE / "model"
    beside = done.dense is not None and dense.exists()
    columns = [dense, pruned] if beside else [pruned]
    table = Table(
        "", *(["dense"] if beside else []), "dense" if config.is_dense else "pruned", box=None, pad_edge=False
    )
    for name, value in done.scores.items():
        values = [done.dense[name], value] if done.dense is not None and beside else [value]
        table.add_row(f"{name.replace('_', ' ')} (test)", *(f"{v:.2f}" for v in values))
    table.add_row("zeros in the blocks", *(["0.0 %"] if beside else []), f"{done.sparsity:.1%}".replace("%", " %"))
    table.add_row("model.safetensors", *(f"{_bytes(folder) / 1e6:.1f} MB" for folder in columns))
    table.add_row("the same, gzipped", *(f"{_gzipped(folder) / 1e6:.1f} MB" for folder in columns))
    table.add_row("one sentence, PyTorch", *(f"{1e3 * s:.1f} ms" for s in _latencies(columns, config)))
    console.print()
    console.print(table)
    kept = ""
    if beside and done.dense is not None:
        kept = f"The pruned model keeps {done.score / done.dense[done.main]:.1%} of the dense {done.main}. "
    console.print(
        f"\n{kept}It is in {pruned}, an ordinary model folder, so zeros are still stored as numbers and PyTorch still "
        f"multiplies by them: equal sizes and times are as expected. {_duration(done.seconds)}, {done.steps:,} steps.",
        highlight=False,
    )


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _gzipped(folder: Path) -> int:
    return sum(len(gzip.compress(path.read_bytes(), 1)) for path in folder.glob("*.safetensors"))


def _latencies(folders: list[Path], config: RunConfig) -> list[float]:
    """Median seconds of one example, the models taking turns."""
    kind = getattr(transformers, TASKS[config.task].architecture)
    loaded = [kind.from_pretrained(folder).eval() for folder in folders]
    ids = torch.randint(5, loaded[0].config.vocab_size, (1, 32), generator=torch.Generator().manual_seed(0))
    took: list[list[float]] = [[] for _ in loaded]
    with torch.inference_mode():
        for turn in range(TIMINGS):
            for place, model in enumerate(loaded):
                started = time.perf_counter()
                model(input_ids=ids)
                if turn:  # the first one warms up
                    took[place].append(time.perf_counter() - started)
    return [statistics.median(times) for times in took]
