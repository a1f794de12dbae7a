"""The command and its subcommands. The flags of `prune` come from RunConfig's fields; errors are one line."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import inspect
import os
import shutil
from collections.abc import Container, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from rich.console import Console

from pinscher import __version__, comparing, inspecting, reporting
from pinscher.errors import InputError

if TYPE_CHECKING:
    from pinscher.train.config import RunConfig
    from pinscher.train.showing import Stored

WIDE = 100  # columns; in fewer the coloured help would cut the flags' names

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich" if shutil.get_terminal_size().columns >= WIDE else None,
    help="Fine-tune a transformer while pruning it, then store it small and run it fast on a CPU.",
)
console, complaints = Console(), Console(stderr=True)
DISK = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up", errno.EROFS: "read-only disk"}
PLACE = (errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG)
BOLD = 0.95  # a sparsity that few models survive
DEMO = {
    "baseline": True,
    "rows": 2400,
    "epochs": 2.0,
    "output": "runs/demo",
}  # what `pinscher prune` without arguments adds


def main() -> None:
    """The entry point."""
    with plainly():
        app()


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """Bad input ends with one line and code 2, never with a traceback."""
    try:
        yield
    except InputError as error:
        _complain(str(error))
    except KeyboardInterrupt:
        complaints.print("interrupted")
        raise SystemExit(130) from None
    except OSError as error:
        if error.errno not in (*DISK, *PLACE):
            raise
        _complain(f"cannot write {error.filename or 'the run'}: {DISK.get(error.errno, error.strerror)}.")
    except Exception as error:
        if "No space left on device" not in str(error):  # safetensors wraps it
            raise
        _complain(f"cannot write the run: {DISK[errno.ENOSPC]}.")


def _complain(text: str) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        complaints.print(f"error: {text}", style="red", highlight=False, markup=False, soft_wrap=True)
    raise SystemExit(2) from None


def _version(value: bool) -> None:
    if value:
        print(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None: ...


# ------------------------------------------------------------ prune


def prune(
    config: Annotated[str | None, typer.Option(help="YAML file with settings; flags win.", show_default=False)] = None,
    resume: Annotated[str | None, typer.Option(help="Continue the run in this folder.", show_default=False)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    **flags: Any,
) -> None:
    """Fine-prune a model on a task. Without arguments: a small real model on real film reviews, to 80 %."""
    from pinscher.train import experiment, runfolder, showing
    from pinscher.train import recipes as table

    if flags["recipe"] == "list":
        showing.recipes(console, table.RECIPES)
        return
    _hush()
    given = {name: value for name, value in flags.items() if value is not None and value != []}
    if resume is not None:
        if given or config is not None or dry_run:
            raise InputError("--resume continues a run with its own settings: give no others.")
        settings = runfolder.config_of(resume)
        if runfolder.is_finished(resume):
            _resume_finished(settings)
            return
    else:
        settings = _settings(config, given)
    screen = _screen()
    if settings.target_size is not None and resume is None:
        settings = _sized(settings, screen)
    if dry_run:
        showing.plan(screen, settings)
        return
    result = experiment.run(settings, resume=resume is not None, console=screen)
    if result.status != "finished":
        screen.print(f"stopped at step {result.steps:,}. Continue with: pinscher prune --resume {settings.folder}")
        raise SystemExit(130)
    showing.result(screen, result, _store(settings) if _is_stored(settings) else None)


def _sized(settings: RunConfig, screen: Console) -> RunConfig:
    """The same run with the sparsity that makes the small file fit."""
    from pinscher.store import budget
    from pinscher.train import models, plan

    size = budget.parse(str(settings.target_size))
    made = plan.make(settings)
    model = models.load_model(settings.model, made.task, made.labels, made.tokenizer, settings.new_head)
    prunable = {f"{site.name}.{site.parameter}" for site in plan.sites_of(settings, model)}
    sparsity = budget.sparsity_for(size, model, prunable)
    doubt = ": expect much of the quality to go with it" if sparsity > BOLD else ""
    doubt = doubt or (": nothing has to be pruned, the run is dense" if sparsity == 0 else "")
    screen.print(f"{settings.target_size} needs a sparsity of {sparsity:.1%}{doubt}", highlight=False)
    return dataclasses.replace(settings, sparsity=sparsity)


def _resume_finished(settings: RunConfig) -> None:
    """A run that was killed after its result was written may still owe its small file."""
    from pinscher.train import runfolder, showing

    runfolder.remove_checkpoints(settings.folder)
    if not _is_stored(settings) or (settings.folder / "export" / "README.md").exists():
        raise InputError(f"{settings.folder} is finished: there is nothing to resume.")
    showing.result(_screen(), runfolder.read_result(settings.folder), _store(settings))


def _is_stored(settings: RunConfig) -> bool:
    """Whether a run ends with a small file; of several processes the first one writes it."""
    wanted = (settings.export and not settings.is_dense) or settings.target_size is not None
    return wanted and int(os.environ.get("RANK", "0")) == 0


def _store(settings: RunConfig) -> Stored:
    """Writes the small file beside the model, everything in INT8, and scores it unless that means generating text."""
    from pinscher import export, load, native
    from pinscher.train.showing import Stored
    from pinscher.train.tasks import TASKS

    output = settings.folder / "export"
    score = not hasattr(TASKS[settings.task], "generate")
    scores = export.small(export.load(str(settings.folder)), output, embeddings="int8", head="int8", score=score)
    return Stored(output, scores, load(output) if native.core() is not None else None)


def _settings(path: str | None, given: dict[str, Any]) -> RunConfig:
    """Recipe, then file, then flags; the later one wins."""
    from pinscher.train import recipes as table
    from pinscher.train.config import RunConfig

    if "option" in given:
        given["option"] = dict(_pair(text) for text in given["option"])
    read = RunConfig.settings_of(path) if path is not None else {}
    recipe = given.get("recipe") or read.get("recipe")
    told = {**(table.settings(recipe) if recipe else {}), **read, **given}
    if "target_size" in told and "sparsity" in {**read, **given}:
        raise InputError("give either --sparsity or --target-size.")
    if not {"model", "task"} & set(told):
        told = {**DEMO, **told}
    return RunConfig.from_dict(told, str(path or "the command"))


def _pair(text: str) -> tuple[str, Any]:
    import yaml

    name, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"--option takes NAME=VALUE, not {text!r}.")
    return name.strip(), yaml.safe_load(value)


def _screen() -> Console:
    """Only the first of several processes speaks."""
    return console if int(os.environ.get("RANK", "0")) == 0 else Console(quiet=True)


def _hush() -> None:
    """The libraries' own bars and hints would stand between the lines that matter."""
    import datasets
    import transformers

    logging: Any = transformers.utils.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    datasets.disable_progress_bars()


