"""The 0/1 patterns of a run's matrices as text for a page: one bit per weight, deflated, or coarser if too large.

A pattern that would not fit is shown as squares of `factor` x `factor` weights, each with the share that is kept.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pinscher.report.analysis import Array

BUDGET = 13_000_000  # characters, over all runs of a page
FACTORS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


@dataclass(frozen=True)
class Pattern:
    """A matrix's pattern as the page holds it."""

    rows: int
    columns: int
    factor: int  # 1: `data` holds bits, rows padded to bytes; otherwise a byte for each square
    data: str  # deflated, base64


def pack(mask: Array) -> bytes:
    """A mask's bits, eight to a byte, each row starting on a new byte; deflated."""
    return zlib.compress(np.packbits(mask, axis=1).tobytes(), 6)


def unpack(packed: bytes, rows: int, columns: int) -> Array:
    """The inverse of `pack`."""
    bits = np.frombuffer(zlib.decompress(packed), np.uint8).reshape(rows, -1)
    return np.unpackbits(bits, axis=1, count=columns).astype(bool)


def coarse(mask: Array, factor: int) -> Array:
    """The share kept of each square, 0 to 255; squares at the edges may be smaller."""
    down, right = (np.arange(0, size, factor) for size in mask.shape)
    counts = np.add.reduceat(np.add.reduceat(mask.astype(np.uint32), down, 0), right, 1)
    areas = np.outer(*(np.diff([*starts, size]) for starts, size in zip((down, right), mask.shape, strict=True)))
    return np.rint(255 * counts / areas).astype(np.uint8)


def cells(pattern: Pattern) -> Array:
    """The cells of a page's pattern, 0 to 255: one for each weight or square."""
    data = base64.b64decode(pattern.data)
    if pattern.factor == 1:
        return unpack(data, pattern.rows, pattern.columns).astype(np.uint8) * 255
    height, width = (-(-size // pattern.factor) for size in (pattern.rows, pattern.columns))
    return np.frombuffer(zlib.decompress(data), np.uint8).reshape(height, width)


def embed(packed: Sequence[tuple[bytes, int, int]], budget: int = BUDGET) -> list[Pattern]:
    """The patterns of one run (what `pack` gave, rows, columns) in at most about `budget` characters."""
    exact = [Pattern(rows, columns, 1, _text(bits)) for bits, rows, columns in packed]
    if sum(len(pattern.data) for pattern in exact) <= budget:
        return exact
    found = exact
    for factor in FACTORS:
        found, used = [], 0
        for bits, rows, columns in packed:
            squares = coarse(unpack(bits, rows, columns), factor)
            found.append(Pattern(rows, columns, factor, _text(zlib.compress(squares.tobytes(), 6))))
            used += len(found[-1].data)
            if used > budget:
                break
        else:
            break
    return found if len(found) == len(packed) else []  # far too large: no patterns


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
