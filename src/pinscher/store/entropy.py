"""The entropy codec: places and values of the nonzero codes, with one stream of each per level (twoway.py).

    matrix   stream row classes | stream column classes            of the mask
             for each level: varint ones | stream of gaps          between ones, or between zeros if those are fewer
             stream row classes | stream column classes            of the values
             for each level: stream of values

A level's places come block by block: for every row class a in turn the rows of class a, row by row, with the columns of
class level - a. An empty class stream means that all are of class 0. Values come in the order of the places, level by
level.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pinscher import native
from pinscher.store import twoway
from pinscher.store.streams import DamagedError, Reader, small_unsigned, stream, varint
from pinscher.store.twoway import Classes

Array = NDArray[Any]


def encode(matrix: Array) -> bytes:
    """A matrix of integers [rows, columns]; zero means pruned."""
    mask, row, column = encode_mask(matrix != 0)
    return mask + encode_values(matrix[row, column], row, column, (matrix.shape[0], matrix.shape[1]))


def encode_mask(kept: Array) -> tuple[bytes, Array, Array]:
    """A mask as bytes, and row and column of its ones in the order in which they are coded."""
    classes = twoway.mask_classes(kept)
    layout = Layout(classes)
    sequence = layout.sequence(kept)
    parts = [_encode_classes(classes), *(_encode_level(sequence[start:end]) for start, end in layout.spans())]
    return b"".join(parts), *layout.places(np.flatnonzero(sequence))


def encode_values(values: Array, row: Array, column: Array, shape: tuple[int, int]) -> bytes:
    """The values at these places, level by level."""
    graded = values.dtype == np.int8
    sizes = twoway.value_classes(values, row, column, shape) if graded else twoway.flat(*shape)
    level = sizes.rows[row] + sizes.columns[column]
    parts = [stream(np.ascontiguousarray(values[level == number])) for number in range(sizes.levels)]
    return b"".join([_encode_classes(sizes), *parts])


def decode(
    reader: Reader, rows: int, columns: int, dtype: np.dtype[Any], scale: NDArray[np.float32] | None = None
) -> Array:
    """The matrix; with a scale for each row, the fp32 weights of int8 codes.

    Raises:
        DamagedError: for anything that `encode` cannot have written.
    """
    core = native.core()
    if core is not None:
        return _decode(core, reader, rows, columns, dtype, scale)
    codes = _decode_slowly(reader, rows, columns, dtype)
    return codes if scale is None else codes.astype(np.float32) * scale[:, None]


def _decode_slowly(reader: Reader, rows: int, columns: int, dtype: np.dtype[Any]) -> Array:
    """The reference: computes every place, then puts the values there."""
    row, column = decode_mask(reader, rows, columns)
    return decode_values(reader, row, column, (rows, columns), dtype)


def decode_mask(reader: Reader, rows: int, columns: int) -> tuple[Array, Array]:
    """Row and column of the ones of a mask, in the order in which they are coded."""
    layout = Layout(decode_classes(reader, rows, columns))
    ones = [start + _decode_level(reader, end - start) for start, end in layout.spans()]
    return layout.places(np.concatenate(ones))


def decode_values(
    reader: Reader, row: Array, column: Array, shape: tuple[int, int], dtype: np.dtype[Any], *, zeros: bool = False
) -> Array:
    """The matrix that has the values at these places and zeros elsewhere; `zeros` says that a value may be one."""
    sizes = decode_classes(reader, *shape)
    level = sizes.rows[row] + sizes.columns[column]
    counts = np.bincount(level, minlength=sizes.levels)
    values = []
    for count in counts:
        values.append(_checked(reader.stream(int(count)), dtype, zeros))
        if values[-1].size != count:
            raise DamagedError("the values do not fit the mask")
    out = np.zeros(shape, dtype)
    order = np.argsort(level, kind="stable")
    out[row[order], column[order]] = np.concatenate(values)
    return out


def _decode(
    core: ModuleType,
    reader: Reader,
    rows: int,
    columns: int,
    dtype: np.dtype[Any],
    scale: NDArray[np.float32] | None,
) -> Array:
    """The same with the walk over places and values in native code."""
    mask = read_mask(reader, rows, columns)
    sizes, values = read_values(reader, (rows, columns), mask.kept, dtype)
    return scattered(core, mask, sizes, values, scale)


@dataclass(frozen=True)
class Mask:
    """A mask as it is coded: for each level how many ones it has, and the gaps between them or between its zeros."""

    classes: Classes
    ones: list[int]
    gaps: list[Array]

    @property
    def kept(self) -> int:
        return sum(self.ones)


def read_mask(reader: Reader, rows: int, columns: int) -> Mask:
    classes = decode_classes(reader, rows, columns)
    listed = [_decode_gaps(reader, size) for size in _level_sizes(classes)]
    return Mask(classes, [ones for ones, _ in listed], [gaps for _, gaps in listed])


def read_values(
    reader: Reader, shape: tuple[int, int], kept: int, dtype: np.dtype[Any], *, zeros: bool = False
) -> tuple[Classes, list[Array]]:
    """The classes of the values, and the values of each level: in all no more than were kept."""
    sizes = decode_classes(reader, *shape)
    values: list[Array] = []
    for _ in range(sizes.levels):
        values.append(_checked(reader.stream(kept), dtype, zeros))
        kept -= values[-1].size  # so that all levels together allocate no more than was kept
    return sizes, values


def scattered(
    core: ModuleType, mask: Mask, sizes: Classes, values: list[Array], scale: NDArray[np.float32] | None = None
) -> Array:
    """The matrix with the values at the ones of the mask, each times its row's scale if there are some."""
    classes, dtype = mask.classes, values[0].dtype
    out = np.zeros((len(classes.rows), len(classes.columns)), dtype if scale is None else np.float32)
    sides = classes.rows, classes.columns, sizes.rows, sizes.columns
    if outcome := core.scatter(mask.gaps, mask.ones, *sides, values, scale, out):
        raise DamagedError(("an index is out of range", "the values do not fit the mask")[outcome - 1])
    return out


