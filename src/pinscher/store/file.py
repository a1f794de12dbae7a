"""A model's tensors in one or several safetensors files: packed matrices and plain tensors, each with a checksum.

    model.safetensors                  or model-00001-of-00003.safetensors … and model.safetensors.index.json
      NAME     uint8 [bytes]           a packed matrix (payload.py), under the name of its parameter
      NAME     any other type          a tensor as it is
      __metadata__                     format: "pt", pinscher: the version, checksums: 8 hex digits a tensor, by name

A packed matrix is a vector of bytes where a model expects a matrix, so a reader that does not know the format fails
on its shape instead of loading nonsense. Files are memory-mapped: only requested tensors are read.

All packed matrices of a model together may hold FREE + EXPANSION * B bytes of weights, if its tensors have B bytes. So
a small file cannot demand much memory; a model of almost only zeros is padded when it is written.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pinscher.store import payload
from pinscher.store.quantize import Quantized
from pinscher.store.streams import DamagedError

VERSION = 1
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PATTERN = "model{suffix}.safetensors"
SHARD = "5GB"
EXPANSION = 1024  # bytes of weights for each byte; 99.9 % zeros make about 500, with the biases and norms of a model
MOST_INDEX = 1 << 28  # bytes of the index


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
    if not (folder / INDEX).exists():
        raise DamagedError(f"{folder} holds no {SINGLE}")
    if not (folder / INDEX).is_file() or (folder / INDEX).stat().st_size > MOST_INDEX:  # a pipe would be waited for
        raise DamagedError(f"{folder / INDEX} cannot be read: it is not a file, or longer than any index")
    try:
        names = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
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
        DamagedError: for anything that `write` cannot have written; it names the file and the tensor.
    """

    def __init__(self, files: list[Path]) -> None:
        self.place = files[0] if len(files) == 1 else files[0].parent  # its name in messages
        self.size = 0  # bytes of the tensors
        self._stack = ExitStack()
        self._home: dict[str, tuple[Path, Any]] = {}
        for path in files:
            shard = re.fullmatch(r"model-\d{5}-of-(\d{5})\.safetensors", path.name)
            if shard and int(shard[1]) != len(files):
                raise DamagedError(f"{path.parent}: {len(files)} of {int(shard[1])} files: the model is not complete")
        try:
            for path in files:
                self._open(path)
            self._check_room()
        except BaseException:
            self.close()
            raise

    def _check_room(self) -> None:
        """Refuses matrices that are together larger than the bytes of the file can justify."""
        raws = [self.raw(name) for name in self._home]
        self.size = size_of(raws)
        wanted = sum(payload.declared(payload.view(raw)) for raw in raws if is_packed(raw))
        if wanted > payload.FREE + EXPANSION * self.size:
            raise DamagedError(
                f"{self.place} declares {wanted:,} bytes of weights, more than {self.size:,} bytes can hold"
            )

    def _open(self, path: Path) -> None:
        if not path.is_file():  # a pipe would be waited for
            why = "it is not a file" if path.exists() else "there is no such file"
            raise DamagedError(f"{path} cannot be read: {why}")
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

    def path(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self._home[name][0]

    def raw(self, name: str) -> Tensor:
        """A tensor as it is stored."""
        path, file = self._home[name]
        return self._read(file, path, name)

    def head(self, name: str) -> payload.Head | None:
        """The header of a packed matrix; None for a plain tensor."""
        raw = self.raw(name)
        with self.naming(name):
            return payload.head(payload.view(raw)) if is_packed(raw) else None

    def tensor(self, name: str) -> Tensor:
        """A tensor as the model has it."""
        raw = self.raw(name)
        with self.naming(name):
            return payload.unpack(raw) if is_packed(raw) else raw

    def rows(self, name: str) -> Quantized | Tensor:
        """A packed matrix with output rows first; see `payload.unpack_rows`."""
        with self.naming(name):
            return payload.unpack_rows(self.raw(name))

    @contextmanager
    def naming(self, name: str) -> Iterator[None]:
        """Adds file and tensor to a DamagedError of the block."""
        try:
            yield
        except DamagedError as error:
            raise DamagedError(f"{self.path(name)}: {name}: {error}") from None

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
