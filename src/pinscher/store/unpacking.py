"""Reads a matrix from bytes with a header and a checksum, with numpy alone; docs/format.md describes every byte.

payload.py writes such bytes, and gives them as torch's tensors.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pinscher.errors import InputError
from pinscher.store import entropy, integers
from pinscher.store.codecs import BY_NUMBER, CODECS
from pinscher.store.integers import Coded
from pinscher.store.streams import DamagedError, Reader

Array = NDArray[Any]
MAGIC, VERSION = b"PNSR", 1
HEADER = struct.Struct("<4sBBBBIII")  # magic, version, codec, kind, flags, rows, columns, checksum
TRANSPOSED, SCALED = 1, 2  # flags
# The types of values by torch's names, with the bytes of a number; a file has the index in this list.
SIZES = {
    "int8": 1,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float64": 8,
    "uint8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "bool": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
KINDS = tuple(SIZES)
BITS: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.int8),
    2: np.dtype(np.int16),
    4: np.dtype(np.int32),
    8: np.dtype(np.int64),
}
# A matrix of B bytes may hold at most FREE + EXPANSION * B bytes of weights; an emptier one is padded with zero bytes.
# All matrices of a model together share one FREE (archive.py).
FREE, EXPANSION = 1 << 24, 2048


@dataclass(frozen=True)
class Head:
    """The header of a payload, checked."""

    codec: int
    kind: str  # one of KINDS
    rows: int
    columns: int
    transposed: bool
    scaled: bool

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the weight as its module has it."""
        return (self.columns, self.rows) if self.transposed else (self.rows, self.columns)

    @property
    def is_float(self) -> bool:
        """Whether the weights are numbers with a fraction, however they are coded."""
        return self.scaled or is_float(self.kind)


def is_float(kind: str) -> bool:
    """Whether a type, by torch's name, has fractions."""
    return kind.startswith(("float", "bfloat"))


def weight_bytes(rows: int, columns: int, size: int) -> int:
    """The bytes of the weights; for an empty matrix those of its longer side, which has classes and scales too."""
    return max(rows, 1) * max(columns, 1) * size


def declared(data: memoryview) -> int:
    """The bytes of the weights that a payload claims to hold, unverified; 0 if it is not a payload."""
    if len(data) < HEADER.size or bytes(data[:4]) != MAGIC:
        return 0
    _, _, _, kind, flags, rows, columns, _ = HEADER.unpack_from(data)
    size = 4 if flags & SCALED or kind >= len(KINDS) else SIZES[KINDS[kind]]
    return weight_bytes(rows, columns, size)


def head(data: memoryview) -> Head:
    """The header of a payload, its checksum verified.

    Raises:
        DamagedError: with the cause.
    """
    if len(data) < HEADER.size:
        raise DamagedError("it is too short")
    magic, version, number, kind, flags, rows, columns, checksum = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise DamagedError("it is not a packed matrix")
    if version != VERSION:
        raise DamagedError(f"it has format version {version}, this pinscher reads {VERSION}: a newer one may read it")
    fields = HEADER.pack(magic, version, number, kind, flags, rows, columns, 0)
    if zlib.crc32(data[HEADER.size :], zlib.crc32(fields)) != checksum:
        raise DamagedError("its checksum is wrong: the file is damaged")
    if number not in BY_NUMBER or kind >= len(KINDS) or flags > TRANSPOSED | SCALED:
        raise DamagedError("it uses a codec or type that this pinscher does not know: update pinscher")
    found = Head(number, KINDS[kind], rows, columns, bool(flags & TRANSPOSED), bool(flags & SCALED))
    if found.scaled and found.kind != "int8":
        raise DamagedError("scales without int8 codes")
    size = 4 if found.scaled else SIZES[found.kind]
    if weight_bytes(rows, columns, size) > FREE + EXPANSION * len(data):
        raise DamagedError(f"it declares {rows} x {columns} weights, more than {len(data)} bytes can hold")
    return found


def unpack(data: memoryview) -> tuple[Array, Head]:
    """The matrix, output rows first: fp32 if it was quantised, else the bits of its type as integers of that size.

    Raises:
        DamagedError: for anything that `payload.pack` cannot have written.
    """
    found = head(data)
    reader = Reader(data[HEADER.size :])
    matrix = _scaled(reader, found) if found.scaled else _codes(reader, found)
    _finish(reader)
    return matrix, found


def unpack_rows(data: memoryview) -> tuple[Coded | Array, Head]:
    """The same, but codes and scales if it was quantised."""
    found = head(data)
    reader = Reader(data[HEADER.size :])
    scale = _scale(reader, found.rows) if found.scaled else None
    codes = _codes(reader, found)
    _finish(reader)
    return (codes if scale is None else Coded(codes, scale)), found


def floats(bits: Array, kind: str) -> Array:
    """Numbers in fp32, from their bits or as they are.

    Raises:
        DamagedError: for a type that has no fractions, or that numpy does not know.
    """
    if kind == "bfloat16":
        return integers.from_bfloat16(bits.view(np.uint16))
    if kind not in ("float16", "float32", "float64"):
        raise DamagedError(f"numbers of type {kind} cannot be read without torch")
    found: Array = bits.view(np.dtype(kind)).astype(np.float32, copy=False)
    return found


def _finish(reader: Reader) -> None:
    if any(reader.take(len(reader.data) - reader.at)):
        raise DamagedError("bytes are left over")


def _codes(reader: Reader, found: Head) -> Array:
    matrix = BY_NUMBER[found.codec].decode(reader, found.rows, found.columns, BITS[SIZES[found.kind]])
    return np.require(matrix, requirements="W")


def _scaled(reader: Reader, found: Head) -> Array:
    scale = _scale(reader, found.rows)
    if found.codec == CODECS["entropy"].number:  # directly to fp32, without intermediate codes
        return entropy.decode(reader, found.rows, found.columns, np.dtype(np.int8), scale)
    return integers.numbers(_codes(reader, found), scale)


def _scale(reader: Reader, rows: int) -> Array:
    bits = reader.stream(rows)
    if bits.size != rows or (rows and bits.dtype != np.uint16):
        raise DamagedError("the scales do not fit the rows")
    scale = integers.from_bfloat16(bits.astype(np.uint16))
    if not (np.isfinite(scale) & (scale >= 0)).all():
        raise DamagedError("a scale is not a positive number")
    return scale


def view(data: Any) -> memoryview:
    """The bytes of a payload, from any kind of buffer; numpy arrays must be vectors of bytes."""
    if isinstance(data, np.ndarray):
        if data.dtype != np.uint8 or data.ndim != 1:
            raise DamagedError("it is not a packed matrix")
        return np.ascontiguousarray(data).data.cast("B")
    return memoryview(data)


__all__ = ["Coded", "DamagedError", "Head", "InputError", "floats", "head", "unpack", "unpack_rows", "view"]
