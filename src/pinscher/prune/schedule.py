"""The density of the model after t optimiser steps, and the steps at which weights are ranked. Pure functions of t.

The paper's cubic schedule, with total steps T, warm-up t_i, cool-down t_f, from density r_i to r_f:

    t < t_i            r_i
    t_i <= t < T-t_f   r_f + (r_i - r_f) * ((T - t_f - t) / (T - t_f - t_i))^3
    otherwise          r_f

With a jump to density j, the curve starts from min(r_i, j) instead of r_i; t_i is the step of the jump.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pinscher import settings
from pinscher.registry import Registry
from pinscher.settings import COUNT, NOT_NEGATIVE, Number

STEPS = {"total": COUNT, "interval": COUNT, "warmup": NOT_NEGATIVE, "cooldown": NOT_NEGATIVE}
DENSITY = Number(0, 1)


@dataclass(frozen=True)
class Schedule:
    """The base class: three phases, of which a subclass defines the middle one.

    Args:
        total: optimiser steps of the whole run (T).
        warmup: steps before pruning starts (t_i).
        cooldown: steps at the end with the final density (t_f).
        interval: steps between two rankings of the weights (the paper's window of 10).
        final: density at the end (r_f).
        initial: density at the start (r_i).
        jump: density right after the warm-up, from which the schedule continues; 1 is no jump.
    """

    total: int
    warmup: int
    cooldown: int
    interval: int
    final: float
    initial: float = 1.0
    jump: float = 1.0

    once: ClassVar[bool] = False  # whether the mask stays fixed after the first masking

    def __post_init__(self) -> None:
        for name, takes in STEPS.items():
            settings.number(takes, getattr(self, name), name, whole=True)
        for name in ("final", "initial", "jump"):
            settings.number(DENSITY, getattr(self, name), f"{name} density")
        if self.jump < self.final:
            raise ValueError(f"the jump to density {self.jump:g} goes beyond the final density {self.final:g}")
        if self.jump < 1.0 and self.once:
            raise ValueError("a schedule that prunes once cannot jump: leave the jump out")
        if self.warmup + self.cooldown > self.total:
            raise ValueError(
                f"the schedule does not fit: warm-up {self.warmup} + cool-down {self.cooldown} steps exceed the "
                f"{self.total} steps of the run. Train longer or shorten them."
            )
        if self.settled_at < 1:
            raise ValueError(
                f"the schedule does not fit: the cool-down takes all {self.total} steps and leaves none to measure the "
                "weights in. Shorten it."
            )
        if self.interval > self.settled_at:
            raise ValueError(
                f"the schedule does not fit: no interval of {self.interval} steps ends in the {self.settled_at} steps "
                f"before the cool-down. Choose interval <= {self.settled_at}, a shorter cool-down or a longer run."
            )

    @property
    def settled_at(self) -> int:
        """The first step of the final density."""
        return self.total - self.cooldown

    def density(self, t: int) -> float:
        """The fraction of weights to keep after t completed steps."""
        if t < self.warmup:
            return self.initial
        if t >= self.settled_at:
            return self.final
        left = (self.settled_at - t) / (self.settled_at - self.warmup)
        start = min(self.initial, self.jump)
        return self.final + (start - self.final) * self.shape(left)

    def shape(self, left: float) -> float:
        """The remaining fraction of the way from `initial` to `final`, given the remaining fraction of middle steps."""
        raise NotImplementedError

    def due(self, t: int) -> bool:
        """Whether the weights are re-ranked after t completed steps."""
        if t < 1 or self.density(t) >= 1.0:
            return False
        return t % self.interval == 0 or t in (self.settled_at, self.total)

    def settled(self, t: int) -> bool:
        """Whether the cool-down has been reached."""
        return t >= self.settled_at


SCHEDULES: Registry[type[Schedule]] = Registry("schedule")


@SCHEDULES.register("cubic")
class Cubic(Schedule):
    """The paper's schedule: fast at first, slow towards the end."""

    def shape(self, left: float) -> float:
        return left**3


@SCHEDULES.register("linear")
class Linear(Schedule):
    """The same number of weights removed at every masking."""

    def shape(self, left: float) -> float:
        return left


@SCHEDULES.register("constant")
class Constant(Schedule):
    """The final density from the end of the warm-up on; the mask is still re-ranked."""

    def shape(self, left: float) -> float:
        return 0.0


@SCHEDULES.register("one-shot")
class OneShot(Schedule):
    """Dense until the cool-down, then pruned once; the cool-down is the recovery."""

    once = True

    def shape(self, left: float) -> float:
        return 1.0

    def due(self, t: int) -> bool:
        return t == self.settled_at and self.density(t) < 1.0
