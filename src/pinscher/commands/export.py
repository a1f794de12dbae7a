"""`pinscher export`: store a run's model, or any other, in the small format or another one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pinscher import files
from pinscher.commands.console import bar, hush, megabytes, say, shown, text
from pinscher.commands.flags import WHOLE, number
from pinscher.errors import InputError
from pinscher.models import hub
from pinscher.models.folders import class_of
from pinscher.registry import unknown
from pinscher.runfolder import RunFolder, check_writable, holding
from pinscher.settings import NOT_NEGATIVE

if TYPE_CHECKING:
    from pinscher.store.shrink import Shrunk
    from pinscher.train.folder import Result

FORMATS = ("pinscher", "hf", "scipy", "onnx")
KEEP = "keep"  # values as they are
BATCH = 16  # examples of a calibration batch
ONNX_ROWS = 64  # training rows on which the activations of an ONNX file are measured, unless --calibrate says more


def command(
    source: Annotated[str, typer.Argument(help="Run folder, model folder or hub id.", show_default=False)],
    output: Annotated[str | None, text("Folder to write; by default RUN/export, or RUN/export-FORMAT.")] = None,
    form: Annotated[str, typer.Option("--format", help="pinscher, hf, scipy or onnx.")] = "pinscher",
    values: Annotated[str, shown("Values of the blocks: int8, int7, int6, int4, fp16, bf16, fp32, keep.")] = "int8",
    embeddings: Annotated[str, shown("Values of the embeddings; the same choices.")] = KEEP,
    head: Annotated[str, shown("Values of the pooler and the head; the same choices.")] = KEEP,
    calibrate: Annotated[
        str, shown("Number of training rows of the run on which INT8 scales are chosen.", WHOLE)
    ] = "0",
    shrink: Annotated[
        bool, typer.Option("--shrink", help="Remove dead features and heads; outputs stay the same.")
    ] = False,
    score: Annotated[bool, typer.Option("--score", help="Score the stored model on the run's test set.")] = False,
    push_to_hub: Annotated[str | None, text("Also upload the folder to this repository on the hub.")] = None,
) -> None:
    """Store a pruned model in a small file, or in another format."""
    rows = number(NOT_NEGATIVE, calibrate, "--calibrate")
    hush()
    if form not in FORMATS:
        raise InputError(unknown("format", form, FORMATS) + ".")
    if output is not None:
        check_writable(Path(output))
    run = RunFolder(source)
    inside = run.export if form == "pinscher" else run.export_in(form)
    folder = inside if output is None else Path(output)
    written = [folder, run.export_scored] if score else [folder]
    how: dict[str, Any] = {"values": values, "embeddings": embeddings, "head": head, "calibrate": rows}
    with holding(*written):
        loaded = load(source)
        if output is None and loaded.run is None:
            raise InputError("give the folder to write: --output DIR.")
        scores: dict[str, float] = {}
        removed = shrunk(loaded, form).told() if shrink else []
        if form == "pinscher":
            with bar("packing") as progress:
                scores = small(loaded, folder, **how, score=score, push_to_hub=push_to_hub, progress=progress)
        elif score or push_to_hub:
            raise InputError("--score and --push-to-hub go with --format pinscher.")
        else:
            write(loaded, folder, form, **how)
    for line in [*told(loaded, folder, form, how, scores), *removed]:
        say(line)


@dataclass(frozen=True)
class Source:
    """A model to export, and what is known of its origin."""

    model: Any
    tokenizer: Any
    run: Path | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    beside: Mapping[str, bytes] = field(default_factory=dict)  # files of sentence-transformers


def load(place: str) -> Source:
    """A run's model, or any model by folder or name."""
    import transformers

    from pinscher.train import pretrained, scoring

    run = scoring.run_of(place)
    folder = str(RunFolder(run).require_model()) if run else place
    config = pretrained.load_config(folder)
    kind: Any = class_of(config, place) if config.architectures else transformers.AutoModel
    model, _ = hub.load_weights(kind, folder)
    try:
        tokenizer = pretrained.load_tokenizer(folder)
    except InputError:
        tokenizer = None  # a model can do without
    beside = _beside(folder)
    return Source(model, tokenizer, run, _facts(run) if run else {"base_model": place} | _wrapper(beside), beside)


def finished(result: Result) -> Source:
    """The model of a run that has just ended, from memory if it is there."""
    from pinscher.train import pretrained

    if result.model is None:
        return load(str(result.folder))
    folder = str(RunFolder(result.folder).model)
    tokenizer = pretrained.load_tokenizer(folder)  # as it was saved, before the test
    return Source(result.model, tokenizer, result.folder, _facts(result.folder), _beside(folder))


def _wrapper(beside: Mapping[str, bytes]) -> dict[str, str]:
    """The class of sentence-transformers that reads the folder."""
    return {"loads_as": "SentenceTransformer"} if beside else {}


def _beside(folder: str) -> Mapping[str, bytes]:
    """The files of sentence-transformers in a model's folder, if it has some."""
    from pinscher.models import sentences

    return sentences.files_of(hub.locate(folder))


def _facts(run: Path) -> dict[str, Any]:
    from pinscher.train import folder as runfolder
    from pinscher.train.tasks import TASKS

    settings, result = runfolder.config_of(run), runfolder.read_result(run)
    wrapper = TASKS[settings.task].loads_as
    return ({} if wrapper is None else {"loads_as": wrapper}) | {
        "base_model": settings.model,
        "task": settings.task,
        "method": "dense fine-tuning" if settings.is_dense else settings.method,
        "sparsity": result.sparsity,
        "scores": result.scores,
        "dense_scores": result.dense,
    }


