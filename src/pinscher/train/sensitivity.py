"""How sensitive each layer, and each kind of matrix, is: it alone is pruned by magnitude, and the model is scored.

Scores are on validation rows, a part of the training set, so decisions based on them do not use the test set.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from pinscher import settings as checks
from pinscher.errors import InputError
from pinscher.prune import Site, find_sites
from pinscher.prune.masking import Scores, threshold, zero_
from pinscher.runfolder import RunFolder
from pinscher.train import data, pretrained, scoring
from pinscher.train import folder as runfolder
from pinscher.train.config import RunConfig
from pinscher.train.evaluation import answer, mean_loss
from pinscher.train.plan import evaluating_device, fitted, task_of
from pinscher.train.tasks import Task

LEVELS = (0.5, 0.8, 0.9)
ROWS = 500
LOSS = "loss"  # the measure for tasks whose answers take too long to generate


@dataclass(frozen=True)
class Loss:
    """The cost of pruning a unit at each level: points of the score, or the rise of the loss."""

    unit: str
    group: str  # layer or kind
    weights: int
    sparsity: float  # before pruning
    lost: dict[float, float]


@dataclass(frozen=True)
class Sensitivity:
    """The model's own score on the validation rows, and what pruning each unit alone costs, worst first."""

    task: str
    measure: str
    rows: int
    score: float
    losses: list[Loss]


def measure(
    model: str,
    settings: dict[str, Any],
    levels: Sequence[float] = LEVELS,
    rows: int = ROWS,
    progress: Callable[[int, int], None] | None = None,
) -> Sensitivity:
    """Prunes each layer and each kind of matrix in turn and scores the model.

    Args:
        model: hub id, model folder or run folder, whose task and data are then the default.
        settings: fields of RunConfig: task, data, columns, lengths.
        levels: sparsities to try.
        rows: maximum number of validation rows.
        progress: called with the numbers of trials done and in total.

    Raises:
        InputError: if the task, its data or a head for it is missing.
    """
    levels = checks.numbers_in(checks.SHARE, levels, "--levels")
    rows = checks.number(checks.COUNT, rows, "--rows", whole=True)
    if Path(model).is_file():
        raise InputError(f"{model} is a file: --sensitivity runs the model, so give the folder of one.")
    config = _config(model, settings)
    tokenizer = pretrained.load_tokenizer(config.model)
    task = fitted(task_of(config), config, tokenizer)
    train, validation = _rows(config, task, rows)
    labels = scoring.labels_of(config.model, task, train)
    loaded = pretrained.load_model(config.model, task, labels, tokenizer, trained=True).to(evaluating_device())
    by_loss = task.judged_by_loss
    features = task.features(validation, tokenizer, labels, training=by_loss)

    def score() -> float:
        if by_loss:
            return mean_loss(loaded, features, task, tokenizer, config.eval_batch_size)
        said = answer(loaded, task, tokenizer, validation, labels, config.eval_batch_size, features)
        return task.scores(said, validation)[task.main]

    sign = -1.0 if by_loss else 1.0
    whole, units, losses = score(), _units(find_sites(loaded)), []
    for number, (group, name, sites) in enumerate(units):
        lost = {}
        for place, level in enumerate(levels):
            with pruned(sites, level):
                lost[level] = sign * (whole - score())
            if progress is not None:
                progress(number * len(levels) + place + 1, len(units) * len(levels))
        count = sum(site.numel for site in sites)
        losses.append(Loss(name, group, count, sum(site.zeros() for site in sites) / count, lost))
    losses.sort(key=lambda one: tuple(-one.lost[level] for level in sorted(levels, reverse=True)))
    return Sensitivity(task.name, LOSS if by_loss else task.main, len(validation), whole, losses)


@contextmanager
def pruned(sites: Sequence[Site], sparsity: float) -> Iterator[None]:
    """Inside the block, the smallest weights of some matrices, ranked together, are zero."""
    before = [site.weight.clone() for site in sites]
    keep = math.floor((1 - sparsity) * sum(site.numel for site in sites) + 0.5)
    scores = [Scores(weight, combine=torch.abs) for weight in before]
    cut = threshold(scores, keep)
    try:
        with torch.no_grad():
            for place, site in enumerate(sites):
                for at, kept in cut.keeps(scores[place], place):
                    zero_(site.weight[at], kept)
        yield
    finally:
        with torch.no_grad():
            for site, weight in zip(sites, before, strict=True):
                site.weight.copy_(weight)


def _units(sites: Sequence[Site]) -> list[tuple[str, str, list[Site]]]:
    """The matrices of each layer, and those of each kind."""
    units: dict[tuple[str, str], list[Site]] = {}
    for group in ("layer", "kind"):
        for site in sites:
            units.setdefault((group, site.block if group == "layer" else site.kind), []).append(site)
    return [(group, name, members) for (group, name), members in units.items()]


def _config(model: str, settings: dict[str, Any]) -> RunConfig:
    run = scoring.run_of(model)
    if run is not None:
        known, model = runfolder.config_of(run), str(RunFolder(run).model)
        if settings.get("task", known.task) == known.task:
            return dataclasses.replace(known, model=model, **settings)
    if "task" not in settings:
        raise InputError("--sensitivity needs the task: --task NAME.")
    return RunConfig.from_dict({**settings, "model": model})


def _rows(config: RunConfig, task: Task, most: int) -> tuple[Dataset, Dataset]:
    """Training rows, and the validation rows of a run with these settings, at most `most` of them."""
    source = data.Source(config.data, config.train_file, config.validation_file, config.test_file)
    fraction = config.validation_fraction
    splits = data.load(task, source, validation_fraction=fraction, rows=config.rows, seed=config.seed)
    assert splits.train is not None
    assert splits.validation is not None
    return splits.train, splits.validation.select(range(min(most, len(splits.validation))))
