"""Sharded weights: the DTensors of FSDP2 (`torch.distributed.fsdp.fully_shard`) and HSDP.

FSDP2 cuts every parameter into blocks of whole rows, one for each rank, in the order of ranks (`Shard(0)`; the last
ones may be shorter, or empty). So each rank holds a contiguous part of every matrix in flat order. Ranking needs no
more: only counts are exchanged. Under HSDP rows are cut along one dimension of a mesh and repeated along the other;
counts are summed along the first only. No parameter is ever gathered here.
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
    """Whether a tensor is a DTensor, by duck typing, so that torch.distributed is not needed."""
    return hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; any other tensor unchanged. Never a copy."""
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
    """The sum over all ranks of a number counted in each part of a tensor."""
    return number if not is_sharded(tensor) else _ranks(*_cut("a tensor", tensor)).count(number)


def rows_each(tensor: Tensor) -> int:
    """The rows of a full part of a tensor; all rows if the tensor is not sharded."""
    rows = tensor.shape[0]
    if not is_sharded(tensor):
        return rows
    mesh, dim = _cut("a tensor", tensor)
    return -(-rows // int(mesh.size(dim)))


def start_of(tensor: Tensor) -> int:
    """The flat index of this rank's first weight in the whole tensor."""
    if not is_sharded(tensor):
        return 0
    mesh, dim = _cut("a tensor", tensor)
    row = min(tensor.shape[0], int(mesh.get_local_rank(dim)) * rows_each(tensor))
    return row * (tensor.numel() // max(1, tensor.shape[0]))


def like(owner: Tensor, values: Tensor) -> Tensor:
    """Values of this rank's weights as a DTensor that is sharded like their owner.

    Args:
        owner: a parameter. Unless it is a DTensor, the values are returned unchanged.
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
    """Whether FSDP2 manages a model, so that all ranks must run its forward passes together."""
    return any(_is_managed(module) for module in model.modules())


def reshard(model: nn.Module) -> None:
    """Frees parameters that FSDP2 keeps gathered after a forward pass, as it does for the root module."""
    for module in model.modules():
        if _is_managed(module):
            module.reshard()  # type: ignore[operator]


def mesh_of(tensors: Iterable[Tensor]) -> Any:
    """The device mesh over which tensors are sharded; None if none is."""
    return next((tensor.device_mesh for tensor in tensors if is_sharded(tensor)), None)  # type: ignore[attr-defined]


def _is_managed(module: nn.Module) -> bool:
    return hasattr(module, "set_reshard_after_forward")  # an FSDPModule, without importing torch.distributed.fsdp


def _cut(name: str, tensor: Any) -> tuple[Any, int]:
    """The mesh of a sharded tensor, and the mesh dimension along which rows are cut."""
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
        total = counts.to(mesh.device_type, copy=True)  # NCCL only sums on GPUs
        torch.distributed.all_reduce(total, group=group)
        return total.to(counts.device)

    return Ranks(mesh.get_local_rank(dim), mesh.size(dim), add)
