"""A copy of a student that is as small as it can be, and still runs.

Matrices are kept as a bit for every weight and the values of those that are not zero, wherever that is smaller; they
are expanded one at a time while the copy runs. Frozen parameters are not copied at all, tied ones once. The copy's
module tree is built without memory for weights and belongs to nobody else: the student's hooks, modes and optimiser
never see it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from pinscher.prune.sites import clean_name, evaluating, is_matrix

HARDLY_SPARSE = 0.9  # above this density a matrix is kept plain: packing would save little and cost time


class Snapshot:
    """The weights of a model at one moment, runnable.

    Args:
        model: the student. Its structure is copied now, its weights at every `take`.
    """

    def __init__(self, model: nn.Module) -> None:
        # Wrappers (DDP, torch.compile) are left behind: the copy is of what they wrap.
        while isinstance(inner := getattr(model, "module", getattr(model, "_orig_mod", None)), nn.Module):
            model = inner
        self.student = model
        self.module = _skeleton(model)
        self.plain: dict[str, Tensor] = {}
        self.packed: dict[str, Packed] = {}
        self._places: dict[str, list[tuple[nn.Module, str]]] = {}  # where each tensor belongs in the copy
        self._packable: set[str] = set()
        self._expandable: dict[nn.Module, list[tuple[str, str]]] = {}
        self._find_places()

    def _find_places(self) -> None:
        first: dict[int, str] = {}
        for name, holder, leaf in _tensors(self.student):
            owner = _owner_of(holder, leaf)
            canonical = first.setdefault(id(owner), name) if isinstance(owner, nn.Parameter) else name
            prefix = name.rpartition(".")[0]
            module = self.module.get_submodule(prefix)
            self._places.setdefault(canonical, []).append((module, leaf))
            # Torch's own composite modules (MultiheadAttention) read their children's weights without calling them.
            parent = self.module.get_submodule(prefix.rpartition(".")[0])
            if isinstance(owner, nn.Parameter) and owner.dim() == 2 and not _is_torch_composite(parent):
                self._packable.add(canonical)
                self._expandable.setdefault(module, []).append((canonical, leaf))
        for module in self._expandable:
            module.register_forward_pre_hook(self._expand)
            module.register_forward_hook(self._release, always_call=True)

    @torch.no_grad()
    def take(self) -> None:
        """Copies the student's weights as the forward pass sees them, gates included."""
        self.plain, self.packed = {}, {}
        with evaluating(self.student):  # random gates show what they are at test time
            for name, holder, leaf in _tensors(self.student):
                if name not in self._places:
                    continue  # tied to one that is kept
                tensor = getattr(holder, leaf).detach()
                if _is_frozen(holder, leaf):
                    self.plain[name] = tensor
                elif name in self._packable and (packed := Packed.of(tensor)) is not None:
                    self.packed[name] = packed
                else:
                    self.plain[name] = tensor.clone()
        self._place()

    def __call__(self, batch: Mapping[str, Any]) -> Any:
        with torch.no_grad():
            return self.module(**batch)

    def _place(self) -> None:
        """Gives the copy's modules their plain tensors; packed ones come when they are needed."""
        for name, tensor in self.plain.items():
            self._put(name, tensor)
        for name, packed in self.packed.items():
            self._put(name, packed.values[:0])

    def _put(self, name: str, tensor: Tensor) -> None:
        for module, leaf in self._places[name]:
            if leaf in module._buffers:
                module._buffers[leaf] = tensor
            else:
                module._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)

    def _expand(self, module: nn.Module, inputs: Any) -> None:
        for name, leaf in self._expandable[module]:
            if name in self.packed:
                module._parameters[leaf] = nn.Parameter(self.packed[name].expand(), requires_grad=False)

    def _release(self, module: nn.Module, inputs: Any, output: Any) -> None:
        for name, leaf in self._expandable[module]:
            if name in self.packed:
                module._parameters[leaf] = nn.Parameter(self.packed[name].values[:0], requires_grad=False)

    @property
    def nbytes(self) -> int:
        """Memory that is the snapshot's own (frozen tensors are the student's)."""
        frozen = self._frozen()
        plain = sum(t.numel() * t.element_size() for n, t in self.plain.items() if n not in frozen)
        return plain + sum(p.nbytes for p in self.packed.values())

    def state_dict(self) -> dict[str, Any]:
        frozen = self._frozen()
        return {
            "plain": {n: t for n, t in self.plain.items() if n not in frozen},
            "packed": {n: {"bits": p.bits, "values": p.values, "shape": list(p.shape)} for n, p in self.packed.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        frozen = self._frozen()
        saved = {*state["plain"], *state["packed"], *frozen}
        if saved != set(self._places):
            raise ValueError(
                f"the teacher in the checkpoint is of another model, for one {min(saved ^ set(self._places))}"
            )
        self.plain = {**frozen, **{n: t.clone() for n, t in state["plain"].items()}}
        self.packed = {
            n: Packed(p["bits"].clone(), p["values"].clone(), torch.Size(p["shape"]))
            for n, p in state["packed"].items()
        }
        self._place()

    def _frozen(self) -> dict[str, Tensor]:
        return {
            name: getattr(holder, leaf).detach()
            for name, holder, leaf in _tensors(self.student)
            if name in self._places and _is_frozen(holder, leaf)
        }


class Packed:
    """A matrix as one bit a weight and the values that are not zero."""

    def __init__(self, bits: Tensor, values: Tensor, shape: torch.Size) -> None:
        self.bits, self.values, self.shape = bits, values, shape

    @classmethod
    def of(cls, tensor: Tensor) -> Packed | None:
        """Packs a matrix; None if it is hardly sparse."""
        flat = tensor.reshape(-1)
        alive = flat != 0
        if int(torch.count_nonzero(alive)) > HARDLY_SPARSE * flat.numel():
            return None
        padded = torch.zeros(-(-flat.numel() // 8) * 8, dtype=torch.uint8, device=flat.device)
        padded[: flat.numel()] = alive
        return cls((padded.view(-1, 8) << _bit_places(flat)).sum(1, dtype=torch.uint8), flat[alive], tensor.shape)

    def expand(self) -> Tensor:
        alive = (self.bits[:, None] >> _bit_places(self.bits)).bitwise_and_(1).view(-1)[: self.shape.numel()]
        dense = torch.zeros(self.shape.numel(), dtype=self.values.dtype, device=self.values.device)
        return dense.masked_scatter_(alive.view(torch.bool), self.values).view(self.shape)

    @property
    def nbytes(self) -> int:
        return self.bits.numel() + self.values.numel() * self.values.element_size()


def _bit_places(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)


def _tensors(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Every parameter and buffer by its ordinary name, as (name, module, attribute); gates are seen through."""
    for prefix, module in model.named_modules():
        if "parametrizations" in prefix.split("."):
            continue
        gated = list(module.parametrizations) if parametrize.is_parametrized(module) else []
        for leaf in [*module._parameters, *gated, *module._buffers]:
            if _owner_of(module, leaf) is not None:
                yield clean_name(f"{prefix}.{leaf}" if prefix else leaf), module, leaf


def _owner_of(module: nn.Module, leaf: str) -> Any:
    """The parameter or buffer itself, below any gate."""
    if parametrize.is_parametrized(module, leaf):
        return module.parametrizations[leaf].original  # type: ignore[union-attr, index]
    return getattr(module, leaf)


def _is_frozen(module: nn.Module, leaf: str) -> bool:
    """Whether the tensor cannot change: a parameter that does not train and, being no matrix, is not pruned."""
    parameter = module._parameters.get(leaf)
    return parameter is not None and not parameter.requires_grad and not is_matrix(module)


def _is_torch_composite(module: nn.Module) -> bool:
    lists = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
    return type(module).__module__.startswith("torch.nn.") and not isinstance(module, lists)


def _skeleton(model: nn.Module) -> nn.Module:
    """A copy of the module tree in evaluation mode, without weights in memory, gates, hooks or patched methods."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=False) for p in model.parameters()
    }
    skeleton = copy.deepcopy(model, memo)
    for module in list(skeleton.modules()):
        if parametrize.is_parametrized(module):
            # Not torch's remove_parametrizations: it changes the class, which the copy shares with the student.
            gated = module._modules.pop("parametrizations")
            module.__class__ = parametrize.type_before_parametrizations(module)
            for leaf, chain in gated.items():  # type: ignore[union-attr, operator]
                module._parameters[leaf] = chain.original
        module.__dict__.pop("forward", None)  # a wrapper's closure would run the student instead of the copy
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    return skeleton.eval()
