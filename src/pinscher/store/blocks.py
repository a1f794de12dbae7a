"""The blocks codec: a mask whose zeros come in whole blocks, as `--pattern 1x4` leaves them, takes one bit a block.

    matrix   u8 rows of a block | u8 columns of a block | u8 coding
    0 plain    one bit a block, most significant first, block rows not padded | values
    1 coded    the mask of the blocks | the values, both as the entropy codec has them (entropy.py)

A block is kept if one of its weights is not zero. All weights of the kept blocks are values, zeros among them too:
rounding to integers leaves some in every block. Values come in the order of their places, row by row (coded: level by
level). Blocks of one weight are only written plain; the entropy codec is better at them.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pinscher import native
from pinscher.store import entropy, twoway
from pinscher.store.streams import DamagedError, Reader

Array = NDArray[Any]
Shape = tuple[int, int]
PLAIN, CODED = 0, 1
LARGEST = 128  # rows or columns of a block
MOST = 1 << 32  # weights of a matrix whose gaps surely fit into the four bytes that they take
# Blocks are what was pruned if few of their weights are zero (INT4 rounds a quarter of what is kept to zero), and if
# they take fewer bits, by this factor, than blocks that lie half a block off: what was pruned weight by weight gathers
# in rows and columns, wherever a block begins.
FULL, ALIGNED = 0.6, 0.95


def encode(matrix: Array) -> bytes:
    """A matrix of integers [rows, columns]; zero means pruned."""
    block = block_shape(matrix != 0)
    return plain(matrix, block) if block == (1, 1) else min(plain(matrix, block), coded(matrix, block), key=len)


def plain(matrix: Array, block: Shape) -> bytes:
    mask = joined(matrix != 0, block)
    values: bytes = matrix[spread(mask, block)].tobytes()
    return _head(block, PLAIN) + np.packbits(mask).tobytes() + values


def coded(matrix: Array, block: Shape) -> bytes:
    mask = joined(matrix != 0, block)
    row, column = np.nonzero(spread(mask, block))
    values = entropy.encode_values(matrix[row, column], row, column, (matrix.shape[0], matrix.shape[1]))
    return _head(block, CODED) + entropy.encode_mask(mask)[0] + values


def _head(block: Shape, coding: int) -> bytes:
    return bytes([*block, coding])


def decode(reader: Reader, rows: int, columns: int, dtype: np.dtype[Any]) -> Array:
    """The matrix.

    Raises:
        DamagedError: for anything that `encode` cannot have written.
    """
    tall, wide, coding = reader.take(3)
    block = tall, wide
    if any(not 0 < side <= min(LARGEST, max(size, 1)) or size % side for side, size in ((tall, rows), (wide, columns))):
        raise DamagedError(f"blocks of {tall} x {wide} do not fit {rows} x {columns} weights")
    grid = rows // tall, columns // wide
    core = native.core() if rows * columns < MOST else None
    if coding > CODED or (coding == CODED and block == (1, 1)):
        raise DamagedError("the blocks are coded in a way that is never written")
    if coding == PLAIN:
        mask, matrix = _decode_plain(reader, grid, block, dtype)
    elif core is None:
        mask, matrix = _decode_slowly(reader, grid, block, dtype)
    else:
        mask, matrix = _decode(core, reader, grid, block, dtype)
    if (joined(matrix != 0, block) != mask).any():
        raise DamagedError("a kept block without a value")
    return matrix


def _decode_plain(reader: Reader, grid: Shape, block: Shape, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    mask = reader.bits(grid[0] * grid[1]).reshape(grid)
    matrix = np.zeros((grid[0] * block[0], grid[1] * block[1]), dtype)
    matrix[spread(mask, block)] = reader.array(dtype, int(mask.sum()) * block[0] * block[1])
    return mask, matrix


def _decode_slowly(reader: Reader, grid: Shape, block: Shape, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """The reference: the mask of the blocks and that of the weights as they are, then every value put there."""
    mask = np.zeros(grid, bool)
    mask[entropy.decode_mask(reader, *grid)] = True
    places = spread(mask, block)
    shape = grid[0] * block[0], grid[1] * block[1]
    row, column = np.nonzero(places)
    return mask, entropy.decode_values(reader, row, column, shape, dtype, zeros=True)


def _decode(core: ModuleType, reader: Reader, grid: Shape, block: Shape, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """The same by the entropy codec's native code: it takes the mask of the weights as gaps, worked out from blocks."""
    listed = entropy.read_mask(reader, *grid)
    ones = np.ones(listed.kept, np.int8)
    mask = entropy.scattered(core, listed, twoway.flat(*grid), [ones]).view(bool)
    shape, kept = (grid[0] * block[0], grid[1] * block[1]), listed.kept * block[0] * block[1]
    sizes, values = entropy.read_values(reader, shape, kept, dtype, zeros=True)
    flat = entropy.Mask(twoway.flat(*shape), [kept], [_gaps(mask, block, rare=2 * listed.kept <= mask.size)])
    return mask, entropy.scattered(core, flat, sizes, values)


