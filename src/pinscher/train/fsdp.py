"""Shards a Trainer's model over the processes (FSDP2). `storage` saves and loads it.

Neither Accelerate nor the Trainer shards on a CPU (both silently fall back to DDP), so `fully_shard` is called here, on
every block and on the whole model, and the Trainer is told that the model is already distributed. The rest of its loop
is unchanged: every process trains on its own batches, and FSDP2 averages the gradients.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from pinscher.errors import InputError
from pinscher.models.names import clean_name
from pinscher.prune import Pruner, PruningConfig, find_sites


def mesh_over(device: torch.device, replicas: int = 1) -> DeviceMesh:
    """A mesh of all processes, or of replicas by shards. A single process becomes a group of one."""
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    world = dist.get_world_size()
    if replicas == 1:
        return init_device_mesh(device.type, (world,))
    if world % replicas:
        raise InputError(f"{world} processes cannot hold {replicas} copies of the model: start a multiple of that.")
    return init_device_mesh(device.type, (replicas, world // replicas), mesh_dim_names=("replicas", "shards"))


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shards every transformer block separately, so that one at a time is gathered, and the rest with the model."""
    modules = {clean_name(name): module for name, module in model.named_modules()}
    for block in dict.fromkeys(site.block for site in find_sites(model)):
        if block:
            fully_shard(modules[block], mesh=mesh)
    fully_shard(model, mesh=mesh)
    plain = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    assert not plain, f"{plain[0]} is not sharded"


def shard_and_prune(model: nn.Module, mesh: DeviceMesh, config: PruningConfig | None) -> Pruner | None:
    """Shards a model and makes its pruner. Learned masks are made first, to be sharded with the model."""
    try:
        if config is not None and config.make_criterion().learns_masks:
            pruner = Pruner(model, config)
            shard(model, mesh)
            return pruner
        shard(model, mesh)
        return None if config is None else Pruner(model, config)
    except ValueError as error:  # a pattern that the shards would cut
        raise InputError(str(error)) from None
