"""What `pinscher inspect` does: joins checkpoints with what is known of models, codecs and tasks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from pinscher.errors import InputError

if TYPE_CHECKING:
    from pinscher.report.inspect import Inspection
    from pinscher.report.places import Place
    from pinscher.report.sources import Checkpoint
    from pinscher.train.sensitivity import Sensitivity

WIDE = 200  # columns that a table may take
LEVELS, ROWS = "0.5,0.8,0.9", 500  # of a sensitivity
WEIGHTS = ("*.safetensors", "*.json", "pytorch_model*.bin", "recipe.yaml")  # what is fetched from the hub


def _text(help: str) -> Any:
    return typer.Option(help=help, show_default=False)


def command(
    model: Annotated[
        str, typer.Argument(help="Hub id, model folder, run folder, or a file of weights.", show_default=False)
    ],
    layers: Annotated[str | None, _text("Only matrices whose name this expression is found in.")] = None,
    rank: Annotated[bool, typer.Option(help="Work out the ranks, which takes most of the time.")] = True,
    json_file: Annotated[str | None, typer.Option("--json", help="Also write everything into this file.")] = None,
    mask_method: Annotated[str | None, _text("How mask_scores prune, where the checkpoint does not say.")] = None,
    mask_threshold: Annotated[float | None, _text("The final threshold that mask_scores were trained with.")] = None,
    sensitivity: Annotated[
        bool, typer.Option("--sensitivity", help="How much each layer can lose alone, on a task.")
    ] = False,
    task: Annotated[str | None, _text("The task; a run's own by default.")] = None,
    data: Annotated[str | None, _text("Folder with the task's files.")] = None,
    train_file: Annotated[str | None, _text("Training rows; a part of them is scored on.")] = None,
    text_column: Annotated[list[str] | None, _text("Column with the text; twice for pairs.")] = None,
    label_column: Annotated[str | None, _text("Column with the label.")] = None,
    levels: Annotated[str | None, _text(f"Sparsities to try, with commas; by default {LEVELS}.")] = None,
    rows: Annotated[int | None, _text(f"Validation rows to score on; by default {ROWS}.")] = None,
) -> None:
    """Say what the zeros of any checkpoint are like: pattern, dead rows and columns, rank, size in each codec."""
    from pinscher.checkpoint import write_text
    from pinscher.report.masks import Rule

    console = _console()
    told: dict[str, Any] = {"task": task, "data": data, "train_file": train_file}
    told |= {"text_column": text_column, "label_column": label_column}
    settings = {name: value for name, value in told.items() if value}
    asked = [*settings, *(name for name, value in (("levels", levels), ("rows", rows)) if value is not None)]
    if asked and not sensitivity:
        raise InputError(f"--{asked[0].replace('_', '-')} goes with --sensitivity.")
    _hush()
    with _bar(console, "looking") as progress:
        found = look(model, Rule(mask_method, mask_threshold), layers=layers, rank=rank, progress=progress)
    if sensitivity:
        from pinscher.train.sensitivity import measure

        with _bar(console, "pruning and scoring") as progress:
            measured = measure(model, settings, _levels(levels or LEVELS), ROWS if rows is None else rows, progress)
        found.sensitivity = asdict(measured)
    show(found, console)
    if sensitivity:
        show_sensitivity(measured, console)
    if json_file is not None:
        write_text(json_file, json.dumps(found.to_dict(), indent=1) + "\n")


def look(
    model: str,
    rule: Any = None,
    *,
    layers: str | None = None,
    rank: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Inspection:
    """Inspects a checkpoint, wherever it is.

    Args:
        model: hub id, model folder, run folder, or a file of weights.
        rule: how mask scores in it prune, where it does not say (`pinscher.report.masks.Rule`).
        layers: only matrices whose name this expression is found in.
        rank: work out the ranks, which takes most of the time.
        progress: is told how many matrices are done, of how many.
    """
    from pinscher.report import masks, places, sources
    from pinscher.report.inspect import inspect
    from pinscher.store import payload

    checkpoint = sources.read(model, _path(model), _small)
    applied = masks.applied(checkpoint.tensors, masks.rule_for(checkpoint, rule or masks.UNKNOWN))
    checkpoint.tensors, notes = applied.tensors, applied.notes
    known, why = _known(checkpoint)
    found, missing = places.placed(checkpoint.tensors, known)
    if not found:
        found = places.guessed(checkpoint.tensors)
        notes.append(f"{why}: matrices are recognised by names and shapes (docs/inspect.md).")
    elif missing:
        notes.append(f"{missing} of the {len(known)} matrices of its model are not in the checkpoint.")
    checkpoint.notes += notes
    return inspect(checkpoint, found, payload.sizes, layers=layers, rank=rank, progress=progress)


def _path(model: str) -> Path:
    """The file or folder that holds the weights; from the hub if it is none."""
    from pinscher.train import models

    path = Path(model).expanduser()
    if path.is_file():
        return path
    if (path / "config.yaml").exists() and not (path / "config.json").exists():
        if not (path / "model").exists():
            raise InputError(f"{path} has no model yet: continue it with: pinscher prune --resume {path}")
        return path / "model"
    if path.is_dir():
        return path
    if path.suffix in (".safetensors", ".bin", ".pt", ".pth", ".ckpt"):
        raise InputError(f"there is no file {model}.")
    located = Path(models.locate(model))
    return located if located.is_dir() else _from_hub(model)


def _from_hub(model: str) -> Path:
    from huggingface_hub import snapshot_download

    from pinscher.train import models
    from pinscher.train.hub import offline_if_unreachable

    try:
        with offline_if_unreachable():
            return Path(snapshot_download(model, allow_patterns=list(WEIGHTS)))
    except Exception as error:  # no network, no such model, no such name: the hub's client has many names for them
        raise models.unreachable(model, "model", error) from None


def _small(folder: Path) -> dict[str, Any]:
    from pinscher.store.file import Stored, files_of

    with Stored(files_of(folder)) as stored:
        return {name: tensor.clone() for name, tensor in stored.items()}


def _known(checkpoint: Checkpoint) -> tuple[list[Place], str]:
    """The matrices of the model that config.json names; or none, and why. No weight is made or loaded for it."""
    import torch
    import transformers

    from pinscher.prune import find_sites
    from pinscher.report.places import Place

    auto: Any = transformers.AutoModel
    config = {name: value for name, value in checkpoint.config.items() if name != "quantization_config"}
    if not config:
        return [], "There is no config.json beside it"
    kind = (config.get("architectures") or [""])[0]
    made = getattr(transformers, kind, None) if isinstance(kind, str) and kind else None
    try:
        settings = transformers.AutoConfig.for_model(**config)
        with torch.device("meta"):
            model = made(settings) if made is not None else auto.from_config(settings)
        sites = find_sites(model)
    except Exception:  # settings that transformers does not know, or cannot make a model of, in its many ways
        return [], f"transformers knows no model {kind or config.get('model_type') or 'of this kind'}"
    return [
        Place(_owner(site.name, site.parameter), site.parameter, site.block, site.kind, site.transposed)
        for site in sites
    ], ""


def _owner(name: str, parameter: str) -> str:
    return name if parameter == "weight" else name.removesuffix(f".{parameter}")


def _levels(text: str) -> list[float]:
    try:
        return sorted({float(word) for word in text.split(",")})
    except ValueError:
        raise InputError(f"--levels takes numbers with commas between them, not {text!r}.") from None


# ------------------------------------------------------------ for people


def _console() -> Console:
    """Wide enough for whole lines, wherever they go: half a number would be none."""
    return Console(width=max(Console().width, WIDE))


def _hush() -> None:
    import transformers

    logging: Any = transformers.utils.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()


@contextmanager
def _bar(console: Console, text: str) -> Iterator[Any]:
    from rich.progress import Progress

    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(text, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def show(found: Inspection, console: Console) -> None:
    """Prints every matrix, the sums over kinds and layers, and what it means."""
    from pinscher.report.inspect import said

    codecs = list(next((m.sizes for m in found.matrices if m.sizes), {}))
    table = _table("layer", "matrix", "shape", "zeros", "pattern", "dead rows", "dead cols", "rank", *codecs)
    for m in found.matrices:
        dead = str(m.pattern.dead_rows), str(m.pattern.dead_columns)
        rank = "-" if m.rank is None else f"{m.rank} {m.rank / max(1, m.full_rank):.0%}"
        shape = f"{m.shape[0]}x{m.shape[1]}"
        sizes = [_size(m.sizes.get(codec)) for codec in codecs]
        table.add_row(m.layer, m.kind, shape, _percent(m.sparsity), m.pattern.name, *dead, rank, *sizes)
    console.print(table)
    for title, sums in (
        ("kind", found.totals(lambda m: m.kind)),
        ("layer", found.totals(lambda m: m.layer)),
        ("", found.totals(lambda _: "all")),
    ):
        table = _table(title, "matrices", "weights", "zeros", "pattern", "dead rows", "dead cols", "rank", *codecs)
        for name, one in sums.items():
            pattern = ", ".join(one["patterns"])
            numbers = f"{one['matrices']}", f"{one['weights']:,}", _percent(one["sparsity"])
            rank = "-" if one["rank"] is None else f"{one['rank']:.0%}"
            sizes = [_size(one["sizes"].get(codec)) for codec in codecs]
            table.add_row(name, *numbers, pattern, f"{one['dead_rows']}", f"{one['dead_columns']}", rank, *sizes)
        console.print("", table)
    console.print()
    for line in [*said(found), *found.notes]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def show_sensitivity(measured: Sensitivity, console: Console) -> None:
    """Prints what each layer and kind loses alone, worst first."""
    levels = list(measured.losses[0].lost)
    unit = "the loss rises by" if measured.measure == "loss" else f"points of {measured.measure} lost"
    console.print(
        f"\n{measured.measure} {measured.score:.2f} on {measured.rows} validation rows of {measured.task}; {unit} when "
        "one layer or kind alone is pruned by magnitude:",
        highlight=False,
        soft_wrap=True,
    )
    table = _table("", "pruned alone", "weights", "zeros now", *(f"at {level:.0%}" for level in levels))
    for one in measured.losses:
        table.add_row(
            one.group,
            one.unit,
            f"{one.weights:,}",
            _percent(one.sparsity),
            *("as is" if level <= one.sparsity else f"{one.lost[level]:+.2f}" for level in levels),
        )
    console.print(table)


def _table(*titles: str) -> Table:
    """Names and patterns to the left, numbers to the right."""
    table = Table(box=None, pad_edge=False)
    for title in titles:
        is_text = title in ("", "layer", "matrix", "kind", "pattern", "pruned alone")
        table.add_column(title, justify="left" if is_text else "right", no_wrap=title not in ("matrix", "pattern"))
    return table


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _size(size: int | None) -> str:
    """Bytes in the unit that leaves three digits or so."""
    if size is None:
        return "-"
    return f"{size / 1e6:.2f} MB" if size >= 1e6 else f"{size / 1e3:.1f} kB"
