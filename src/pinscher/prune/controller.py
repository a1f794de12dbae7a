"""Drives learned masks along the schedule.

Hard movement and PST are ranked like any criterion. Soft movement and l0 do not reach a sparsity by themselves, so a
controller moves one thing that decides which gates are open (see `SoftMovement`, `L0`), and the last step projects
to exactly the target. What that projection had to change is kept as a `Projection`: it measures the controller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pinscher.prune.gates import CLOSED, L0, Gated, SoftMovement, _ConcreteGate, _SoftGate, gate_of
from pinscher.prune.masking import Scores, threshold
from pinscher.prune.schedule import Schedule
from pinscher.prune.sites import Site

if TYPE_CHECKING:
    from pinscher.prune.pruner import Pruner


@dataclass(frozen=True)
class Projection:
    """What the final projection met and did."""

    density: float  # of open gates before it
    changed: float  # fraction of all gates that it opened or closed


def steer(criterion: Gated, sites: Sequence[Site], schedule: Schedule, t: int, pruner: Pruner) -> None:
    """Brings the open gates to the schedule's density after step t."""
    controlled = isinstance(criterion, SoftMovement | L0)
    if not controlled or t >= schedule.total:
        if schedule.due(t) and t <= schedule.total:
            project(criterion, sites, schedule.density(t), pruner)
        return
    density = schedule.density(t)
    if density >= 1.0:
        return
    if isinstance(criterion, SoftMovement):
        _move_level(sites, density, criterion.score_lr, pruner)
    elif isinstance(criterion, L0) and schedule.due(t):
        pruner.rank(density)
        _separate(sites, criterion.margin, pruner)


def project(criterion: Gated, sites: Sequence[Site], density: float, pruner: Pruner) -> None:
    """Sets every gate's mask to the exact top of the ranking."""
    was_open = {site.name: _open(site) for site in sites}
    pruner.rank(density)
    changed = 0
    for site in sites:
        gate = gate_of(site)
        kept = pruner.mask(site.name)
        changed += int((kept != was_open[site.name]).sum())
        gate.mask.copy_(kept)
        if isinstance(gate, _SoftGate | _ConcreteGate):
            gate.fixed.fill_(True)
    if isinstance(criterion, L0):
        _separate(sites, criterion.margin, pruner)
    opened = sum(int(mask.sum()) for mask in was_open.values())
    pruner.projection = Projection(opened / pruner.total, changed / pruner.total)


def _open(site: Site) -> torch.Tensor:
    """Which gates of a site are open now, at test time."""
    gate = gate_of(site)
    if isinstance(gate, _SoftGate) and not gate.fixed:
        return gate.importance > gate.level
    if isinstance(gate, _ConcreteGate) and not gate.fixed:
        return gate.logits > CLOSED
    return gate.mask.clone()


def _move_level(sites: Sequence[Site], density: float, step: float, pruner: Pruner) -> None:
    """One Newton step on density(level) = target, or the exact level where that would be far off."""
    gates = [gate_of(site) for site in sites]
    level = float(gates[0].level)  # type: ignore[arg-type]
    here, there = (
        sum(int((gate.scores(gate.mask) > at).sum()) for gate in gates) / pruner.total for at in (level, level + step)
    )
    slope = (here - there) / step
    error = here - density
    if abs(error) <= 0.02 and slope > 0.02:
        level += max(-step, min(step, error / slope))
    else:
        keep = max(1, int(density * pruner.total + 0.5))
        cut = threshold([Scores(gate.scores(gate.mask)) for gate in gates], keep, pruner.reduce)
        # Just below the last kept score, which itself has to be above the level.
        level = float(torch.nextafter(torch.tensor(cut.value, dtype=torch.float32), torch.tensor(-torch.inf)))
    for gate in gates:
        gate.level.fill_(level)  # type: ignore[operator]


def _separate(sites: Sequence[Site], margin: float, pruner: Pruner) -> None:
    """Moves l0's logits to the side of CLOSED where the ranking wants them, no further than `margin` past it."""
    for site in sites:
        gate = gate_of(site)
        assert isinstance(gate, _ConcreteGate)
        kept = pruner.mask(site.name)
        logits = gate.logits.data
        logits.copy_(torch.where(kept, logits.clamp(min=CLOSED + margin), logits.clamp(max=CLOSED - margin)))
