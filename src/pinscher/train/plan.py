"""The plan of a run, made before it starts: steps, schedule, matrices, memory, time."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import integrations

from pinscher.errors import InputError
from pinscher.prune import PruningConfig, Site, find_sites
from pinscher.registry import did_you_mean
from pinscher.train import data, evaluation, pretrained
from pinscher.train.config import RunConfig
from pinscher.train.processes import processes
from pinscher.train.tasks import TASKS, Task

SAMPLE = 256  # training rows that are checked for unknown tokens
VALIDATION_ROWS = 1000  # more would cost time at every evaluation
EXAMPLES = 30_000  # of a default run
EPOCHS = (3, 15)  # at least and at most, for a default run
EVALUATIONS, SAVES = 30, 10
PRUNED, TAUGHT = 1.1, 1.35  # cost of a step with pruning, and with a teacher too, relative to a dense step
SMALL = 512  # features: up to this, models are trained with higher learning rates (docs/results.md)
# Learning rates: of small models (and for text), of others.
DENSE_RATES = (1e-4, 5e-5)
RESTART_RATES = (3e-4, 1e-4)  # of a model that was fine-tuned before it is pruned
# Epochs of the dense run that comes first and of the pruning, as multiples of a dense run's own.
SHARES = {"quick": (1 / 3, 1 / 2), "standard": (1.0, 1.0), "thorough": (1.0, 6.0)}
PLACES = ("model", "teacher", "data", "train_file", "validation_file", "test_file")


@dataclass(frozen=True)
class Plan:
    """Everything that is known before the first step. All settings of `config` are decided."""

    config: RunConfig
    task: Task
    splits: data.Splits
    tokenizer: Any
    labels: tuple[str, ...]
    train: Dataset  # features
    steps: int

    @property
    def pruning(self) -> PruningConfig | None:
        return self.config.pruning(self.steps)

    @property
    def start(self) -> str | None:
        """The fine-tuned model that the run starts from, if it is there already; a dense run of its own is not."""
        config = self.config
        return config.teacher if config.dense_start and not config.is_dense else None


def task_of(config: RunConfig) -> Task:
    """The task with the user's columns and lengths."""
    try:
        task = TASKS[config.task]
    except ValueError as error:
        raise InputError(str(error)) from None
    columns = [*config.text_column, *([config.label_column] if config.label_column else [])]
    if len(set(columns)) < len(columns):
        twice = next(name for name in columns if columns.count(name) > 1)
        raise InputError(f"column {twice!r} is given twice: name a column of its own for each.")
    task = task.of_model(config.model).with_columns(config.text_column, config.label_column)
    return task.replace(max_length=config.max_length, stride=config.stride, beams=config.beams, bleurt=config.bleurt)


def make(config: RunConfig) -> Plan:
    """Reads the data and decides the settings that the configuration leaves open."""
    task = task_of(config)
    _check_reporters(config.report_to)
    tokenizer = pretrained.load_tokenizer(config.model)
    task = fitted(task, config, tokenizer)
    splits = splits_of(task, config)
    assert splits.train is not None
    labels = task.labels(splits.train)
    train = task.features(splits.train, tokenizer, labels, training=True)
    pretrained.check_known(config.model, tokenizer, _sample(train, SAMPLE)["input_ids"])
    for rows in splits.tests.values() if labels else ():
        task.features(rows, tokenizer, labels, training=False)  # a label that training never shows is an error now
    if config.is_dense or config.baseline:
        task.check_dense()
    if config.max_steps != 0:
        task.check_batch(config.batch_size)
        if task.needs_reference and not config.teaching.is_taught:
            raise InputError(
                "texts without labels teach only what another model says: give --objective knowledge-distillation or "
                "self-regularization, or labelled rows."
            )
    steps = total_steps(config, len(train))
    plan = Plan(_decided(config, task, steps), task, splits, tokenizer, labels, train, steps)
    if config.teacher_start > steps > 0:
        raise InputError(f"--teacher-start {config.teacher_start:g} is after the end of the run, {steps} steps.")
    _check_rewinds(plan)
    return plan


def _check_rewinds(plan: Plan) -> None:
    """Also checks that the schedule fits the steps: an error now, not after the model was loaded."""
    pruning, count = plan.pruning, plan.config.lr_rewinds
    if pruning is None or not plan.steps or not count:
        return
    schedule = pruning.make_schedule()
    if count > (left := schedule.settled_at - schedule.warmup):
        raise InputError(f"--lr-rewinds {count} does not fit: the model is pruned within {left} steps.")


