"""The numerical rank of a matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def rank(weight: NDArray[Any]) -> int:
    """The numerical rank, by numpy's rule for float32: singular values above σ_max · max(shape) · ε.

    Dead rows and columns are left out first. The squares of the singular values are then the eigenvalues of the smaller
    Gram matrix, in float64: they are exact to about 1e-8 σ_max, well below the rule's limit, and several times as fast.
    """
    limit = max(weight.shape) * float(np.finfo(np.float32).eps)
    alive = weight != 0
    core = weight[alive.any(1)][:, alive.any(0)].astype(np.float64)
    if core.size == 0:
        return 0
    core = core if core.shape[0] <= core.shape[1] else core.T
    squares = np.linalg.eigvalsh(core @ core.T)
    return int((squares > squares[-1] * limit**2).sum())


def rank_reference(weight: NDArray[Any]) -> int:
    """The slow, obvious way: numpy's own, by singular values."""
    return int(np.linalg.matrix_rank(weight.astype(np.float32)))
