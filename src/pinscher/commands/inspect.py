"""`pinscher inspect`: analyse the sparsity of any checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from pinscher import settings
from pinscher.commands.console import bar, hush, percent, say, text, wide
from pinscher.commands.flags import FRACTIONAL, WHOLE, given, number
from pinscher.errors import InputError
from pinscher.files import readable
from pinscher.runfolder import RunFolder
from pinscher.settings import COUNT, FINITE, SHARE

if TYPE_CHECKING:
    from pinscher.inspect.inspection import Inspection
    from pinscher.inspect.sources import Checkpoint
    from pinscher.models.names import Place
    from pinscher.train.sensitivity import Sensitivity

WIDE = 200  # columns that a table may take
LEVELS, ROWS = "0.5,0.8,0.9", 500  # of a sensitivity
DATA = ("data", "train_file", "text_column", "label_column")  # settings of a run's data that are flags here
WEIGHTS = ("*.safetensors", "*.json", "pytorch_model*.bin", "recipe.yaml")  # what is fetched from the hub


def command(
    model: Annotated[
        str, typer.Argument(help="Hub id, model folder, run folder or a file of weights.", show_default=False)
    ],
    layers: Annotated[str | None, text("Only matrices whose name matches this regular expression.")] = None,
    rank: Annotated[bool, typer.Option(help="Compute the ranks, which takes most of the time.")] = True,
    json_file: Annotated[str | None, typer.Option("--json", help="Also write everything to this file.")] = None,
    mask_method: Annotated[str | None, text("How mask_scores prune, if the checkpoint does not say.")] = None,
    mask_threshold: Annotated[
        str | None, text("Final threshold that mask_scores were trained with.", FRACTIONAL)
    ] = None,
    sensitivity: Annotated[
        bool, typer.Option("--sensitivity", help="Measure on a task how much each layer loses when pruned alone.")
    ] = False,
    task: Annotated[str | None, text("Task; by default that of the run.")] = None,
    levels: Annotated[str | None, text(f"Sparsities to try, separated by commas; by default {LEVELS}.")] = None,
    rows: Annotated[str | None, text(f"Validation rows to score on; by default {ROWS}.", WHOLE)] = None,
    **flags: Any,
) -> None:
    """Analyse the sparsity of any checkpoint: pattern, dead rows and columns, rank, size in each codec."""
    from pinscher.files import check_file, write_text
    from pinscher.inspect.masks import Rule

    console = wide(WIDE)
    told = given({"task": task, **flags})
    asked = [*told, *(name for name, value in (("levels", levels), ("rows", rows)) if value is not None)]
    if asked and not sensitivity:
        raise InputError(f"--{asked[0].replace('_', '-')} goes with --sensitivity.")
    tried = sorted(settings.numbers_in(SHARE, (LEVELS if levels is None else levels).split(","), "--levels"))
    most = number(COUNT, rows, "--rows")
    threshold = number(FINITE, mask_threshold, "--mask-threshold", FRACTIONAL)
    if json_file is not None:
        check_file(json_file, "--json")
    hush(data=sensitivity)
    with bar("looking", console) as progress:
        found = look(model, Rule(mask_method, threshold), layers=layers, rank=rank, progress=progress)
    if sensitivity:
        from pinscher.train.sensitivity import measure

        with bar("pruning and scoring", console) as progress:
            measured = measure(model, told, tried, ROWS if most is None else most, progress)
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
        rule: how mask scores in it prune, if it does not say so itself (`pinscher.inspect.masks.Rule`).
        layers: only matrices whose name matches this regular expression.
        rank: compute the ranks, which takes most of the time.
        progress: called with the numbers of matrices done and in total.
    """
    from pinscher.inspect import masks, places, sources
    from pinscher.inspect.inspection import inspect
    from pinscher.models import folders
    from pinscher.models.names import guessed
    from pinscher.store import payload

    path = _path(model)
    if path.is_dir():
        folders.check_files(path)
    checkpoint = sources.read(model, path, _small)
    size = sum(tensor.numel() * tensor.element_size() for tensor in checkpoint.tensors.values())
    settings = (checkpoint.folder or path.parent) / folders.CONFIG
    folders.check_counts(checkpoint.config, settings, len(checkpoint.tensors), size)
    applied = masks.applied(checkpoint.tensors, masks.rule_for(checkpoint, rule or masks.UNKNOWN))
    checkpoint.tensors, notes = applied.tensors, applied.notes
    known, why = _known(checkpoint)
    found, missing = places.placed(checkpoint.tensors, known)
    if not found:
        found = guessed(checkpoint.tensors)
        notes.append(f"{why}: matrices are recognised by names and shapes (docs/inspect.md).")
    elif missing:
        notes.append(f"{missing} of the {len(known)} matrices of its model are not in the checkpoint.")
    checkpoint.notes += notes
    return inspect(checkpoint, found, payload.sizes, layers=layers, rank=rank, progress=progress)


