"""Learned masks: movement, soft movement, hard concrete (l0) and PST.

A gate is a torch parametrization of a module's weight: the optimiser trains the weight below it and the gate's own
parameters, the forward pass sees the gated weight. `Pruner.finish` bakes it into a plain weight with exact zeros.

Straight-through: with W' = W * M(S) the scores receive dL/dS = dL/dW' * W, whatever M is.

Movement and PST are ranked like any criterion. Soft movement and l0 do not reach a given sparsity by themselves: after
every step `steer` moves what decides which gates are open, and the last step projects to exactly the target. How far
off the gates were before that is kept as a `Projection`.

A new learned mask is a `Gate` with its tensors, and a registered `Gated` with its options.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from pinscher.models.names import clean_name
from pinscher.prune.calibration import Batches
from pinscher.prune.criteria import CRITERIA, Criterion
from pinscher.prune.masking import Scores, threshold
from pinscher.prune.ranking import Projection, Ranking
from pinscher.prune.schedule import Schedule
from pinscher.prune.sharding import is_sharded, local
from pinscher.prune.sites import Site
from pinscher.prune.weights import Weights, trained_by
from pinscher.settings import COUNT, NOT_NEGATIVE, RATE, Number, setting

BETA, GAMMA, ZETA = 2 / 3, -0.1, 1.1  # the hard-concrete distribution of Louizos et al. 2018
CLOSED = math.log(-GAMMA / ZETA)  # a hard-concrete gate is exactly zero at test time up to this logit
LOGITS = 30  # a sigmoid of more is 1 in float32, and its gradient 0
MILLION = 1_000_000
REFERENCE = 85e6  # weights in BERT-base's blocks: penalties are given for that many, and scaled for others


# ---------------------------------------------------------------- a gate


class Gate(nn.Module):
    """The parametrization of one site's weight. `mask` is True where the last ranking kept a weight.

    Subclasses override `gated` and, for learned masks, `scores`; the rest where they differ.
    """

    mask: Tensor
    shards: ClassVar[bool] = True  # whether the mask is a frozen parameter: FSDP2 shards parameters, but no buffers

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.bypass = False  # lets the weight through as it is
        mask = torch.ones_like(weight, dtype=torch.bool)
        if self.shards:
            self.mask = nn.Parameter(mask, requires_grad=False)
        else:
            self.register_buffer("mask", mask)

    def forward(self, weight: Tensor) -> Tensor:
        return weight if self.bypass else self.gated(weight)

    def gated(self, weight: Tensor) -> Tensor:
        """The weight that the forward pass of the model sees."""
        raise NotImplementedError

    def scores(self, weight: Tensor) -> Tensor:
        """What the site's weights are ranked by, shaped like the weight."""
        raise NotImplementedError

    def baked(self, weight: Tensor) -> Tensor:
        """The weight as it would be stored, before the exact zeros of the mask."""
        return weight * self.mask

    def plain(self, weight: Tensor) -> Tensor:
        """The weight as it is stored: plain, with exact zeros where the mask is False."""
        return self.baked(weight).masked_fill(~self.mask, 0.0)

    def is_open(self) -> Tensor:
        """Which of this rank's positions are open now, at test time."""
        return local(self.mask.detach()).clone()

    def close(self, zeros: Tensor) -> None:
        """Closes a new gate where the model already has zeros."""
        self.mask.copy_(~zeros)

    def steer(self, kept: Tensor) -> None:
        """Moves the gate's parameters towards a mask of this rank's positions; they may train away from it again."""

    def project(self, kept: Tensor) -> None:
        """Opens exactly these of this rank's positions."""
        local(self.mask.detach()).copy_(kept)

    def add_penalty(self, strength: float, total: int) -> None:
        """Adds the gradient of the sparsity penalty, averaged over `total` weights, to the gate's own."""


