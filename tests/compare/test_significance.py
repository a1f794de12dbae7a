"""The paired t-test, by hand and against scipy."""

import math
import random

import pytest
from scipy import stats

from pinscher.compare import significance


def seeded(*scores: float) -> dict[int, float]:
    return dict(enumerate(scores, 1))


def test_by_hand():
    """Differences 1, 2, 3: mean 2, deviation 1, t = 2 √3; with 2 degrees of freedom p = 1 - t / √(t² + 2)."""
    gap = significance.paired(seeded(11, 22, 33), seeded(10, 20, 30))
    t = 2 * math.sqrt(3)
    assert gap.mean == pytest.approx(2)
    assert gap.seeds == 3
    assert gap.p == pytest.approx(1 - t / math.sqrt(t * t + 2))
    assert not gap.significant
    assert significance.paired(seeded(11, 21.1, 31), seeded(10, 20, 30)).significant
    assert significance.mean_and_deviation(seeded(2, 4, 9)) == (5, pytest.approx(math.sqrt(13)))


def test_the_paired_test_is_scipys():
    chance = random.Random(0)
    for size in range(2, 12):
        one, other = ([chance.gauss(80, 2) for _ in range(size)] for _ in range(2))
        gap = significance.paired(seeded(*one), seeded(*other))
        assert gap.p == pytest.approx(stats.ttest_rel(one, other).pvalue, rel=1e-9)


def test_only_seeds_that_both_have_are_paired():
    gap = significance.paired({1: 5.0, 2: 7.0, 9: 100.0}, {2: 6.0, 1: 2.0, 3: 0.0})
    assert (gap.mean, gap.seeds) == (2.0, 2)
    assert significance.paired({1: 5.0}, {2: 5.0}) is None


def test_what_cannot_be_judged_is_not_significant():
    for one, other in (
        (seeded(5), seeded(1)),
        (seeded(5, 6, 7), seeded(4, 5, 6)),
        (seeded(0.3, 0.5), seeded(0.1, 0.3)),
    ):
        gap = significance.paired(one, other)
        assert gap.p is None
        assert not gap.significant
    assert significance.paired(seeded(5, 6), seeded(5, 6)).p == 1.0
    assert significance.mean_and_deviation(seeded(5)) == (5, None)
