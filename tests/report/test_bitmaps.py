"""Pictures of masks come back to the bit."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pinscher.report import bitmaps


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**32 - 1), st.sampled_from(bitmaps.FACTORS))
def test_patterns_come_back(rows, columns, seed, factor):
    mask = np.random.default_rng(seed).random((rows, columns)) < 0.3
    packed = bitmaps.pack(mask)
    assert (bitmaps.unpack(packed, rows, columns) == mask).all()
    squares = bitmaps.coarse(mask, factor)
    for y, x in np.ndindex(squares.shape):
        square = mask[y * factor : (y + 1) * factor, x * factor : (x + 1) * factor]
        assert squares[y, x] == round(255 * square.mean())
    [exact] = bitmaps.embed([(packed, rows, columns)])
    assert exact.factor == 1
    assert (bitmaps.cells(exact) == 255 * mask).all()


def test_patterns_beyond_the_budget_are_coarser():
    mask = np.random.default_rng(0).random((512, 768)) < 0.2
    packed = [(bitmaps.pack(mask), *mask.shape)] * 3
    exact = sum(len(pattern.data) for pattern in bitmaps.embed(packed))
    assert exact < 3 * 4 / 3 * mask.size / 8  # less than a bit a weight, as text
    for part in (3, 30):
        found = bitmaps.embed(packed, exact // part)
        assert len(found) == 3
        assert found[0].factor > 1
        assert sum(len(pattern.data) for pattern in found) <= exact // part
        assert (bitmaps.cells(found[0]) == bitmaps.coarse(mask, found[0].factor)).all()