def with_flags(function: Any, without: Container[str] = ()) -> Any:
    """Gives a command one flag for every field of RunConfig but some."""
    from pinscher.train.config import RunConfig

    kinds: dict[str, Any] = {"str": str, "float": float, "int": int, "bool": bool}
    hints = get_type_hints(function, include_extras=True)
    own = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    own = [p.replace(annotation=hints[p.name]) for p in own]
    parameters = []
    for setting in (setting for setting in dataclasses.fields(RunConfig) if setting.name not in without):
        kind = str(setting.type).removesuffix(" | None")
        flag = f"--{setting.name.replace('_', '-')}"
        names = [f"{flag}/--no-{flag[2:]}"] if kind == "bool" else [flag]
        shown = setting.default if setting.default not in (None, dataclasses.MISSING, False) else None
        option = typer.Option(
            *names,
            help=setting.metadata["help"],
            rich_help_panel=setting.metadata["group"],
            show_default=False if shown is None else str(shown),
        )
        wanted: Any = kinds.get(kind, list[str])
        parameters.append(
            inspect.Parameter(
                setting.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[wanted | None, option]
            )
        )
    everything = [*own, *parameters]
    function.__signature__ = inspect.Signature(everything)
    function.__annotations__ = {p.name: p.annotation for p in everything}
    return function


app.command(name="prune")(with_flags(prune))
app.command(name="compare")(with_flags(comparing.compare, comparing.DECIDED))


# ------------------------------------------------------------ eval


def _text(help: str) -> Any:
    return typer.Option(help=help, show_default=False)


@app.command(name="eval")
def evaluate(
    model: Annotated[str, typer.Argument(help="Hub id, model folder, or the folder of a run.", show_default=False)],
    task: Annotated[str | None, _text("The task; a run's own by default.")] = None,
    data: Annotated[str | None, _text("Folder with the task's files.")] = None,
    test_file: Annotated[str | None, _text("Test rows.")] = None,
    text_column: Annotated[list[str] | None, _text("Column with the text; twice for pairs.")] = None,
    label_column: Annotated[str | None, _text("Column with the label.")] = None,
    split: Annotated[str | None, _text("Split to answer instead of the task's test set, for example test.")] = None,
    rows: Annotated[int | None, _text("Use only so many rows.")] = None,
    max_length: Annotated[int | None, _text("Tokens of an example.")] = None,
    stride: Annotated[int | None, _text("Overlap of the windows of long contexts (qa).")] = None,
    beams: Annotated[int | None, _text("Beams when text is generated.")] = None,
    bleurt: Annotated[str | None, _text("BLEURT checkpoint, for data-to-text.")] = None,
    batch_size: Annotated[int | None, _text("Examples in a batch; a run's own by default, else 64.")] = None,
    output: Annotated[str | None, _text("Folder for predictions and scores.json.")] = None,
) -> None:
    """Score any checkpoint on a task's test set, and write its predictions in the benchmark's own format."""
    from pinscher.train import scoring, showing

    _hush()
    told = {
        "task": task,
        "data": data,
        "test_file": test_file,
        "text_column": text_column,
        "label_column": label_column,
        "test_rows": rows,
        "max_length": max_length,
        "stride": stride,
        "beams": beams,
        "bleurt": bleurt,
    }
    settings = {name: value for name, value in told.items() if value not in (None, [])}
    found = scoring.score(model, settings, split=split, batch_size=batch_size, output=output)
    showing.scores(console, found)


