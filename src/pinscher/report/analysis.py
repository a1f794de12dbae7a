"""The paper's analyses as tables: surviving weights, their concentration, rank and values, and training curves.

Pure functions over arrays. A matrix is [outputs, inputs].
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pinscher.models.rank import rank

Array = NDArray[Any]
POINTS = 1000  # points of a curve: more than a screen can show
BINS = 120  # of the values' histogram
OUTER = 0.999  # the share of each matrix's values that the histogram spans


# ------------------------------------------------------------ one matrix


def gini(shares: Array) -> float:
    """The Gini coefficient: 0 if all values are equal, near 1 if one value makes up the whole sum."""
    values = np.sort(np.asarray(shares, np.float64))
    total = values.sum()
    if not total:
        return 0.0
    count = len(values)
    return float(2 * (values * np.arange(1, count + 1)).sum() / (count * total) - (count + 1) / count)


def measures(weight: Array) -> dict[str, float]:
    """Figures of one matrix: density, rank as a share of full rank, concentration of its weights."""
    alive = weight != 0
    rows, columns = alive.mean(1), alive.mean(0)
    return {
        "density": float(alive.mean()),
        "rank": rank(weight) / min(weight.shape),
        "dead_rows": float((rows == 0).mean()),
        "dead_columns": float((columns == 0).mean()),
        "gini_rows": gini(rows),
        "gini_columns": gini(columns),
    }


def reach(weight: Array) -> float:
    """The size below which nearly all surviving values of a matrix lie."""
    values = np.abs(weight[weight != 0])
    if not values.size:
        return 0.0
    place = min(values.size - 1, int(OUTER * values.size))
    return float(np.partition(values, place)[place])


def histogram(weights: Iterable[Array], limit: float) -> dict[str, Any]:
    """Surviving values over [-limit, limit]: the share in each bin, and the share outside."""
    edges = np.linspace(-limit, limit, BINS + 1)
    counts, total = np.zeros(BINS, np.int64), 0
    for weight in weights:
        values = weight[weight != 0]
        counts += np.histogram(values, edges)[0]
        total += values.size
    shares = counts / max(1, total)
    return {"shares": shares.tolist(), "outside": float(1 - shares.sum()) if total else 0.0}


# ------------------------------------------------------------ curves


def thin(x: Array, y: Array, most: int = POINTS) -> tuple[Array, Array]:
    """At most `most` points that keep the shape of the curve and its ends (largest triangle, three buckets)."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    good = np.isfinite(y)
    x, y = x[good], y[good]
    if len(x) <= most:
        return x, y
    bounds = np.linspace(1, len(x) - 1, most - 1).astype(int)
    kept = [0]
    for i in range(most - 2):
        here = slice(bounds[i], bounds[i + 1])
        ahead = slice(bounds[i + 1], bounds[i + 2] if i + 2 < len(bounds) else len(x))
        away_x, away_y, last = x[ahead].mean(), y[ahead].mean(), kept[-1]
        area = np.abs((x[last] - away_x) * (y[here] - y[last]) - (x[last] - x[here]) * (away_y - y[last]))
        kept.append(bounds[i] + int(area.argmax()))
    kept.append(len(x) - 1)
    return x[kept], y[kept]


def joined(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array, Array]:
    """The steps that two series share, and their values there. Lines of a damaged log may lack one of the two."""
    steps, mine, theirs = np.intersect1d(first[0], second[0], return_indices=True)
    values, others = first[1][mine], second[1][theirs]
    good = np.isfinite(values) & np.isfinite(others)
    return steps[good], values[good], others[good]


def churn(steps: Array, returned: Array, maskings: Array) -> tuple[Array, Array]:
    """Weights that returned in a masking, averaged over the maskings between two lines of the log."""
    first = np.concatenate(([0.0], maskings[:-1]))
    before = np.concatenate(([0.0], returned[:-1]))
    made = maskings - first
    some = made > 0
    return steps[some], (returned - before)[some] / made[some]
