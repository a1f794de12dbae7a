"""The pruner's interface to optimisers and training loops: unwrapping, reading a step, refusing unusable ones."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from pinscher.prune.masking import Ranks
from pinscher.prune.sharding import local
from pinscher.prune.sites import Site


def unwrap(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimiser inside Accelerate's wrapper; a DeepSpeed engine is an error."""
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


def refuse_early_updates(sites: Sequence[Site]) -> None:
    """Raises an error if a weight is updated inside backward."""
    for site in sites:
        owner = site.owner
        if hasattr(owner, "_in_backward_optimizers") or getattr(owner, "_post_accumulate_grad_hooks", None):
            raise TypeError(
                f"{site.name} is updated inside backward (a post-accumulate-grad hook): its gradient is gone before "
                "all weights can be ranked together. Call optimizer.step() after backward instead."
            )


def refuse_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises an error for a closure: it computes gradients inside the step, after the pruner has read them."""
    if kwargs.get("closure") is not None or any(callable(arg) for arg in args):
        raise TypeError("optimizer.step(closure) computes gradients inside the step; call backward() before step().")


def on_stack(frame: FrameType | None) -> bool:
    """Whether a call is still on the stack; after an exception it is not."""
    here: FrameType | None = sys._getframe(1)
    while frame is not None and here is not None:
        if here is frame:
            return True
        here = here.f_back
    return False


def skips(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a fused optimiser will skip this step because GradScaler found infinities."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and float(found) > 0


def read_step(optimizer: torch.optim.Optimizer, sites: Sequence[Site]) -> None:
    """Reads each site's learning rate, and the scale its gradient still has under a fused optimiser."""
    scale = getattr(optimizer, "grad_scale", None)
    rates = {id(p): float(group["lr"]) for group in optimizer.param_groups for p in group["params"]}
    for site in sites:
        site.lr = rates.get(id(site.owner), 0.0)
        site.grad_scale = 1.0 if scale is None else float(scale)


def probe_of(sites: Sequence[Site]) -> tuple[Site, int, float] | None:
    """A nonzero entry of a scaled gradient, which shows `reread_scale` whether the step unscaled it."""
    if sites[0].grad_scale == 1.0:
        return None
    for site in sites:
        if (grad := site.grad) is not None and bool(grad.any()):
            place = int(grad.abs().argmax())
            return site, place, float(grad[place])
    return None


def reread_scale(sites: Sequence[Site], probe: tuple[Site, int, float] | None) -> None:
    """Resets the scale if the step has unscaled the gradients in place, as torch's fused optimisers do."""
    if probe is None or (grad := probe[0].grad) is None or float(grad[probe[1]]) == probe[2]:
        return
    for site in sites:
        site.grad_scale = 1.0


def finite(gradients: Iterable[Tensor | None], ranks: Ranks) -> bool:
    """Whether all gradients are finite, on every rank. Only gradients with a non-finite sum are read twice."""
    seen = [local(g) for g in gradients if g is not None]
    bad = sum(not bool(g.sum(dtype=torch.float32).isfinite()) and not bool(g.isfinite().all()) for g in seen)
    return ranks.count(bad) == 0


def drop_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Makes the next step change nothing: optimisers skip parameters without a gradient."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
