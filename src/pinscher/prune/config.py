"""PruningConfig: everything that decides which weights survive, as one plain value."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pinscher.prune import calibrated as _calibrated  # noqa: F401  (registers its methods)
from pinscher.prune import fisher as _fisher  # noqa: F401
from pinscher.prune import gates as _gates  # noqa: F401  (registers the learned masks)
from pinscher.prune.criteria import CRITERIA, Criterion, Snip
from pinscher.prune.patterns import SCOPES, UNSTRUCTURED, Layout, parse
from pinscher.prune.schedule import SCHEDULES, Schedule
from pinscher.prune.sites import Site

HOLDS = ("cooldown", "always", "never")
STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def _help(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class PruningConfig:
    """How a model is pruned while it is trained. Every field says what it does in its metadata ("help")."""

    method: str = _help("pins", "Criterion: " + ", ".join(CRITERIA) + ".")
    sparsity: float = _help(0.8, "Fraction of the prunable weights that is zero at the end, between 0 and 1.")
    total_steps: int | None = _help(None, "Optimiser steps of the whole run; a Trainer fills them in by itself.")
    schedule: str = _help("cubic", "Path of the sparsity: " + ", ".join(SCHEDULES) + ".")
    warmup: float = _help(0.1, "Steps before pruning starts; below 1 a fraction of total_steps.")
    cooldown: float = _help(0.35, "Steps at the end with the final sparsity; below 1 a fraction of total_steps.")
    interval: int = _help(10, "Steps between two rankings of the weights; also the smoothing window.")
    hold: str = _help("cooldown", "When pruned weights are set to zero after every step: cooldown, always, never.")
    regrow: bool = _help(True, "Whether a pruned weight may be chosen again.")
    initial_sparsity: float | None = _help(None, "Sparsity the schedule starts from; by default the model's own.")
    pattern: str = _help(UNSTRUCTURED, "What is pruned as a whole: unstructured, N:M, RxC, rows, columns, heads.")
    scope: str | None = _help(None, "What is ranked together: global, matrix, layer or kind; by default the method's.")
    target_modules: str | tuple[str, ...] | None = _help(None, "Modules to prune instead: names or expressions.")
    exclude_modules: str | tuple[str, ...] | None = _help(None, "Modules to leave alone: names or expressions.")
    state_dtype: str = _help("float32", "Precision of the smoothed scores: float32 or bfloat16 (half the memory).")
    track_revived: bool = _help(False, "Count weights that come back, at one more byte a weight.")
    options: dict[str, Any] = field(default_factory=dict, metadata={"help": "The method's own options."})

    def __post_init__(self) -> None:
        for name in ("target_modules", "exclude_modules"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                object.__setattr__(self, name, tuple(value))
        if not 0.0 <= self.sparsity < 1.0:
            hint = f" Did you mean {self.sparsity / 100:g}?" if 1.0 < self.sparsity < 100.0 else ""
            raise ValueError(f"sparsity must lie in [0, 1), not {self.sparsity:g}.{hint}")
        if self.initial_sparsity is not None and not 0.0 <= self.initial_sparsity <= self.sparsity:
            raise ValueError(f"initial_sparsity must lie between 0 and sparsity, not {self.initial_sparsity:g}")
        if self.total_steps is not None and (not isinstance(self.total_steps, int) or self.total_steps < 1):
            raise ValueError(
                f"total_steps must be the number of optimiser steps of the run, not {self.total_steps}: "
                "the schedule ends there."
            )
        if not isinstance(self.interval, int):
            raise ValueError(f"interval must be a whole number of steps, not {self.interval}")
        SCHEDULES[self.schedule]
        if self.hold not in HOLDS:
            raise ValueError(f"hold must be one of {', '.join(HOLDS)}, not {self.hold!r}")
        if self.state_dtype not in STATE_DTYPES:
            raise ValueError(f"state_dtype must be one of {', '.join(STATE_DTYPES)}, not {self.state_dtype!r}")
        for name in ("warmup", "cooldown"):
            value = getattr(self, name)
            if not 0 <= value < math.inf or (value >= 1 and value != int(value)):
                raise ValueError(f"{name} must be a number of steps, or a fraction below 1; not {value}")
        if self.scope is not None and self.scope not in SCOPES:
            raise ValueError(f"scope must be one of {', '.join(SCOPES)}, not {self.scope!r}")
        parse(self.pattern).final(1.0 - self.sparsity)
        self.make_criterion()
        if self.total_steps is not None:
            self.make_schedule()

    def make_criterion(self) -> Criterion:
        """The method as an object; a wrong option is an error that names the right ones."""
        kind = CRITERIA[self.method]
        known = {f.name: str(f.type) for f in dataclasses.fields(kind)}
        options = {}
        for name, value in self.options.items():
            if name not in known:
                has = f"its options are {', '.join(known)}" if known else "it has none"
                raise ValueError(f"method {self.method!r} has no option {name!r}: {has}")
            options[name] = _number(value, known[name], f"option {name!r} of method {self.method!r}")
        return kind(**options)

    def make_schedule(self, initial_density: float | None = None) -> Schedule:
        """The schedule in steps, starting from `initial_density` unless the configuration fixes the start."""
        if self.total_steps is None:
            raise ValueError(
                "total_steps is missing: the number of optimiser steps of the run, where the schedule ends."
            )
        criterion = self.make_criterion()
        if self.initial_sparsity is not None:
            initial_density = 1.0 - self.initial_sparsity
        cooldown = self._steps(self.cooldown)
        if isinstance(criterion, Snip):  # measures first, then trains with the mask
            if criterion.batches >= self.total_steps:
                raise ValueError(f"snip measures {criterion.batches} batches but the run has {self.total_steps} steps")
            cooldown = self.total_steps - criterion.batches
        one_shot = criterion.schedule is not None  # such a method has neither a warm-up nor windows
        return SCHEDULES[criterion.schedule or self.schedule](
            total=self.total_steps,
            warmup=0 if one_shot else self._steps(self.warmup),
            cooldown=cooldown,
            interval=1 if one_shot else self.interval,
            final=parse(self.pattern).final(1.0 - self.sparsity),
            initial=1.0 if initial_density is None else initial_density,
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


def _number(value: Any, wanted: str, what: str) -> Any:
    """A value as the number that an option takes, written as one or as text (to YAML 1e-4 is a text); else as it is."""
    kinds = set(wanted.replace(" ", "").split("|"))
    if not kinds <= {"float", "int", "None"} or (value is None and "None" in kinds):
        return value
    make = float if "float" in kinds else int
    try:
        number = make(value)
    except (TypeError, ValueError):
        number = None
    if number is None or isinstance(value, bool) or (make is int and number != float(value)):
        raise ValueError(f"{what} must be a{' whole' if make is int else ''} number, not {value!r}")
    return number