def gate_above(module: nn.Module, parameter: str) -> Gate | None:
    """The gate above a module's parameter, if there is one."""
    if not parametrize.is_parametrized(module, parameter):
        return None
    first = module.parametrizations[parameter][0]  # type: ignore[index]
    return first if isinstance(first, Gate) else None  # others may parametrize weights too


def gate_of(site: Site) -> Gate:
    """The gate above a site's weight."""
    gate = gate_above(site.module, site.parameter)
    assert gate is not None
    return gate


# ---------------------------------------------------------------- weights below gates


class GatedWeights(Weights):
    """Weights with a gate above each of them. `unpruned` are further matrices with gates, which are not masked."""

    stores_masks: ClassVar[bool] = True

    def __init__(self, model: nn.Module, sites: Sequence[Site], criterion: Criterion) -> None:
        super().__init__(model, sites, criterion)
        self.unpruned: Sequence[Site] = ()
        self.finished = False

    @property
    def all_sites(self) -> list[Site]:
        return [*self.sites, *self.unpruned]

    def put_above(self, site: Site, gate: Gate) -> None:
        """Parametrizes a site's weight, in all modules that use it."""
        for module in [site.module, *site.shared_with]:
            parametrize.register_parametrization(module, site.parameter, gate)
        gate.train(site.module.training)

    def finish(self) -> nn.Module:
        """Turns gated weights into plain ones.

        FSDP2 identifies a sharded parameter by its place in the module tree, so its gate stays and passes the weight
        through.
        """
        for site in self.all_sites:
            gate, owner = gate_of(site), site.owner
            plain = gate.plain(owner.detach())
            if is_sharded(owner):
                local(owner.detach()).copy_(local(plain))
                gate.bypass = True
                continue
            for module in [site.module, *site.shared_with]:
                parametrize.remove_parametrizations(module, site.parameter, leave_parametrized=False)
            site.owner.data.copy_(plain)
        self.finished = True
        return self.model

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        found = super().tensors()
        for site in self.all_sites:
            stored = found.setdefault(site.name, {})
            if not self.finished:
                stored["weight"] = site.owner.detach()
                stored.update({f"gate.{name}": tensor for name, tensor in gate_of(site).state_dict().items()})
        return found

    def own_tensors(self) -> list[Tensor]:
        gates = [] if self.finished else [gate_of(site) for site in self.sites]
        return super().own_tensors() + [local(tensor) for gate in gates for tensor in gate.state_dict().values()]


class LearnedWeights(GatedWeights):
    """Weights below gates that learn."""

    criterion: Gated[Any]

    def refuse_shards(self, made_before: bool) -> None:
        if self.criterion.unshardable is not None:
            raise ValueError(self.criterion.unshardable)
        if not made_before:
            raise ValueError(
                "learned masks are parameters and have to be sharded with the weights: make the Pruner first, then "
                "call fully_shard, then build the optimiser from pruner.param_groups()."
            )

    def refuse_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        masks = {id(p) for p in self.parameters()}
        if not masks <= trained_by(optimizer):
            raise ValueError(
                "the learned masks' parameters are not in this optimiser. Build it after the pruner, from "
                "pruner.param_groups()."
            )
        if any(len({id(p) in masks for p in group["params"]}) > 1 for group in optimizer.param_groups):
            raise ValueError(
                "the learned masks share a parameter group with the weights, so they would train at the weights' "
                "learning rate. Build the optimiser from pruner.param_groups() instead of model.parameters()."
            )

    def install(self, sparse: bool) -> None:
        if self.criterion.freezes:
            _freeze_backbone(self.model, self.sites)
        for site in self.sites:
            weight = site.owner.detach()
            gate = self.criterion.make_gate(weight).to(weight.device)
            if sparse:
                gate.close(weight == 0)
            self.put_above(site, gate)

    def parameters(self) -> list[nn.Parameter]:
        if self.finished:
            return []
        return [p for site in self.sites for p in gate_of(site).parameters() if p.requires_grad]

    def param_groups(self) -> list[dict[str, Any]]:
        rate = {} if self.criterion.score_lr is None else {"lr": self.criterion.score_lr}
        return [{"params": self.parameters(), "weight_decay": 0.0, **rate}]

    def gradients(self) -> Iterator[Tensor | None]:
        return (parameter.grad for parameter in self.parameters())

    def apply(self, ranking: Ranking) -> None:
        """Does nothing: gates are masked when they are projected."""

    @torch.no_grad()
    def model_state_dict(self) -> dict[str, Any]:
        if gate_above(self.sites[0].module, self.sites[0].parameter) is None:  # finished; those of shards stay
            return self.model.state_dict()
        state: dict[str, Tensor] = dict(self.model.state_dict())
        for site in self.sites:
            gate, owner = gate_of(site), site.owner.detach()
            weight = owner if gate.bypass else gate.plain(owner)  # bypassed gates are baked already
            for module in [site.module, *site.shared_with]:
                prefix = next(n for n, found in self.model.named_modules(remove_duplicate=False) if found is module)
                inside = f"{prefix}.parametrizations.{site.parameter}."
                state = {name: tensor for name, tensor in state.items() if not name.startswith(inside)}
                state[f"{prefix}.{site.parameter}"] = weight
        return state


