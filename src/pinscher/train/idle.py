"""Settings that would change nothing in a run.

A recipe, a file or a comparison may hold them, since what they are for differs from run to run. A person who gives one
as a flag expects something of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pinscher import settings
from pinscher.errors import InputError
from pinscher.train.config import DENSE, RunConfig

SELF = "self-regularization"


@dataclass(frozen=True)
class Rule:
    """Some settings, in which runs they do something, and what they go with."""

    names: tuple[str, ...]
    works: Callable[[RunConfig], bool]
    goes_with: str


def _prunes_while_training(config: RunConfig) -> bool:
    return not config.is_dense and config.max_steps != 0


def _chooses_steps(config: RunConfig) -> bool:
    """Whether a number of steps is left open that a budget chooses."""
    own = not config.is_dense and config.epochs is None and config.max_steps is None
    return own or (config.needs_dense and config.dense_steps is None)


RULES = (
    Rule(("budget",), _chooses_steps, "pruning without --epochs or --max-steps, or a dense run without --dense-steps"),
    Rule(
        ("dense_steps", "dense_learning_rate"),
        lambda config: config.needs_dense,
        "a dense run: --dense-start, --baseline, or --objective knowledge-distillation without --teacher",
    ),
    Rule(
        ("mix", "temperature", "hardness", "hidden_weight", "embeddings_weight"),
        lambda config: _prunes_while_training(config) and config.objective != "empirical-risk",
        "a teacher: --objective knowledge-distillation or self-regularization, and training",
    ),
    Rule(
        ("teacher_start", "teacher_lag"),
        lambda config: _prunes_while_training(config) and config.objective == SELF,
        f"a teacher that changes: --objective {SELF}",
    ),
    Rule(("average", "lr_rewinds"), _prunes_while_training, "pruning while training"),
    Rule(("jump", "schedule", "pattern", "scope", "hold"), lambda config: config.method != DENSE, "pruning"),
)


def check(configs: Iterable[RunConfig], given: Iterable[str]) -> None:
    """Raises InputError for a setting that was given by name and changes nothing in any of some runs.

    A setting that has its default value asks for nothing.
    """
    names, runs = set(given), list(configs)
    defaults = {field.name: field.default for field in dataclasses.fields(RunConfig)}
    for rule in RULES:
        for name in rule.names:
            asked = [config for config in runs if name in names and getattr(config, name) != defaults[name]]
            if asked and not any(rule.works(config) for config in asked):
                raise InputError(f"{settings.flag(name)} would change nothing: it goes with {rule.goes_with}.")
    if {"epochs", "max_steps"} <= names:
        raise InputError("give either --epochs or --max-steps: the steps would win.")
