"""Weights that are spread over processes: FSDP2's DTensors (`torch.distributed.fsdp.fully_shard`) and HSDP's.

FSDP2 cuts every parameter into runs of whole rows, one for each rank, in the order of ranks (`Shard(0)`; the last ones
may be shorter, or empty). So each rank holds a contiguous part of every matrix in flat order, which is all that ranking
needs: what is exchanged are counts. Under HSDP rows are cut along one dimension of a mesh and repeated along the other:
counts are summed along the first only. Nothing here ever gathers a parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pinscher.prune.masking import ALONE, Ranks


class _Named(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def owner(self) -> Tensor: ...


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor. Asked by what it can do, so that torch.distributed need not be there."""
    return hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """The part of a sharded tensor that lives on this rank; any other tensor as it is. Never a copy."""
    if not hasattr(tensor, "to_local"):
        return tensor
    part: Tensor = tensor.to_local()
    return part


def ranks_of(sites: Sequence[_Named]) -> Ranks:
    """The processes that hold the sites' weights together; `ALONE` where every process holds all of them.

    Raises:
        ValueError: if only some matrices are sharded, or not by rows, or not all over the same processes.
    """
    sharded = [site for site in sites if is_sharded(site.owner)]
    if not sharded:
        return ALONE
    if len(sharded) < len(sites):
        whole = next(site.name for site in sites if not is_sharded(site.owner))
        raise ValueError(
            f"{sharded[0].name} is sharded but {whole} is not, so their weights cannot be counted together: call "
            "fully_shard on the whole model, after its blocks."
        )
    mesh, dim = _cut(sharded[0].name, sharded[0].owner)
    for site in sharded:
        if _cut(site.name, site.owner) != (mesh, dim):
            raise ValueError(
                f"{site.name} is sharded over other processes than {sharded[0].name}: give every fully_shard the same "
                "mesh."
            )
    return _ranks(mesh, dim)


def count(tensor: Tensor, number: int) -> int:
    """The sum over all ranks of a number that each counted in its own part of a tensor."""
    return number if not is_sharded(tensor) else _ranks(*_cut("a tensor", tensor)).count(number)


def rows_each(tensor: Tensor) -> int:
    """How many rows a rank with a full part of a tensor holds: all of them where the tensor is not sharded."""
    rows = tensor.shape[0]
    if not is_sharded(tensor):
        return rows
    mesh, dim = _cut("a tensor", tensor)
    return -(-rows // int(mesh.size(dim)))


def start_of(tensor: Tensor) -> int:
    """The flat index that this rank's first weight has in the whole tensor."""
    if not is_sharded(tensor):
        return 0
    mesh, dim = _cut("a tensor", tensor)
    row = min(tensor.shape[0], int(mesh.get_local_rank(dim)) * rows_each(tensor))
    return row * (tensor.numel() // max(1, tensor.shape[0]))


def like(owner: Tensor, values: Tensor) -> Tensor:
    """Values of this rank's weights as what they are: a part of a whole that is sharded as their owner is.

    Args:
        owner: a parameter. Unless it is a DTensor the values come back as they are.
        values: its last dimension runs over this rank's weights, flat. The memory is shared.

    Returns:
        a DTensor with the owner's shape in place of the last dimension.
    """
    if not is_sharded(owner):
        return values
    from torch.distributed.tensor import DTensor, Replicate, Shard

    whole: Any = owner
    before = values.shape[:-1]
    shape = torch.Size([*before, *owner.shape])
    placements = [Shard(len(before)) if place.is_shard() else Replicate() for place in whole.placements]
    part = values.view(*before, *local(owner).shape)
    stride = torch.empty(shape, device="meta").stride()
    made: Tensor = DTensor.from_local(part, whole.device_mesh, placements, run_check=False, shape=shape, stride=stride)
    return made


def is_managed(model: nn.Module) -> bool:
    """Whether FSDP2 has a model in hand, so that its forward passes are those of all ranks together."""
    return any(_is_managed(module) for module in model.modules())


def reshard(model: nn.Module) -> None:
    """Lets go of parameters that FSDP2 has gathered for a forward pass and kept, as it does those of the root."""
    for module in model.modules():
        if _is_managed(module):
            module.reshard()  # type: ignore[operator]


def mesh_of(tensors: Iterable[Tensor]) -> Any:
    """The device mesh that tensors are sharded over; None if none is."""
    return next((tensor.device_mesh for tensor in tensors if is_sharded(tensor)), None)  # type: ignore[attr-defined]


def _is_managed(module: nn.Module) -> bool:
    return hasattr(module, "set_reshard_after_forward")  # an FSDPModule, without importing torch.distributed.fsdp


def _cut(name: str, tensor: Any) -> tuple[Any, int]:
    """The mesh of a sharded tensor, and along which of its dimensions rows are cut."""
    from torch.distributed.tensor import Shard

    places = tensor.placements
    cuts = [dim for dim, place in enumerate(places) if not place.is_replicate()]
    if len(cuts) != 1 or type(places[cuts[0]]) is not Shard or places[cuts[0]].dim != 0:
        raise ValueError(
            f"{name} is sharded as {tuple(places)}: only rows that are cut once can be pruned, as fully_shard does by "
            "default (Shard(0)), on a mesh of one dimension or of replicas by shards. Leave out shard_placement_fn and "
            "tensor parallelism."
        )
    return tensor.device_mesh, cuts[0]


def _ranks(mesh: Any, dim: int) -> Ranks:
    group = mesh.get_group(dim)

    def add(counts: Tensor) -> Tensor:
        total = counts.to(mesh.device_type, copy=True)  # NCCL sums on the GPU only
        torch.distributed.all_reduce(total, group=group)
        return total.to(counts.device)

    return Ranks(mesh.get_local_rank(dim), mesh.size(dim), add)