def _freeze_backbone(model: nn.Module, sites: Sequence[Site]) -> None:
    """Freezes everything but the head: the largest part around the blocks that is not the whole, and all embeddings."""
    names = {clean_name(name) for name, _ in model.named_parameters()}
    for site in sites:
        part = site.block or site.name
        while "." in part and not all(name.startswith(part.rpartition(".")[0] + ".") for name in names):
            part = part.rpartition(".")[0]
        for name, parameter in model.named_parameters():
            if clean_name(name).startswith(part + "."):
                parameter.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.weight.requires_grad_(False)
    for site in sites:
        site.owner.requires_grad_(False)


# ---------------------------------------------------------------- what all learned masks share

G = TypeVar("G", bound=Gate)


@dataclass
class Gated(Criterion, Generic[G]):
    """What all learned masks share. `score_lr` is the learning rate of the gates' own parameters; None: the model's."""

    score_lr: float | None = setting(1e-2, takes=RATE)

    weights: ClassVar[type[Weights]] = LearnedWeights
    learns_masks: ClassVar[bool] = True
    adaptable: ClassVar[bool] = False
    freezes: ClassVar[bool] = False  # whether the model's own weights stay as they are

    @property
    def moment(self) -> Literal["before", "after", "never"]:
        return "never"

    def make_gate(self, weight: Tensor) -> G:
        """A new gate for a weight."""
        raise NotImplementedError

    def gates(self, ranking: Ranking) -> list[G]:
        """The gates of all sites."""
        return [cast(G, gate_of(site)) for site in ranking.sites]

    def scores(self, site: Site) -> Scores:
        with torch.no_grad():
            return Scores(local(gate_of(site).scores(site.owner)))

    def add_penalty(self, ranking: Ranking, schedule: Schedule, t: int) -> None:
        strength = self.strength(ranking, schedule, t) * ranking.total / REFERENCE
        for site in ranking.sites:
            gate_of(site).add_penalty(strength * site.grad_scale, ranking.total)

    def strength(self, ranking: Ranking, schedule: Schedule, t: int) -> float:
        """A factor of the penalty in step t."""
        return 1.0

    def steer(self, ranking: Ranking, schedule: Schedule, t: int) -> None:
        density = schedule.density(t)
        if t > schedule.total or density >= 1.0:
            return
        if t == schedule.total or self.projects(ranking, schedule, t):
            self.project(ranking, density)
        else:
            self.approach(ranking, density, schedule.due(t))

    def projects(self, ranking: Ranking, schedule: Schedule, t: int) -> bool:
        """Whether the gates are set to an exact mask after step t. They always are after the last."""
        return schedule.due(t)

    def approach(self, ranking: Ranking, density: float, due: bool) -> None:
        """Brings the gates nearer to a density after a step without projection. `due`: the schedule wants a ranking."""

    def choose_masks(
        self, ranking: Ranking, density: float, model: nn.Module, batches: Batches | None, scope: str | None
    ) -> None:
        self.project(ranking, density)

    def project(self, ranking: Ranking, density: float) -> None:
        """Sets every gate's mask to the exact top of the ranking."""
        gates = self.gates(ranking)
        was_open = [gate.is_open() for gate in gates]
        ranking.rank(density)
        changed = 0
        for i, (gate, before) in enumerate(zip(gates, was_open, strict=True)):
            kept = ranking.mask(i).view_as(before)
            changed += int((kept != before).sum())
            gate.project(kept)
        opened = ranking.ranks.count(sum(int(mask.sum()) for mask in was_open))
        ranking.projection = Projection(opened / ranking.total, ranking.ranks.count(changed) / ranking.total)


