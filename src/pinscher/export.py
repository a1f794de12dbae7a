"""What `pinscher export` does: takes a run or any model, and leaves it small, or in another's format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers

from pinscher import checkpoint
from pinscher.errors import InputError
from pinscher.store import exchange, saving, shrink
from pinscher.train import models, plan, runfolder, scoring
from pinscher.train.config import RunConfig

FORMATS = ("pinscher", "hf", "scipy", "onnx")
EVALUATED = "eval-export"  # where a run keeps what its stored model answered
BATCH = 16  # examples of a calibration batch
ONNX_ROWS = 64  # training rows that the activations of an ONNX file are measured on, if nothing else is asked for


@dataclass(frozen=True)
class Source:
    """A model to export, and what is known of how it came about."""

    model: Any
    tokenizer: Any
    run: Path | None = None
    facts: dict[str, Any] = field(default_factory=dict)


def load(place: str) -> Source:
    """A run's model, or any model by folder or name."""
    run = Path(place) if (Path(place) / "config.yaml").exists() else None
    folder = str(run / "model") if run else place
    if run and not (run / "model").exists():
        raise InputError(f"{run} has no model yet: continue it with: pinscher prune --resume {run}")
    config = models.load_config(folder)
    names = config.architectures or ["AutoModel"]
    kind = getattr(transformers, names[0], None)
    if kind is None:
        raise InputError(f"transformers has no {names[0]}, which {place} says it is.")
    try:
        model = kind.from_pretrained(models.locate(folder))
    except (OSError, ValueError, RuntimeError) as error:
        raise models.unreachable(folder, "model", error) from None
    try:
        tokenizer = models.load_tokenizer(folder)
    except InputError:
        tokenizer = None  # a model can do without
    return Source(model, tokenizer, run, _facts(run) if run else {"base_model": place})


def _facts(run: Path) -> dict[str, Any]:
    settings, result = runfolder.config_of(run), runfolder.read_result(run)
    return {
        "base_model": settings.model,
        "task": settings.task,
        "method": "dense fine-tuning" if settings.is_dense else settings.method,
        "sparsity": result.sparsity,
        "scores": result.scores,
        "dense_scores": result.dense,
    }


def shrunk(source: Source, form: str) -> shrink.Shrunk:
    """Takes what is dead out of a source's model, as far as the format can say so."""
    if form not in ("pinscher", "hf"):
        raise InputError("--shrink goes with --format pinscher or hf.")
    return shrink.shrink_(source.model, plain=form == "hf")


def small(
    source: Source,
    output: Path,
    *,
    values: str = "int8",
    embeddings: str = saving.KEEP,
    head: str = saving.KEEP,
    calibrate: int = 0,
    score: bool = False,
    push_to_hub: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, float]:
    """Stores a model in the small format; returns its scores as stored, if they were asked for."""
    if score and source.run is None:
        raise InputError("--score needs a run, which knows its task. Use: pinscher eval FOLDER --task …")
    made = {"values": values, "embeddings": embeddings, "head": head, "tokenizer": source.tokenizer}
    batches = calibration(source, calibrate) if calibrate else None
    saving.save_pretrained(source.model, output, **made, calibration=batches, facts=source.facts, progress=progress)
    scores: dict[str, float] = {}
    if score and source.run is not None:
        scores = scoring.score(str(source.run), {}, stored=str(output), output=str(source.run / EVALUATED)).scores
        saving.rewrite_card(output, source.model, source.facts | {"stored_scores": scores})
    if push_to_hub is not None:
        saving.push(output, push_to_hub)
    return scores


def calibration(source: Source, rows: int) -> list[dict[str, Any]]:
    """Batches of a run's own training rows."""
    if source.run is None:
        raise InputError("--calibrate needs a run, which knows its data.")
    settings = runfolder.config_of(source.run)
    made = plan.make(RunConfig.from_dict(settings.to_dict()))
    collate = made.task.collator(made.tokenizer)
    features = [made.train[i] for i in range(min(rows, len(made.train)))]
    spare = ("labels", "start_positions", "end_positions")
    return [
        {name: tensor for name, tensor in collate(features[start : start + BATCH]).items() if name not in spare}
        for start in range(0, len(features), BATCH)
    ]


def write(
    source: Source, output: Path, form: str, *, values: str, embeddings: str, head: str, calibrate: int
) -> list[Path]:
    """Writes one of the other formats; returns the files."""
    if output.is_dir() and any(output.iterdir()):
        raise InputError(f"{output} is not empty: give a new folder.")
    saving.check_values(values, embeddings, head)
    _refuse_unused(form, values, embeddings, head, calibrate)
    batches = calibration(source, calibrate) if calibrate else None
    if form == "hf":
        wanted = {"matrix": values, "embedding": embeddings, "head": head}
        exchange.to_hf(source.model, output, source.tokenizer, wanted, batches)
    elif form == "scipy":
        exchange.to_scipy(source.model, output, values)
    else:
        from pinscher.store.onnx import export as export_onnx

        if batches is None and source.run is not None:
            batches = calibration(source, ONNX_ROWS)
        with checkpoint.whole(output) as fresh:
            export_onnx(source.model, fresh, source.tokenizer, task_batches=batches)
    return sorted(path for path in output.iterdir() if path.is_file())


def _refuse_unused(form: str, values: str, embeddings: str, head: str, calibrate: int) -> None:
    """A flag that would change nothing is an error, not a surprise."""
    unused: dict[str, dict[str, Any]] = {
        "scipy": {"--embeddings": embeddings != saving.KEEP, "--head": head != saving.KEEP, "--calibrate": calibrate},
        "onnx": {
            "--values": values != "int8",
            "--embeddings": embeddings != saving.KEEP,
            "--head": head != saving.KEEP,
        },
    }
    if given := [flag for flag, is_given in unused.get(form, {}).items() if is_given]:
        raise InputError(f"{' and '.join(given)} would change nothing with --format {form}: leave it out.")


def told(source: Source, folder: Path, form: str, how: dict[str, Any], scores: dict[str, float]) -> list[str]:
    """What a person wants to know of an export."""
    size = sum(path.stat().st_size for path in folder.iterdir() if path.suffix in (".safetensors", ".npz", ".onnx"))
    parameters = list(source.model.named_parameters())
    dense = sum(p.numel() * p.element_size() for _, p in parameters)
    say = [
        f"{folder}: {size / 1e6:.1f} MB; the dense weights are {dense / 1e6:.1f} MB"
        + (f", {dense / size:.1f} times as much" if dense > size else "")
    ]
    say += [f"  {name} as stored {value:.2f} (test)" for name, value in scores.items()]
    if form == "pinscher":
        known = saving.matrices(source.model)
        embedded = sum(
            p.numel() * p.element_size() for n, p in parameters if n in known and known[n].role == "embedding"
        )
        if how["embeddings"] == "keep" and embedded > size / 2:
            say.append(f"  {embedded / 1e6:.1f} MB of it are embeddings: --embeddings int8 makes them a quarter")
        name = type(source.model).__name__
        say.append(f'  load it: import pinscher; transformers.{name}.from_pretrained("{folder}")')
    return say
