"""Pruning with low-rank adapters (LoRA, Hu et al. 2021): the model's own weights are frozen, only adapters train.

Of a peft model every prunable matrix is parametrized, and the forward pass sees

    W' = M ⊙ (W + s·B·A)

so that a pruned position contributes nothing, adapter included, from the step of its masking on. Scores are taken of
W + s·B·A with G = ∂L/∂W', the gradient of the whole matrix: it is gathered in the backward pass for them and belongs to
no parameter, so no optimiser steps on it and no clipping counts it. A and B receive the gradient of the masked product,
s·Bᵀ(G ⊙ M) and s·(G ⊙ M)Aᵀ. `Pruner.finish` merges: W' becomes the plain weight, and not a zero is lost. Adapters of
matrices that are not pruned are treated alike, with M = 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from pinscher.prune.calibrated import Calibrated
from pinscher.prune.criteria import Criterion
from pinscher.prune.fisher import Obert
from pinscher.prune.gates import Gate, Gated, gate_of
from pinscher.prune.ranking import Ranking
from pinscher.prune.sharding import is_sharded
from pinscher.prune.sites import Site, clean_name, is_adapted, is_conv1d, is_matrix

_KEPT_MODULE = re.compile(r"\.modules_to_save\.[^.]+(?=\.|$)")


class _Straight(torch.autograd.Function):
    """(weight + update) * mask: the update receives the masked gradient, the weight the whole one."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, update: Tensor | None, mask: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        return (weight if update is None else weight + update) * mask

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (mask,) = ctx.saved_tensors
        whole = grads[0] if ctx.needs_input_grad[0] else None
        return whole, grads[0] * mask if ctx.needs_input_grad[1] else None, None


_straight: Callable[[Tensor, Tensor | None, Tensor], Tensor] = _Straight.apply


class Effective(Gate):
    """The parametrization of a frozen matrix. `pull` is ∂L/∂W' since the last step."""

    shards: ClassVar[bool] = False

    def __init__(self, weight: Tensor, adapter: nn.Module | None, transposed: bool) -> None:
        super().__init__(weight)
        self.pull: Tensor | None = None
        self.listens = True  # whether the gradient is gathered
        self.scale, self.transposed = 1.0, transposed
        self.down: nn.Module | None = None
        self.up: nn.Module | None = None
        if adapter is not None:
            self.down, self.up, self.scale = _parts(adapter)

    def gated(self, weight: Tensor) -> Tensor:
        update = self._update(weight.dtype)
        if not torch.is_grad_enabled():
            return (weight if update is None else weight + update) * self.mask
        probe = weight.detach().requires_grad_(self.listens)
        if self.listens:
            probe.register_hook(self._feel)  # type: ignore[no-untyped-call]
        return _straight(probe, update, self.mask)

    def updated(self, weight: Tensor) -> Tensor:
        """W + s·B·A, without the mask: what pruned weights would be if they came back."""
        update = self._update(weight.dtype)
        return weight if update is None else weight + update

    def baked(self, weight: Tensor) -> Tensor:
        return self.updated(weight) * self.mask

    def _update(self, dtype: torch.dtype) -> Tensor | None:
        if self.down is None or self.up is None:
            return None
        product = self.up.weight @ self.down.weight  # type: ignore[operator]
        return ((product.t() if self.transposed else product) * self.scale).to(dtype)

    def _feel(self, grad: Tensor) -> None:
        grad = grad.detach()
        self.pull = grad.clone() if self.pull is None else self.pull + grad  # a matrix may be used more than once


def are_there(sites: Sequence[Site], criterion: Criterion) -> bool:
    """Whether the model has adapters; refuses what cannot be done with them.

    Raises:
        ValueError: for learned masks and methods that change the weights themselves, and for adapters whose effect is
            no matrix that could be masked and merged.
    """
    adapted = [site for site in sites if site.adapter is not None]
    if not adapted:
        return False
    if isinstance(criterion, Gated | Calibrated | Obert):
        raise ValueError(
            f"{type(criterion).__name__} cannot be used with adapters: it trains or changes the frozen weights. Use "
            "pins, platon, magnitude, …; or prune first (prune_once) and then train adapters with regrow=False."
        )
    if any(is_sharded(site.owner) for site in sites):
        raise ValueError("adapters cannot be pruned on sharded weights: prune them on one process, without FSDP2.")
    spread = torch.distributed
    if spread.is_available() and spread.is_initialized() and spread.get_world_size() > 1:
        raise ValueError("adapters can be pruned on one process only: their scores are not summed over processes.")
    for site in adapted:
        _check(site.name, site.adapter)
    return True


