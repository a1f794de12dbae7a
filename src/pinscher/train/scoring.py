"""Scores any checkpoint on a task's test set: a run's model, an exported one, or any other."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset

from pinscher import files
from pinscher.errors import InputError
from pinscher.prune import sparsity
from pinscher.runfolder import SCORES, RunFolder, check_writable, holding
from pinscher.settings import COUNT, number
from pinscher.train import data, pretrained
from pinscher.train import folder as runfolder
from pinscher.train.config import RunConfig
from pinscher.train.evaluation import evaluate, with_reference
from pinscher.train.plan import evaluating_device, first, fitted, splits_of, task_of
from pinscher.train.subject import DataConfig
from pinscher.train.tasks import Task

BATCH_SIZE = 64
# Settings about rows that are taken from a run's own configuration.
INHERITED = ("task", "seed", *(field.name for field in dataclasses.fields(DataConfig)))
OWN = ("train", "validation")  # splits of the run's own rows: those it trains and validates on


@dataclass(frozen=True)
class Scored:
    """A checkpoint's scores in percent (none if the labels are secret), and the files of its answers."""

    model: str
    task: str
    main: str
    scores: dict[str, float]
    splits: dict[str, dict[str, float]]
    rows: int
    sparsity: float | None
    files: tuple[Path, ...]


@dataclass(frozen=True)
class Exam:
    """The test rows for a checkpoint, and how its answers are scored."""

    config: RunConfig
    task: Task
    tokenizer: Any
    tests: dict[str, Dataset]
    labels: Sequence[str]
    batch_size: int
    reference: str | None = None  # the model before it was pruned, of a run


def exam(
    model: str,
    settings: dict[str, Any],
    *,
    split: str | None = None,
    batch_size: int | None = None,
    stored: str | None = None,
) -> Exam:
    """The test set of a run's own task, or of the task that the settings name; see `score`."""
    run, reference = run_of(model), None
    if batch_size is not None:
        batch_size = number(COUNT, batch_size, "--batch-size", whole=True)
    most = settings.get("test_rows")
    if run is not None:
        if stored is None:
            RunFolder(run).require_model()
        known = runfolder.config_of(run).to_dict()
        batch_size = batch_size or known["eval_batch_size"]
        if settings.get("task", known["task"]) == known["task"]:
            settings = {name: known[name] for name in INHERITED if known[name] not in (None, [])} | settings
        model, reference = stored or str(RunFolder(run).model), known["teacher"] or known["model"]
    if "task" not in settings:
        raise InputError("give the task: --task NAME.")
    config = RunConfig.from_dict({**settings, "model": model})
    tokenizer = pretrained.load_tokenizer(model)
    task = fitted(task_of(config), config, tokenizer)
    if split in OWN:
        splits = splits_of(task, config)
        rows = splits.train if split == "train" else splits.validation
        tests = {str(split): first(rows, None if most is None else config.test_rows)}
    else:
        tests = {name: first(rows, config.test_rows) for name, rows in _tests(task, config, split).items()}
    labels = labels_of(model, task, next(iter(tests.values())))
    return Exam(config, task, tokenizer, tests, labels, batch_size or BATCH_SIZE, reference)


def _tests(task: Task, config: RunConfig, split: str | None) -> dict[str, Dataset]:
    """The test rows by split: the task's, or those of the split that is asked for."""
    if split is not None:
        task = task.replace(test_splits=(split,))
    # A run without test rows has split some off its training rows: the same ones are found again.
    train_file = None if config.data or config.test_file else config.train_file
    source = data.Source(config.data, train_file, None, config.test_file)
    return data.load(task, source, training=False, seed=config.seed, only=split).tests


def run_of(model: str) -> Path | None:
    """The folder of a run, if the model is named by one."""
    return Path(model) if RunFolder(model).is_run else None


def score(
    model: str,
    settings: dict[str, Any],
    *,
    split: str | None = None,
    batch_size: int | None = None,
    output: str | None = None,
    stored: str | None = None,
    meanwhile: Callable[[Scored], None] | None = None,
) -> Scored:
    """Answers the test set with a checkpoint and scores the answers. scores.json is written last.

    Args:
        model: hub id, model folder, or the folder of a run, whose task and data are then the default.
        settings: fields of RunConfig: task, data, columns, lengths.
        split: a split to answer instead of the task's test set; it may be without labels. `train` and `validation` are
            the rows that the run trained and validated on.
        batch_size: examples in a batch; by default a run's own, else 64.
        stored: a folder with the run's model in another format, scored instead of `model`.
        output: folder for the predictions; by default `eval` in a run's folder, else EVAL-TASK here.
        meanwhile: called with the scores before scores.json is written, which marks the end.
    """
    if output is not None:
        check_writable(Path(output))
    folder = Path(output) if output is not None else (RunFolder(model).scored if run_of(model) is not None else None)
    with holding(folder or Path()):
        asked = exam(model, settings, split=split, batch_size=batch_size, stored=stored)
        return _score(asked, folder or Path(f"eval-{asked.config.task}"), meanwhile)


def _score(asked: Exam, folder: Path, meanwhile: Callable[[Scored], None] | None) -> Scored:
    model, config, task, tests = asked.config.model, asked.config, asked.task, asked.tests
    loaded = _loaded(asked, model)
    if task.needs_reference and asked.reference is not None:
        told = _loaded(asked, asked.reference), task, asked.tokenizer
        tests = {name: with_reference(*told, rows, asked.labels, asked.batch_size) for name, rows in tests.items()}
    found = evaluate(loaded, task, asked.tokenizer, tests, asked.labels, asked.batch_size)
    written = tuple(task.write(answers, tests[name], folder, name) for name, answers in found.answers.items())
    scored = Scored(
        model,
        config.task,
        task.main,
        found.scores,
        found.splits,
        sum(map(len, tests.values())),
        _zeros(loaded),
        written,
    )
    if meanwhile is not None:
        meanwhile(scored)
    text = json.dumps({"model": model, "task": config.task, "metrics": found.scores, "splits": found.splits}, indent=1)
    files.write_text(folder / SCORES, text + "\n")
    return scored


def _loaded(asked: Exam, model: str) -> Any:
    found = pretrained.load_model(model, asked.task, asked.labels, asked.tokenizer, trained=True)
    return found.to(evaluating_device())


def labels_of(model: str, task: Task, rows: Dataset) -> Sequence[str]:
    """The order of the classes: the checkpoint's own if it names them, else the task's."""
    if task.kind not in ("classes", "tokens"):
        return ()
    named, wanted = pretrained.label_names(model), list(task.names)
    if not named:
        return task.labels(rows)
    if not wanted:
        return named
    if len(wanted) != len(named):
        raise InputError(
            f"{model} has {len(named)} labels ({', '.join(named[:6])}), task {task.name!r} has {len(wanted)}."
        )
    known = {pretrained.plain(name): name for name in wanted}
    if {pretrained.plain(name) for name in named} != set(known):
        raise InputError(
            f"{model} calls its labels {', '.join(named)}, task {task.name!r} has {', '.join(wanted)}: which is which "
            "is not known. Rename them in id2label of its config.json."
        )
    return [known[pretrained.plain(name)] for name in named]


def _zeros(model: Any) -> float | None:
    try:
        return sparsity(model)
    except ValueError:
        return None