def shrunk(source: Source, form: str) -> Shrunk:
    """Removes dead features and heads from a source's model, as far as the format can describe the result."""
    from pinscher.store import shrink

    if form not in ("pinscher", "hf"):
        raise InputError("--shrink goes with --format pinscher or hf.")
    return shrink.shrink_(source.model, plain=form == "hf")


def small(
    source: Source,
    output: Path,
    *,
    values: str = "int8",
    embeddings: str = KEEP,
    head: str = KEEP,
    calibrate: int = 0,
    score: bool = False,
    push_to_hub: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, float]:
    """Stores a model in the small format; returns the scores of the stored model if `score`."""
    from pinscher.store import saving

    if score and source.run is None:
        raise InputError("--score needs a run, which knows its task. Use: pinscher eval FOLDER --task …")
    made = {"values": values, "embeddings": embeddings, "head": head, "tokenizer": source.tokenizer}
    made |= {"beside": source.beside}
    batches = calibration(source, calibrate) if calibrate else None
    if score and source.run is not None:
        RunFolder(source.run).export_scores.unlink(missing_ok=True)  # of an earlier export
    saving.save_pretrained(source.model, output, **made, calibration=batches, facts=source.facts, progress=progress)
    scores = scored(source, output) if score else {}
    if push_to_hub is not None:
        saving.push(output, push_to_hub)
    return scores


def scored(source: Source, output: Path) -> dict[str, float]:
    """Scores a stored model on its run's test set, and adds the scores to its card. scores.json is written last: if it
    exists, both are done.
    """
    from pinscher.store import saving
    from pinscher.train import scoring

    assert source.run is not None

    def tell(found: scoring.Scored) -> None:
        saving.rewrite_card(output, source.model, source.facts | {"stored_scores": found.scores})

    place = str(RunFolder(source.run).export_scored)
    return scoring.score(str(source.run), {}, stored=str(output), output=place, meanwhile=tell).scores


def calibration(source: Source, rows: int) -> list[dict[str, Any]]:
    """Batches of a run's own training rows."""
    from pinscher.train import folder as runfolder
    from pinscher.train import plan
    from pinscher.train.config import RunConfig

    if source.run is None:
        raise InputError("--calibrate needs a run, which knows its data.")
    settings = runfolder.config_of(source.run)
    made = plan.make(RunConfig.from_dict(settings.to_dict()))
    collate = made.task.collator(made.tokenizer)
    features = [made.train[i] for i in range(min(rows, len(made.train)))]
    spare = ("labels", "start_positions", "end_positions", "texts")
    return [
        {name: tensor for name, tensor in collate(features[start : start + BATCH]).items() if name not in spare}
        for start in range(0, len(features), BATCH)
    ]


def write(
    source: Source, output: Path, form: str, *, values: str, embeddings: str, head: str, calibrate: int
) -> list[Path]:
    """Writes one of the other formats; returns the files."""
    from pinscher.store import exchange, saving

    files.check_elsewhere(output)
    if output.is_dir() and any(output.iterdir()):
        raise InputError(f"{output} is not empty: give a new folder.")
    saving.check_values(values, embeddings, head)
    _refuse_unused(form, values, embeddings, head, calibrate)
    batches = calibration(source, calibrate) if calibrate else None
    if form == "hf":
        wanted = {"matrix": values, "embedding": embeddings, "head": head}
        exchange.to_hf(source.model, output, source.tokenizer, wanted, batches, source.beside)
    elif form == "scipy":
        exchange.to_scipy(source.model, output, values)
    else:
        from pinscher.store.onnx import export as export_onnx

        if batches is None and source.run is not None:
            batches = calibration(source, ONNX_ROWS)
        with files.whole(output) as fresh:
            export_onnx(source.model, fresh, source.tokenizer, task_batches=batches)
    return sorted(path for path in output.iterdir() if path.is_file())


def _refuse_unused(form: str, values: str, embeddings: str, head: str, calibrate: int) -> None:
    """Rejects flags that would change nothing."""
    unused: dict[str, dict[str, Any]] = {
        "scipy": {"--embeddings": embeddings != KEEP, "--head": head != KEEP, "--calibrate": calibrate},
        "onnx": {
            "--values": values != "int8",
            "--embeddings": embeddings != KEEP,
            "--head": head != KEEP,
        },
    }
    if given := [flag for flag, is_given in unused.get(form, {}).items() if is_given]:
        raise InputError(f"{' and '.join(given)} would change nothing with --format {form}: leave it out.")


def told(source: Source, folder: Path, form: str, how: dict[str, Any], scores: dict[str, float]) -> list[str]:
    """Lines that say what was written, how large it is and how to load it."""
    from pinscher.store import saving

    size = sum(path.stat().st_size for path in folder.iterdir() if path.suffix in (".safetensors", ".npz", ".onnx"))
    parameters = list(source.model.named_parameters())
    dense = sum(p.numel() * p.element_size() for _, p in parameters)
    lines = [
        f"{folder}: {megabytes(size)}; the dense weights are {megabytes(dense)}"
        + (f", {dense / size:.1f} times as much" if dense > size else "")
    ]
    lines += [f"  {name} as stored {value:.2f} (test)" for name, value in scores.items()]
    if form == "pinscher":
        known = saving.matrices(source.model)
        embedded = sum(
            p.numel() * p.element_size() for n, p in parameters if n in known and known[n].role == "embedding"
        )
        if how["embeddings"] == KEEP and embedded > size / 2:
            lines.append(f"  {megabytes(embedded)} of it are embeddings: --embeddings int8 makes them a quarter")
        name, wrapper = type(source.model).__name__, source.facts.get("loads_as")
        how_to = f"transformers.{name}.from_pretrained" if wrapper is None else f"sentence_transformers.{wrapper}"
        lines.append(f'  load it: import pinscher; {how_to}("{folder}")')
    return lines
