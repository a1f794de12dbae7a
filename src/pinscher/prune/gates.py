"""Learned masks: movement, soft movement, hard concrete (l0) and PST.

A gate is a torch parametrization of a module's weight: the optimiser trains the weight below it and the gate's own
parameters, the forward pass sees the gated weight. `Pruner.finish` bakes it into a plain weight with exact zeros.

Straight-through: with W' = W * M(S) the scores receive dL/dS = dL/dW' * W, whatever M is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from pinscher.prune.criteria import CRITERIA, Criterion
from pinscher.prune.masking import Scores
from pinscher.prune.sharding import local
from pinscher.prune.sites import Site

BETA, GAMMA, ZETA = 2 / 3, -0.1, 1.1  # the hard-concrete distribution of Louizos et al. 2018
CLOSED = math.log(-GAMMA / ZETA)  # a hard-concrete gate is exactly zero at test time up to this logit


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


class Gate(nn.Module):
    """The parametrization of one site's weight. `mask` is what the last masking chose."""

    mask: Tensor
    shards: ClassVar[bool] = True  # whether the mask is a frozen parameter: FSDP2 shards those, but no buffers

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
        """The weight as it is stored: plain, with exact zeros where the mask is."""
        return weight * self.mask


@dataclass
class Gated(Criterion):
    """What all learned masks share. `score_lr` is the learning rate of the gates' own parameters."""

    score_lr: float = 1e-2

    freezes: ClassVar[bool] = False  # whether the model's own weights stay as they are
    adds_penalty: ClassVar[bool] = False

    def make_gate(self, weight: Tensor) -> Gate:
        raise NotImplementedError

    def scores(self, site: Site) -> Scores:
        with torch.no_grad():
            return Scores(local(gate_of(site).scores(site.owner)))

    def add_penalty(self, site: Site, strength: float, total: int) -> None:
        """Adds the gradient of the sparsity penalty, averaged over `total` weights, to the gate's own."""

    def close(self, gate: Gate, zeros: Tensor) -> None:
        """Closes a new gate where the checkpoint already holds zeros."""
        gate.mask.copy_(~zeros)


def is_gated(site: Site) -> bool:
    """Whether a gate stands above a site's weight."""
    return parametrize.is_parametrized(site.module, site.parameter) and isinstance(
        site.module.parametrizations[site.parameter][0],  # type: ignore[index]
        Gate,
    )


def gate_of(site: Site) -> Gate:
    gate = site.module.parametrizations[site.parameter][0]  # type: ignore[index]
    assert isinstance(gate, Gate)
    return gate


# ---------------------------------------------------------------- movement


class _ScoreGate(Gate):
    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight)
        self.importance = nn.Parameter(torch.zeros_like(weight))

    def gated(self, weight: Tensor) -> Tensor:
        return _masked(weight, self.importance, self.mask)

    def scores(self, weight: Tensor) -> Tensor:
        return self.importance


@CRITERIA.register("movement")
@dataclass
class Movement(Gated):
    """Hard movement pruning (Sanh et al. 2020): keep the top r of the learned scores."""

    def make_gate(self, weight: Tensor) -> Gate:
        return _ScoreGate(weight)

    def close(self, gate: Gate, zeros: Tensor) -> None:
        assert isinstance(gate, _ScoreGate)
        super().close(gate, zeros)
        gate.importance.data.masked_fill_(zeros, -self.score_lr)


class _SoftGate(_ScoreGate):
    """Open where the score is above `level`, until a masking fixes the mask."""

    level: Tensor
    fixed: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight)
        self.register_buffer("level", torch.tensor(-torch.inf, dtype=torch.float64))
        self.register_buffer("fixed", torch.tensor(False))

    def gated(self, weight: Tensor) -> Tensor:
        return _masked(weight, self.importance, self._kept())

    def baked(self, weight: Tensor) -> Tensor:
        return weight * self._kept()

    def _kept(self) -> Tensor:
        return self.mask if self.fixed else self.importance.detach() > self.level