def _path(model: str) -> Path:
    """The file or folder that holds the weights; downloaded from the hub if the name is neither."""
    from pinscher.models import hub

    path = Path(model).expanduser()
    if path.is_file():
        return path
    if RunFolder(path).is_run:
        return RunFolder(path).require_model()
    if path.is_dir():
        return path
    if path.suffix in (".safetensors", ".bin", ".pt", ".pth", ".ckpt"):
        raise InputError(f"there is no file {model}.")
    located = Path(hub.locate(model))
    return located if located.is_dir() else _from_hub(model)


def _from_hub(model: str) -> Path:
    from huggingface_hub import snapshot_download

    from pinscher.models import hub
    from pinscher.models.hub import offline_if_unreachable

    try:
        with offline_if_unreachable():
            return Path(snapshot_download(model, allow_patterns=list(WEIGHTS)))
    except Exception as error:  # no network, no such model, no such name: the hub's client has many names for them
        raise hub.unreachable(model, "model", error) from None


def _small(folder: Path) -> dict[str, Any]:
    from pinscher.store.file import Stored, files_of

    with Stored(files_of(folder)) as stored:
        return {name: tensor.clone() for name, tensor in stored.items()}


def _known(checkpoint: Checkpoint) -> tuple[list[Place], str]:
    """The matrices of the model that config.json names, or none and the reason. No weights are created or loaded."""
    import torch
    import transformers

    from pinscher.models.blocks import block_matrices
    from pinscher.models.families import type_of
    from pinscher.models.folders import class_of

    auto: Any = transformers.AutoModel
    config = {name: value for name, value in checkpoint.config.items() if name != "quantization_config"}
    if not config:
        return [], "There is no config.json beside it"
    try:
        settings = transformers.AutoConfig.for_model(**config)
        try:
            made = class_of(settings, checkpoint.place)
        except InputError:
            made = auto.from_config
        with torch.device("meta"):
            model = made(settings)
        places = [matrix.place for matrix in block_matrices(model)]
    except Exception:  # settings that transformers does not know, or cannot build a model from
        kind = config.get("architectures")
        name = kind[0] if isinstance(kind, list) and kind else type_of(config) or "of this kind"
        return [], f"transformers knows no model {name}"
    return places, "" if places else f"{type(model).__name__} has no matrices in blocks"


# ------------------------------------------------------------ for people


def show(found: Inspection, console: Console) -> None:
    """Prints every matrix, the sums over kinds and layers, and a summary."""
    from pinscher.inspect.inspection import said

    codecs = list(next((m.sizes for m in found.matrices if m.sizes), {}))
    table = _table("layer", "matrix", "shape", "zeros", "pattern", "dead rows", "dead cols", "rank", *codecs)
    for m in found.matrices:
        dead = str(m.pattern.dead_rows), str(m.pattern.dead_columns)
        rank = "-" if m.rank is None else f"{m.rank} {m.rank / max(1, m.full_rank):.0%}"
        shape = f"{m.shape[0]}x{m.shape[1]}"
        sizes = [_size(m.sizes.get(codec)) for codec in codecs]
        table.add_row(m.layer, m.kind, shape, percent(m.sparsity), m.pattern.name, *dead, rank, *sizes)
    console.print(table)
    for title, sums in (
        ("kind", found.totals(lambda m: m.kind)),
        ("layer", found.totals(lambda m: m.layer)),
        ("", found.totals(lambda _: "all")),
    ):
        table = _table(title, "matrices", "weights", "zeros", "pattern", "dead rows", "dead cols", "rank", *codecs)
        for name, one in sums.items():
            pattern = ", ".join(one["patterns"])
            numbers = f"{one['matrices']}", f"{one['weights']:,}", percent(one["sparsity"])
            rank = "-" if one["rank"] is None else f"{one['rank']:.0%}"
            sizes = [_size(one["sizes"].get(codec)) for codec in codecs]
            table.add_row(name, *numbers, pattern, f"{one['dead_rows']}", f"{one['dead_columns']}", rank, *sizes)
        console.print("", table)
    console.print()
    for line in [*said(found), *found.notes]:
        say(line, console)


def show_sensitivity(measured: Sensitivity, console: Console) -> None:
    """Prints what pruning each layer and kind alone costs, worst first."""
    levels = list(measured.losses[0].lost)
    unit = "the loss rises by" if measured.measure == "loss" else f"points of {measured.measure} lost"
    say(
        f"\n{measured.measure} {measured.score:.2f} on {measured.rows} validation rows of {measured.task}; {unit} when "
        "one layer or kind alone is pruned by magnitude:",
        console,
    )
    table = _table("", "pruned alone", "weights", "zeros now", *(f"at {level:.0%}" for level in levels))
    for one in measured.losses:
        table.add_row(
            one.group,
            one.unit,
            f"{one.weights:,}",
            percent(one.sparsity),
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


def _size(count: int | None) -> str:
    return "-" if count is None else readable(count)
