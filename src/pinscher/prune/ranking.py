"""Ranking: which weights are kept. Ranks all sites' scores together (or as a layout says) and gives the masks.

Masks are stored only if necessary. Smoothed scores do not change until the next ranking, so the threshold alone gives
the mask again, without memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pinscher.prune.criteria import Criterion
from pinscher.prune.masking import ALONE, Ranks, Scores, Threshold, parts, shared_out, threshold, zero_
from pinscher.prune.patterns import Family, Layout, inward, oriented
from pinscher.prune.sharding import like, local
from pinscher.prune.sites import Site


@dataclass(frozen=True)
class Projection:
    """What setting learned masks to an exact ranking changed."""

    density: float  # of open gates before it
    changed: float  # fraction of all gates that it opened or closed


class Ranking:
    """The last ranking of a model's weights.

    Args:
        sites: what is ranked.
        criterion: gives the scores.
        store: keep the masks as tensors, one byte a weight.
        regrow: whether a pruned weight may be chosen again; if not, existing zeros count as pruned.
        ranks: the processes that share the weights.
        layout: units and scopes to rank by, for which masks are stored; None ranks all single weights together.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        criterion: Criterion,
        *,
        store: bool,
        regrow: bool,
        ranks: Ranks = ALONE,
        layout: Layout | None = None,
    ) -> None:
        self.sites, self.criterion, self.store, self.regrow, self.ranks = sites, criterion, store, regrow, ranks
        self.layout = layout
        self.total = sum(site.numel for site in sites)
        self.threshold: Threshold | None = None
        self.pruned: dict[str, Tensor] = {}  # stored masks, flat, True where pruned
        if not regrow:
            self.pruned = {site.name: site.weight == 0 for site in sites}
        zeros = sum(int((site.weight == 0).sum()) for site in sites)
        self.kept = self.total - ranks.count(zeros)
        self.revived = 0  # weights that the last ranking brought back, where masks are stored
        self.returned = 0  # the same for all rankings so far; a weight may count repeatedly
        self.maskings = 0  # rankings so far
        self.projection: Projection | None = None  # of learned masks, at the last ranking

    @property
    def exists(self) -> bool:
        return self.threshold is not None or bool(self.pruned)

    def rank(self, density: float) -> None:
        """Chooses exactly `count(density)` weights to keep."""
        keep = self.count(density)
        if self.layout is None:
            self.threshold = threshold([self.scores(site) for site in self.sites], keep, self.ranks)
        if self.store:
            before = self.pruned
            if self.layout is None:
                self.pruned = {site.name: self._fresh_mask(i) for i, site in enumerate(self.sites)}
            else:
                self.pruned = dict(self.laid_out(self.layout, density))
            local = sum(site.weight.numel() for site in self.sites)
            self.check(keep, local - sum(int(torch.count_nonzero(p)) for p in self.pruned.values()))
            back = sum(int(torch.count_nonzero(was & ~self.pruned[name])) for name, was in before.items())
            self.revived = self.ranks.count(back)
            self.returned += self.revived
        self.maskings += 1
        self.kept = keep

    def refuse_unmeasured(self, method: str, interval: int) -> None:
        """Raises an error if weights would be ranked by scores that are all zero."""
        if self.criterion.moment == "never" or not self.criterion.needs_grad:
            return
        scores = (self.scores(site).read(slice(None)) for site in self.sites)
        if not self.ranks.count(sum(int((values != 0).sum()) for values in scores)):
            raise RuntimeError(
                f"{method} has measured nothing yet to rank the weights by. Train at least {interval} steps, and call "
                "finish before the gradients are cleared."
            )

    def adopt(self, pruned: dict[str, Tensor]) -> None:
        """Takes over masks (flat, True where pruned) that a method has chosen by itself."""
        back = sum(int(torch.count_nonzero(was & ~pruned[name])) for name, was in self.pruned.items())
        self.pruned, self.revived = pruned, self.ranks.count(back)
        self.kept = self.total - self.ranks.count(sum(int(torch.count_nonzero(p)) for p in pruned.values()))

    def count(self, density: float) -> int:
        """The number of weights kept at a density: floor(density * d + 0.5), or that of whole units."""
        return math.floor(density * self.total + 0.5) if self.layout is None else self.layout.count(density)

    def check(self, keep: int, left: int) -> None:
        """Raises an error unless the number of kept weights is the one asked for; `left` is that of this rank."""
        kept = self.ranks.count(left)
        if kept != keep:
            raise RuntimeError(f"{kept} weights would be kept instead of {keep}: please report this")

    def scores(self, site: Site) -> Scores:
        """The scores by which a site's weights are ranked; -inf for those that may not return."""
        scores = self.criterion.scores(site)
        if self.regrow:
            return scores

        def combine(*pieces: Tensor, out: Tensor) -> Tensor:
            *ingredients, pruned = pieces
            alive = out.copy_(pieces[0]) if scores.combine is None else scores.combine(*ingredients, out=out)
            return alive.masked_fill_(pruned, -torch.inf)

        return Scores(*scores.tensors, self.pruned[site.name], combine=combine)

    def keeps(self, index: int) -> Iterator[tuple[slice, Tensor]]:
        """(flat slice, 1 where kept and 0 where not, as int32) of one site by the last ranking, part by part."""
        site = self.sites[index]
        if site.name in self.pruned:
            pruned = self.pruned[site.name]
            yield from ((at, pruned[at].logical_not().int()) for at in parts(pruned.numel()))
        elif self.threshold is not None:
            yield from self.threshold.keeps(self.scores(site), index)

    def mask(self, index: int) -> Tensor:
        """The last mask of one site, flat, True where kept."""
        mask = torch.ones_like(self.sites[index].weight, dtype=torch.bool)
        for at, kept in self.keeps(index):
            mask[at] = kept.bool()
        return mask

    def apply(self) -> None:
        """Sets pruned weights to exact zeros."""
        left = 0
        for i, site in enumerate(self.sites):
            weight = site.weight
            for at, kept in self.keeps(i):
                left += int(kept.sum(dtype=torch.int32))
                zero_(weight[at], kept)
        self.check(self.kept, left)

    def _fresh_mask(self, index: int) -> Tensor:
        """The mask of one site that the new threshold gives, flat, True where pruned."""
        assert self.threshold is not None
        pruned = torch.empty_like(self.sites[index].weight, dtype=torch.bool)
        for at, kept in self.threshold.keeps(self.scores(self.sites[index]), index):
            torch.eq(kept, 0, out=pruned[at])
        return pruned

    def laid_out(self, layout: Layout, density: float) -> Iterator[tuple[str, Tensor]]:
        """The masks of all sites by name, flat, True where pruned; each list of units is ranked separately."""
        pattern = layout.pattern
        for members, keep in zip(layout.lists, layout.keeps(density), strict=True):
            scores = [self._unit_scores(layout, family) for family in members]
            cut = threshold(scores, keep, self.ranks)
            for i, family in enumerate(members):
                kept = torch.empty(scores[i].numel, dtype=torch.bool, device=family.sites[0].weight.device)
                for at, stays in cut.keeps(scores[i], i):
                    kept[at] = stays.bool()
                for site in family.sites:
                    if pattern.whole:
                        yield site.name, ~inward(site, pattern.spread(site, kept))
                    else:
                        yield site.name, ~pattern.tied(site, self.scores(site), kept)

    def _unit_scores(self, layout: Layout, family: Family) -> Scores:
        """The scores of the units of some matrices. Without regrowth a unit is dead when all of its weights are."""
        pattern = layout.pattern
        if not pattern.whole:
            return pattern.loose(family.sites[0], self.scores(family.sites[0]))
        totals, alive = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        for site in family.sites:
            values = oriented(site, self.criterion.scores(site).read(slice(None)))
            totals = totals.to(values.device) + pattern.sums(site, values)
            if not self.regrow:
                living = oriented(site, ~self.pruned[site.name])
                alive = alive.to(values.device) + pattern.sums(site, living)
        return Scores(totals if self.regrow else totals.masked_fill(alive == 0, -torch.inf))

    def state_dict(self) -> dict[str, Any]:
        """Values that mean the same on any number of ranks; every rank must call it."""
        cut = self.threshold
        quotas = cut and cut.quotas and self.ranks.add(torch.tensor(cut.quotas)).tolist()
        return {
            "threshold": None if cut is None else {"value": cut.value, "quotas": quotas},
            "kept": self.kept,
            "revived": self.revived,
            "returned": self.returned,
            "maskings": self.maskings,
            "pruned": {site.name: like(site.owner, self.pruned[site.name]) for site in self.sites if self.pruned},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict()`; the data of the scores must have been restored before."""
        cut = state["threshold"]
        self.threshold = None if cut is None else Threshold(cut["value"])
        self.kept, self.revived = state["kept"], state["revived"]
        self.returned, self.maskings = state.get("returned", 0), state.get("maskings", 0)  # not in older checkpoints
        self.pruned = {}
        if self.store:  # otherwise they follow from the threshold
            self.pruned = {
                s.name: local(state["pruned"][s.name]).reshape(-1).to(s.weight.device, copy=True)
                for s in self.sites
                if s.name in state["pruned"]
            }
        if cut is not None and cut["quotas"]:
            self.threshold = Threshold(cut["value"], self._my_quotas(cut["value"], cut["quotas"]))

    def _my_quotas(self, value: float, quotas: list[int]) -> tuple[int, ...]:
        """This rank's part of the quotas of all ranks together."""
        if self.store:  # quotas are not used when masks are stored; only their sum matters
            return tuple(quotas) if self.ranks.index == 0 else (0,) * len(quotas)
        return shared_out(quotas, [self.scores(site) for site in self.sites], value, self.ranks)