# ---------------------------------------------------------------- movement


class _Masked(torch.autograd.Function):
    """weight * mask, passing the straight-through gradient to the scores."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, scores: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(weight, mask)
        return weight * mask

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        weight, mask = ctx.saved_tensors
        return grads[0] * mask, grads[0] * weight, None


_masked: Callable[[Tensor, Tensor, Tensor], Tensor] = _Masked.apply


class _ScoreGate(Gate):
    """Learns a score for every weight. `closed` is the score of weights that are zero from the start."""

    def __init__(self, weight: Tensor, spread: float, step: float) -> None:
        super().__init__(weight)
        self.closed = -spread - step
        self.importance = nn.Parameter(spread * (_quantiles(weight.abs()) - 1.0))

    def gated(self, weight: Tensor) -> Tensor:
        return _masked(weight, self.importance, self.mask)

    def scores(self, weight: Tensor) -> Tensor:
        return self.importance

    def close(self, zeros: Tensor) -> None:
        super().close(zeros)
        self.importance.data.masked_fill_(zeros, self.closed)


def _quantiles(values: Tensor) -> Tensor:
    """The quantile of each value, from 0 for the smallest to below 1."""
    order = values.flatten().argsort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return (places / len(order)).to(values.dtype).view_as(values)


@CRITERIA.register("movement")
@dataclass
class Movement(Gated[_ScoreGate]):
    """Hard movement pruning (Sanh et al. 2020): keep the top r of the learned scores.

    Scores that start at 0 are noise when a short run starts to prune. They start in the order of |W| instead, `spread`
    apart at the most; what moves by `score_lr` in a step overcomes that in a part of the run. 0 is the authors' start.
    """

    score_lr: float = setting(1e-2, takes=RATE)
    spread: float = setting(0.5, takes=NOT_NEGATIVE)

    searched: ClassVar[tuple[str, tuple[float, ...]] | None] = ("score_lr", (1e-2, 3e-2))

    def make_gate(self, weight: Tensor) -> _ScoreGate:
        return _ScoreGate(weight, self.spread, self.score_lr)


class _SoftGate(_ScoreGate):
    """Open where the score is above `level`, until a projection fixes the mask."""

    level: Tensor
    fixed: Tensor

    def __init__(self, weight: Tensor, spread: float, step: float, penalty: float) -> None:
        super().__init__(weight, spread, step)
        self.step, self.penalty = step, penalty
        self.register_buffer("level", torch.tensor(-torch.inf, dtype=torch.float64))
        self.register_buffer("fixed", torch.tensor(False))

    def gated(self, weight: Tensor) -> Tensor:
        return _masked(weight, self.importance, self._kept())

    def baked(self, weight: Tensor) -> Tensor:
        return weight * self._kept()

    def is_open(self) -> Tensor:
        return super().is_open() if self.fixed else local(self.importance.detach()) > self.level

    def close(self, zeros: Tensor) -> None:
        self.importance.data.masked_fill_(zeros, self.closed)
        self.level.fill_(self.closed + self.step / 2)

    def project(self, kept: Tensor) -> None:
        super().project(kept)
        self.fixed.fill_(True)

    def add_penalty(self, strength: float, total: int) -> None:
        if self.importance.grad is not None:
            open_ = local(self.importance.detach()).sigmoid()
            local(self.importance.grad).addcmul_(open_, 1 - open_, value=self.penalty * strength / total)

    def above(self, level: float) -> int:
        """How many of this rank's scores are above a level."""
        return int((local(self.importance.detach()) > level).sum())

    def _kept(self) -> Tensor:
        return self.mask if self.fixed else self.importance.detach() > self.level


