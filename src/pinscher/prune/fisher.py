"""oBERT: second-order pruning with a block Fisher matrix, once or along a schedule.

The change of the loss is ½ δᵀFδ, with F estimated from gradients in blocks along its diagonal. Pruning weight q costs
ρ_q = w_q² / (2 [F⁻¹]_qq); pruning a set Q moves the remaining weights by δ = - F⁻¹_:Q (F⁻¹_QQ)⁻¹ w_Q.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pinscher.prune.criteria import CRITERIA, Criterion
from pinscher.prune.masking import Scores
from pinscher.prune.sites import Site
from pinscher.settings import COUNT, POSITIVE, setting

CHUNK = 1 << 22  # numbers of the inverse Fisher matrix that exist at a time (32 MB)


@CRITERIA.register("obert")
@dataclass
class Obert(Criterion):
    """Second-order pruning with a block Fisher matrix (Kurtic et al. 2022), ranked globally.

    F = damping · I + 1/m Σ g gᵀ over the last m = `gradients` gradients, in blocks of `block` neighbouring weights. The
    saliency is w² / (2 [F⁻¹]_ii). With `update` the weights that stay are moved to make up for all pruned weights of
    their block together. The gradients are kept, m numbers a weight; F⁻¹ exists in parts only.
    """

    gradients: int = setting(50, takes=COUNT)
    block: int = setting(50, takes=COUNT)
    damping: float = setting(1e-7, takes=POSITIVE)
    update: bool = True

    adaptable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._ready: dict[str, Tensor] = {}  # saliencies, only during a ranking

    @classmethod
    def prunes_once(cls) -> bool:
        return True

    def calibration_rows(self, batch_size: int) -> int:
        return self.gradients * batch_size

    def prepare(self, site: Site, state_dtype: torch.dtype) -> None:
        dtype = torch.float64 if site.owner.dtype == torch.float64 else state_dtype
        weight = site.weight
        if site.stride < site.numel and site.stride % self.block:
            raise ValueError(
                f"obert's blocks of {self.block} weights would be cut where {site.name} is: each process holds "
                f"{site.stride:,} of its weights. Choose a block that divides that, options={{'block': …}}."
            )
        site.state["gradients"] = torch.zeros(self.gradients, weight.numel(), dtype=dtype, device=weight.device)
        site.state["seen"] = torch.zeros(1, dtype=torch.int64)

    def observe(self, site: Site, t: int, closing: int) -> None:
        place = site.state["gradients"][int(site.state["seen"]) % self.gradients]
        grad = site.grad
        if grad is None:  # the matrix was not used in this step
            place.zero_()
        else:
            place.copy_(grad if site.grad_scale == 1.0 else grad / site.grad_scale)
        site.state["seen"] += 1

    def ready(self, site: Site) -> None:
        weight = site.weight
        weight = weight if weight.dtype == torch.float64 else weight.float()
        known = self._known(site)
        scores = saliency(weight, known, self.damping, self.block) if len(known) else torch.zeros_like(weight)
        self._ready[site.name] = scores

    def scores(self, site: Site) -> Scores:
        if site.name not in self._ready:
            self.ready(site)
        return Scores(self._ready[site.name])

    def compensate(self, site: Site, pruned: Tensor) -> None:
        self._ready.pop(site.name, None)
        if self.update:
            compensate_(site.weight, self._known(site), pruned, self.damping, self.block)

    def _known(self, site: Site) -> Tensor:
        return site.state["gradients"][: int(site.state["seen"])]


def inverse_fisher(gradients: Tensor, damping: float) -> Tensor:
    """The inverse of F = damping · I + 1/m Σ g gᵀ for every block, by m rank-one updates (Sherman-Morrison-Woodbury).

        F⁻¹ <- F⁻¹ - F⁻¹ g gᵀ F⁻¹ / (m + gᵀ F⁻¹ g)

    Args:
        gradients: [m, blocks, width], float64.
        damping: λ.
    """
    number, blocks, width = gradients.shape
    inverse = torch.eye(width, dtype=gradients.dtype, device=gradients.device).div_(damping).repeat(blocks, 1, 1)
    for grad in gradients:
        moved = torch.bmm(inverse, grad[:, :, None])
        scale = number + (grad * moved[:, :, 0]).sum(1)
        inverse.baddbmm_(moved / scale[:, None, None], moved.transpose(1, 2), alpha=-1.0)
    return inverse


def _chunks(gradients: Tensor, width: int) -> Iterator[tuple[slice, Tensor]]:
    """Cuts gradients [m, n] into (flat slice, [m, blocks, width] in float64), the last block filled up with zeros."""
    number, size = gradients.shape
    step = max(1, CHUNK // (width * width)) * width
    for start in range(0, size, step):
        at = slice(start, min(start + step, size))
        yield at, _blocks(gradients[:, at].double(), width).view(number, -1, width)


def saliency(weight: Tensor, gradients: Tensor, damping: float, width: int) -> Tensor:
    """The flat ρ = w² / (2 [F⁻¹]_ii) of every weight, from its recent gradients [m, n]."""
    found = torch.empty_like(weight)
    for at, grads in _chunks(gradients, width):
        diagonal = inverse_fisher(grads, damping).diagonal(dim1=1, dim2=2).reshape(-1)[: at.stop - at.start]
        found[at] = (weight[at].double().square() / (2 * diagonal)).to(found.dtype)
    return found


def compensate_(weight: Tensor, gradients: Tensor, pruned: Tensor, damping: float, width: int) -> None:
    """Moves the weights that stay by δ = - F⁻¹_:Q (F⁻¹_QQ)⁻¹ w_Q, with Q all pruned weights of a block together."""
    for at, grads in _chunks(gradients, width):
        inverse = inverse_fisher(grads, damping)
        gone = _blocks(pruned[at], width).view(-1, width)
        values = _blocks(weight[at].double(), width).view(-1, width)
        both = gone[:, :, None] & gone[:, None, :]
        eye = torch.eye(width, dtype=inverse.dtype, device=inverse.device)
        inner = torch.where(both, inverse, eye * damping**-1)  # the identity where nothing is pruned, in F⁻¹'s scale
        pull = torch.linalg.solve(inner, (values * gone)[:, :, None])
        values -= torch.bmm(inverse, pull)[:, :, 0]
        weight[at] = values.masked_fill_(gone, 0.0).reshape(-1)[: at.stop - at.start].to(weight.dtype)


def _blocks(flat: Tensor, width: int) -> Tensor:
    """Fills the last dimension up with zeros to a multiple of `width`."""
    return torch.nn.functional.pad(flat, (0, -flat.shape[-1] % width))
