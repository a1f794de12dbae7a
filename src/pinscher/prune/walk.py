"""Walks through a model's blocks with calibration data, for methods that prune by the inputs of each matrix.

Blocks are visited in the order of the model: the calibration batches run through the model, hooks gather the inputs of
one block's matrices, these are pruned, and the next block sees the outputs of the pruned ones, as in the original
methods. Only one block's statistics exist at a time: a number for each input feature (Wanda), or for each pair of them
(SparseGPT). A batch's forward pass ends with the block, so b blocks cost about (b + 1) / 2 passes over the data.

Units that compete across matrices cannot be chosen during the walk. With a pattern or a scope there are two walks: the
first, over the unpruned model, computes the scores of all weights; after the ranking, the second prunes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pinscher.models.inputs import evaluating, gather, run, watching
from pinscher.prune.calibration import Batches, listed
from pinscher.prune.hessian import Keep, shares
from pinscher.prune.patterns import Layout
from pinscher.prune.ranking import Ranking
from pinscher.prune.sites import Site

if TYPE_CHECKING:
    from pinscher.prune.calibrated import Calibrated


@torch.no_grad()
def prune_blocks_(
    model: nn.Module,
    ranking: Ranking,
    criterion: Calibrated,
    density: float,
    batches: Batches | None,
    scope: str | None = None,
) -> dict[str, Tensor]:
    """Prunes every site of a ranking block by block, and returns the flat masks (True is pruned).

    Without a layout every matrix keeps its share of exactly floor(density · d + 0.5) weights: the running total over
    the matrices is rounded. With one it says what is kept; N:M without a scope is chosen on the way, as in the papers.
    Positions where `attention_mask` is 0 do not count.

    Raises:
        ValueError: if there is no calibration data, a matrix is not used, values are not finite, or more weights must
            be kept than may be. After any error, the model is unchanged.
    """
    sites, layout = ranking.sites, ranking.layout
    data = listed(criterion, batches)
    barred = None if ranking.regrow else ranking.pruned
    keeps: Mapping[str, Keep]
    with evaluating(model):
        walk = _Walk(model, sites, criterion, data, _calls(model, sites, data[0]))
        if layout is None:
            dealt = shares(ranking.count(density), [site.numel for site in sites])
            keeps = dict(zip([site.name for site in sites], dealt, strict=True))
        elif layout.pattern.of_neighbours is not None and scope is None:
            keeps = dict.fromkeys([site.name for site in sites], layout.pattern.of_neighbours)
        else:
            keeps = _ranked(walk, ranking, layout, density)
            if layout.pattern.whole:  # single zeros in a unit that is kept do not matter
                barred = None
        with _undoing(sites):
            masks = _pruned(walk, keeps, barred)
            ranking.check(ranking.count(density), sum(int((~mask).sum()) for mask in masks.values()))
    return masks


@dataclass
class _Walk:
    """Iterates over the blocks of a model, with the statistics of each site's inputs when its block is reached.

    Args:
        model: the model, in evaluation mode.
        sites: matrices, in the order of the model.
        criterion: gathers the statistics.
        data: batches.
        calls: number of uses of each site's matrix in a forward pass.
    """

    model: nn.Module
    sites: Sequence[Site]
    criterion: Calibrated
    data: Sequence[Any]
    calls: Mapping[str, int]

    def __iter__(self) -> Iterator[tuple[Site, Tensor, Tensor]]:
        """Every site, with a copy [out, in] of its weight and its statistics, block by block."""
        for group in _blocks(self.sites):
            calls = sum(self.calls[site.name] for site in group)
            statistics = _gathered(self.model, group, self.criterion, self.data, calls)
            for site in group:
                stored = site.owner.detach()
                dtype = torch.float64 if stored.dtype == torch.float64 else torch.float32
                weight = _matrix(site, stored).to(dtype, copy=True, memory_format=torch.contiguous_format)
                _refuse_unusable(f"the weights of {site.name} are not finite", weight)
                _refuse_unusable(
                    f"the inputs of {site.name} are not finite on the calibration data", statistics[site.name]
                )
                yield site, weight, statistics.pop(site.name)


def _refuse_unusable(what: str, values: Tensor) -> None:
    if not bool(values.isfinite().all()):
        raise ValueError(f"{what}. Did training diverge?")


def _ranked(walk: _Walk, ranking: Ranking, layout: Layout, density: float) -> dict[str, Tensor]:
    """The masks [out, in], True where kept, from a ranking of the scores of all matrices. Changes no weight."""
    criterion = walk.criterion
    try:
        for site, weight, statistics in walk:
            scores = criterion.costs(weight, statistics)
            _refuse_unusable(f"the scores of {site.name} are not finite", scores)
            criterion.measured[site.name] = _matrix(site, scores).reshape(-1)
        masks = dict(ranking.laid_out(layout, density))
    finally:
        criterion.measured.clear()
    return {site.name: ~_matrix(site, masks[site.name]) for site in walk.sites}


def _pruned(walk: _Walk, keeps: Mapping[str, Keep], barred: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Prunes every site during the walk, and returns the flat masks (True is pruned)."""
    masks = {}
    for site, weight, statistics in walk:
        ban = None if barred is None else _matrix(site, barred[site.name])
        pruned = walk.criterion.prune_(weight, statistics, keeps[site.name], ban)
        if ban is not None and bool((ban & ~pruned).any()):
            raise ValueError(
                f"a part of {site.name} has fewer weights left than it is to keep, and regrow=False lets none come "
                "back."
            )
        weight.masked_fill_(pruned, 0.0)
        _matrix(site, site.owner.detach()).copy_(weight)
        _refuse_unusable(f"what is left of {site.name} is not finite", site.owner.detach())  # fp16 may overflow
        masks[site.name] = _matrix(site, pruned).reshape(-1)  # its own inverse
    return masks


@contextlib.contextmanager
def _undoing(sites: Sequence[Site]) -> Iterator[None]:
    """Restores all weights after an error: earlier blocks are already pruned then."""
    before = [(site.owner.detach(), site.owner.detach().clone()) for site in sites]
    try:
        yield
    except BaseException:
        for weight, values in before:
            weight.copy_(values)
        raise


def _matrix(site: Site, tensor: Tensor) -> Tensor:
    """Converts between the layout of a site and [out, in]; its own inverse."""
    if tensor.dim() == 1:
        tensor = tensor.view(site.shape)
    return tensor.t() if site.transposed else tensor


def _blocks(sites: Sequence[Site]) -> Iterator[list[Site]]:
    """The sites of each block, in the order of the model; a site outside of any block is alone."""
    groups: dict[str, list[Site]] = {}
    for site in sites:
        groups.setdefault(site.block or site.name, []).append(site)
    yield from groups.values()


def _calls(model: nn.Module, sites: Sequence[Site], batch: Any) -> dict[str, int]:
    """The number of uses of each site's matrix in a forward pass; more than one if it is shared."""
    counts = dict.fromkeys((site.name for site in sites), 0)

    def count(name: str, inputs: Tensor) -> None:
        counts[name] += 1

    with watching(_modules(sites), count):
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

    def add(name: str, rows: Tensor) -> None:
        criterion.add_(found[name], rows)

    gather(model, data, _modules(group), add, calls)
    return found


def _modules(sites: Sequence[Site]) -> dict[str, list[nn.Module]]:
    """The modules that use each site's matrix; none if the module's input is not the matrix's input."""
    return {site.name: [site.module, *site.shared_with] if site.parameter == "weight" else [] for site in sites}
