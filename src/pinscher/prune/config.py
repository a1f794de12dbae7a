"""PruningConfig: all settings that decide which weights survive, as one plain value."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pinscher import settings
from pinscher.errors import InputError
from pinscher.prune import calibrated as _calibrated  # noqa: F401  (registers its methods)
from pinscher.prune import fisher as _fisher  # noqa: F401
from pinscher.prune import gates as _gates  # noqa: F401  (registers the learned masks)
from pinscher.prune.criteria import CRITERIA, Criterion
from pinscher.prune.patterns import SCOPES, UNSTRUCTURED, Layout, parse
from pinscher.prune.schedule import SCHEDULES, Schedule
from pinscher.prune.sites import Site
from pinscher.settings import COUNT, FRACTION, SPARSITY, STEPS, Names, setting

INTERVAL = 10  # the paper's window
HOLDS = ("cooldown", "always", "never")
STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class PruningSettings:
    """The settings that `PruningConfig` and `RunConfig` share: which weights are pruned, and when."""

    method: str = setting(
        "pins",
        f"Pruning method: {', '.join(CRITERIA)}; a run may also be dense, without pruning.",
        group="Run",
        takes=Names(CRITERIA),
    )
    sparsity: float = setting(
        0.8, "Fraction of the prunable weights that is zero at the end, from 0 to below 1.", group="Run", takes=SPARSITY
    )
    schedule: str = setting(
        "cubic", f"How the sparsity rises: {', '.join(SCHEDULES)}.", group="Pruning", takes=Names(SCHEDULES)
    )
    warmup: float = setting(
        0.1, "Steps before pruning starts; below 1, a fraction of all steps.", group="Pruning", takes=STEPS
    )
    cooldown: float = setting(
        0.35, "Steps at the end at the final sparsity; below 1, a fraction of all steps.", group="Pruning", takes=STEPS
    )
    jump: float | None = setting(
        None,
        "Sparsity to reach at once when the warm-up ends; the schedule continues from there. By default none.",
        group="Pruning",
        takes=FRACTION,
    )
    interval: int | None = setting(
        None,
        "Steps between two rankings of the weights, and the smoothing window; by default 10, fewer in short runs.",
        group="Pruning",
        takes=COUNT,
    )
    hold: str = setting(
        "cooldown",
        f"When pruned weights are set to zero after every step: {', '.join(HOLDS)}.",
        group="Pruning",
        takes=Names(HOLDS),
    )
    regrow: bool = setting(True, "Whether a pruned weight may come back.", group="Pruning")
    pattern: str = setting(
        UNSTRUCTURED,
        "Units to prune: unstructured (single weights), N:M (2:4), RxC blocks (4x1), rows, columns, heads.",
        group="Pruning",
    )
    scope: str | None = setting(
        None,
        f"Units to rank together: {', '.join(SCOPES)}; by default global (pst: matrix).",
        group="Pruning",
        takes=Names(SCOPES),
    )
    target_modules: str | tuple[str, ...] | None = setting(
        None, "Modules to prune instead of the usual ones: names or regular expressions.", group="Pruning"
    )
    exclude_modules: str | tuple[str, ...] | None = setting(
        None, "Modules not to prune: names or regular expressions.", group="Pruning"
    )
    state_dtype: str = setting(
        "float32",
        f"Precision of the smoothed scores: {', '.join(STATE_DTYPES)}; bfloat16 takes half the memory.",
        group="Pruning",
        takes=Names(STATE_DTYPES),
    )


@dataclass(frozen=True)
class PruningConfig(PruningSettings):
    """How a model is pruned while it is trained. Every field says what it does in its metadata ("help")."""

    total_steps: int | None = setting(
        None,
        "Optimiser steps of the whole run; a Trainer fills them in by itself.",
        takes=dataclasses.replace(
            COUNT, words="must be the number of optimiser steps of the run,", why="the schedule ends there"
        ),
    )
    initial_sparsity: float | None = setting(
        None,
        "Sparsity that the schedule starts from; by default the model's own.",
        takes=dataclasses.replace(FRACTION, words="must lie between 0 and sparsity,"),
    )
    track_revived: bool = setting(False, "Count weights that come back, at one more byte a weight.")
    options: dict[str, Any] = setting({}, "The method's own options.")

    def __post_init__(self) -> None:
        settings.check(self)
        if self.interval is None:
            object.__setattr__(self, "interval", INTERVAL)
        if self.initial_sparsity is not None and self.initial_sparsity > self.sparsity:
            raise InputError(f"initial_sparsity must lie between 0 and sparsity, not {self.initial_sparsity:g}")
        if self.jump is not None and self.jump > self.sparsity:
            raise InputError(f"jump must lie between 0 and sparsity, not {self.jump:g}")
        parse(self.pattern).final(1.0 - self.sparsity)
        self.make_criterion()
        if self.total_steps is not None:
            self.make_schedule()

    def make_criterion(self) -> Criterion:
        """The method as an object; for a wrong option the error names the valid ones."""
        return make_criterion(self.method, self.options)

    def make_schedule(self, initial_density: float | None = None) -> Schedule:
        """The schedule in steps, starting from `initial_density` unless the configuration fixes the start."""
        if self.total_steps is None:
            raise ValueError(
                "total_steps is missing: the number of optimiser steps of the run, where the schedule ends."
            )
        criterion = self.make_criterion()
        if self.initial_sparsity is not None:
            initial_density = 1.0 - self.initial_sparsity
        one_shot = criterion.schedule is not None  # such a method has neither a warm-up nor windows
        return SCHEDULES[criterion.schedule or self.schedule](
            total=self.total_steps,
            warmup=0 if one_shot else self._steps(self.warmup),
            cooldown=criterion.cooldown(self._steps(self.cooldown), self.total_steps),
            interval=1 if one_shot else self.interval or INTERVAL,
            final=parse(self.pattern).final(1.0 - self.sparsity),
            initial=1.0 if initial_density is None else initial_density,
            jump=1.0 if self.jump is None else max(1.0 - self.jump, parse(self.pattern).final(1.0 - self.sparsity)),
        )

    def make_layout(self, sites: Sequence[Site], model: nn.Module) -> Layout | None:
        """The units that are ranked, and against which others.

        None for all single weights together; for a method that chooses its masks by itself, if it is left to it.
        """
        criterion = self.make_criterion()
        scope = self.scope or criterion.scope
        if self.pattern == UNSTRUCTURED and (self.scope is None if criterion.chooses else scope == "global"):
            return None
        return Layout(parse(self.pattern), scope, sites, model)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, fit for JSON or YAML."""
        data = dataclasses.asdict(self)
        for name in ("target_modules", "exclude_modules"):
            if isinstance(data[name], tuple):
                data[name] = list(data[name])
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> PruningConfig:
        return cls(**data)

    def _steps(self, value: float) -> int:
        return round(value * (self.total_steps or 0)) if value < 1 else int(value)


def make_criterion(method: str, options: Mapping[str, Any]) -> Criterion:
    """A method with its options as an object.

    Raises:
        InputError: for an option that it does not have, or a value that the option does not take.
    """
    kind = CRITERIA[method]
    known = {field.name: field for field in dataclasses.fields(kind)}
    for name in options:
        if name not in known:
            has = f"its options are {', '.join(known)}" if known else "it has none"
            raise InputError(f"method {method!r} has no option {name!r}: {has}")
    label = f"method {method!r}:"
    return kind(**{n: settings.checked(known[n], value, label=f"{label} {n}") for n, value in options.items()})
