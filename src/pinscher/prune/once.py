"""prune_once: prunes a model without training it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pinscher.models.inputs import evaluating, run
from pinscher.prune.calibration import Batches, listed
from pinscher.prune.config import PruningConfig
from pinscher.prune.criteria import CRITERIA
from pinscher.prune.patterns import UNSTRUCTURED
from pinscher.prune.pruner import Pruner
from pinscher.prune.sharding import is_sharded
from pinscher.prune.sites import Patterns


def prunes_once(method: str) -> bool:
    """Whether a method can prune a model without training it."""
    return CRITERIA[method].prunes_once()


def prune_once(
    model: nn.Module,
    method: str = "sparsegpt",
    sparsity: float = 0.5,
    batches: Batches | None = None,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    pattern: str = UNSTRUCTURED,
    scope: str | None = None,
    target_modules: Patterns = None,
    exclude_modules: Patterns = None,
    **options: Any,
) -> nn.Module:
    """Prunes a model in place, once, without training it, and returns it.

    Args:
        model: any model that a `Pruner` takes.
        method: wanda, sparsegpt, obert, magnitude or random.
        sparsity: fraction of the prunable weights that is zero afterwards, exactly (or as closely as units allow).
        batches: calibration data, model inputs: mappings (called by names), tuples (in order) or tensors. Not needed by
            magnitude and random; obert needs labels in them.
        loss: function that gives the loss of the model's outputs (obert); by default their `loss`.
        pattern: what is pruned as a whole: unstructured, N:M, RxC, rows, columns, heads.
        scope: what is ranked together: global, matrix, layer or kind; by default the method's.
        target_modules: modules to prune instead, as in `find_sites`.
        exclude_modules: modules to leave alone.
        options: the method's own.

    Raises:
        ValueError: if the method cannot work without training, or lacks data. Nothing is changed then.
    """
    if not prunes_once(method):
        able = ", ".join(name for name in CRITERIA if prunes_once(name))
        raise ValueError(
            f"{method} measures weights while they train, so it cannot prune without training: use {able}."
        )
    config = PruningConfig(
        method=method,
        sparsity=sparsity,
        total_steps=1,
        schedule="one-shot",
        warmup=0,
        cooldown=0,
        interval=1,
        pattern=pattern,
        scope=scope,
        target_modules=target_modules,  # type: ignore[arg-type]
        exclude_modules=exclude_modules,  # type: ignore[arg-type]
        options=options,
    )
    pruner = Pruner(model, config, calibration=batches)
    pruner.refuse_sparser()
    if pruner.criterion.needs_grad:
        _observe(pruner, batches, loss or _own_loss)
    return pruner.finish(early=True)


def _observe(pruner: Pruner, batches: Batches | None, loss: Callable[[Any], Tensor]) -> None:
    """Shows the gradients of every batch to the criterion; the model's own gradients are not changed."""
    owners = [site.owner for site in pruner.sites]
    if is_sharded(owners[0]):
        raise ValueError(
            "sharded weights get their gradients in a training loop only: prune once before sharding, or attach a "
            "Pruner with method='obert' to an optimiser."
        )
    needed = [owner.requires_grad for owner in owners]
    with evaluating(pruner.model), torch.enable_grad():
        try:
            for owner in owners:
                owner.requires_grad_(True)
            for t, batch in enumerate(listed(pruner.criterion, batches), 1):
                found = torch.autograd.grad(loss(run(pruner.model, batch)), owners, allow_unused=True)
                for site, owner, grad in zip(pruner.sites, owners, found, strict=True):
                    before, owner.grad = owner.grad, grad
                    pruner.criterion.observe(site, t, closing=1)
                    owner.grad = before
        finally:
            for owner, flag in zip(owners, needed, strict=True):
                owner.requires_grad_(flag)


def _own_loss(outputs: Any) -> Tensor:
    found = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if not isinstance(found, Tensor):
        raise ValueError(
            "obert needs the loss's gradients, but the model's outputs have no loss: put labels into the batches, or "
            "give prune_once(…, loss=function of the outputs)."
        )
    return found