def _level_sizes(classes: Classes) -> list[int]:
    """How many places each level has."""
    rows, columns = np.bincount(classes.rows, minlength=1), np.bincount(classes.columns, minlength=1)
    return [int(size) for size in np.convolve(rows, columns)]


class Layout:
    """The order in which the places of a matrix are coded: by level, then by row class, then row by row."""

    def __init__(self, classes: Classes) -> None:
        self.shape = len(classes.rows), len(classes.columns)
        self.flat = classes.levels == 1
        self.levels = classes.levels
        row_counts, column_counts = np.bincount(classes.rows, minlength=1), np.bincount(classes.columns, minlength=1)
        self.row_order = np.argsort(classes.rows, kind="stable")
        self.column_order = np.argsort(classes.columns, kind="stable")
        a, b = np.meshgrid(np.arange(len(row_counts)), np.arange(len(column_counts)), indexing="ij")
        order = np.lexsort((a.ravel(), (a + b).ravel()))
        a, b = a.ravel()[order], b.ravel()[order]
        self.level = a + b
        self.height, self.width = row_counts[a], column_counts[b]
        self.top = (np.cumsum(row_counts) - row_counts)[a]
        self.left = (np.cumsum(column_counts) - column_counts)[b]
        self.end = np.cumsum(self.height * self.width)
        self.start = self.end - self.height * self.width

    def spans(self) -> list[tuple[int, int]]:
        """Where each level's places start and end in the sequence."""
        sizes = np.bincount(self.level, self.end - self.start, minlength=self.levels).astype(np.int64)
        ends = np.cumsum(sizes)
        return list(zip((ends - sizes).tolist(), ends.tolist(), strict=True))

    def sequence(self, kept: Array) -> Array:
        """The mask in coding order, one-dimensional."""
        if self.flat:
            return kept.reshape(-1)
        sorted_ = kept[self.row_order][:, self.column_order]
        return np.concatenate([block.reshape(-1) for block in self._blocks(sorted_)])

    def _blocks(self, matrix: Array) -> Iterator[Array]:
        for top, height, left, width in zip(self.top, self.height, self.left, self.width, strict=True):
            yield matrix[top : top + height, left : left + width]

    def places(self, at: Array) -> tuple[Array, Array]:
        """Row and column of ascending places of the sequence."""
        columns = max(self.shape[1], 1)
        if self.flat:
            row = at // columns
            return row, at - row * columns
        edges = np.searchsorted(at, np.append(self.start, self.end[-1]))
        repeats = np.diff(edges)
        inside = at - np.repeat(self.start, repeats)
        # A quotient of integers below 2^53 in floating point, nudged: exact, and several times faster than dividing
        # them.
        width = np.maximum(self.width, 1)
        row = ((inside + 0.5) * np.repeat(1.0 / width, repeats)).astype(np.int64)
        column = inside - row * np.repeat(width, repeats) + np.repeat(self.left, repeats)
        row += np.repeat(self.top, repeats)
        return self.row_order[row], self.column_order[column]


def _encode_classes(classes: Classes) -> bytes:
    if classes.levels == 1:
        return varint(0) * 2
    return stream(classes.rows) + stream(classes.columns)


def decode_classes(reader: Reader, rows: int, columns: int) -> Classes:
    sides = []
    for count in (rows, columns):
        side = reader.stream(count)
        if side.size not in (0, count) or side.dtype != np.uint8 or side.max(initial=0) >= twoway.MOST:
            raise DamagedError("the classes do not fit the shape")
        sides.append(side if side.size else np.zeros(count, np.uint8))
    return Classes(*sides)


def _encode_level(kept: Array) -> bytes:
    ones = int(kept.sum())
    rare = ones * 2 <= kept.size
    at = np.flatnonzero(kept if rare else ~kept)
    gaps = np.diff(at, prepend=-1) - 1
    return varint(ones) + stream(small_unsigned(gaps))


def _decode_gaps(reader: Reader, size: int) -> tuple[int, Array]:
    """How many ones a level of `size` places has, and the gaps between them, or between zeros if those are fewer."""
    ones = reader.varint()
    if ones > size:
        raise DamagedError("more kept weights than places")
    gaps = reader.stream(size)
    if gaps.size != min(ones, size - ones) or gaps.dtype.kind != "u" or gaps.dtype.itemsize > 4:
        raise DamagedError("the gaps do not fit the count")
    return ones, gaps


def _decode_level(reader: Reader, size: int) -> Array:
    """Where the ones of a level are, ascending."""
    ones, gaps = _decode_gaps(reader, size)
    at = np.cumsum(gaps, dtype=np.int64)
    at += np.arange(at.size)
    if at.size and at[-1] >= size:
        raise DamagedError("an index is out of range")
    if ones * 2 <= size:
        return at
    kept = np.ones(size, bool)
    kept[at] = False
    return np.flatnonzero(kept)


def _checked(values: Array, dtype: np.dtype[Any], zeros: bool) -> Array:
    if values.size and values.dtype != dtype:
        raise DamagedError("the values have the wrong type")
    if not zeros and not values.all():
        raise DamagedError("a kept weight without a value")
    return values.astype(dtype, copy=False)
