"""Codecs between matrices of integers, most of them zero, and bytes: one class each, with two functions.

    CODECS["bitmask"].encode(matrix) -> bytes          matrix [rows, columns], zero means pruned
    CODECS["bitmask"].decode(reader, rows, columns, dtype) -> matrix

`decode(encode(matrix))` is the matrix, bit for bit, for any integer type; floating-point weights are passed as bits.
Bytes that `encode` cannot have written raise DamagedError. All numbers are little-endian.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pinscher.errors import InputError
from pinscher.registry import Registry, unknown
from pinscher.store import blocks, entropy
from pinscher.store.streams import DamagedError, Reader, varint

Array = NDArray[Any]
U16, U32 = np.dtype("<u2"), np.dtype("<u4")
ESCAPE = 255  # delta: this many more zeros, and no value


class Codec(Protocol):
    @property
    def number(self) -> int:
        """Its number in files; never reused."""
        ...

    def encode(self, matrix: Array) -> bytes: ...
    def decode(self, reader: Reader, rows: int, columns: int, dtype: np.dtype[Any]) -> Array: ...


class Dense:
    """Every value, row by row."""

    number = 0

    def encode(self, matrix: Array) -> bytes:
        return matrix.tobytes()

    def decode(self, reader: Reader, rows: int, columns: int, dtype: np.dtype[Any]) -> Array:
        return reader.array(dtype, rows * columns).reshape(rows, columns).copy()  # not the file's own memory


class Csr:
    """Compressed sparse rows, as scipy has them: u32 indptr [rows + 1], u16 (u32 if wide) indices, values."""

    number = 1

    def encode(self, matrix: Array) -> bytes:
        row, column = np.nonzero(matrix)
        indptr = np.zeros(matrix.shape[0] + 1, U32)
        indptr[1:] = np.cumsum(np.bincount(row, minlength=matrix.shape[0]))
        return indptr.tobytes() + column.astype(_index(matrix.shape[1])).tobytes() + matrix[row, column].tobytes()

    def decode(self, reader: Reader, rows: int, columns: int, dtype: np.dtype[Any]) -> Array:
        indptr = reader.array(U32, rows + 1).astype(np.int64)
        counts = np.diff(indptr)
        if indptr[0] != 0 or (counts < 0).any() or (counts > columns).any():
            raise DamagedError("the row pointers are not in order")
        column = reader.array(_index(columns), int(indptr[-1])).astype(np.int64)
        if column.size and column.max() >= columns:
            raise DamagedError("an index is out of range")
        place = np.repeat(np.arange(rows), counts) * columns + column
        if (np.diff(place) <= 0).any():
            raise DamagedError("the indices are not in order")
        return _scattered(place, values_of(reader, column.size, dtype), rows, columns)


class Delta:
    """One byte of distance for each value, row after row: varint count | distances | values; 255 skips 255 zeros."""

    number = 2

    def encode(self, matrix: Array) -> bytes:
        place = np.flatnonzero(matrix)
        gaps = np.diff(place, prepend=-1) - 1
        skips = gaps // ESCAPE
        distances = np.full(gaps.size + int(skips.sum()), ESCAPE, np.uint8)
        distances[np.cumsum(skips + 1) - 1] = gaps % ESCAPE
        return varint(distances.size) + distances.tobytes() + matrix.reshape(-1)[place].tobytes()

    def decode(self, reader: Reader, rows: int, columns: int, dtype: np.dtype[Any]) -> Array:
        distances = reader.array(np.dtype(np.uint8), reader.varint())
        holds = distances != ESCAPE
        place = (np.cumsum(distances + holds.astype(np.int64)) - 1)[holds]
        if place.size and place[-1] >= rows * columns:
            raise DamagedError("an index is out of range")
        if distances.size and not holds[-1]:
            raise DamagedError("a skip that leads nowhere")
        return _scattered(place, values_of(reader, place.size, dtype), rows, columns)


class Bitmask:
    """One bit a place, most significant first, rows not padded; then the values."""

    number = 3

    def encode(self, matrix: Array) -> bytes:
        kept = (matrix != 0).reshape(-1)
        mask: bytes = np.packbits(kept).tobytes()
        values: bytes = matrix.reshape(-1)[kept].tobytes()
        return mask + values

    def decode(self, reader: Reader, rows: int, columns: int, dtype: np.dtype[Any]) -> Array:
        place = np.flatnonzero(reader.bits(rows * columns))
        return _scattered(place, values_of(reader, place.size, dtype), rows, columns)


class Entropy:
    """Places and values near their entropy, given the classes of rows and columns (entropy.py)."""

    number = 4

    def encode(self, matrix: Array) -> bytes:
        return entropy.encode(matrix)

    def decode(self, reader: Reader, rows: int, columns: int, dtype: np.dtype[Any]) -> Array:
        return entropy.decode(reader, rows, columns, dtype)


class Blocks:
    """A mask of blocks, then the values of the kept ones, plainly or at their entropy (blocks.py)."""

    number = 5

    def encode(self, matrix: Array) -> bytes:
        return blocks.encode(matrix)

    def decode(self, reader: Reader, rows: int, columns: int, dtype: np.dtype[Any]) -> Array:
        return blocks.decode(reader, rows, columns, dtype)


CODECS: Registry[Codec] = Registry("codec")
CODECS["dense"] = Dense()
CODECS["csr"] = Csr()
CODECS["delta"] = Delta()
CODECS["bitmask"] = Bitmask()
CODECS["entropy"] = Entropy()
CODECS["blocks"] = Blocks()
BY_NUMBER = {codec.number: codec for codec in CODECS.values()}
assert len(BY_NUMBER) == len(CODECS)


def codec(name: str) -> Codec:
    """The codec of that name."""
    if name not in CODECS:
        raise InputError(unknown("codec", name, CODECS) + ".")
    return CODECS[name]


def smallest(matrix: Array, names: tuple[str, ...] = tuple(CODECS)) -> tuple[Codec, bytes]:
    """The codec with the fewest bytes for this matrix; of equal ones the simpler."""
    made = [(codec(name), codec(name).encode(matrix)) for name in names]
    return min(made, key=lambda pair: (len(pair[1]), pair[0].number))


def values_of(reader: Reader, count: int, dtype: np.dtype[Any]) -> Array:
    values = reader.array(dtype, count)
    if not values.all():
        raise DamagedError("a kept weight without a value")
    return values


def _index(columns: int) -> np.dtype[Any]:
    return U16 if columns <= 1 << 16 else U32


def _scattered(place: Array, values: Array, rows: int, columns: int) -> Array:
    out = np.zeros(rows * columns, values.dtype)
    out[place] = values
    return out.reshape(rows, columns)
