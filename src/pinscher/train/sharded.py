"""Files of sharded models (FSDP2, HSDP): every process writes its own part; any number of processes can read them.

    sharded.save(folder, model=model.state_dict(), optimizer=optimizer.state_dict(), pruner=pruner.state_dict())
    state = sharded.load(folder, model)

Checkpoints use torch.distributed.checkpoint with safetensors: no pickle, one file for each process, and one JSON file
for everything that is not a tensor. A folder is written completely or not at all, as in `checkpoint`. `write_weights`
writes an ordinary model's files instead; only the first process then holds whole tensors, one file's worth at a time.

Every function here must be called by all processes.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import empty as empty_sharded

from pinscher import files
from pinscher.prune.sharding import local, mesh_of, reshard
from pinscher.train import checkpoint, checksums
from pinscher.train.checksums import DamagedError
from pinscher.train.processes import agreed

VALUES = "sharded.json"
FORMAT = 1
LIMIT = 2 << 30  # bytes of a weights file


def save(folder: str | os.PathLike[str], **states: Any) -> Path:
    """Stores nested dicts, lists, numbers, strings, tensors and DTensors atomically; replaces what the folder held.

    Everything but DTensors is taken from the first process.

    Raises:
        TypeError: for a value that is not plain data or a tensor, naming its place. Nothing is written then.
    """
    with whole(folder, checked=True) as fresh:
        write(fresh, **states)
    return Path(folder)


def write(folder: Path, **states: Any) -> None:
    """The same into an existing folder, one given by `whole(…, checked=True)`."""
    tensors: dict[str, Tensor] = {}
    plain = checkpoint.plain(states, tensors)
    described = {name: _description(tensor) for name, tensor in tensors.items()}
    stored = _apart({name: tensor.detach() for name, tensor in tensors.items() if tensor.numel()})
    state_dict_saver.save(stored, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    if dist.get_rank() == 0:
        text = json.dumps({"format": FORMAT, checkpoint.CHECKED: True, "states": plain, "tensors": described})
        (folder / VALUES).write_text(text)


def load(folder: str | os.PathLike[str], model: nn.Module, *, verified: bool = False) -> dict[str, Any]:
    """Reads what `save` stored: each process reads its part, by the present sharding of `model`. The first process
    compares the checksums, unless the caller has `verified` them.

    Raises:
        FileNotFoundError: if there is no checkpoint.
        ValueError: if it is damaged or of another format, or the model is not sharded.
    """
    folder = files.last_whole(folder)
    reshard(model)
    mesh = mesh_of(model.parameters())
    if mesh is None:
        raise ValueError("the model is not sharded: call fully_shard before a sharded checkpoint is loaded")
    if not verified:
        agreed(lambda: checksums.verify(folder))
    values = checkpoint.read_values(folder / VALUES, FORMAT)
    try:
        tensors = {name: _empty(described, mesh) for name, described in values["tensors"].items()}
    except (KeyError, TypeError, AttributeError, RuntimeError):
        raise DamagedError(f"{folder / VALUES} is damaged: it does not describe the tensors") from None
    wanted = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
    try:
        state_dict_loader.load(wanted, storage_reader=HuggingFaceStorageReader(str(folder)))
    except CheckpointException as error:
        causes = [str(cause[0]) for cause in error.failures.values()]
        raise DamagedError(f"the checkpoint in {folder} is damaged: {causes[0]}") from None
    return checkpoint.restored_states(values, tensors, folder)


def is_there(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder holds a checkpoint of this kind."""
    return (files.last_whole(folder) / VALUES).exists()


@contextlib.contextmanager
def whole(folder: str | os.PathLike[str], checked: bool = False) -> Iterator[Path]:
    """`files.whole` for all processes: the first makes the folder, and renames it when all have written. A `checked`
    folder gets checksums.
    """
    folder = Path(folder)
    with contextlib.ExitStack() as stack:
        if dist.get_rank() == 0:
            stack.enter_context(files.whole(folder))
        dist.barrier()
        yield files.fresh_name(folder)
        dist.barrier()
        if checked and dist.get_rank() == 0:
            checksums.write(files.fresh_name(folder))
    dist.barrier()


def write_weights(state: Mapping[str, Tensor], folder: Path, limit: int = LIMIT) -> None:
    """Writes an ordinary model's weights: safetensors files of about `limit` bytes, with an index if they are several.

    Tensors are gathered one after the other, on the first process only, which holds no more than one file's worth.
    """
    files: list[list[str]] = [[]]
    size = 0
    for name, tensor in state.items():
        if files[-1] and size + tensor.numel() * tensor.element_size() > limit:
            files.append([])
            size = 0
        files[-1].append(name)
        size += tensor.numel() * tensor.element_size()
    places: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        file = "model.safetensors" if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        gathered = {name: gather(state[name]) for name in names}
        if dist.get_rank() == 0:
            save_file({n: t for n, t in gathered.items() if t is not None}, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(names, file)
    if dist.get_rank() == 0 and len(files) > 1:
        total = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def gather(tensor: Tensor) -> Tensor | None:
    """The whole of a sharded tensor on the first process; None on the others. A plain tensor is whole everywhere."""
    first = dist.get_rank() == 0
    if not isinstance(tensor, DTensor):
        return tensor.detach().cpu().contiguous().clone() if first else None
    mesh, placements = tensor.device_mesh, tensor.placements
    dim = next(i for i, place in enumerate(placements) if place.is_shard())
    if any(mesh.get_local_rank(other) for other in range(mesh.ndim) if other != dim):
        return None  # a replica: the first one speaks for all
    group, size = mesh.get_group(dim), mesh.size(dim)
    part = local(tensor.detach())
    rows = -(-tensor.shape[0] // size)
    padded = part.new_zeros(rows, *tensor.shape[1:])
    padded[: part.shape[0]] = part
    buffers = [torch.empty_like(padded) for _ in range(size)] if first else None
    dist.gather(padded, buffers, dst=0, group=group)
    return None if buffers is None else torch.cat(buffers)[: tensor.shape[0]].cpu().contiguous()


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, with copies of those that share memory with an earlier one: safetensors refuses them."""
    seen: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        place = local(tensor).untyped_storage().data_ptr()
        found[name] = tensor.clone() if place in seen else tensor.contiguous()
        seen.add(place)
    return found


def _description(tensor: Tensor) -> dict[str, Any]:
    """What is needed to make room for a tensor; `cut` is the dimension that is sharded."""
    cuts = [p.dim for p in tensor.placements if isinstance(p, Shard)] if isinstance(tensor, DTensor) else []
    described = {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
    return described | ({"cut": cuts[0]} if cuts else {})


def _empty(described: dict[str, Any], mesh: Any) -> Tensor:
    shape, dtype = torch.Size(described["shape"]), getattr(torch, described["dtype"])
    if "cut" not in described:
        return torch.empty(shape, dtype=dtype)
    replicas = [Replicate()] * (mesh.ndim - 1)  # FSDP2 shards along the last dimension of a mesh
    made: Tensor = empty_sharded(shape, dtype=dtype, device_mesh=mesh, placements=[*replicas, Shard(described["cut"])])
    return made
