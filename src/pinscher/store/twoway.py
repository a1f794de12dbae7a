"""Classes of rows and columns that predict a pruned matrix: which places are kept, and how large the codes are.

A row i gets a small integer a_i, a column j a b_j; places with the same level a_i + b_j are alike and share one
stream. For the mask this is the additive model logit P(kept) = α_i + β_j on a grid; for the values log|code| ≈ ρ_i +
γ_j. PINS leaves masks whose rows and columns differ widely, so this saves space; a random mask has one level and costs
nothing. Coding time and size depend on how well the classes fit, but any classes decode exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
MOST = 48  # classes of one side; levels stay below 2 * MOST
STREAM = 14  # bytes a stream costs beyond its entropy: counts, kind, bins, the coder's last state
VALUE_STREAM = 60  # the same for values, whose bins are more
GRID = (0.35, 0.5, 0.7, 1.0, 1.4, 2.0)
VALUE_GRID = (0.12, 0.18, 0.27, 0.4, 0.6)


@dataclass(frozen=True)
class Classes:
    """A class for each row and for each column, from 0 up."""

    rows: Array  # uint8 [rows]
    columns: Array  # uint8 [columns]

    @property
    def levels(self) -> int:
        return 1 + int(self.rows.max(initial=0)) + int(self.columns.max(initial=0))


def flat(rows: int, columns: int) -> Classes:
    """One class for all."""
    return Classes(np.zeros(rows, np.uint8), np.zeros(columns, np.uint8))


def entropy(counts: Array, axis: int | None = None) -> Any:
    """The bits of symbols with these counts, coded by their own frequencies (all, or along an axis)."""
    counts = counts.astype(np.float64)
    total = counts.sum(axis=axis, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        bits = np.where(counts > 0, counts * np.log2(total / counts), 0.0)
    return bits.sum(axis=axis)


def logits(kept: Array, rounds: int = 6) -> tuple[Array, Array]:
    """α [rows] and β [columns] of the most likely additive model, by Newton steps on each side in turn.

    Half a place is added to each count, so that empty and full rows stay finite.
    """
    rows, columns = kept.shape
    per_row, per_column = kept.sum(1, dtype=np.float32) + 0.5, kept.sum(0, dtype=np.float32) + 0.5
    total = float(np.clip(kept.mean(dtype=np.float64), 1e-6, 1 - 1e-6))
    alpha = np.log(per_row / (columns + 1 - per_row))
    beta = np.log(per_column / (rows + 1 - per_column)) - np.log(total / (1 - total))
    for _ in range(rounds):
        for side, wanted in ((0, per_row), (1, per_column)):
            p = alpha[:, None] + beta
            np.negative(p, out=p)
            with np.errstate(over="ignore"):
                np.exp(p, out=p)
            p += 1
            np.reciprocal(p, out=p)
            expected = p.sum(1 - side)
            p *= 1 - p
            step = np.clip((wanted - 0.5 - expected) / (p.sum(1 - side) + 0.5), -1, 1)
            if side == 0:
                alpha += step
            else:
                beta += step
    return alpha, beta


def mask_classes(kept: Array) -> Classes:
    """The classes with which the mask takes the fewest bytes, including the classes; flat if none save space."""
    rows, columns = kept.shape
    best = flat(rows, columns)
    size, ones = kept.size, int(kept.sum())
    least = entropy(np.array([ones, size - ones])) / 8 + STREAM
    if not _worth_fitting(kept, ones):
        return best
    alpha, beta = logits(kept)
    for step in GRID:
        found = Classes(_grid(alpha, step), _grid(beta, step))
        bytes_ = _mask_bytes(kept, found)
        if bytes_ < least:
            best, least = found, bytes_
    return best


def value_classes(codes: Array, row: Array, column: Array, shape: tuple[int, int]) -> Classes:
    """The same for the codes of the kept places (int8, at `row` and `column`); zeros may be among them."""
    best = flat(*shape)
    if codes.size < 2 * VALUE_STREAM:
        return best
    symbols = codes.view(np.uint8).astype(np.int64)
    least = entropy(np.bincount(symbols, minlength=256)) / 8 + VALUE_STREAM
    size = np.log(np.maximum(np.abs(codes.astype(np.float32)), 0.5))  # a zero is the smallest of codes
    rho = _means(size, row, shape[0], 0.5)
    gamma = _means(size - rho[row], column, shape[1], 3.0)
    for step in VALUE_GRID:
        found = Classes(_grid(rho, step), _grid(gamma, step))
        level = found.rows[row].astype(np.int64) + found.columns[column]
        counts = np.bincount(level * 256 + symbols, minlength=found.levels * 256).reshape(-1, 256)
        used = int((counts.sum(1) > 0).sum())
        bytes_ = entropy(counts, 1).sum() / 8 + used * VALUE_STREAM + _side_bytes(found)
        if bytes_ < least:
            best, least = found, bytes_
    return best


def _worth_fitting(kept: Array, ones: int) -> bool:
    """Whether the counts of rows or columns vary more than by chance."""
    density = ones / max(kept.size, 1)
    if not 0 < density < 1 or kept.size < 512:
        return False
    excess = 0.0
    for axis in (0, 1):
        counts, places = kept.sum(axis, dtype=np.int64), kept.shape[axis]
        excess += ((counts - places * density) ** 2).sum() / (places * density * (1 - density)) - counts.size
    return bool(excess > 4 * sum(kept.shape))  # nats, doubled: less would not pay for the classes themselves


def _grid(values: Array, step: float) -> Array:
    """Grid steps counted from the smallest, clipped to the range of classes."""
    places = np.round(values / step).astype(np.int64)
    low = max(int(np.median(places)) - MOST // 2, int(places.min()))
    classes: Array = (np.clip(places, low, low + MOST - 1) - low).astype(np.uint8)
    return classes


def _means(values: Array, index: Array, count: int, doubt: float) -> Array:
    """The mean of each group, shrunk towards the overall mean by `doubt` imaginary members."""
    sums = np.bincount(index, values, minlength=count)
    sizes = np.bincount(index, minlength=count)
    means: Array = (sums + doubt * values.mean()) / (sizes + doubt)
    return means


def _mask_bytes(kept: Array, classes: Classes) -> float:
    """The bytes of the mask: the entropy of each level's stream, and the classes."""
    a, b = classes.rows.astype(np.int64), classes.columns.astype(np.int64)
    by_column = np.zeros((int(b.max()) + 1, kept.shape[0]))
    for group in range(by_column.shape[0]):
        by_column[group] = kept[:, b == group].sum(1)
    ones = np.zeros(classes.levels)
    places = np.zeros(classes.levels)
    widths = np.bincount(b)
    for group in range(by_column.shape[0]):
        np.add.at(ones, a + group, by_column[group])
        np.add.at(places, a + group, widths[group])
    bits = entropy(np.stack([ones, places - ones], 1), 1).sum()
    return float(bits / 8 + (ones > 0).sum() * STREAM + _side_bytes(classes))


def _side_bytes(classes: Classes) -> float:
    return float(sum(entropy(np.bincount(side)) / 8 + STREAM + 8 for side in (classes.rows, classes.columns)))
