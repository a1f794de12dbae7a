"""The paper's own figures, by model, task, sparsity, method and objective (paper_results.json)."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from pinscher.errors import InputError
from pinscher.registry import unknown
from pinscher.train.recipes import CELLS

FILE = Path(__file__).with_name("paper_results.json")
NONE = "none"
EXACT = dict(zip(CELLS, ("bert-base", "gpt2", "minilm-12l-384h", "electra-base"), strict=True))
# Parts of model names -> the nearest model of the paper.
HINTS = {"minilm": "minilm-12l-384h", "electra": "electra-base", "gpt2": "gpt2", "gpt-2": "gpt2"}
DEFAULT = "bert-base"

# Notes for comparing the paper's figures of a task with ours.
CAUTIONS = {
    "conll2003": "conll2003: the paper's figures look like those of the development set (94.0 dense; on the test set "
    "91 to 92.6 are usual). Ours are of the test set; the development set's are under validation in results.csv, "
    "where --validation-rows 3250 takes all of it."
}

Key = tuple[str, str, str, int, str, str]


@functools.cache
def _everything() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return data


@functools.cache
def figures() -> dict[Key, float]:
    """(model, task, metric, sparsity in percent, method, objective) -> score."""
    return {tuple(row[:-1]): row[-1] for row in _everything()["figures"]}


def models() -> dict[str, str]:
    """The paper's models: name in the data -> display name."""
    return dict(_everything()["models"])


def source() -> str:
    return str(_everything()["source"])


def check(name: str | None) -> None:
    """Rejects a model that the paper does not have."""
    known = [*models(), NONE]
    if name is not None and name not in known:
        raise InputError(unknown("model of the paper", name, known) + ".")


def nearest(model: str, wanted: str | None = None) -> list[list[str]]:
    """The paper's models whose figures may be shown beside ours, in tiers, preferred ones first.

    A model that the paper used is a tier of its own. A model that the user asks for is the only one.
    """
    if wanted is not None:
        return [] if wanted == NONE else [[wanted]]
    name = model.lower().rsplit("/", 1)[-1]
    hinted = [paper for word, paper in HINTS.items() if word in name]
    own = [[EXACT[model]]] if model in EXACT else []
    return [*own, list(dict.fromkeys([*hinted, DEFAULT, *models()]))]


def figure(model: str, task: str, metric: str, sparsity: float, method: str, objective: str) -> float | None:
    """The paper's score of a cell, if it has one. Sparsity is a fraction; 0 is dense fine-tuning."""
    return figures().get((model, task, metric, round(100 * sparsity), method, objective))