def splits_of(task: Task, config: RunConfig) -> data.Splits:
    """The training, validation and test rows of a run."""
    splits = data.load(
        task,
        data.Source(config.data, config.train_file, config.validation_file, config.test_file),
        validation_fraction=config.validation_fraction,
        rows=config.rows,
        seed=config.seed,
    )
    most = VALIDATION_ROWS if config.validation_file is None else None
    return dataclasses.replace(
        splits,
        validation=first(splits.validation, config.validation_rows or most),
        tests={name: first(rows, config.test_rows) for name, rows in splits.tests.items()},
    )


def with_reference(plan: Plan, model: Any) -> Plan:
    """The plan whose validation and test rows have what scores compare with, by the model before it is pruned."""
    size = plan.config.eval_batch_size

    def marked(rows: Dataset) -> Dataset:
        return evaluation.with_reference(model, plan.task, plan.tokenizer, rows, plan.labels, size)

    assert plan.splits.validation is not None
    tests = {name: marked(rows) for name, rows in plan.splits.tests.items()}
    splits = dataclasses.replace(plan.splits, validation=marked(plan.splits.validation), tests=tests)
    return dataclasses.replace(plan, splits=splits)


def with_settings(plan: Plan, config: RunConfig) -> Plan:
    """The plan of another run on the same model and data, without reading anything again."""
    steps = total_steps(config, len(plan.train))
    return dataclasses.replace(plan, config=_decided(config, plan.task, steps), steps=steps)


def _check_reporters(names: Sequence[str]) -> None:
    reporting: Any = integrations
    known = [*reporting.INTEGRATION_TO_CALLBACK, "all", "none"]
    there = reporting.get_available_reporting_integrations()
    for name in names:
        if name not in known:
            meant = did_you_mean(name, known) or f" There are {', '.join(sorted(known))}."
            raise InputError(f"cannot report to {name!r}.{meant}")
        if name not in (*there, "all", "none"):
            raise InputError(f"cannot report to {name}: it is not installed. Try: pip install {name}")


def total_steps(config: RunConfig, examples: int) -> int:
    """Optimiser steps of the run."""
    if config.max_steps is not None:
        return config.max_steps
    batches = math.ceil(examples / (config.batch_size * int(processes().num_processes)))
    share = 1.0 if config.is_dense else _shares(config)[1]
    epochs = config.epochs or share * min(max(EXAMPLES / examples, EPOCHS[0]), EPOCHS[1])
    return max(1, round(epochs * math.ceil(batches / config.gradient_accumulation)))


def _shares(config: RunConfig) -> tuple[float, float]:
    return SHARES[config.budget or "standard"]


def _decided(config: RunConfig, task: Task, steps: int) -> RunConfig:
    text, pruning = task.kind == "causal-lm", config.pruning(steps)
    size = 0 if text or pretrained.width(config.model) <= SMALL else 1
    restarts = config.dense_start and not config.is_dense
    dense, share = _shares(config)
    choices: dict[str, Any] = {
        "max_steps": steps,
        "learning_rate": (RESTART_RATES if restarts else DENSE_RATES)[size],
        "dense_steps": max(1, round(steps * dense / share)),
        "dense_learning_rate": config.learning_rate or DENSE_RATES[size],
        "label_smoothing": 0.1 if text else 0.0,
        "eval_every": max(1, min(steps, max(50, math.ceil(steps / EVALUATIONS)))),
        "save_every": max(1, math.ceil(steps / SAVES)),
        "max_length": task.max_length,
        "interval": None if pruning is None else pruning.interval,
        "output": str(config.folder),
    }
    if task.teaches and config.distils and not config.is_dense:
        choices["teacher"] = config.model
    if task.needs_reference:  # all that is learned is what the teacher says, and it says it without dropout
        choices["dropout"] = 0.0
    chosen = {name: value for name, value in choices.items() if getattr(config, name) is None}
    # A run can be resumed from any directory.
    places = {name: chosen.get(name, getattr(config, name)) for name in PLACES}
    chosen |= {name: str(Path(p).resolve()) for name, p in places.items() if p is not None and Path(p).exists()}
    return dataclasses.replace(config, **chosen)


