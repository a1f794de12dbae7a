"""Calibration data: batches of model inputs, for methods that run the model to prune it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pinscher.prune.criteria import CRITERIA, Criterion

Batches = Iterable[Any] | Callable[[], Iterable[Any]]


def listed(criterion: Criterion, batches: Batches | None) -> list[Any]:
    """The batches as a list.

    Raises:
        ValueError: if there are none.
    """
    data = list(batches() if callable(batches) else batches or ())
    if not data:
        raise missing(criterion)
    return data


def missing(criterion: Criterion) -> ValueError:
    """The error of a method that needs calibration data and has none."""
    name = next(name for name in CRITERIA if CRITERIA[name] is type(criterion))
    return ValueError(
        f"{name} needs calibration data: give batches of model inputs, Pruner(model, config, calibration=batches) or "
        f"prune_once(model, {name!r}, batches=batches)."
    )
