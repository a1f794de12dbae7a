"""Prints the plan of a run before it and the result after it."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from pinscher.commands.console import duration, megabytes, percent, say
from pinscher.runfolder import RunFolder

if TYPE_CHECKING:
    from pinscher.train.config import RunConfig
    from pinscher.train.folder import Result

TIMINGS = 41


def show_plan(console: Console, config: RunConfig) -> None:
    """Prints the plan of a run."""
    from pinscher.train import plan as planning
    from pinscher.train import pretrained
    from pinscher.train.recipes import NONE

    made = planning.make(config)
    model = pretrained.load_model(config.model, made.task, made.labels, made.tokenizer, config.new_head)
    costs = planning.costs(made, model)
    settings, splits = made.config, made.splits
    rows = {"train": splits.train, "validation": splits.validation} | splits.tests
    lines = [
        f"model      {settings.model}, {costs.parameters / 1e6:.1f} M parameters",
        f"prunable   {costs.matrices} matrices, {costs.prunable:,} weights",
        f"task       {made.task.name}, scored by {made.task.main}",
        "rows       " + ", ".join(f"{name} {len(some):,}" for name, some in rows.items() if some is not None),
        f"steps      {made.steps:,} of {settings.batch_size * settings.gradient_accumulation} examples, "
        f"learning rate {settings.learning_rate:g}, evaluated every {settings.eval_every}",
    ]
    if settings.recipe and settings.recipe != NONE:
        lines.insert(0, f"recipe     {settings.recipe}; --recipe none leaves it out")
    if settings.needs_dense and made.steps:
        lines.append(
            f"dense run  {settings.dense_steps:,} steps first, learning rate {settings.dense_learning_rate:g}"
            + (", which the pruning starts from" * settings.dense_start)
        )
    pruning = made.pruning
    if pruning is not None and made.steps == 0:
        lines.append(f"pruning    {pruning.method} to {pruning.sparsity:.0%}, once, without training")
    elif pruning is not None:
        schedule = pruning.make_schedule()
        lines += [
            f"pruning    {pruning.method} to {pruning.sparsity:.0%} by {settings.objective}: {schedule.warmup} steps "
            f"of warm-up, {schedule.cooldown} of cool-down, ranked every {schedule.interval}",
        ]
    lines += [
        f"memory     about {costs.memory / 1e9:.1f} GB for weights, optimiser, scores and teacher; activations on top",
        f"time       about {duration(costs.seconds)} on this machine" + ", with the dense run" * settings.needs_dense,
        f"output     {settings.folder}",
    ]
    for line in [*lines, *splits.notes, "", *planning.schedule_sketch(made)]:
        say(line, console)


def show_recipes(console: Console) -> None:
    """Prints the recipes, one per line."""
    from pinscher.train.recipes import BEST, RECIPES

    for name, settings in BEST.items():
        say(f"{name}  " + ", ".join(f"{key.replace('_', ' ')}: {value}" for key, value in settings.items()), console)
    say("", console)
    columns = "epochs", "batch_size", "learning_rate", "warmup", "cooldown"
    lines = [("recipe", "model", "epochs", "batch", "lr", "warm-up", "cool-down")]
    lines += [(name, s["model"], *(f"{s[key]:g}" for key in columns)) for name, s in RECIPES.items()]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        say("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip(), console)


@dataclass(frozen=True)
class Stored:
    """The small file of a run: its folder, its scores where it was scored, and the model as the runtime loads it."""

    folder: Path
    scores: dict[str, float]
    model: Any = None


def show_result(console: Console, done: Result, stored: Stored | None = None) -> None:
    """Prints the result of a run, beside the dense run and the small file if there are any."""
    from pinscher.train import folder as runfolder

    config = runfolder.config_of(done.folder)
    run = RunFolder(done.folder)
    pruned, dense = run.model, run.dense.model
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
    zeros = percent(done.sparsity)
    row("zeros in the blocks", percent(0), zeros, zeros)
    folders = [dense if before is not None else None, pruned, stored.folder if stored else None]
    row("size on disk", *(None if folder is None else megabytes(_bytes(folder)) for folder in folders))
    in_memory = [done.dense_model if before is not None else None, done.model, stored.model if stored else None]
    models = [model or folder for model, folder in zip(in_memory, [*folders[:2], None], strict=True)]
    times = _latencies(models, config)
    row("one sentence", *(None if seconds is None else f"{1e3 * seconds:.1f} ms" for seconds in times))
    console.print()
    console.print(table)
    gain = times[1] / times[2] if times[1] and times[2] else None
    console.print(_closing(done, config.recipe, before, stored, gain), highlight=False)


def _closing(
    done: Result, recipe: str | None, before: dict[str, float] | None, stored: Stored | None, gain: float | None
) -> str:
    used = f"Made by {recipe}. " if recipe and recipe != "none" else ""
    kept = ""
    if before is not None and before[done.main]:
        kept = f"The pruned model keeps {done.score / before[done.main]:.1%} of the dense {done.main}. "
    model = RunFolder(done.folder).model
    small = f"make it small with: pinscher export {done.folder}."
    if stored is not None:
        ratio = _bytes(model) / _bytes(stored.folder)
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
        f"\n{used}{kept}It is in {model}, an ordinary model folder; {small} {speed} "
        f"{duration(done.seconds)}, {done.steps:,} steps."
    )


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _latencies(models: list[Any], config: RunConfig) -> list[float | None]:
    """Median seconds of one example, the models (or their folders, or None) taking turns."""
    import torch
    import transformers

    from pinscher.train.tasks import TASKS

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
