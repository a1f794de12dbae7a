"""`pinscher prune`: fine-tune and prune a model on a task, then store it small."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from pinscher.commands import views
from pinscher.commands.console import hush, is_first_process, screen, text
from pinscher.commands.flags import given
from pinscher.errors import InputError
from pinscher.runfolder import RunFolder

if TYPE_CHECKING:
    from pinscher.train.config import RunConfig
    from pinscher.train.folder import Result

BOLD = 0.95  # few models survive more sparsity than this
# What `pinscher prune` without a model or task adds.
DEMO = {"baseline": True, "rows": 2400, "epochs": 2.0, "output": "runs/demo"}


def command(
    config: Annotated[str | None, text("YAML file with settings; flags override it.")] = None,
    resume: Annotated[str | None, text("Continue the run in this folder.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    **flags: Any,
) -> None:
    """Fine-tune and prune a model on a task. Without arguments: prune a small model on film reviews to 80 %."""
    if flags["recipe"] == "list":
        views.show_recipes(screen())
        return
    from pinscher.train import folder as runfolder
    from pinscher.train import run as experiment

    hush()
    asked = given(flags)
    if resume is not None:
        if asked or config is not None or dry_run:
            raise InputError("--resume continues a run with its own settings: give no others.")
        settings = runfolder.config_of(resume)
    else:
        settings = _settings(config, asked)
    to = screen()
    if settings.target_size is not None and resume is None:
        settings = _sized(settings, to)
    if dry_run:
        views.show_plan(to, settings)
        return
    with runfolder.locked(RunFolder(settings.folder)):
        if resume is not None and RunFolder(resume).is_finished:
            _resume_finished(settings)
            return
        done = experiment.run(settings, resume=resume is not None, console=to)
        if done.status != "finished":
            to.print(f"stopped at step {done.steps:,}. Continue with: pinscher prune --resume {settings.folder}")
            raise SystemExit(130)
        views.show_result(to, done, _store(done, settings) if _is_stored(settings) else None)


# ------------------------------------------------------------ settings


def _settings(path: str | None, asked: dict[str, Any]) -> RunConfig:
    """Recipe, then file, then flags; later ones win. Without a named recipe, the best one known is used."""
    from pinscher.train import idle, recipes
    from pinscher.train.config import RunConfig

    read = RunConfig.settings_of(path) if path is not None else {}
    told = {**read, **asked}
    if "recipe" not in told:
        told["recipe"] = recipes.default(told)
    told = recipes.applied(told["recipe"] or recipes.NONE, told, int(os.environ.get("WORLD_SIZE", "1")))
    if "target_size" in told and "sparsity" in {**read, **asked}:
        raise InputError("give either --sparsity or --target-size.")
    if not {"model", "task"} & set(told):
        told = {**DEMO, **told}
    made = RunConfig.from_dict(told, path or "")
    idle.check([made], asked)
    return made


def _sized(settings: RunConfig, to: Console) -> RunConfig:
    """The same settings with the sparsity that gives a small file of --target-size."""
    from pinscher.store import budget
    from pinscher.train import plan, pretrained

    size = budget.parse(str(settings.target_size))
    made = plan.make(settings)
    model = pretrained.load_model(settings.model, made.task, made.labels, made.tokenizer, settings.new_head)
    prunable = {f"{site.name}.{site.parameter}" for site in plan.sites_of(settings, model)}
    sparsity = budget.sparsity_for(size, model, prunable)
    doubt = ": expect much lower quality" if sparsity > BOLD else ""
    doubt = doubt or (": nothing has to be pruned, the run is dense" if sparsity == 0 else "")
    to.print(f"{settings.target_size} needs a sparsity of {sparsity:.1%}{doubt}", highlight=False)
    return dataclasses.replace(settings, sparsity=sparsity)


# ------------------------------------------------------------ the small file


def _is_stored(settings: RunConfig) -> bool:
    """Whether this process writes the small file when the run has finished."""
    return _is_wanted(settings) and is_first_process()


def _is_wanted(settings: RunConfig) -> bool:
    return (settings.export and not settings.is_dense) or settings.target_size is not None


def _store(done: Result, settings: RunConfig) -> views.Stored:
    """Writes the small file beside the model, all in INT8, and scores it unless that means generating text.

    Work that was done before an interruption is not repeated, unless its files were damaged since.
    """
    from pinscher import files, native
    from pinscher.commands import export
    from pinscher.runtime.loading import load

    output, source = RunFolder(settings.folder).export, export.finished(done)
    if not _loads(output):
        if output.exists() and not _is_ours(output):
            raise InputError(f"{output} holds something else than the small file: move it away, and resume again.")
        files.remove(output)
        scores = export.small(source, output, embeddings="int8", head="int8", score=_is_scored(settings))
    else:
        scores = export.scored(source, output) if _is_scored(settings) else {}
    return views.Stored(output, scores, load(output) if native.core() is not None else None)


def _is_scored(settings: RunConfig) -> bool:
    from pinscher.train.tasks import TASKS

    return not TASKS[settings.task].generates


def _is_stored_already(settings: RunConfig) -> bool:
    """Whether the small file is there, and scored where it has to be."""
    run = RunFolder(settings.folder)
    return _loads(run.export) and (not _is_scored(settings) or run.export_scores.exists())


def _loads(output: Path) -> bool:
    """Whether the small file is there, whole, with its tokenizer; its weights have checksums."""
    from pinscher.commands import export
    from pinscher.train import pretrained

    if not output.exists():
        return False
    try:
        pretrained.load_tokenizer(str(output))
        export.load(str(output))
    except InputError:
        return False
    return True


def _is_ours(output: Path) -> bool:
    """Whether a folder that does not load is the rest of a small file, as its settings or its card show."""
    from pinscher.store import saving

    card = output / "README.md"
    return saving.is_ours(output) or (card.is_file() and b"pinscher" in card.read_bytes())


def _check_model(run: RunFolder) -> None:
    """Refuses to store a model that was damaged since it was saved."""
    from pinscher.train import folder as runfolder

    try:
        runfolder.check_model(run)
    except InputError as damage:
        raise InputError(f"{damage}. Put the file back from a copy, or make the run again with --overwrite.") from None


def _resume_finished(settings: RunConfig) -> None:
    """Completes a run that was killed after its result was written: the small file, its scores.

    Of several processes the first does it.
    """
    from pinscher.train import folder as runfolder
    from pinscher.train.processes import processes

    run, is_done = RunFolder(settings.folder), not _is_wanted(settings) or _is_stored_already(settings)
    if not is_done:
        _check_model(run)
    processes().wait_for_everyone()  # all have looked at the folder as it was
    if is_first_process():
        run.remove_checkpoints()
    if is_done:
        raise InputError(f"{run} is finished: there is nothing to resume.")
    if is_first_process():
        done = runfolder.read_result(run.path)
        views.show_result(screen(), done, _store(done, settings))
