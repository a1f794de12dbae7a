"""A compact copy of a student's weights that can be run.

Matrices are stored as their nonzero values and the gaps between them, where that is smaller; frozen parameters such as
embeddings are not copied, tied ones once. There is no second module tree: during one forward pass the student's own
modules use the copy's tensors, without gradients and in evaluation mode. So whatever the student is (compiled, patched,
normalised), the teacher is too.

Of a sharded student (FSDP2) each rank keeps a copy of its part. FSDP2 gathers weights from buffers of its own, so the
copy's values are written into the student's parts, and the student's are restored afterwards.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils import parametrize

from pinscher.models.blocks import is_matrix
from pinscher.models.inputs import evaluating
from pinscher.models.surgery import become_, subclass
from pinscher.prune.gates import Gate, gate_above
from pinscher.prune.sharding import is_managed, is_sharded, like, local, reshard

HARDLY_SPARSE = 0.75  # denser matrices are stored plainly: packing would save little and cost time


class Snapshot:
    """The weights of a model at one moment, runnable.

    Args:
        model: the student.
    """

    def __init__(self, model: nn.Module) -> None:
        while isinstance(model, DistributedDataParallel | DataParallel):
            model = model.module
        self.student = model
        self.plain: dict[str, Tensor] = {}
        self.packed: dict[str, Packed] = {}
        self.shared: dict[str, nn.Parameter] = {}  # frozen parameters, the student's own
        self.buffers: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self) -> None:
        """Copies the student's weights as the forward pass sees them, gates applied; if sharded, this rank's parts."""
        reshard(self.student)
        self.plain, self.packed, self.shared, self.buffers = {}, {}, {}, {}
        # A compiled module would be recompiled for the class that expands its weight.
        compiled = any(
            type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None
            for module in self.student.modules()
        )
        with evaluating(self.student):  # random gates have their value at test time
            for name, places in _places(self.student).items():
                owner, tensor = places[0].owner, places[0].effective
                if not isinstance(owner, nn.Parameter):
                    self.buffers[name] = tensor.clone()
                elif not owner.requires_grad and not is_matrix(places[0].module):
                    self.shared[name] = owner
                elif not compiled and (packed := Packed.of(local(tensor))) is not None:
                    self.packed[name] = packed
                else:
                    self.plain[name] = local(tensor.detach()).clone()

    def __call__(self, batch: Mapping[str, Any]) -> Any:
        if not (self.plain or self.packed or self.shared):
            raise RuntimeError("no snapshot has been taken yet")
        self.own_what_thawed()
        if getattr(parametrize, "_cache_enabled", False):
            raise RuntimeError("the teacher cannot run inside parametrize.cached(): it would get the student's weights")
        devices = {p.device for p in self.student.parameters() if p.device.type == "cuda"}
        # Some models draw random numbers at test time too; they must not change those of the training.
        lent = self._lent_parts if is_managed(self.student) else self._lent
        with torch.no_grad(), torch.random.fork_rng(devices), evaluating(self.student), lent():
            return self.student(**batch)

    @contextlib.contextmanager
    def _lent(self) -> Iterator[None]:
        """Makes the student's modules use the copy's tensors while the block runs."""
        tensors = {**self.buffers, **self.shared, **self.plain}
        found = _places(self.student)
        # What the student has added since then (a buffer made on first use) is left unchanged.
        places = [(place, tensors[name]) for name, some in found.items() if name in tensors for place in some]
        before = [(place, place.owner) for place, _ in places]
        classes = {module: type(module) for name in self.packed for module in [p.module for p in found[name]]}
        try:
            for place, tensor in places:
                place.put(tensor, bypass=True)
            for name, packed in self.packed.items():
                for place in found[name]:
                    _expand_on_access(place, packed)
            yield
        finally:
            for module, kind in classes.items():
                become_(module, kind)
                module.__dict__.pop("_lent", None)
            for place, owner in before:
                place.put(owner, bypass=False)

    @contextlib.contextmanager
    def _lent_parts(self) -> Iterator[None]:
        """Writes the copy's values into the sharded student's parts, and restores the student's afterwards."""
        reshard(self.student)  # otherwise weights that are gathered already would be used again
        found = _places(self.student)
        buffers = [(place, self.buffers[n]) for n in self.buffers if n in found for place in found[n]]
        mine = {name: local(found[name][0].owner.detach()) for name in (*self.plain, *self.packed)}
        before = {name: part.clone() for name, part in mine.items()}
        owners = [(place, place.owner) for place, _ in buffers]
        gates = [gate for name in mine for place in found[name] if (gate := place.gate) is not None]
        closed = [gate.bypass for gate in gates]
        try:
            for place, tensor in buffers:
                place.put(tensor, bypass=True)
            for name, part in mine.items():
                part.copy_(self.plain[name] if name in self.plain else self.packed[name].expand())
            for gate in gates:
                gate.bypass = True
            yield
        finally:
            reshard(self.student)
            for gate, bypass in zip(gates, closed, strict=True):
                gate.bypass = bypass
            for name, part in mine.items():
                part.copy_(before[name])
            for place, owner in owners:
                place.put(owner, bypass=False)

    def own_what_thawed(self) -> None:
        """Copies a shared parameter as soon as it is trainable again, before it can have changed."""
        for name in [name for name, owner in self.shared.items() if owner.requires_grad]:
            self.plain[name] = local(self.shared.pop(name).detach()).clone()

    @property
    def nbytes(self) -> int:
        """Memory that is the snapshot's own."""
        plain = sum(t.numel() * t.element_size() for t in (*self.plain.values(), *self.buffers.values()))
        return plain + sum(p.nbytes for p in self.packed.values())

    def state_dict(self) -> dict[str, Any]:
        self.own_what_thawed()
        if is_managed(self.student):
            return self._sharded_state()
        return {
            "plain": dict(self.plain),
            "packed": {n: {"gaps": p.gaps, "values": p.values, "shape": list(p.shape)} for n, p in self.packed.items()},
            "shared": list(self.shared),
            "buffers": dict(self.buffers),
        }

    def _sharded_state(self) -> dict[str, Any]:
        """DTensors, unpacked, so that they can be redistributed over another number of ranks."""
        reshard(self.student)
        owners = {name: places[0].owner for name, places in _places(self.student).items()}
        parts = self.plain | {name: packed.expand() for name, packed in self.packed.items()}
        return {
            "plain": {name: like(owners[name], part.reshape(-1)) for name, part in parts.items()},
            "packed": {},
            "shared": list(self.shared),
            "buffers": dict(self.buffers),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict()`.

        Raises:
            ValueError: if it is of a model with other tensors. Nothing is changed then.
        """
        reshard(self.student)
        owners = {name: places[0].owner for name, places in _places(self.student).items()}
        mine = {name: owner for name, owner in owners.items() if isinstance(owner, nn.Parameter)}
        shapes = {name: tensor.shape for name, tensor in state["plain"].items()}
        shapes |= {name: torch.Size(packed["shape"]) for name, packed in state["packed"].items()}
        shapes |= {name: mine[name].shape if name in mine else None for name in state["shared"]}
        wrong = [n for n in {*shapes, *mine} if n not in mine or n not in shapes or mine[n].shape != shapes[n]]
        if wrong:
            raise ValueError(f"the teacher in the checkpoint is of another model, for one {min(wrong)}")
        device = next(iter(mine.values())).device
        self.plain = {n: local(t).to(mine[n].device, copy=True) for n, t in state["plain"].items()}
        self.packed = {
            n: Packed(
                p["gaps"].to(mine[n].device, copy=True),
                p["values"].to(mine[n].device, copy=True),
                torch.Size(p["shape"]),
            )
            for n, p in state["packed"].items()
        }
        self.buffers = {
            n: t.to(owners[n].device if n in owners else device, copy=True) for n, t in state["buffers"].items()
        }
        self.shared = {name: mine[name] for name in state["shared"]}
        for name in [name for name in self.plain if is_sharded(mine[name])]:
            if (again := Packed.of(self.plain[name])) is not None:
                self.packed[name] = again
                del self.plain[name]
        self.own_what_thawed()


class Packed:
    """A matrix as its nonzero values and the gaps between them, one byte each unless one is longer."""

    def __init__(self, gaps: Tensor, values: Tensor, shape: torch.Size) -> None:
        self.gaps, self.values, self.shape = gaps, values, shape

    @classmethod
    def of(cls, tensor: Tensor) -> Packed | None:
        """Packs a matrix; None for other tensors, or if it would hardly become smaller."""
        if tensor.dim() != 2:
            return None
        flat = tensor.detach().reshape(-1)
        if int(torch.count_nonzero(flat)) > HARDLY_SPARSE * flat.numel():
            return None
        places = flat.nonzero().view(-1)
        gaps = places.diff(prepend=places.new_tensor([-1]))
        short = gaps.numel() == 0 or int(gaps.max()) < 256
        return cls(gaps.to(torch.uint8 if short else torch.int64), flat[places], tensor.shape)

    def expand(self) -> Tensor:
        dense = torch.zeros(self.shape.numel(), dtype=self.values.dtype, device=self.values.device)
        dense.index_copy_(0, self.gaps.cumsum(0, dtype=torch.int64).sub_(1), self.values)
        return dense.view(self.shape)

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.gaps, self.values))


@dataclass(frozen=True)
class _Place:
    """Where a module keeps a tensor: as a parameter, as a buffer, or below a gate."""

    module: nn.Module
    leaf: str

    @property
    def gate(self) -> Gate | None:
        return gate_above(self.module, self.leaf)

    @property
    def holder(self) -> dict[str, Any]:
        if self.gate is not None:
            below: nn.Module = self.module.parametrizations[self.leaf]  # type: ignore[index, assignment]
            return below._parameters
        return self.module._parameters if self.leaf in self.module._parameters else self.module._buffers

    @property
    def owner(self) -> Tensor:
        tensor = self.holder["original" if self.gate is not None else self.leaf]
        assert isinstance(tensor, Tensor)
        return tensor

    @property
    def effective(self) -> Tensor:
        tensor = getattr(self.module, self.leaf) if self.gate is not None else self.owner
        assert isinstance(tensor, Tensor)
        return tensor

    def put(self, tensor: Tensor, bypass: bool) -> None:
        gate, holder = self.gate, self.holder
        if holder is not self.module._buffers and not isinstance(tensor, nn.Parameter):
            tensor = nn.Parameter(tensor, requires_grad=False)
        holder["original" if gate is not None else self.leaf] = tensor
        if gate is not None:
            gate.bypass = bypass


def _expand_on_access(place: _Place, packed: Packed) -> None:
    """Makes a module's attribute the expanded matrix, computed on each access and freed after use.

    A property of a subclass works for any reader, the module's own forward or a parent that reads the weight, so only
    one matrix needs to exist at a time.
    """
    place.module.__dict__.setdefault("_lent", {})[place.leaf] = packed
    become_(place.module, subclass(type(place.module), **{place.leaf: _expanded(place.leaf)}))


@functools.cache
def _expanded(leaf: str) -> property:
    """The property that expands the packed matrix of a name."""
    return property(lambda module: nn.Parameter(module.__dict__["_lent"][leaf].expand(), requires_grad=False))


def _places(model: nn.Module) -> dict[str, list[_Place]]:
    """Every parameter and buffer by its first name, with all places where it is used, without gates."""
    found: dict[str, list[_Place]] = {}
    first: dict[int, str] = {}
    modules = dict(model.named_modules())
    gated = {prefix: _gated_leaves(module) for prefix, module in modules.items()}
    hidden = {
        id(part)
        for prefix, module in modules.items()
        for leaf, gate in gated[prefix].items()
        for part in (module.parametrizations[leaf], *gate.modules())
    }
    for prefix, module in modules.items():
        if id(module) in hidden:
            continue
        for leaf in [*module._parameters, *gated[prefix], *module._buffers]:
            place = _Place(module, leaf)
            if leaf in gated[prefix] or place.holder[leaf] is not None:
                path = f"{prefix}.{leaf}" if prefix else leaf
                name = first.setdefault(id(place.owner), path.replace("_orig_mod.", ""))
                found.setdefault(name, []).append(place)
    return found


def _gated_leaves(module: nn.Module) -> dict[str, Gate]:
    """The parameters of a module that have a gate above them."""
    leaves = list(module.parametrizations) if parametrize.is_parametrized(module) else []  # type: ignore[arg-type]
    return {leaf: gate for leaf in leaves if (gate := gate_above(module, leaf)) is not None}
