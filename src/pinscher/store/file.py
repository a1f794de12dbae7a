"""A model's tensors in one or several safetensors files: packed matrices and plain tensors, every one with a checksum.

    model.safetensors                  or model-00001-of-00003.safetensors … and model.safetensors.index.json
      NAME     uint8 [bytes]           a packed matrix (payload.py), under the name of its parameter
      NAME     any other type          a tensor as it is
      __metadata__                     format: "pt", pinscher: the version, checksums: 8 hex digits a tensor, by name

A packed matrix is a vector of bytes where a model expects a matrix, so a reader that does not know the format fails
on its shape instead of loading nonsense. Files are memory-mapped: what is not asked for is not read.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pinscher.store import payload
from pinscher.store.streams import DamagedError

VERSION = 1
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PATTERN = "model{suffix}.safetensors"
SHARD = "5GB"


def write(folder: Path, tensors: Mapping[str, Tensor], max_shard_size: int | str = SHARD) -> list[Path]:
    """Writes the files into a folder that is there; the caller makes the folder whole or not there."""
    split = split_torch_state_dict_into_shards(dict(tensors), filename_pattern=PATTERN, max_shard_size=max_shard_size)
    for name, members in split.filename_to_tensors.items():
        part = {member: tensors[member].detach().cpu().contiguous() for member in members}
        checksums = "".join(checksum(member, part[member]) for member in sorted(part))
        save_file(part, folder / name, metadata={"format": "pt", "pinscher": str(VERSION), "checksums": checksums})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")
    return [folder / name for name in split.filename_to_tensors]


def checksum(name: str, tensor: Tensor) -> str:
    """CRC-32 over name, type, shape and bytes."""
    start = zlib.crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
    data: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""
    return f"{zlib.crc32(data, start):08x}"


def is_packed(tensor: Tensor) -> bool:
    """Whether a stored tensor is a packed matrix."""
    return tensor.dtype == torch.uint8 and tensor.dim() == 1


def files_of(folder: Path) -> list[Path]:
    """The model's files.

    Raises:
        DamagedError: if there are none, or the index names a place outside the folder.
    """
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    try:
        names = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
    except FileNotFoundError:
        raise DamagedError(f"{folder} holds no {SINGLE}") from None
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise DamagedError(f"{folder / INDEX} cannot be read: the file is damaged") from None
    if not names:
        raise DamagedError(f"{folder / INDEX} names no file: the file is damaged")
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not re.fullmatch(r".{1,188}\.safetensors", name):
            raise DamagedError(f"{folder / INDEX} names {str(name)[:99]!r}, which is not a file of this folder")
        if not (folder / name).exists():
            raise DamagedError(f"{folder} lacks {name}: the model is not complete")
    return [folder / name for name in sorted(names)]


class Stored:
    """The tensors of a stored model, opened and checked; a context manager.

    Raises:
        DamagedError: in the name of the file and the tensor, for anything `write` cannot have written.
    """

    def __init__(self, files: list[Path]) -> None:
        self._stack = ExitStack()
        self._home: dict[str, tuple[Path, Any]] = {}
        for path in files:
            shard = re.fullmatch(r"model-\d{5}-of-(\d{5})\.safetensors", path.name)
            if shard and int(shard[1]) != len(files):
                raise DamagedError(f"{path.parent}: {len(files)} of {int(shard[1])} files: the model is not complete")
        try:
            for path in files:
                self._open(path)
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path) -> None:
        try:
            file = self._stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError, ValueError, OverflowError) as error:
            raise DamagedError(f"{path} cannot be read: the file is damaged ({error})") from None
        metadata = file.metadata() or {}
        if "pinscher" not in metadata:
            raise DamagedError(f"{path} was not written by pinscher, or is damaged")
        if metadata["pinscher"] != str(VERSION):
            version = metadata["pinscher"][:20]
            raise DamagedError(f"{path} has format version {version!r}, this pinscher reads {VERSION}: update pinscher")
        names = sorted(file.keys())
        sums = metadata.get("checksums", "")
        if len(sums) != 8 * len(names) or metadata.get("format") != "pt":
            raise DamagedError(f"{path} has the wrong number of checksums: the file is damaged")
        for place, name in enumerate(names):
            if name in self._home:
                raise DamagedError(f"{path} holds {name} a second time")
            if checksum(name, self._read(file, path, name)) != sums[8 * place : 8 * place + 8]:
                raise DamagedError(f"{path}: {name} has the wrong checksum: the file is damaged")
            self._home[name] = path, file

    def _read(self, file: Any, path: Path, name: str) -> Tensor:
        try:
            tensor: Tensor = file.get_tensor(name)
        except (SafetensorError, RuntimeError, ValueError, TypeError, struct.error) as error:
            raise DamagedError(f"{path}: {name} cannot be read ({error})") from None
        return tensor

    def names(self) -> list[str]:
        return sorted(self._home)

    def raw(self, name: str) -> Tensor:
        """A tensor as it is stored."""
        path, file = self._home[name]
        return self._read(file, path, name)

    def head(self, name: str) -> payload.Head | None:
        """What a packed matrix says of itself; None for a plain tensor."""
        raw = self.raw(name)
        if not is_packed(raw):
            return None
        try:
            return payload.head(payload.view(raw))
        except DamagedError as error:
            raise DamagedError(f"{self._home[name][0]}: {name}: {error}") from None

    def tensor(self, name: str) -> Tensor:
        """A tensor as the model has it."""
        raw = self.raw(name)
        if not is_packed(raw):
            return raw
        try:
            return payload.unpack(raw)
        except DamagedError as error:
            raise DamagedError(f"{self._home[name][0]}: {name}: {error}") from None

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor, one at a time."""
        for name in self.names():
            yield name, self.tensor(name)

    def close(self) -> None:
        self._home.clear()
        self._stack.close()

    def __enter__(self) -> Stored:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
