"""Writes a stored model's files, and gives their contents as torch's tensors; archive.py says what is in them."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor

from pinscher.store import archive, payload
from pinscher.store.archive import EXPANSION, INDEX, SINGLE, VERSION, Archive, files_of
from pinscher.store.quantize import Quantized

PATTERN = "model{suffix}.safetensors"
SHARD = "5GB"


def write(folder: Path, tensors: Mapping[str, Tensor], max_shard_size: int | str = SHARD) -> list[Path]:
    """Writes the files into an existing folder; the caller makes the write atomic.

    The same tensors give the same bytes.
    """
    tensors = _padded(tensors)
    split = split_torch_state_dict_into_shards(dict(tensors), filename_pattern=PATTERN, max_shard_size=max_shard_size)
    for name, members in split.filename_to_tensors.items():
        part = {member: tensors[member].detach().cpu().contiguous() for member in members}
        checksums = "".join(checksum(member, part[member]) for member in sorted(part))
        save_file(part, folder / name, metadata={"format": "pt", "pinscher": str(VERSION), "checksums": checksums})
        _sort_metadata_(folder / name)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")
    return [folder / name for name in split.filename_to_tensors]


def _padded(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The same tensors, with zero bytes after the largest matrix if there are too few bytes for all their weights."""
    weights = {name: payload.declared(payload.view(tensor)) for name, tensor in tensors.items() if is_packed(tensor)}
    lacking = -(-(sum(weights.values()) - payload.FREE) // EXPANSION) - size_of(tensors.values())
    if lacking <= 0:
        return tensors
    largest = max(weights, key=lambda name: weights[name])
    made = payload.padded(payload.view(tensors[largest]), lacking)
    return {**tensors, largest: torch.frombuffer(bytearray(made), dtype=torch.uint8)}


def size_of(tensors: Iterable[Tensor]) -> int:
    """The bytes of some tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _sort_metadata_(path: Path) -> None:
    """Sorts the metadata of a file by name, because safetensors writes it in random order."""
    with path.open("r+b") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(text) <= length, "a header does not grow when it is sorted"
        file.seek(8)
        file.write(text.ljust(length))


def checksum(name: str, tensor: Tensor) -> str:
    """The checksum of a tensor with its name."""
    data: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""
    return archive.checksum(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)


def is_packed(tensor: Tensor) -> bool:
    """Whether a stored tensor is a packed matrix."""
    return tensor.dtype == torch.uint8 and tensor.dim() == 1


class Stored(Archive):
    """The same tensors as torch has them."""

    def raw(self, name: str) -> Tensor:
        """A tensor as it is stored; it shares the file's memory."""
        found = self.stored(name)
        dtype: torch.dtype = getattr(torch, found.kind)
        if not found.data.size:
            return torch.empty(found.shape, dtype=dtype)
        return torch.from_numpy(found.data).view(dtype).view(found.shape)

    def tensor(self, name: str) -> Tensor:
        """A tensor as the model has it."""
        raw = self.raw(name)
        with self.naming(name):
            return payload.unpack(raw) if is_packed(raw) else raw

    def rows(self, name: str) -> Quantized | Tensor:
        """A packed matrix with output rows first; see `payload.unpack_rows`."""
        with self.naming(name):
            return payload.unpack_rows(self.raw(name))

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor, one at a time."""
        for name in self.names():
            yield name, self.tensor(name)


__all__ = ["EXPANSION", "INDEX", "SINGLE", "VERSION", "Stored", "checksum", "files_of", "is_packed", "size_of", "write"]
