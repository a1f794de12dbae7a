"""A learning rate that goes back to its peak while a model is pruned (Renda et al. 2020; oBERT's recipes).

After each pruning the rate is high enough for recovery; in the cool-down it falls to 0 for the last time. The rate is
a pure function of t, so a resumed run continues exactly.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

FLOOR = 0.1  # where every cycle but the last one ends


def rewound(total: int, warmup: int, starts: Sequence[int]) -> Callable[[int], float]:
    """The rate after t steps, as a multiple of its peak: up in `warmup` steps, then down to 0 at `total`.

    At each of `starts` it is back at the peak; just before, it is down at a tenth of it.
    """
    edges = [warmup, *sorted({start for start in starts if warmup < start < total}), total]

    def factor(t: int) -> float:
        if t < warmup:
            return t / max(1, warmup)
        cycle = min(bisect.bisect_right(edges, t), len(edges) - 1)
        first, last = edges[cycle - 1], edges[cycle]
        floor = 0.0 if last == total else FLOOR
        return floor + (1.0 - floor) * max(0.0, (last - t) / max(1, last - first))

    return factor


def rewinds(count: int, warmup: int, settled: int) -> list[int]:
    """Where the rate goes back to its peak: `count` times, evenly in the pruning phase, the last time at its end."""
    return [round(warmup + (settled - warmup) * part / count) for part in range(1, count + 1)]
