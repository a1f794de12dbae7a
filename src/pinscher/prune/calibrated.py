"""One-shot methods that look at calibration data: Wanda and SparseGPT.

Wanda and SparseGPT ask what a matrix's inputs are. Blocks are walked in the order of the model: the calibration batches
run through the model, hooks gather the inputs of one block's matrices, these are pruned, and the next block sees what
the pruned ones make of the data, as in the originals. Only one block's statistics exist at a time: a number for each
input feature (Wanda), or a square of them (SparseGPT). A batch's forward pass ends where the block does, so b blocks
cost about (b + 1) / 2 passes over the data.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from pinscher.prune import hessian
from pinscher.prune.criteria import CRITERIA, Criterion
from pinscher.prune.sites import Site, evaluating

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
        if self.calibration < 1:
            raise ValueError(f"calibration must be at least 1 row, not {self.calibration}")

    def empty(self, features: int, like: Tensor) -> Tensor:
        """The statistics of inputs before any was seen."""
        raise NotImplementedError

    def add_(self, statistics: Tensor, inputs: Tensor) -> None:
        """Adds inputs [tokens, features] to the statistics."""
        raise NotImplementedError

    def prune_(self, weight: Tensor, statistics: Tensor, keep: int, barred: Tensor | None) -> Tensor:
        """Chooses the mask (True is pruned) of a matrix [out, in]; may change its values."""
        raise NotImplementedError


@CRITERIA.register("wanda")
@dataclass
class Wanda(Calibrated):
    """|W_ij| · ‖X_j‖₂, compared within each output row (Sun et al. 2023). Weights that stay are not changed."""

    def empty(self, features: int, like: Tensor) -> Tensor:
        return torch.zeros(features, dtype=torch.float64, device=like.device)

    def add_(self, statistics: Tensor, inputs: Tensor) -> None:
        statistics += inputs.double().square().sum(0)

    def prune_(self, weight: Tensor, statistics: Tensor, keep: int, barred: Tensor | None) -> Tensor:
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

    def prune_(self, weight: Tensor, statistics: Tensor, keep: int, barred: Tensor | None) -> Tensor:
        return hessian.sparsegpt_(weight, statistics, keep, self.damping, self.block, barred)


# ---------------------------------------------------------------- the walk through the blocks


class _EnoughError(Exception):
    """Ends a forward pass: the block's inputs are known."""


@torch.no_grad()
def prune_blocks_(
    model: nn.Module,
    sites: Sequence[Site],
    criterion: Calibrated,
    density: float,
    batches: Batches | None,
    barred: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Prunes every site block by block, and returns the flat masks (True is pruned).

    Every matrix keeps its share of exactly floor(density · d + 0.5) weights: the running total over the matrices is
    rounded. Positions where `attention_mask` is 0 are no data.

    Raises:
        ValueError: if there is no calibration data, or a matrix takes no part in it. Nothing is changed then.
    """
    data = listed(criterion, batches)
    total = math.floor(density * sum(site.numel for site in sites) + 0.5)
    keeps = dict(zip([s.name for s in sites], hessian.shares(total, [s.numel for s in sites]), strict=True))
    masks = {}
    with evaluating(model):
        calls = _calls(model, sites, data[0])
        for group in _blocks(sites):
            statistics = _gathered(model, group, criterion, data, sum(calls[site.name] for site in group))
            for site in group:
                ban = None if barred is None else _matrix(site, barred[site.name])
                masks[site.name] = _prune_site_(site, criterion, statistics.pop(site.name), keeps[site.name], ban)
    return masks


def _prune_site_(site: Site, criterion: Calibrated, statistics: Tensor, keep: int, barred: Tensor | None) -> Tensor:
    stored = site.owner.detach()
    dtype = torch.float64 if stored.dtype == torch.float64 else torch.float32
    weight = _matrix(site, stored).to(dtype, copy=True, memory_format=torch.contiguous_format)
    if not bool(statistics.isfinite().all()):
        raise ValueError(f"the inputs of {site.name} are not finite on the calibration data. Did training diverge?")
    pruned = criterion.prune_(weight, statistics, keep, barred)
    if barred is not None and bool((barred & ~pruned).any()):
        raise ValueError(
            f"a part of {site.name} has fewer weights left than it is to keep, and regrow=False lets none come back."
        )
    weight.masked_fill_(pruned, 0.0)
    _matrix(site, stored).copy_(weight)
    return _matrix(site, pruned).reshape(-1)  # its own inverse


def _matrix(site: Site, tensor: Tensor) -> Tensor:
    """[out, in], whichever way round the site stores it; and back."""
    if tensor.dim() == 1:
        tensor = tensor.view(site.shape)
    return tensor.t() if site.transposed else tensor


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


def _blocks(sites: Sequence[Site]) -> Iterator[list[Site]]:
    """Sites of one block together, in the order of the model; one outside of any block by itself."""
    groups: dict[str, list[Site]] = {}
    for site in sites:
        groups.setdefault(site.block or site.name, []).append(site)
    yield from groups.values()


def run(model: nn.Module, batch: Any) -> Any:
    """Calls the model with a batch: a mapping by names, a tuple or list in order, anything else as the one input."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def _calls(model: nn.Module, sites: Sequence[Site], batch: Any) -> dict[str, int]:
    """How often each site's matrix is used in a forward pass: a shared one more than once."""
    counts = dict.fromkeys((site.name for site in sites), 0)

    def count(site: Site, inputs: Tensor) -> None:
        counts[site.name] += 1

    with _watching(sites, count):
        run(model, batch)
    unused = [name for name, number in counts.items() if number == 0]
    if unused:
        raise ValueError(
            f"{len(unused)} of {len(sites)} matrices see no inputs on the calibration data, for one {unused[0]}. Leave "
            "them out with exclude_modules."
        )
    return counts


def _gathered(
    model: nn.Module, group: Sequence[Site], criterion: Calibrated, data: Sequence[Any], calls: int
) -> dict[str, Tensor]:
    """The statistics of one block's inputs over all batches."""
    found = {s.name: criterion.empty(_matrix(s, s.owner).shape[1], s.owner) for s in group}
    for batch in data:
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        left = calls

        def add(site: Site, inputs: Tensor, mask: Any = mask) -> None:
            nonlocal left
            if isinstance(mask, Tensor) and inputs.dim() > 2 and inputs.shape[:2] == mask.shape:
                inputs = inputs[mask.bool()]
            criterion.add_(found[site.name], inputs.reshape(-1, inputs.shape[-1]))
            left -= 1
            if left == 0:
                raise _EnoughError

        with _watching(group, add), contextlib.suppress(_EnoughError):
            run(model, batch)
    return found


class _watching:  # noqa: N801  (reads as a statement: with _watching(...))
    """While it is open, every use of a site's module shows its input to `look`."""

    def __init__(self, sites: Sequence[Site], look: Callable[[Site, Tensor], None]) -> None:
        self.sites, self.look = sites, look
        self.hooks: list[Any] = []

    def __enter__(self) -> None:
        for site in self.sites:
            for module in [site.module, *site.shared_with] if site.parameter == "weight" else ():

                def show(module: nn.Module, args: Any, kwargs: Any, site: Site = site) -> None:
                    self.look(site, args[0] if args else next(iter(kwargs.values())))

                self.hooks.append(module.register_forward_pre_hook(show, with_kwargs=True))

    def __exit__(self, *error: object) -> None:
        for hook in self.hooks:
            hook.remove()
