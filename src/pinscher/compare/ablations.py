"""Ablations: variants of pins that differ in one choice, as tables of settings."""

from __future__ import annotations

from typing import Any

from pinscher.errors import InputError
from pinscher.prune.teacher import OBJECTIVES
from pinscher.registry import unknown


def _options(name: str, *values: str) -> dict[str, dict[str, Any]]:
    return {value: {"option": {name: value}} for value in values}


# axis: name of the variant -> its settings
ABLATIONS: dict[str, dict[str, dict[str, Any]]] = {
    "objective": {name: {"objective": name} for name in OBJECTIVES},
    "teacher": {
        "best": {},  # the latest best, as in the paper
        "late": {"teacher_start": 0.65},  # none before the final sparsity
        "near": {"teacher_start": 0.1, "teacher_lag": 1.25},  # none much denser than the student
        "mixed": {"mix": "entropy"},
    },
    "smoothing": _options("smoothing", "window", "ema", "none"),
    "score": _options("score", "abs", "update", "signed")
    # averages of signed scores are mostly noise, so these two are also tried unsmoothed
    | {f"{name}-unsmoothed": {"option": {"score": name, "smoothing": "none"}} for name in ("update", "signed")},
    "regrow": {"on": {"regrow": True}, "off": {"regrow": False}},
    "interval": {str(steps): {"interval": steps} for steps in (1, 10, 50)},
    "hold": {name: {"hold": name} for name in ("cooldown", "always", "never")},
}


def variants(axis: str) -> dict[str, dict[str, Any]]:
    """The variants of an ablation, as methods of a comparison: label -> settings."""
    if axis not in ABLATIONS:
        raise InputError(unknown("ablation", axis, ABLATIONS) + ".")
    prefix = "pins-" if axis == "objective" else f"pins-{axis}-"
    return {f"{prefix}{name}": {"method": "pins", **told} for name, told in ABLATIONS[axis].items()}
