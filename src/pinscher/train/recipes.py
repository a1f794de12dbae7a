"""The settings of every cell of the paper's tables, as one table: `pinscher prune --recipe paper/rte-80`.

The paper states the learning rate, the schedule and the batch sizes it searched; the reference script gives RTE, and
PLATON's scripts the epochs, warm-up and cool-down of the other tasks. A cell is MODEL x TASK x SPARSITY;
`paper/TASK-SPARSITY` is BERT-base (data-to-text: GPT-2), `paper/minilm/…` and `paper/electra/…` the other two models.
"""

from __future__ import annotations

import difflib
from typing import Any

from pinscher.errors import InputError

# task: epochs, batch, warm-up, cool-down
SCHEDULES: dict[str, tuple[int, int, int, int]] = {
    "rte": (20, 16, 200, 1200),
    "mrpc": (10, 8, 300, 900),
    "stsb": (15, 16, 500, 2500),
    "cola": (15, 32, 500, 1500),
    "sst2": (6, 32, 1000, 5000),
    "qnli": (10, 32, 2000, 12000),
    "mnli": (8, 32, 5400, 27000),
    "qqp": (10, 32, 5400, 27000),
    "squad": (10, 16, 5400, 27000),
    "conll2003": (10, 32, 500, 1500),  # in none of the scripts: CoLA's, which has about as many rows
    "e2e": (5, 8, 0, 0),
    "dart": (5, 8, 0, 0),
    "webnlg": (5, 8, 0, 0),
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


def _cell(model: str, task: str, percent: int) -> dict[str, Any]:
    epochs, batch, warmup, cooldown = SCHEDULES[task]
    settings: dict[str, Any] = {
        "model": model,
        "task": task,
        "sparsity": percent / 100,
        "epochs": float(epochs),
        "batch_size": batch if "bert-base" in model or "gpt2" in model else 32,
        "learning_rate": 3e-5,
        "warmup": float(warmup),
        "cooldown": float(cooldown),
        "interval": 10,
        "eval_every": 50,
    }
    if task == "rte":
        settings["lr_warmup"] = 200.0
    if task in TEXT:  # PST's script; it has no warm-up or cool-down to take over
        settings |= {"learning_rate": 1e-4, "label_smoothing": 0.1, "warmup": 0.1, "cooldown": 0.35, "eval_every": 500}
    return settings


RECIPES: dict[str, dict[str, Any]] = {
    f"paper/{prefix}{task}-{percent}": _cell(model, task, percent)
    for model, (prefix, groups) in CELLS.items()
    for tasks, percents in groups.items()
    for task in tasks
    for percent in percents
}


def settings(name: str) -> dict[str, Any]:
    """The settings of a recipe."""
    if name not in RECIPES:
        close = difflib.get_close_matches(name, RECIPES, n=1, cutoff=0.4)
        meant = f" Did you mean {close[0]!r}?" if close else ""
        raise InputError(f"unknown recipe {name!r}.{meant} Show all with: pinscher prune --recipe list")
    return dict(RECIPES[name])
