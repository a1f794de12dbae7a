"""Mean, standard deviation and a paired t-test over seeds.

Two methods that ran with the same seeds saw the same data in the same order, so their scores are compared seed by seed.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from scipy import stats

LEVEL = 0.05


@dataclass(frozen=True)
class Difference:
    """How far one method is above another, over the seeds that both were run with."""

    mean: float
    seeds: int
    p: float | None  # None: fewer than two seeds, or differences that do not vary, which no t-test can judge

    @property
    def significant(self) -> bool:
        return self.p is not None and self.p < LEVEL


def mean_and_deviation(scores: Mapping[int, float]) -> tuple[float, float | None]:
    """Mean, and standard deviation of a sample (n - 1) where there are two seeds or more."""
    values = list(scores.values())
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def paired(one: Mapping[int, float], other: Mapping[int, float]) -> Difference | None:
    """`one` against `other`, two mappings of seed to score; None where they share no seed."""
    seeds = [seed for seed in one if seed in other]
    if not seeds:
        return None
    gaps = [one[seed] - other[seed] for seed in seeds]
    mean = statistics.fmean(gaps)
    spread = max(gaps) - min(gaps)
    if len(gaps) < 2 or spread <= 1e-9 * max(1.0, abs(mean)):  # rounding alone is no variance
        return Difference(mean, len(gaps), 1.0 if len(gaps) > 1 and abs(mean) <= 1e-9 else None)
    test = stats.ttest_rel([one[seed] for seed in seeds], [other[seed] for seed in seeds])
    return Difference(mean, len(gaps), float(test.pvalue))
