"""One-shot methods that look at calibration data: Wanda and SparseGPT.

They ask what a matrix's inputs are: `walk.py` shows these to them, block by block. By themselves they choose masks as
in their papers, row by row (Wanda) and while they walk through the columns (SparseGPT). Where a pattern or a scope is
asked for, they give scores, units are ranked as with any other criterion, and SparseGPT makes up for what goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from pinscher.prune import hessian
from pinscher.prune.criteria import CRITERIA, Criterion
from pinscher.prune.hessian import Keep
from pinscher.prune.masking import Scores
from pinscher.prune.sites import Site

Batches = Iterable[Any] | Callable[[], Iterable[Any]]


@dataclass
class Calibrated(Criterion):
    """What the methods share that prune once, by the inputs of each matrix. `calibration` is how many rows they see."""

    calibration: int = 128

    scope: ClassVar[Literal["global", "matrix"]] = "matrix"
    chooses: ClassVar[bool] = True
    needs_grad: ClassVar[bool] = False
    schedule: ClassVar[str | None] = "one-shot"
    hold: ClassVar[str | None] = "always"

    def __post_init__(self) -> None:
        self.measured: dict[str, Tensor] = {}  # flat scores by site, from a walk until the ranking after it
        if self.calibration < 1:
            raise ValueError(f"calibration must be at least 1 row, not {self.calibration}")

    def empty(self, features: int, like: Tensor) -> Tensor:
        """The statistics of inputs before any was seen."""
        raise NotImplementedError

    def add_(self, statistics: Tensor, inputs: Tensor) -> None:
        """Adds inputs [tokens, features] to the statistics."""
        raise NotImplementedError

    def costs(self, weight: Tensor, statistics: Tensor) -> Tensor:
        """The scores of a matrix [out, in]: none is negative, so that they can be added up to those of units."""
        raise NotImplementedError

    def prune_(self, weight: Tensor, statistics: Tensor, keep: Keep, barred: Tensor | None) -> Tensor:
        """Gives the mask (True is pruned) of a matrix [out, in]; may change its values."""
        raise NotImplementedError

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

    damping: float = 0.01
    block: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.damping <= 0:
            raise ValueError(f"damping must be positive, not {self.damping}")
        if self.block < 1:
            raise ValueError(f"block must be at least 1 column, not {self.block}")

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


# ---------------------------------------------------------------- calibration data


def listed(criterion: Criterion, batches: Batches | None) -> list[Any]:
    """The calibration batches, or an error that says how to give some."""
    data = list(batches() if callable(batches) else batches or ())
    return data or require(criterion, None)


def require(criterion: Criterion, batches: Batches | None) -> list[Any]:
    """Refuses a method that needs calibration data where none was given."""
    if batches is not None:
        return []
    name = next(name for name in CRITERIA if CRITERIA[name] is type(criterion))
    raise ValueError(
        f"{name} needs calibration data: give batches of model inputs, Pruner(model, config, calibration=batches) or "
        f"prune_once(model, {name!r}, batches=batches)."
    )


def run(model: nn.Module, batch: Any) -> Any:
    """Calls the model with a batch: a mapping by names, a tuple or list in order, anything else as the one input."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)
