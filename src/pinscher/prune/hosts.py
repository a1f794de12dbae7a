"""What the pruner has to know of optimisers and training loops: unwrap, read a step, refuse what cannot work."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from pinscher.prune.calibrated import Calibrated
from pinscher.prune.criteria import Criterion
from pinscher.prune.gates import Gated, Pst, gate_of
from pinscher.prune.masking import Ranks
from pinscher.prune.sharding import local
from pinscher.prune.sites import Site, clean_name


def unwrap(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimiser inside Accelerate's wrapper; a DeepSpeed engine is refused."""
    while True:
        kind = type(optimizer)
        if "deepspeed" in kind.__module__.lower() or "deepspeed" in kind.__name__.lower():
            raise TypeError(
                "DeepSpeed cannot be used: its engine steps on flattened copies of the weights, out of the pruner's "
                "reach. Use DDP or FSDP2 instead."
            )
        if not hasattr(optimizer, "optimizer"):
            break
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"attach() needs a torch.optim.Optimizer, not {kind.__name__}")
    return optimizer


def check(optimizer: torch.optim.Optimizer, sites: Sequence[Site], criterion: Criterion) -> None:
    """Refuses an optimiser that would leave the pruner without gradients or with stale ones."""
    for site in sites:
        owner = site.owner
        if hasattr(owner, "_in_backward_optimizers") or getattr(owner, "_post_accumulate_grad_hooks", None):
            raise TypeError(
                f"{site.name} is updated inside backward (a post-accumulate-grad hook): its gradient is gone before "
                "all weights can be ranked together. Call optimizer.step() after backward instead."
            )
    inside = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if isinstance(criterion, Gated):
        wanted = [(site.name, p) for site in sites for p in gate_of(site).parameters() if p.requires_grad]
        if any(id(p) not in inside for _, p in wanted):
            raise ValueError(
                "the learned masks' parameters are not in this optimiser. Build it after the pruner, from "
                "pruner.param_groups()."
            )
        masks = {id(p) for _, p in wanted}
        if any(len({id(p) in masks for p in group["params"]}) > 1 for group in optimizer.param_groups):
            raise ValueError(
                "the learned masks share a parameter group with the weights, so they would train at the weights' "
                "learning rate. Build the optimiser from pruner.param_groups() instead of model.parameters()."
            )
    elif any(site.moving is not None for site in sites):
        moving = [p for site in sites if site.moving is not None for p in site.moving.parameters()]
        trained = [p for p in moving if p.requires_grad]
        if any(id(p) not in inside for p in trained):
            raise ValueError("the adapters are not in this optimiser: build it from pruner.param_groups().")
    elif criterion.needs_grad:
        missing = [site.name for site in sites if id(site.owner) not in inside or not site.owner.requires_grad]
        if missing:
            raise ValueError(
                f"{len(missing)} of {len(sites)} prunable matrices are frozen or not in this optimiser, for one "
                f"{missing[0]}. Train them, or leave them out with exclude_modules."
            )


def refuse_shards(sites: Sequence[Site], criterion: Criterion, made_before: bool) -> None:
    """Refuses what cannot be done with sharded weights, and the wrong order of sharding and pruner.

    Args:
        sites: the sharded matrices.
        criterion: the method.
        made_before: whether the pruner was made before the model was sharded.

    Raises:
        ValueError: with what to do instead.
    """
    if isinstance(criterion, Calibrated):
        raise ValueError(
            "sharded weights cannot be pruned by calibration: no process holds a whole matrix. Prune before sharding "
            "(prune_once on one process), or use another method."
        )
    if isinstance(criterion, Pst):
        raise ValueError(
            "pst cannot be used with sharded weights: its scores are products of factors that would be cut apart. Use "
            "DDP, or another method."
        )
    if isinstance(criterion, Gated) and not made_before:
        raise ValueError(
            "learned masks are parameters, which have to be sharded with the weights: make the Pruner first, then call "
            "fully_shard, then build the optimiser from pruner.param_groups()."
        )
    if made_before and not isinstance(criterion, Gated):
        raise ValueError(
            f"{sites[0].name} was sharded after the Pruner was made, which keeps scores of whole matrices: call "
            "fully_shard first, then make the Pruner, then the optimiser."
        )


def refuse_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A closure computes gradients inside the step, after the pruner has looked at them."""
    if kwargs.get("closure") is not None or any(callable(arg) for arg in args):
        raise TypeError("optimizer.step(closure) computes gradients inside the step; call backward() before step().")


def on_stack(frame: FrameType | None) -> bool:
    """Whether a call is still under way, seen from here. After an exception it is not, though nobody said so."""
    here: FrameType | None = sys._getframe(1)
    while frame is not None and here is not None:
        if here is frame:
            return True
        here = here.f_back
    return False


def skips(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a fused optimiser will leave this step out because GradScaler found infinities."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and float(found) > 0


def read_step(optimizer: torch.optim.Optimizer, sites: Sequence[Site]) -> None:
    """Notes each site's learning rate, and the scale its gradient still carries under a fused optimiser."""
    scale = getattr(optimizer, "grad_scale", None)
    rates = {id(p): float(group["lr"]) for group in optimizer.param_groups for p in group["params"]}
    for site in sites:
        site.lr = rates.get(id(site.owner), 0.0)
        site.grad_scale = 1.0 if scale is None else float(scale)


def probe_of(sites: Sequence[Site]) -> tuple[Site, int, float] | None:
    """One gradient entry that is not zero, by which `reread_scale` sees what the step did to scaled gradients."""
    if sites[0].grad_scale == 1.0:
        return None
    for site in sites:
        if (grad := site.grad) is not None and bool(grad.any()):
            place = int(grad.abs().argmax())
            return site, place, float(grad[place])
    return None


def reread_scale(sites: Sequence[Site], probe: tuple[Site, int, float] | None) -> None:
    """Torch's fused optimisers unscale gradients in place during the step: then they carry no scale any more."""
    if probe is None or (grad := probe[0].grad) is None or float(grad[probe[1]]) == probe[2]:
        return
    for site in sites:
        site.grad_scale = 1.0


def finite(gradients: Iterable[Tensor | None], ranks: Ranks) -> bool:
    """Whether all gradients are finite, on every rank. A finite sum says so at once; the rest is looked at closely."""
    seen = [local(g) for g in gradients if g is not None]
    bad = sum(not bool(g.sum(dtype=torch.float32).isfinite()) and not bool(g.isfinite().all()) for g in seen)
    return ranks.count(bad) == 0


def drop_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Makes the coming step change nothing: optimisers pass over parameters without a gradient."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def freeze_backbone(model: nn.Module, sites: Sequence[Site]) -> None:
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
