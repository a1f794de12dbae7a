"""A stored model's tensors, opened and checked with numpy alone; file.py writes such files, and gives torch's tensors.

    model.safetensors                  or model-00001-of-00003.safetensors … and model.safetensors.index.json
      NAME     uint8 [bytes]           a packed matrix (unpacking.py), under the name of its parameter
      NAME     any other type          a tensor as it is
      __metadata__                     format: "pt", pinscher: the version, checksums: 8 hex digits a tensor, by name

A packed matrix is a vector of bytes where a model expects a matrix, so a reader that does not know the format fails
on its shape instead of loading nonsense. Files are memory-mapped: only requested tensors are read.

All packed matrices of a model together may hold FREE + EXPANSION * B bytes of weights, if its tensors have B bytes. So
a small file cannot demand much memory; a model of almost only zeros is padded when it is written.
"""

from __future__ import annotations

import json
import mmap
import re
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from pinscher.store import unpacking
from pinscher.store.integers import Coded
from pinscher.store.streams import DamagedError

Array = NDArray[Any]
VERSION = 1
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
EXPANSION = 1024  # bytes of weights for each byte; 99.9 % zeros make about 500, with the biases and norms of a model
MOST_INDEX = 1 << 28  # bytes of the index
# safetensors' names of types, and torch's.
KINDS = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "C64": "complex64",
}


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


def checksum(name: str, kind: str, shape: tuple[int, ...], data: Any) -> str:
    """CRC-32 over name, type (by torch's name), shape and bytes."""
    start = zlib.crc32(f"{name} torch.{kind} {list(shape)}".encode())
    return f"{zlib.crc32(data, start):08x}"


@dataclass(frozen=True)
class Raw:
    """A tensor as it is stored."""

    kind: str  # its type, by torch's name
    shape: tuple[int, ...]
    data: Array  # its bytes

    @property
    def is_packed(self) -> bool:
        """Whether it is a packed matrix."""
        return self.kind == "uint8" and len(self.shape) == 1

    @property
    def is_float(self) -> bool:
        """Whether its numbers have fractions."""
        return unpacking.is_float(self.kind)


class Archive:
    """The tensors of a stored model, opened and checked; a context manager.

    Raises:
        DamagedError: for anything that file.py cannot have written; it names the file and the tensor.
    """

    def __init__(self, files: list[Path]) -> None:
        self.place = files[0] if len(files) == 1 else files[0].parent  # its name in messages
        self.size = 0  # bytes of the tensors
        self._home: dict[str, tuple[Path, Raw]] = {}
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
        raws = [raw for _, raw in self._home.values()]
        self.size = sum(raw.data.size for raw in raws)
        wanted = sum(unpacking.declared(unpacking.view(raw.data)) for raw in raws if raw.is_packed)
        if wanted > unpacking.FREE + EXPANSION * self.size:
            raise DamagedError(
                f"{self.place} declares {wanted:,} bytes of weights, more than {self.size:,} bytes can hold"
            )

    def _open(self, path: Path) -> None:
        if not path.is_file():  # a pipe would be waited for
            why = "it is not a file" if path.exists() else "there is no such file"
            raise DamagedError(f"{path} cannot be read: {why}")
        try:
            with safe_open(path, framework="np") as file:  # which checks the header
                metadata, names = file.metadata() or {}, sorted(file.keys())
        except (SafetensorError, OSError, ValueError, OverflowError) as error:
            raise DamagedError(f"{path} cannot be read: the file is damaged ({error})") from None
        if "pinscher" not in metadata:
            raise DamagedError(f"{path} was not written by pinscher, or is damaged")
        if metadata["pinscher"] != str(VERSION):
            version = metadata["pinscher"][:20]
            raise DamagedError(f"{path} has format version {version!r}, this pinscher reads {VERSION}: update pinscher")
        sums = metadata.get("checksums", "")
        if len(sums) != 8 * len(names) or metadata.get("format") != "pt":
            raise DamagedError(f"{path} has the wrong number of checksums: the file is damaged")
        tensors = _tensors(path, names)
        for place, name in enumerate(names):
            if name in self._home:
                raise DamagedError(f"{path} holds {name} a second time")
            raw = tensors[name]
            if checksum(name, raw.kind, raw.shape, raw.data) != sums[8 * place : 8 * place + 8]:
                raise DamagedError(f"{path}: {name} has the wrong checksum: the file is damaged")
            self._home[name] = path, raw

    def names(self) -> list[str]:
        return sorted(self._home)

    def path(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self._home[name][0]

    def stored(self, name: str) -> Raw:
        """A tensor as it is stored."""
        return self._home[name][1]

    def head(self, name: str) -> unpacking.Head | None:
        """The header of a packed matrix; None for a plain tensor."""
        raw = self.stored(name)
        with self.naming(name):
            return unpacking.head(unpacking.view(raw.data)) if raw.is_packed else None

    def floats(self, name: str) -> Array:
        """A tensor in fp32, in its module's layout; it may share the file's memory."""
        raw = self.stored(name)
        with self.naming(name):
            if not raw.is_packed:
                return unpacking.floats(raw.data, raw.kind).reshape(raw.shape)
            matrix, found = unpacking.unpack(unpacking.view(raw.data))
            made = matrix if found.scaled else unpacking.floats(matrix, found.kind)
            return np.ascontiguousarray(made.T) if found.transposed else made

    def coded(self, name: str) -> Coded | Array:
        """A packed matrix with output rows first: codes and scales if it was quantised, else its numbers in fp32."""
        with self.naming(name):
            made, found = unpacking.unpack_rows(unpacking.view(self.stored(name).data))
            return made if isinstance(made, Coded) else unpacking.floats(made, found.kind)

    @contextmanager
    def naming(self, name: str) -> Iterator[None]:
        """Adds file and tensor to a DamagedError of the block."""
        try:
            yield
        except DamagedError as error:
            raise DamagedError(f"{self.path(name)}: {name}: {error}") from None

    def close(self) -> None:
        self._home.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _tensors(path: Path, names: list[str]) -> dict[str, Raw]:
    """The tensors of a file whose header safetensors has checked; their bytes are those of the file."""
    with path.open("rb") as file:
        start = 8 + struct.unpack("<Q", file.read(8))[0]
        header = json.loads(file.read(start - 8))
        # Private and writable, since torch wants to be able to write: nothing of it gets into the file.
        whole = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), np.uint8)
    found = {}
    for name in names:
        told = header[name]
        if told["dtype"] not in KINDS:
            raise DamagedError(f"{path}: {name} cannot be read (it is of type {told['dtype']})")
        begin, end = told["data_offsets"]
        found[name] = Raw(KINDS[told["dtype"]], tuple(told["shape"]), whole[start + begin : start + end])
    return found