@CRITERIA.register("smvp")
@dataclass
class SoftMovement(Gated):
    """Soft movement pruning (Sanh et al. 2020): keep where sigmoid(S) > tau, with a penalty on mean sigmoid(S).

    The original reaches some sparsity for some (tau, lambda). Here a controller moves tau after every step so that the
    density follows the schedule; lambda (`penalty`) rises with the sparsity asked for.
    """

    penalty: float = 400.0

    adds_penalty: ClassVar[bool] = True

    def make_gate(self, weight: Tensor) -> Gate:
        return _SoftGate(weight)

    def close(self, gate: Gate, zeros: Tensor) -> None:
        assert isinstance(gate, _SoftGate)
        gate.importance.data.masked_fill_(zeros, -self.score_lr)
        gate.level.fill_(-self.score_lr / 2)

    def add_penalty(self, site: Site, strength: float, total: int) -> None:
        gate = gate_of(site)
        assert isinstance(gate, _SoftGate)
        if gate.importance.grad is not None:
            open_ = local(gate.importance.detach()).sigmoid()
            local(gate.importance.grad).addcmul_(open_, 1 - open_, value=self.penalty * strength / total)


# ---------------------------------------------------------------- hard concrete


class _ConcreteGate(Gate):
    fixed: Tensor

    def __init__(self, weight: Tensor, start: float) -> None:
        super().__init__(weight)
        self.logits = nn.Parameter(torch.full_like(weight, start))
        self.register_buffer("fixed", torch.tensor(False))

    def gated(self, weight: Tensor) -> Tensor:
        if self.fixed:
            return weight * self._openness(self.logits) * self.mask
        if not self.training:
            return weight * self._openness(self.logits)
        noise = torch.empty_like(self.logits).uniform_(1e-6, 1 - 1e-6).logit_()
        return weight * self._openness((noise + self.logits) / BETA)

    def scores(self, weight: Tensor) -> Tensor:
        return self.logits

    def baked(self, weight: Tensor) -> Tensor:
        return weight * self._openness(self.logits) * self.mask

    @staticmethod
    def _openness(logits: Tensor) -> Tensor:
        return (logits.sigmoid() * (ZETA - GAMMA) + GAMMA).clamp(0, 1)


@CRITERIA.register("l0")
@dataclass
class L0(Gated):
    """Hard-concrete gates with a penalty on the expected number of open ones (Louizos et al. 2018).

    The original reaches some sparsity for some lambda. Here, at every masking, the gates that the schedule wants closed
    (open) are moved to the closed (open) side of the point where a gate is exactly zero, by `margin`: the nearest
    logits that meet the constraint. In between they train freely.
    """

    score_lr: float = 1e-1
    penalty: float = 1.0
    start: float = 2.5
    margin: float = 0.5

    adds_penalty: ClassVar[bool] = True

    def make_gate(self, weight: Tensor) -> Gate:
        return _ConcreteGate(weight, self.start)

    def close(self, gate: Gate, zeros: Tensor) -> None:
        assert isinstance(gate, _ConcreteGate)
        gate.logits.data.masked_fill_(zeros, CLOSED - self.margin)

    def add_penalty(self, site: Site, strength: float, total: int) -> None:
        gate = gate_of(site)
        assert isinstance(gate, _ConcreteGate)
        if gate.logits.grad is not None:
            open_ = (local(gate.logits.detach()) - BETA * CLOSED).sigmoid()
            local(gate.logits.grad).addcmul_(open_, 1 - open_, value=self.penalty * strength / total)


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
class Pst(Gated):
    """Parameter-efficient sparse training (Li et al. 2022): the weight is W + beta U V.

    Ranked within each matrix by |W + beta U V| + alpha1 A B + alpha2 (R + C). Only U, V, A, B, R, C and the head train.
    """

    score_lr: float = 1e-3
    rank: int = 8
    alpha1: float = 1.0
    alpha2: float = 1.0
    beta: float = 1.0

    scope: ClassVar[Literal["global", "matrix"]] = "matrix"
    freezes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank must be at least 1, not {self.rank}")

    def make_gate(self, weight: Tensor) -> Gate:
        return _PstGate(weight, self.rank, self.alpha1, self.alpha2, self.beta)


@torch.no_grad()
def plain_state_dict(model: nn.Module, sites: Iterable[Site]) -> dict[str, Tensor]:
    """The model's state dict as if its gates were baked now: ordinary names, exact zeros. The model stays as it is."""
    state: dict[str, Tensor] = dict(model.state_dict())
    for site in sites:
        gate, owner = gate_of(site), site.owner
        baked = owner.detach()
        if not gate.bypass:  # which is baked already
            baked = gate.baked(baked).masked_fill(~gate.mask, 0.0)
        for module in [site.module, *site.shared_with]:
            prefix = next(name for name, found in model.named_modules(remove_duplicate=False) if found is module)
            inside = f"{prefix}.parametrizations.{site.parameter}."
            state = {name: tensor for name, tensor in state.items() if not name.startswith(inside)}
            state[f"{prefix}.{site.parameter}"] = baked
    return state