@CRITERIA.register("smvp")
@dataclass
class SoftMovement(Gated[_SoftGate]):
    """Soft movement pruning (Sanh et al. 2020): keep where sigmoid(S) > tau, with a penalty on mean sigmoid(S).

    The original reaches some sparsity for some (tau, lambda). Here tau moves after every step so that the density
    follows the schedule. lambda (`penalty`) is the authors' for BERT-base and counts from the first step on. Scores
    start as those of `Movement` do.
    """

    score_lr: float = setting(1e-2, takes=RATE)
    spread: float = setting(0.5, takes=NOT_NEGATIVE)
    penalty: float = setting(400.0, takes=NOT_NEGATIVE)

    searched: ClassVar[tuple[str, tuple[float, ...]] | None] = ("penalty", (100.0, 400.0))

    def make_gate(self, weight: Tensor) -> _SoftGate:
        return _SoftGate(weight, self.spread, self.score_lr, self.penalty)

    def projects(self, ranking: Ranking, schedule: Schedule, t: int) -> bool:
        # A single level ignores units, so with units the model has to recover from the projection in the cool-down.
        return ranking.layout is not None and schedule.settled(t) and schedule.due(t)

    def approach(self, ranking: Ranking, density: float, due: bool) -> None:
        """One Newton step on density(level) = target, or the exact level where that would be far off."""
        gates, step = self.gates(ranking), self.score_lr

        def density_at(level: float) -> float:
            return ranking.ranks.count(sum(gate.above(level) for gate in gates)) / ranking.total

        level = float(gates[0].level)
        here = density_at(level)
        slope = (here - density_at(level + step)) / step
        if abs(here - density) <= 0.02 and slope > 0.02:
            level += max(-step, min(step, (here - density) / slope))
        else:
            level = _exact_level(gates, density, ranking)
        for gate in gates:
            gate.level.fill_(level)
        ranking.kept = round(density_at(level) * ranking.total)


def _exact_level(gates: Sequence[_SoftGate], density: float, ranking: Ranking) -> float:
    keep = max(1, int(density * ranking.total + 0.5))
    last = threshold([Scores(local(gate.importance.detach())) for gate in gates], keep, ranking.ranks).value
    return last - 1e-6 * max(1.0, abs(last))  # the last kept score has to be above the level


# ---------------------------------------------------------------- hard concrete


