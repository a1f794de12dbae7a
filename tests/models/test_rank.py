"""The rank against numpy's and against values worked out by hand."""

import numpy as np
import pytest

from pinscher.models.rank import rank, rank_reference


@pytest.mark.parametrize("shape", [(40, 40), (96, 24), (24, 96), (1, 7)])
@pytest.mark.parametrize("density", [1.0, 0.3, 0.05, 0.0])
def test_the_rank_is_numpys(shape, density):
    random = np.random.default_rng(0)
    weight = random.normal(size=shape).astype(np.float32) * (random.random(shape) < density)
    weight[:, ::5] = 0
    assert rank(weight) == rank_reference(weight)


def test_the_rank_of_products_and_repeated_rows():
    random = np.random.default_rng(1)
    low = (random.normal(size=(64, 3)) @ random.normal(size=(3, 80))).astype(np.float32)
    assert rank(low) == rank_reference(low) == 3
    assert rank(np.eye(5, dtype=np.float32)[[0, 1, 1, 0, 4]]) == 3
    # Singular values on both sides of numpy's limit, 64 · 1.2e-7 · σ_max.
    close = np.diag(np.logspace(0, -9, 64)).astype(np.float32)
    assert rank(close) == rank_reference(close) == int((np.logspace(0, -9, 64) > 64 * 2**-23).sum())
