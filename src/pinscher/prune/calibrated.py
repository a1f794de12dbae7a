"""One-shot methods that use calibration data: Wanda and SparseGPT.

They need the inputs of each matrix, which `walk.py` gathers block by block. By default they choose masks as in their
papers: within each row (Wanda), or while walking through the columns (SparseGPT). If a pattern or a scope is given,
they give scores, units are ranked as with any other criterion, and SparseGPT compensates for the pruned weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from pinscher.prune import hessian
from pinscher.prune.calibration import Batches
from pinscher.prune.criteria import CRITERIA, Criterion
from pinscher.prune.hessian import Keep
from pinscher.prune.masking import Scores
from pinscher.prune.ranking import Ranking
from pinscher.prune.sites import Site
from pinscher.prune.walk import prune_blocks_
from pinscher.settings import COUNT, POSITIVE, setting


@dataclass
class Calibrated(Criterion):
    """The base class of methods that prune once, by the inputs of each matrix. `calibration`: number of rows."""

    calibration: int = setting(128, takes=COUNT)

    scope: ClassVar[Literal["global", "matrix"]] = "matrix"
    chooses: ClassVar[bool] = True
    needs_grad: ClassVar[bool] = False
    schedule: ClassVar[str | None] = "one-shot"
    hold: ClassVar[str | None] = "always"
    needs_calibration: ClassVar[bool] = True
    adaptable: ClassVar[bool] = False
    unshardable: ClassVar[str | None] = (
        "sharded weights cannot be pruned by calibration: no process holds a whole matrix. Prune before sharding "
        "(prune_once on one process), or use another method."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.measured: dict[str, Tensor] = {}  # flat scores by site, between a walk and the ranking

    def empty(self, features: int, like: Tensor) -> Tensor:
        """Initial statistics, of no inputs."""
        raise NotImplementedError

    def add_(self, statistics: Tensor, inputs: Tensor) -> None:
        """Adds inputs [tokens, features] to the statistics."""
        raise NotImplementedError

    def costs(self, weight: Tensor, statistics: Tensor) -> Tensor:
        """The scores of a matrix [out, in]. None is negative, so that they can be summed over units."""
        raise NotImplementedError

    def prune_(self, weight: Tensor, statistics: Tensor, keep: Keep, barred: Tensor | None) -> Tensor:
        """Gives the mask (True is pruned) of a matrix [out, in]; may change its values."""
        raise NotImplementedError

    def calibration_rows(self, batch_size: int) -> int:
        return self.calibration

    def choose_masks(
        self, ranking: Ranking, density: float, model: nn.Module, batches: Batches | None, scope: str | None
    ) -> None:
        ranking.adopt(prune_blocks_(model, ranking, self, density, batches, scope))

    def scores(self, site: Site) -> Scores:
        return Scores(self.measured[site.name])


@CRITERIA.register("wanda")
@dataclass
class Wanda(Calibrated):
    """|W_ij| · ‖X_j‖₂, compared within each output row (Sun et al. 2023). Weights that stay are not changed."""

    def empty(self, features: int, like: Tensor) -> Tensor:
        return torch.zeros(features, dtype=torch.float64, device=like.device)

    def add_(self, statistics: Tensor, inputs: Tensor) -> None:
        statistics += inputs.double().square().sum(0)

    def costs(self, weight: Tensor, statistics: Tensor) -> Tensor:
        return hessian.wanda_scores(weight, statistics)

    def prune_(self, weight: Tensor, statistics: Tensor, keep: Keep, barred: Tensor | None) -> Tensor:
        return hessian.wanda(weight, statistics, keep, barred)


@CRITERIA.register("sparsegpt")
@dataclass
class SparseGpt(Calibrated):
    """Layer-wise reconstruction with the Hessian XᵀX (Frantar & Alistarh 2023): see `hessian.sparsegpt_`.

    `damping` is the part of the mean of H's diagonal that is added to it, `block` how many columns' mask is chosen
    together.
    """

    damping: float = setting(0.01, takes=POSITIVE)
    block: int = setting(128, takes=COUNT)

    def empty(self, features: int, like: Tensor) -> Tensor:
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        return torch.zeros(features, features, dtype=dtype, device=like.device)

    def add_(self, statistics: Tensor, inputs: Tensor) -> None:
        inputs = inputs.to(statistics.dtype)
        statistics.addmm_(inputs.t(), inputs)

    def costs(self, weight: Tensor, statistics: Tensor) -> Tensor:
        return hessian.surgeon_scores(weight, statistics, self.damping)

    def prune_(self, weight: Tensor, statistics: Tensor, keep: Keep, barred: Tensor | None) -> Tensor:
        return hessian.sparsegpt_(weight, statistics, keep, self.damping, self.block, barred)