def fitted(task: Task, config: RunConfig, tokenizer: Any) -> Task:
    """The task with no more tokens than the model can take; it must leave room for text."""
    limit = pretrained.max_tokens(config.model, tokenizer)
    if task.max_length > limit:
        if config.max_length is not None:
            raise InputError(
                f"--max-length {config.max_length} is more than the {limit} tokens that {config.model} takes."
            )
        task = task.replace(max_length=limit)
    texts = len(task.inputs) if task.joins_texts else 1
    special = int(tokenizer.num_special_tokens_to_add(pair=texts == 2))
    if task.max_length < special + texts:  # the tokenizer would not cut at all, and say nothing
        raise InputError(
            f"--max-length {task.max_length} leaves no room for text: an example has {special} special tokens. Give at "
            f"least {special + texts}."
        )
    return task


def _sample(rows: Dataset, number: int) -> Any:
    """At most `number` rows, evenly spread."""
    return rows[[i * len(rows) // number for i in range(number)]] if len(rows) > number else rows[:]


def first(rows: Dataset | None, most: int | None) -> Any:
    """The first `most` rows; all of them for None."""
    return rows if rows is None or most is None or len(rows) <= most else rows.select(range(most))


# ------------------------------------------------------------ what it will cost


@dataclass(frozen=True)
class Costs:
    """Estimates: bytes from what is allocated, seconds from a few real steps on this machine."""

    matrices: int
    prunable: int
    parameters: int
    memory: int
    seconds: float


def sites_of(config: RunConfig, model: Any) -> list[Site]:
    """The matrices that a run would prune."""
    try:
        return find_sites(model, config.target_modules or None, config.exclude_modules or None)
    except (ValueError, re.error) as error:
        raise InputError(f"there is nothing to prune in {config.model}: {error}") from None


def costs(plan: Plan, model: Any, trials: int = 3) -> Costs:
    """Times a few forward and backward passes; the model's gradients are cleared again."""
    config = plan.config
    sites = pruned_by(plan, model, sites_of(config, model))
    prunable = sum(site.numel for site in sites)
    parameters = sum(p.numel() for p in model.parameters())
    copies = 4 * parameters + (0 if plan.pruning is None else 3 * prunable)  # weights, gradients, AdamW; the scores
    if config.teaching.teaches_itself:
        copies += parameters
    step = _seconds_a_step(plan, model, trials)
    seconds = plan.steps * step * (TAUGHT if config.teaching.is_taught else PRUNED)
    if config.needs_dense and config.dense_steps is not None:
        seconds += config.dense_steps * step
    return Costs(len(sites), prunable, parameters, 4 * copies, seconds)


def pruned_by(plan: Plan, model: Any, sites: list[Site]) -> list[Site]:
    """Those of a model's sites that the plan's pattern prunes.

    Raises:
        InputError: if the pattern does not fit.
    """
    try:
        layout = None if plan.pruning is None else plan.pruning.make_layout(sites, model)
    except ValueError as error:
        raise InputError(str(error)) from None
    return sites if layout is None else layout.sites


def _seconds_a_step(plan: Plan, model: Any, trials: int) -> float:
    collate, size = plan.task.collator(plan.tokenizer), plan.config.batch_size
    by_length = sorted(range(len(plan.train)), key=lambda i: len(plan.train[i]["input_ids"]))
    spots = [max(0, round(len(by_length) * (i + 0.5) / trials) - size // 2) for i in range(trials)]
    took: list[float] = []
    model.train()
    for spot in [spots[0], *spots]:  # the first one warms up
        batch = collate([plan.train[i] for i in by_length[spot : spot + size]])
        started = time.perf_counter()
        model(**batch).loss.backward()
        took.append(time.perf_counter() - started)
        model.zero_grad()
    return sum(took[1:]) / trials * plan.config.gradient_accumulation


def sketch(densities: Sequence[float], height: int = 6) -> list[str]:
    """A small plot of the sparsity over the steps, as lines of text."""
    rows = []
    for level in range(height, 0, -1):
        line = "".join("█" if (1 - d) * height >= level - 0.5 else " " for d in densities)
        rows.append(f"{level / height:5.0%} ┤{line}")
    return [*rows, "      └" + "─" * len(densities)]


def schedule_sketch(plan: Plan, width: int = 48) -> list[str]:
    pruning = plan.pruning
    if pruning is None or plan.steps == 0:
        return []
    schedule = pruning.make_schedule()
    return sketch([schedule.density(round(i * plan.steps / (width - 1))) for i in range(width)])


def evaluating_device() -> torch.device:
    """Where a model is put to be evaluated."""
    return torch.device(processes().device)
