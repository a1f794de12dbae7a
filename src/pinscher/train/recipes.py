"""Named settings: `best/…` are our own, `paper/…` are the cells of the paper's tables.

`best/BUDGET` is the default of `pinscher prune`: fine-tune densely, then prune that model while it learns from the
logits and hidden states of the dense one (docs/prune.md).

The paper states the learning rate, the schedule and the batch sizes it searched; the reference script gives RTE, and
PLATON's scripts the epochs, warm-up and cool-down of the other tasks. A cell is MODEL x TASK x SPARSITY;
`paper/TASK-SPARSITY` is BERT-base (data-to-text: GPT-2), `paper/minilm/…` and `paper/electra/…` the other two models.
A name without a sparsity (`paper/rte`) leaves it open.

The scripts count warm-up and cool-down in steps of their own batch size. With another batch size they are scaled, so
that pruning starts and ends after the same number of examples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pinscher.errors import InputError
from pinscher.prune.teacher import DISTILLATION
from pinscher.registry import did_you_mean
from pinscher.train.config import BUDGETS, DENSE, RunConfig

# task: epochs, batch, warm-up, cool-down. The learning rate warms up as long as the pruning does.
SCHEDULES: dict[str, tuple[int, int, int, float]] = {
    "rte": (20, 16, 200, 1200),
    "mrpc": (10, 8, 300, 900),
    "stsb": (15, 16, 500, 2500),
    "cola": (15, 32, 500, 1500),
    "sst2": (6, 32, 1000, 5000),
    "qnli": (10, 32, 2000, 12000),
    "mnli": (8, 32, 5400, 27000),
    "qqp": (10, 32, 5400, 27000),
    "squad": (10, 16, 5400, 27000),
    "conll2003": (10, 32, 500, 1500),  # in none of the scripts; those of CoLA, which has about as many rows
    "e2e": (5, 8, 500, 0.35),  # PST's script has no cool-down to take over: our default
    "dart": (5, 8, 500, 0.35),
    "webnlg": (5, 8, 500, 0.35),
}
GLUE = ("rte", "mrpc", "stsb", "cola", "sst2", "qnli", "mnli", "qqp")
TEXT = ("e2e", "dart", "webnlg")
# model: (its name in recipes, task: sparsities in percent)
CELLS: dict[str, tuple[str, dict[tuple[str, ...], tuple[int, ...]]]] = {
    "google-bert/bert-base-uncased": (
        "",
        {GLUE: (30, 50, 80, 90), ("squad",): (50, 60, 70, 80), ("conll2003",): (70, 80)},
    ),
    "openai-community/gpt2": ("", {TEXT: (80,)}),
    "microsoft/MiniLM-L12-H384-uncased": ("minilm/", {("rte", "cola", "qnli"): (80, 90)}),
    "google/electra-base-discriminator": ("electra/", {("rte", "cola", "qnli"): (80, 90)}),
}
# Our own, by budget.
BEST: dict[str, dict[str, Any]] = {
    f"best/{budget}": {
        "budget": budget,
        "dense_start": True,
        "objective": DISTILLATION,
        "temperature": 2.0,
        "hidden_weight": 1.0,
    }
    for budget in BUDGETS
}
NONE = "none"  # the recipe without settings
STEPS = ("warmup", "cooldown", "lr_warmup")  # settings in steps; below 1, a fraction of all steps


def scaled(settings: Mapping[str, Any], before: int, now: int) -> dict[str, Any]:
    """Settings in steps of `before` examples, converted to steps of `now` examples."""
    steps = {name: settings[name] for name in STEPS if settings.get(name, 0) >= 1}
    return {**settings, **{name: float(max(1, round(value * before / now))) for name, value in steps.items()}}


def _of_task(model: str, task: str) -> dict[str, Any]:
    """The settings that all cells of a task share."""
    epochs, batch, warmup, cooldown = SCHEDULES[task]
    settings: dict[str, Any] = {
        "model": model,
        "task": task,
        "epochs": float(epochs),
        "batch_size": 32 if CELLS[model][0] else batch,  # the scripts' own are for the models without a name in recipes
        "learning_rate": 3e-5,
        "lr_warmup": float(warmup),
        "warmup": float(warmup),
        "cooldown": float(cooldown),
        "interval": 10,
        "eval_every": 50,
    }
    if task in TEXT:
        settings |= {"learning_rate": 1e-4, "label_smoothing": 0.1, "eval_every": 500}
    return scaled(settings, batch, settings["batch_size"])


# Without a sparsity: paper/TASK, paper/MODEL/TASK.
OPEN: dict[str, dict[str, Any]] = {
    f"paper/{prefix}{task}": _of_task(model, task)
    for model, (prefix, groups) in CELLS.items()
    for tasks in groups
    for task in tasks
}
RECIPES: dict[str, dict[str, Any]] = {
    f"paper/{prefix}{task}-{percent}": {**OPEN[f"paper/{prefix}{task}"], "sparsity": percent / 100}
    for prefix, groups in CELLS.values()
    for tasks, percents in groups.items()
    for task in tasks
    for percent in percents
}


def settings(name: str) -> dict[str, Any]:
    """The settings of a recipe, for its own batch size."""
    known = BEST | RECIPES | OPEN
    if name not in known:
        meant = did_you_mean(name, known)
        raise InputError(f"unknown recipe {name!r}.{meant} Show all with: pinscher prune --recipe list")
    return dict(known[name])


def applied(name: str, told: Mapping[str, Any], processes: int = 1) -> dict[str, Any]:
    """A recipe overridden by other settings; the recipe's steps are scaled to the resulting batch size.

    Args:
        name: the recipe.
        told: the other settings, from a file or flags. Steps among them are not scaled.
        processes: how many processes train together, each with a batch of its own.
    """
    if name == NONE:
        return dict(told)
    recipe = settings(name)
    if name in BEST:
        return _best(recipe, told)
    usual = {"batch_size": recipe["batch_size"], "gradient_accumulation": 1}
    try:
        examples = processes * math.prod(int(told.get(key) or value) for key, value in usual.items())
    except (TypeError, ValueError):  # not a number: the check of the settings will say so
        examples = 0
    return {**(scaled(recipe, recipe["batch_size"], examples) if examples > 0 else recipe), **told}


def recipe(name: str, **told: Any) -> RunConfig:
    """A recipe's settings, overridden by others: `pinscher.recipe("best/standard", model=…, task=…)`."""
    return RunConfig.from_dict({**applied(name, told), "recipe": name})


def _best(recipe: Mapping[str, Any], told: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe overridden by settings, without what does not go together with them."""
    if told.get("budget", recipe["budget"]) != recipe["budget"]:
        raise InputError(
            f"best/{recipe['budget']} has a budget of its own: leave out --budget {told['budget']}, or take "
            f"best/{told['budget']}."
        )
    if told.get("objective", recipe["objective"]) != recipe["objective"]:  # another teacher, or none: only the epochs
        recipe = {"budget": recipe["budget"]}
    return {**recipe, **told}


def default(told: Mapping[str, Any]) -> str:
    """The recipe of a run that names none: the best one for its budget, or none if little or nothing is trained."""
    trains = told.get("max_steps") != 0 and told.get("lora_rank") is None and not told.get("fsdp")
    prunes = told.get("method") != DENSE and told.get("sparsity") != 0
    return f"best/{told.get('budget') or 'standard'}" if trains and prunes else NONE
