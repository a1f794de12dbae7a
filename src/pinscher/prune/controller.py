"""Drives learned masks along the schedule.

Hard movement and PST are ranked like any criterion. Soft movement and l0 do not reach a sparsity by themselves, so a
controller moves one thing that decides which gates are open (see `SoftMovement`, `L0`), and the last step projects
to exactly the target. What the projection meets, as the last step of training left it, is kept as a `Projection`: it
measures the controller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from pinscher.prune import hosts
from pinscher.prune.gates import CLOSED, L0, Gated, SoftMovement, _ConcreteGate, _SoftGate, gate_of
from pinscher.prune.masking import Scores, threshold
from pinscher.prune.sharding import is_sharded, local
from pinscher.prune.sites import Site

if TYPE_CHECKING:
    from pinscher.prune.pruner import Pruner


@dataclass(frozen=True)
class Projection:
    """What the final projection met and did."""

    density: float  # of open gates before it
    changed: float  # fraction of all gates that it opened or closed


def open_gates(criterion: Gated, pruner: Pruner) -> None:
    """Puts a gate above every site's weight."""
    if criterion.freezes:
        hosts.freeze_backbone(pruner.model, pruner.sites)
    for site in pruner.sites:
        weight = site.owner
        gate = criterion.make_gate(weight.detach()).to(weight.device)
        if pruner.schedule.initial < 1.0:
            criterion.close(gate, weight.detach() == 0)
        for module in [site.module, *site.shared_with]:
            parametrize.register_parametrization(module, site.parameter, gate)
        gate.train(site.module.training)


def bake(sites: Sequence[Site]) -> None:
    """Turns gated weights into plain ones, with exact zeros where the masks are.

    FSDP2 knows a sharded parameter by its place in the module tree: there the gate stays, and lets everything through.
    """
    for site in sites:
        gate, owner = gate_of(site), site.owner
        baked = gate.baked(owner.detach()).masked_fill(~gate.mask, 0.0)
        if is_sharded(owner):
            local(owner.detach()).copy_(local(baked))
            gate.bypass = True
            continue
        for module in [site.module, *site.shared_with]:
            parametrize.remove_parametrizations(module, site.parameter, leave_parametrized=False)
        site.owner.data.copy_(baked)


def add_penalty(criterion: Gated, pruner: Pruner) -> None:
    """Adds the penalty's gradient to the loss's, after clipping and whatever the loop's accumulation and AMP."""
    schedule = pruner.schedule
    strength = (1.0 - schedule.density(pruner.t)) / max(1.0 - schedule.final, 1e-12)
    for site in pruner.sites:
        criterion.add_penalty(site, strength * site.grad_scale, pruner.total)


def steer(criterion: Gated, pruner: Pruner, t: int) -> None:
    """Brings the open gates to the schedule's density after step t."""
    schedule = pruner.schedule
    density = schedule.density(t)
    if t > schedule.total or density >= 1.0:
        return
    controlled = isinstance(criterion, SoftMovement | L0)
    if isinstance(criterion, SoftMovement) and pruner.ranking.layout is not None and schedule.settled(t):
        controlled = False  # one level knows nothing of units: the cool-down is there to recover from the projection
    if t == schedule.total or (schedule.due(t) and not controlled):
        project(criterion, pruner, density)
    elif isinstance(criterion, SoftMovement):
        _move_level(pruner, density, criterion.score_lr)
    elif isinstance(criterion, L0) and schedule.due(t):
        pruner.ranking.rank(density)
        _separate(pruner, criterion.margin)


def project(criterion: Gated, pruner: Pruner, density: float) -> None:
    """Sets every gate's mask to the exact top of the ranking."""
    was_open = [_open(site) for site in pruner.sites]
    pruner.ranking.rank(density)
    changed = 0
    for i, (site, before) in enumerate(zip(pruner.sites, was_open, strict=True)):
        gate = gate_of(site)
        mask = local(gate.mask.detach())
        kept = pruner.ranking.mask(i).view_as(mask)
        changed += int((kept != before).sum())
        mask.copy_(kept)
        if isinstance(gate, _SoftGate | _ConcreteGate):
            gate.fixed.fill_(True)
    if isinstance(criterion, L0):
        _separate(pruner, criterion.margin)
    opened = sum(int(mask.sum()) for mask in was_open)
    opened, changed = pruner.ranks.count(opened), pruner.ranks.count(changed)
    pruner.projection = Projection(opened / pruner.total, changed / pruner.total)


def _open(site: Site) -> Tensor:
    """Which of this rank's gates of a site are open now, at test time."""
    gate = gate_of(site)
    if isinstance(gate, _SoftGate) and not gate.fixed:
        return local(gate.importance.detach()) > gate.level
    if isinstance(gate, _ConcreteGate) and not gate.fixed:
        return local(gate.logits.detach()) > CLOSED
    return local(gate.mask.detach()).clone()


def _move_level(pruner: Pruner, density: float, step: float) -> None:
    """One Newton step on density(level) = target, or the exact level where that would be far off."""
    gates = [gate for site in pruner.sites if isinstance(gate := gate_of(site), _SoftGate)]

    def density_at(level: float) -> float:
        opened = sum(int((local(gate.importance.detach()) > level).sum()) for gate in gates)
        return pruner.ranks.count(opened) / pruner.total

    level = float(gates[0].level)
    here = density_at(level)
    slope = (here - density_at(level + step)) / step
    if abs(here - density) <= 0.02 and slope > 0.02:
        level += max(-step, min(step, (here - density) / slope))
    else:
        level = _exact_level(gates, density, pruner)
    for gate in gates:
        gate.level.fill_(level)
    pruner.ranking.kept = round(density_at(level) * pruner.total)


def _exact_level(gates: Sequence[_SoftGate], density: float, pruner: Pruner) -> float:
    keep = max(1, int(density * pruner.total + 0.5))
    last = threshold([Scores(local(gate.importance.detach())) for gate in gates], keep, pruner.ranks).value
    return last - 1e-6 * max(1.0, abs(last))  # the last kept score has to be above the level


def _separate(pruner: Pruner, margin: float) -> None:
    """Moves l0's logits to the side of CLOSED where the ranking wants them, no further than `margin` past it."""
    for i, site in enumerate(pruner.sites):
        gate = gate_of(site)
        assert isinstance(gate, _ConcreteGate)
        logits = local(gate.logits.detach())
        kept = pruner.ranking.mask(i).view_as(logits)
        logits.copy_(torch.where(kept, logits.clamp(min=CLOSED + margin), logits.clamp(max=CLOSED - margin)))
