"""Names the pattern of a matrix's zeros: the most specific one that holds and is not due to chance.

    find(alive [outputs, inputs], head) -> Pattern("2:4")

A pattern holds only without exception. Many hold by chance: in a matrix of 99 % random zeros no eight neighbours have
five survivors. So each pattern is tested against the next simpler one that holds: if a random matrix with the same
counts would show it with a probability above CHANCE, it is not named.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]
CHANCE = 1e-6
FULL = 0.25  # least share of groups with N survivors, of those with any, for an N:M pattern
DENSE = 0.001  # a smaller share of zeros is not pruning: training leaves a few
SIDES = (1, 2, 4, 8, 16, 32, 64, 128)  # of blocks
SAMPLE = 1 << 14  # groups for which the probability is computed
GROUPS = (2, 4, 8, 16, 32)  # the M of N:M


@dataclass(frozen=True)
class Pattern:
    """A pattern's name and family, and the numbers of rows and columns without any weight."""

    name: str  # dense, empty, unstructured, rows, columns, rows and columns, heads, 2:4, blocks 4x1, …
    family: str  # dense, empty, unstructured, rows-columns, heads, n:m, blocks
    dead_rows: int
    dead_columns: int
    dead_heads: int = 0


def find(alive: Mask, head: int = 0, head_axis: int = 0) -> Pattern:
    """Names the pattern of a matrix.

    Args:
        alive: which weights are not zero, outputs first.
        head: rows (or columns) of one attention head; 0 where the matrix has none.
        head_axis: 0 if heads are rows (query, key, value), 1 if they are columns (the attention's output).
    """
    if not alive.size:
        return Pattern("empty", "empty", *alive.shape)
    rows, columns = np.asarray(alive.any(1)), np.asarray(alive.any(0))
    dead = int((~rows).sum()), int((~columns).sum())
    living = (rows, columns)[head_axis]
    heads = int((~living.reshape(-1, head).any(1)).sum()) if head > 1 and living.size % head == 0 else 0
    name, family = _name(alive, rows, columns, heads * head == dead[head_axis] > 0 == dead[1 - head_axis])
    return Pattern(name, family, *dead, heads)


def _name(alive: Mask, rows: Mask, columns: Mask, whole_heads: bool) -> tuple[str, str]:
    if not alive.any():
        return "empty", "empty"
    if 1 - alive.mean() < DENSE:
        return "dense", "dense"
    if _is_rows_and_columns(alive, rows, columns):
        if whole_heads:
            return "heads", "heads"
        names = [name for name, some in (("rows", rows), ("columns", columns)) if not some.all()]
        return " and ".join(names), "rows-columns"
    block = blocks(alive)
    if block is not None:
        return f"blocks {block[0]}x{block[1]}", "blocks"
    inputs, outputs = n_of_m(alive), n_of_m(alive.T)
    if inputs is not None:
        return f"{inputs[0]}:{inputs[1]}", "n:m"
    if outputs is not None:
        return f"{outputs[0]}:{outputs[1]} along outputs", "n:m"
    return "unstructured", "unstructured"


def _is_rows_and_columns(alive: Mask, rows: Mask, columns: Mask) -> bool:
    """Whether dead rows and columns account for all zeros, and chance does not account for them."""
    rest = alive[np.ix_(rows, columns)]
    dead = (~rows).sum(), (~columns).sum()
    if not any(dead) or 1 - rest.mean() >= DENSE:
        return False
    zeros = math.log(1 - alive.mean())
    ways = sum(_log_ways(size, int(some)) for size, some in zip(alive.shape, dead, strict=True))
    return bool(ways + zeros * (alive.size - rest.size) < math.log(CHANCE))


def _log_ways(size: int, some: int) -> float:
    return math.lgamma(size + 1) - math.lgamma(some + 1) - math.lgamma(size - some + 1)


# ------------------------------------------------------------ blocks


def blocks(alive: Mask) -> tuple[int, int] | None:
    """Height and width of the largest aligned tiles that are wholly dead or alive; None if there are none."""
    best, held = (1, 1), {(1, 1): alive}
    shapes = sorted(((r, c) for r in SIDES for c in SIDES), key=lambda shape: (shape[0] * shape[1], shape))
    for height, width in shapes[1:]:
        # Halves of valid tiles are valid, so only shapes that extend a valid one need to be tried.
        half = next((s for s in ((height // 2, width), (height, width // 2)) if s in held), None)
        if half is None or alive.shape[0] % height or alive.shape[1] % width:
            continue
        tiles = _tiles(held[half], height // half[0], width // half[1])
        if (tiles.any((1, 3)) == tiles.all((1, 3))).all():
            held[height, width] = np.asarray(tiles.any((1, 3)))
            if _is_no_accident(held, best, (height, width)):
                best = height, width
    return None if best == (1, 1) else best


def _tiles(mask: Mask, height: int, width: int) -> Mask:
    return mask.reshape(mask.shape[0] // height, height, mask.shape[1] // width, width)


def _is_no_accident(held: dict[tuple[int, int], Mask], small: tuple[int, int], large: tuple[int, int]) -> bool:
    """Whether independent tiles of the small shape, at the same density, would hardly form the large ones."""
    small = small if large[0] % small[0] == 0 and large[1] % small[1] == 0 else (1, 1)
    density = float(held[small].mean())
    parts = large[0] * large[1] // (small[0] * small[1])
    alike = density**parts + (1 - density) ** parts
    return held[large].size * math.log(max(alike, 1e-300)) < math.log(CHANCE)


# ------------------------------------------------------------ N:M


def n_of_m(alive: Mask) -> tuple[int, int] | None:
    """The N and M for which no M neighbours in a row have more than N survivors; None if that is due to chance.

    N:M pruning leaves N survivors in nearly every group. If few groups are full, the counts only differ from those of a
    random mask, as in masks that keep some heads and not others. If several N:M hold, a wider group wins if it allows a
    smaller share and is less likely by chance.
    """
    best, evidence = None, math.log(CHANCE)
    for size in GROUPS:
        if alive.shape[1] % size or alive.shape[1] < 2 * size:
            break
        counts = alive.reshape(-1, size).sum(1)
        most = int(counts.max())
        full = (counts == most).sum() / max(1, (counts > 0).sum())
        if most < size and full >= FULL and (best is None or most * best[1] < size * best[0]):
            log_chance = _log_chance(alive, most, size)
            if log_chance < evidence:
                best, evidence = (most, size), log_chance
    return best


def _log_chance(alive: Mask, most: int, size: int) -> float:
    """The log probability that no group has more than `most` survivors, from a sample of the groups.

    Weights survive independently, with a probability given by their row and column, because pruned matrices have rows
    and columns of very different density. Identical rows count as one.
    """
    groups = alive.size // size
    some = np.arange(0, groups, max(1, groups // SAMPLE))
    rows, columns = alive.mean(1), alive.mean(0).reshape(-1, size)
    row, column = np.divmod(some, len(columns))
    chances = np.minimum(rows[row, None] * columns[column] / alive.mean(), 1.0)
    counts = np.zeros((size + 1, len(some)))  # the probability of each count in a group
    counts[0] = 1
    for place in range(size):
        counts[1:] += (counts[:-1] - counts[1:]) * chances[:, place]
        counts[0] *= 1 - chances[:, place]
    whole = float(np.log(np.clip(counts[: most + 1].sum(0), 1e-300, 1.0)).mean()) * groups
    if whole >= math.log(CHANCE):
        return whole
    return whole * len(np.unique(np.packbits(alive, axis=1), axis=0)) / len(alive)
