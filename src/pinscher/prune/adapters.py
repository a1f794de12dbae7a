"""Pruning with low-rank adapters (LoRA, Hu et al. 2021): the model's own weights are frozen, only adapters train.

In a peft model every prunable matrix is parametrized, and the forward pass sees

    W' = M ⊙ (W + s·B·A)

so a pruned position contributes nothing, adapter included, as soon as it is masked. Scores are computed from W + s·B·A
and G = ∂L/∂W', the gradient of the whole matrix. G is collected in the backward pass and belongs to no parameter, so
neither optimiser nor clipping sees it. A and B receive the gradient of the masked product, s·Bᵀ(G ⊙ M) and
s·(G ⊙ M)Aᵀ. `Pruner.finish` merges: W' becomes the plain weight and keeps every zero. Adapters of matrices that are not
pruned are treated alike, with M = 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from pinscher.models.blocks import is_adapted, is_conv1d, is_matrix
from pinscher.models.names import clean_name, is_of_adapter
from pinscher.prune.criteria import Criterion
from pinscher.prune.gates import Gate, GatedWeights, gate_of
from pinscher.prune.ranking import Ranking
from pinscher.prune.sharding import is_sharded
from pinscher.prune.sites import Site
from pinscher.prune.weights import trained_by

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
    """The effective weight: frozen base plus trainable adapter, masked. `pull` is ∂L/∂W' since the last step."""

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
        """W + s·B·A, without the mask: the values that pruned weights would have if they came back."""
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


class AdaptedWeights(GatedWeights):
    """Frozen weights below adapters."""

    adapted: ClassVar[bool] = True

    def __init__(self, model: nn.Module, sites: Sequence[Site], criterion: Criterion) -> None:
        super().__init__(model, sites, criterion)
        self.unpruned = _unpruned(model, sites)

    def refuse_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        trained = {id(p) for site in self.sites for p in gate_of(site).parameters() if p.requires_grad}
        if not trained <= trained_by(optimizer):
            raise ValueError("the adapters are not in this optimiser: build it from pruner.param_groups().")

    def install(self, sparse: bool) -> None:
        """Parametrizes every matrix, and stops the adapters from adding themselves to outputs."""
        for site in self.all_sites:
            gate = Effective(site.owner.detach(), site.adapter, site.transposed)
            gate.listens = site not in self.unpruned
            if gate.listens:
                gate.mask.copy_(site.owner.detach() != 0)
            site.owner.requires_grad_(False)
            self.put_above(site, gate)
            site.moving = gate
            if site.adapter is not None:
                site.adapter.forward = site.module.__call__

    def apply(self, ranking: Ranking) -> None:
        for i, site in enumerate(self.sites):
            mask = gate_of(site).mask
            mask.copy_(ranking.mask(i).view_as(mask))

    def end_step(self) -> None:
        """Drops the gradients of the last step's scores."""
        for site in self.sites:
            if site.moving is not None:
                site.moving.pull = None

    def finish(self) -> nn.Module:
        """Merges the adapters, and returns the plain model inside the peft model."""
        super().finish()
        for site in self.all_sites:
            if site.adapter is not None:
                del site.adapter.forward
            site.moving = site.adapter = None
        if not hasattr(self.model, "unload"):
            raise TypeError(
                f"{type(self.model).__name__} cannot remove its adapters: prune the model that get_peft_model returns."
            )
        self.model = cast(nn.Module, cast(Any, self.model).unload())
        return self.model

    @torch.no_grad()
    def model_state_dict(self) -> dict[str, Any]:
        if self.finished:
            return self.model.state_dict()
        state = {plain: t for name, t in self.model.state_dict().items() if (plain := plain_name(name)) is not None}
        for site in self.all_sites:
            weight = gate_of(site).plain(site.owner.detach())
            for module in [site.module, *site.shared_with]:
                path = next(n for n, found in self.model.named_modules(remove_duplicate=False) if found is module)
                state[f"{clean_name(path)}.{site.parameter}"] = weight
        return state


def _unpruned(model: nn.Module, sites: Sequence[Site]) -> list[Site]:
    """The matrices with adapters that are not pruned; they are merged as well."""
    pruned = {id(site.adapter) for site in sites}
    found = []
    for name, module in model.named_modules():
        if is_adapted(module) and id(module) not in pruned:
            inner = cast(nn.Module, module.base_layer)
            if not is_matrix(inner):
                raise ValueError(f"{clean_name(name)} has an adapter but is no matrix: leave it out of target_modules.")
            _check(clean_name(name), module)
            found.append(Site(clean_name(name), inner, transposed=is_conv1d(inner), adapter=module))
    return found


def are_there(sites: Sequence[Site], criterion: Criterion) -> bool:
    """Whether the model has adapters.

    Raises:
        ValueError: for methods that train or change the weights themselves, and for adapters that cannot be merged
            into a masked matrix.
    """
    adapted = [site for site in sites if site.adapter is not None]
    if not adapted:
        return False
    if not criterion.adaptable:
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


def _check(name: str, adapter: Any) -> None:
    active = list(adapter.active_adapters)
    if len(active) != 1:
        raise ValueError(f"{name} has {len(active)} active adapters: exactly one can be merged.")
    dropout = adapter.lora_dropout[active[0]]
    if getattr(dropout, "p", 0.0) > 0.0:
        raise ValueError(
            f"{name}: lora_dropout={dropout.p:g} drops inputs of the adapter alone, so there is no one matrix "
            "to mask. Set lora_dropout=0."
        )
    if getattr(adapter, "merged", False):
        raise ValueError(f"{name}: its adapter is already merged. Call unmerge_adapter() first.")
    plain = isinstance(adapter.lora_A[active[0]], nn.Linear) and adapter.lora_B[active[0]].bias is None
    if not plain or active[0] in getattr(adapter, "lora_variant", {}):
        raise ValueError(f"{name}: only plain LoRA can be merged under a mask: no DoRA or other variant, no lora_bias.")


def _parts(adapter: Any) -> tuple[nn.Module, nn.Module, float]:
    """A, B and s of a peft layer."""
    name = adapter.active_adapters[0]
    return adapter.lora_A[name], adapter.lora_B[name], float(adapter.scaling[name])


def plain_name(name: str) -> str | None:
    """A tensor's name in the plain model; None for tensors it lacks: adapters, originals of trained heads."""
    if is_of_adapter(name) or "parametrizations" in name.split("."):
        return None
    return clean_name(_KEPT_MODULE.sub("", name))