def _gaps(mask: Array, block: Shape, rare: bool) -> Array:
    """The gaps between the weights of kept blocks, row by row, or if those are not rare, between all others."""
    at = np.flatnonzero(np.repeat(mask if rare else ~mask, block[0], axis=0))
    gaps = np.zeros((at.size, block[1]), np.uint32)
    gaps[:, 0] = (np.diff(at, prepend=-1) - 1) * block[1]
    return gaps.reshape(-1)


def joined(kept: Array, block: Shape) -> Array:
    """Which blocks hold a weight that is kept."""
    tall = np.logical_or.reduce(kept.reshape(kept.shape[0] // block[0], block[0], kept.shape[1]), axis=1)
    found: Array = functools.reduce(np.logical_or, (tall[:, side :: block[1]] for side in range(block[1])))
    return found


def spread(mask: Array, block: Shape) -> Array:
    """The mask of the weights, for a mask of the blocks."""
    return np.repeat(np.repeat(mask, block[0], axis=0), block[1], axis=1)


def block_shape(kept: Array) -> Shape:
    """The shape of the blocks that were pruned; (1, 1) if single weights were.

    It is the one that takes the fewest bits: a bit a block, then which weights of the kept blocks are zero. The width
    is found first, then the height of blocks so wide.
    """
    ones, best = int(kept.sum()), (1, 1)
    least = _bits(kept, best, ones)
    for axis in (1, 0):
        start, masks = best, {1: joined(kept, best)}  # by the length of a block along this axis
        for side in _divisors(kept.shape[axis]):
            factor = next(number for number in range(2, side + 1) if side % number == 0)
            masks[side] = joined(masks[side // factor], _along(axis, factor))
            block = _along(axis, side, start)
            bits = _bits(masks[side], block, ones)
            full = ones >= FULL * block[0] * block[1] * masks[side].sum()
            if full and bits < min(least, ALIGNED * _bits(_shifted(masks[1], axis, side), block, ones)):
                best, least = block, bits
    return best


def _along(axis: int, side: int, other: Shape = (1, 1)) -> Shape:
    return (other[0], side) if axis else (side, other[1])


def _shifted(mask: Array, axis: int, side: int) -> Array:
    """The mask of blocks that begin half a block later."""
    return joined(np.roll(mask, -(side // 2), axis), _along(axis, side))


def _bits(mask: Array, block: Shape, ones: int) -> float:
    """What a mask of blocks takes, and the zeros among the weights that it keeps."""
    blocks = int(mask.sum())
    places = blocks * block[0] * block[1]
    counts = np.array([[blocks, mask.size - blocks], [ones, places - ones]])
    return float(twoway.entropy(counts, 1).sum())


def _divisors(number: int) -> list[int]:
    """Those above 1, the smallest first."""
    return [side for side in range(2, min(number, LARGEST) + 1) if number % side == 0]