def others(model: nn.Module, sites: Sequence[Site]) -> list[Site]:
    """The matrices with adapters that are not pruned: they have to be merged as well."""
    pruned = {id(site.adapter) for site in sites}
    found = []
    for name, module in model.named_modules():
        if is_adapted(module) and id(module) not in pruned:
            inner = cast(nn.Module, module.base_layer)
            if not is_matrix(inner):
                raise ValueError(f"{clean_name(name)} has an adapter and is no matrix: leave it out of target_modules.")
            _check(clean_name(name), module)
            found.append(Site(clean_name(name), inner, transposed=is_conv1d(inner), adapter=module))
    return found


def _check(name: str, adapter: Any) -> None:
    active = list(adapter.active_adapters)
    if len(active) != 1:
        raise ValueError(f"{name} has {len(active)} active adapters: one is needed to be merged.")
    dropout = adapter.lora_dropout[active[0]]
    if getattr(dropout, "p", 0.0) > 0.0:
        raise ValueError(
            f"{name}: lora_dropout={dropout.p:g} drops inputs of the adapter alone, so there is no one matrix "
            "to mask. Set lora_dropout=0."
        )
    if getattr(adapter, "merged", False):
        raise ValueError(f"{name}: its adapter is merged already. Call unmerge_adapter() first.")
    plain = isinstance(adapter.lora_A[active[0]], nn.Linear) and adapter.lora_B[active[0]].bias is None
    if not plain or active[0] in getattr(adapter, "lora_variant", {}):
        raise ValueError(f"{name}: only plain LoRA can be merged under a mask: no DoRA or other variant, no lora_bias.")


def _parts(adapter: Any) -> tuple[nn.Module, nn.Module, float]:
    """A, B and s of a peft layer."""
    name = adapter.active_adapters[0]
    return adapter.lora_A[name], adapter.lora_B[name], float(adapter.scaling[name])


def open_(sites: Sequence[Site], others: Sequence[Site]) -> None:
    """Parametrizes every site, and turns off the adapters' own way of adding themselves to outputs."""
    for site in [*sites, *others]:
        gate = Effective(site.owner.detach(), site.adapter, site.transposed)
        gate.listens = site not in others
        if gate.listens:
            gate.mask.copy_(site.owner.detach() != 0)
        site.owner.requires_grad_(False)
        for module in [site.module, *site.shared_with]:
            parametrize.register_parametrization(module, site.parameter, gate)
        gate.train(site.module.training)
        site.moving = gate
        if site.adapter is not None:
            site.adapter.forward = site.module.__call__


def close_(sites: Sequence[Site], ranking: Ranking) -> None:
    """Sets every mask to what the last ranking kept."""
    for i, site in enumerate(sites):
        mask = gate_of(site).mask
        mask.copy_(ranking.mask(i).view_as(mask))


def forget(sites: Sequence[Site]) -> None:
    """Drops the gradients that the last step's scores were made of."""
    for site in sites:
        if site.moving is not None:
            site.moving.pull = None


def unload(model: nn.Module, sites: Sequence[Site]) -> nn.Module:
    """The plain model inside a peft model, its matrices as they are now."""
    for site in sites:
        if site.adapter is not None:
            del site.adapter.forward
        site.moving = site.adapter = None
    if not hasattr(model, "unload"):
        raise TypeError(
            f"{type(model).__name__} cannot give up its adapters: prune the model that get_peft_model returns."
        )
    return cast(nn.Module, cast(Any, model).unload())


def plain_name(name: str) -> str | None:
    """A tensor's name in the plain model; None for what that has not: adapters, the originals of trained heads."""
    if re.search(r"(^|\.)(lora_\w+|original_module|parametrizations)\.", name):
        return None
    return clean_name(_KEPT_MODULE.sub("", name))


@torch.no_grad()
def plain_state_dict(model: nn.Module, sites: Sequence[Site]) -> dict[str, Tensor]:
    """The state dict of the plain model as if its adapters were merged now. The model stays as it is."""
    state = {plain: t for name, t in model.state_dict().items() if (plain := plain_name(name)) is not None}
    for site in sites:
        gate = gate_of(site)
        baked = gate.baked(site.owner.detach()).masked_fill(~gate.mask, 0.0)
        for module in [site.module, *site.shared_with]:
            path = next(name for name, found in model.named_modules(remove_duplicate=False) if found is module)
            state[f"{clean_name(path)}.{site.parameter}"] = baked
    return state