class _ConcreteGate(Gate):
    """Open with a learned probability in training, and to a degree given by its logit at test time. A projection ends
    this: the degree becomes a factor of the weight, and from then on the gate is fully open or closed.
    """

    fixed: Tensor
    multiplier: Tensor

    def __init__(self, weight: Tensor, start: float, margin: float, penalty: float) -> None:
        super().__init__(weight)
        self.margin, self.penalty = margin, penalty
        self.logits = nn.Parameter(torch.full_like(weight, start))
        self.register_buffer("fixed", torch.tensor(False))
        self.register_buffer("multiplier", torch.tensor(1.0, dtype=torch.float64))  # of the penalty, for all gates

    def gated(self, weight: Tensor) -> Tensor:
        if self.fixed:  # DDP waits for a gradient of every parameter in every step, of the logits too
            return weight * self.mask + 0 * self.logits
        if not self.training:
            return weight * self._openness(self.logits)
        noise = torch.empty_like(self.logits).uniform_(1e-6, 1 - 1e-6).logit_()
        return weight * self._openness((noise + self.logits) / BETA)

    def scores(self, weight: Tensor) -> Tensor:
        return self.logits

    def baked(self, weight: Tensor) -> Tensor:
        return weight * self.mask if self.fixed else weight * self._openness(self.logits) * self.mask

    def is_open(self) -> Tensor:
        return super().is_open() if self.fixed else local(self.logits.detach()) > CLOSED

    def fold_(self, weight: Tensor) -> None:
        """Multiplies this rank's part of the weight by how far the gates are open at test time."""
        weight.mul_(self._openness(local(self.logits.detach())))

    def expected(self) -> int:
        """How many of this rank's gates are open, in expectation, in millionths: whole numbers add up to the same on
        any number of ranks.
        """
        return int((self._chances() * MILLION).long().sum())

    def close(self, zeros: Tensor) -> None:
        self.logits.data.masked_fill_(zeros, CLOSED - self.margin)

    def steer(self, kept: Tensor) -> None:
        """Moves logits to the side of CLOSED where the mask wants them, no further than `margin` past it."""
        logits = local(self.logits.detach())
        logits.copy_(torch.where(kept, logits.clamp(min=CLOSED + self.margin), logits.clamp(max=CLOSED - self.margin)))

    def project(self, kept: Tensor) -> None:
        super().project(kept)
        self.fixed.fill_(True)
        self.steer(kept)

    def add_penalty(self, strength: float, total: int) -> None:
        if self.logits.grad is not None:
            open_ = self._chances()
            local(self.logits.grad).addcmul_(open_, 1 - open_, value=self.penalty * strength / total)

    def _chances(self) -> Tensor:
        """The probability that each of this rank's gates is open at all."""
        return (local(self.logits.detach()) - BETA * CLOSED).sigmoid()

    @staticmethod
    def _openness(logits: Tensor) -> Tensor:
        return (logits.sigmoid() * (ZETA - GAMMA) + GAMMA).clamp(0, 1)


@CRITERIA.register("l0")
@dataclass
class L0(Gated[_ConcreteGate]):
    """Hard-concrete gates with a penalty on the expected number of open ones (Louizos et al. 2018).

    The original reaches some sparsity for some lambda (`penalty`). Here its multiplier is a Lagrangian one: it rises
    while more gates are expected to be open than the schedule wants, and falls while there are fewer. At every ranking
    the gates that the schedule wants closed (open) are also moved to the closed (open) side of the point where a gate
    is exactly zero, by `margin`: the nearest logits that meet the constraint. When the final density is reached the
    masks are fixed, and the cool-down trains plain weights.
    """

    score_lr: float = setting(1e-1, takes=RATE)
    penalty: float = setting(125.0, takes=NOT_NEGATIVE)
    start: float = setting(2.197, takes=Number(-LOGITS, LOGITS))
    margin: float = setting(0.5, takes=Number(0, LOGITS, above=True))
    pressure: float = setting(0.1, takes=NOT_NEGATIVE)  # the multiplier's gain in a step, by how much is too dense

    searched: ClassVar[tuple[str, tuple[float, ...]] | None] = ("penalty", (40.0, 125.0))

    def make_gate(self, weight: Tensor) -> _ConcreteGate:
        return _ConcreteGate(weight, self.start, self.margin, self.penalty)

    def strength(self, ranking: Ranking, schedule: Schedule, t: int) -> float:
        gates = self.gates(ranking)
        if gates[0].fixed:
            return 0.0
        expected = ranking.ranks.count(sum(gate.expected() for gate in gates)) / MILLION / ranking.total
        now = max(0.0, float(gates[0].multiplier) + self.pressure * (expected - schedule.density(t)))
        for gate in gates:
            gate.multiplier.fill_(now)
        return now

    def steer(self, ranking: Ranking, schedule: Schedule, t: int) -> None:
        if not self.gates(ranking)[0].fixed:
            super().steer(ranking, schedule, t)

    def projects(self, ranking: Ranking, schedule: Schedule, t: int) -> bool:
        return schedule.settled(t)

    def project(self, ranking: Ranking, density: float) -> None:
        """As for others; the degree to which gates were open becomes a factor of the weights."""
        fixed = bool(self.gates(ranking)[0].fixed)
        super().project(ranking, density)
        for site, gate in zip(ranking.sites, self.gates(ranking), strict=True):
            if not fixed:
                gate.fold_(local(site.owner.detach()))

    def approach(self, ranking: Ranking, density: float, due: bool) -> None:
        if due:
            ranking.rank(density)
            for i, gate in enumerate(self.gates(ranking)):
                gate.steer(ranking.mask(i).view(ranking.sites[i].part))