# ------------------------------------------------------------ export


@app.command(name="export")
def export_(
    source: Annotated[str, typer.Argument(help="The folder of a run, or any model.", show_default=False)],
    output: Annotated[str | None, _text("Folder to write; by default RUN/export.")] = None,
    form: Annotated[str, typer.Option("--format", help="pinscher, hf, scipy or onnx.")] = "pinscher",
    values: Annotated[str, _shown("Values of the blocks: int8, int7, int6, int4, fp16, bf16, fp32, keep.")] = "int8",
    embeddings: Annotated[str, _shown("The same for the embeddings.")] = "keep",
    head: Annotated[str, _shown("The same for pooler and head.")] = "keep",
    calibrate: Annotated[int, _shown("Choose scales by so many training rows of the run.")] = 0,
    shrink: Annotated[bool, typer.Option("--shrink", help="Remove dead features and heads: the same outputs.")] = False,
    score: Annotated[bool, typer.Option("--score", help="Score the stored model on the run's test set.")] = False,
    push_to_hub: Annotated[str | None, _text("Also upload the folder to this repository on the hub.")] = None,
) -> None:
    """Store a pruned model small, or in another's format."""
    from pinscher import export

    _hush()
    if form not in export.FORMATS:
        raise InputError(f"unknown format {form!r}: there are {', '.join(export.FORMATS)}.")
    loaded = export.load(source)
    if output is None and loaded.run is None:
        raise InputError("give the folder to write: --output DIR.")
    folder = Path(output) if output else Path(source) / ("export" if form == "pinscher" else f"export-{form}")
    how: dict[str, Any] = {"values": values, "embeddings": embeddings, "head": head, "calibrate": calibrate}
    scores: dict[str, float] = {}
    removed = export.shrunk(loaded, form).told() if shrink else []
    if form == "pinscher":
        with _bar() as progress:
            scores = export.small(loaded, folder, **how, score=score, push_to_hub=push_to_hub, progress=progress)
    elif score or push_to_hub:
        raise InputError("--score and --push-to-hub go with --format pinscher.")
    else:
        export.write(loaded, folder, form, **how)
    for line in [*export.told(loaded, folder, form, how, scores), *removed]:
        console.print(line, highlight=False, soft_wrap=True)


def _shown(help: str) -> Any:
    return typer.Option(help=help)


@contextlib.contextmanager
def _bar() -> Iterator[Any]:
    """A bar over the matrices, on a terminal."""
    from rich.progress import Progress

    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("packing", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


# ------------------------------------------------------------ bench


@app.command(name="bench")
def bench_(
    source: Annotated[str, typer.Argument(help="The folder of a run, or any model.", show_default=False)],
    batch: Annotated[str, _shown("Rows in a batch; several with commas.")] = "1,8",
    length: Annotated[str, _shown("Tokens in a row.")] = "32,128,384",
    engine: Annotated[list[str] | None, typer.Option(help="Engines; by default all that are installed.")] = None,
    threads: Annotated[int, _shown("Threads of each engine; by default one for each core.")] = 0,
    seconds: Annotated[float, _shown("To spend on each batch and length, about.")] = 15.0,
    output: Annotated[str | None, _text("Folder for bench.json and bench.png; by default the run's.")] = None,
) -> None:
    """Time a model in every engine that is installed, and say which to use."""
    from pinscher import benching

    _hush()
    shapes = tuple(
        (rows, tokens) for rows in benching.numbers("batch", batch) for tokens in benching.numbers("length", length)
    )
    folder = Path(output or (source if (Path(source) / "config.yaml").exists() else "."))
    report = benching.run(
        source,
        shapes,
        engine,
        threads or os.cpu_count() or 1,
        folder,
        seconds,
        lambda text: complaints.print(text, highlight=False),
    )
    benching.show(report, console)
    console.print(f"\n{report['advice']}\n\n{folder / 'bench.json'}, bench.png", highlight=False, soft_wrap=True)


app.command(name="report")(reporting.command)
app.command(name="inspect")(inspecting.command)


if __name__ == "__main__":
    main()