# ---------------------------------------------------------------- PST


class _PstGate(Gate):
    def __init__(self, weight: Tensor, rank: int, alpha1: float, alpha2: float, beta: float) -> None:
        super().__init__(weight)
        rows, columns = weight.shape
        self.alpha1, self.alpha2, self.beta = alpha1, alpha2, beta
        self.update_left = nn.Parameter(torch.randn(rows, rank, dtype=weight.dtype))
        self.update_right = nn.Parameter(torch.zeros(rank, columns, dtype=weight.dtype))
        self.score_left = nn.Parameter(torch.randn(rows, rank, dtype=weight.dtype))
        self.score_right = nn.Parameter(torch.zeros(rank, columns, dtype=weight.dtype))
        self.score_row = nn.Parameter(torch.zeros(rows, 1, dtype=weight.dtype))
        self.score_column = nn.Parameter(torch.zeros(1, columns, dtype=weight.dtype))

    def gated(self, weight: Tensor) -> Tensor:
        updated = self._updated(weight)
        return _masked(updated, updated.abs() + self._learned(), self.mask)

    def scores(self, weight: Tensor) -> Tensor:
        return self._updated(weight).abs() + self._learned()

    def baked(self, weight: Tensor) -> Tensor:
        return self._updated(weight) * self.mask

    def _updated(self, weight: Tensor) -> Tensor:
        return weight + self.beta * (self.update_left @ self.update_right)

    def _learned(self) -> Tensor:
        return self.alpha1 * (self.score_left @ self.score_right) + self.alpha2 * (self.score_row + self.score_column)


@CRITERIA.register("pst")
@dataclass
class Pst(Gated[_PstGate]):
    """Parameter-efficient sparse training (Li et al. 2022): the weight is W + beta U V.

    Ranked within each matrix by |W + beta U V| + alpha1 A B + alpha2 (R + C). Only U, V, A, B, R, C and the head train,
    by default at the model's learning rate, as in the authors' scripts.
    """

    score_lr: float | None = setting(None, takes=RATE)
    rank: int = setting(8, takes=COUNT)
    alpha1: float = 1.0
    alpha2: float = 1.0
    beta: float = 1.0

    scope: ClassVar[Literal["global", "matrix"]] = "matrix"
    freezes: ClassVar[bool] = True
    searched: ClassVar[tuple[str, tuple[float, ...]] | None] = ("score_lr", (1e-4, 1e-3))
    unshardable: ClassVar[str | None] = (
        "pst cannot be used with sharded weights: its scores are products of factors that would be cut apart. Use "
        "DDP, or another method."
    )

    def make_gate(self, weight: Tensor) -> _PstGate:
        return _PstGate(weight, self.rank, self.alpha1, self.alpha2, self.beta)
