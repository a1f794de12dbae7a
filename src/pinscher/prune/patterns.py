"""Patterns and scopes: which weights are pruned as a unit, and which units compete in the ranking.

A unit is kept or pruned as a whole. Its score is the sum of its weights' scores, because pruning it costs as much as
pruning each of them. Everything here is in the orientation [outputs, inputs], also for matrices that are stored
transposed.

    unstructured   every weight is a unit
    N:M            of every M neighbouring inputs of an output exactly N are kept in the end
    RxC            blocks of R outputs by C inputs
    rows, columns  all weights of an output, or of an input
    heads          what belongs to an attention head: rows of query, key and value, columns of the output (heads.py)

A scope says which units compete: all ("global"), those of one matrix, of one layer, or of one kind of matrix.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from pinscher.prune.masking import Scores
from pinscher.prune.sharding import is_sharded
from pinscher.prune.sites import Site

UNSTRUCTURED = "unstructured"
SCOPES = ("global", "matrix", "layer", "kind")


@dataclass(frozen=True)
class Family:
    """Matrices with common units: a single matrix, or those of an attention.

    Args:
        sites: the matrices.
        units: the number of their units.
        size: weights of a unit, over all of the matrices.
        fixed: further weights, which are always kept.
    """

    sites: tuple[Site, ...]
    units: int
    size: int = 1
    fixed: int = 0


class Pattern:
    """The interface. A pattern has either `whole` units of several weights, or ranks weights one by one."""

    whole: ClassVar[bool] = True
    groups: ClassVar[bool] = True  # whether weights depend on each other's place; if not, any part can be ranked

    @property
    def of_neighbours(self) -> tuple[int, int] | None:
        """(N, M) if exactly N of every M neighbours are kept in the end; rows are then independent."""
        return None

    def families(self, sites: Sequence[Site], model: nn.Module) -> list[Family]:
        """The units of a model.

        Raises:
            ValueError: if the pattern does not fit a matrix; the message names it.
        """
        raise NotImplementedError

    def final(self, density: float) -> float:
        """The final density, given the one that the user asked for.

        Raises:
            ValueError: if the pattern cannot have this density.
        """
        return density

    def fits(self, site: Site, rows: int) -> bool:
        """Whether cutting the stored matrix after every `rows` rows preserves units and their order."""
        return False

    def sums(self, site: Site, values: Tensor) -> Tensor:
        """Sums weight-shaped values [outputs, inputs] over the part of each unit that lies in this site: [units]."""
        raise NotImplementedError

    def spread(self, site: Site, kept: Tensor) -> Tensor:
        """The mask [outputs, inputs] of a site, given the mask of its units: [units]."""
        raise NotImplementedError

    def loose(self, site: Site, scores: Scores) -> Scores:
        """Without whole units: the scores of the weights among which the ranking chooses, in order."""
        raise NotImplementedError

    def tied(self, site: Site, scores: Scores, kept: Tensor) -> Tensor:
        """Without whole units: the flat mask of a site, given the mask of its loose weights."""
        raise NotImplementedError


class Unstructured(Pattern):
    whole: ClassVar[bool] = False
    groups: ClassVar[bool] = False

    def families(self, sites: Sequence[Site], model: nn.Module) -> list[Family]:
        return [Family((site,), site.numel) for site in sites]

    def fits(self, site: Site, rows: int) -> bool:
        return True

    def loose(self, site: Site, scores: Scores) -> Scores:
        return scores

    def tied(self, site: Site, scores: Scores, kept: Tensor) -> Tensor:
        return kept


@dataclass(frozen=True)
class NofM(Pattern):
    """N of every M neighbouring inputs.

    The N best of a group are kept at any density. The schedule sets how many of the others are kept too; they are
    ranked against those of all groups, so r(t) is exact at every step and only the N remain in the end.
    """

    n: int
    m: int

    whole: ClassVar[bool] = False

    @property
    def of_neighbours(self) -> tuple[int, int] | None:
        return self.n, self.m

    def families(self, sites: Sequence[Site], model: nn.Module) -> list[Family]:
        families = []
        for site in sites:
            _, inputs = outward(site)
            _divides(self.m, inputs, "inputs", site, f"{self.n}:{self.m}")
            fixed = site.numel // self.m * self.n
            families.append(Family((site,), site.numel - fixed, fixed=fixed))
        return families

    def final(self, density: float) -> float:
        if abs(density - self.n / self.m) > 1e-6:
            raise ValueError(
                f"pattern {self.n}:{self.m} keeps {self.n} of every {self.m} weights, so sparsity must be "
                f"{1 - self.n / self.m:.6g}, not {1 - density:.6g}. Set that, or choose another pattern."
            )
        return self.n / self.m

    def fits(self, site: Site, rows: int) -> bool:
        return not site.transposed

    def loose(self, site: Site, scores: Scores) -> Scores:
        groups, best = self._best(site, scores)
        if bool((groups.isnan() & best).any()):
            raise ValueError("too many scores are NaN to rank them. Did training diverge? Try a lower learning rate.")
        return Scores(groups[~best])

    def tied(self, site: Site, scores: Scores, kept: Tensor) -> Tensor:
        _, best = self._best(site, scores)
        best[~best] = kept
        return inward(site, best.view(outward(site, site.part)))

    def _best(self, site: Site, scores: Scores) -> tuple[Tensor, Tensor]:
        """The scores in groups, and which are the N best of their group; of equal ones the first."""
        groups = oriented(site, scores.read(slice(None))).reshape(-1, self.m)
        known = groups.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        better = torch.zeros(groups.shape, dtype=torch.int16, device=groups.device)
        for j in range(self.m):  # a few comparisons of whole columns are faster than many tiny sorts
            other = known[:, j : j + 1]
            better += other > known
            better[:, j + 1 :] += other == known[:, j + 1 :]
        return groups, better < self.n


@dataclass(frozen=True)
class Block(Pattern):
    """Blocks of `rows` outputs by `columns` inputs; None is all of them."""

    rows: int | None
    columns: int | None

    def families(self, sites: Sequence[Site], model: nn.Module) -> list[Family]:
        families = []
        for site in sites:
            outputs, inputs = outward(site)
            rows, columns = self._shape(site)
            _divides(rows, outputs, "outputs", site, f"{rows}x{columns}")
            _divides(columns, inputs, "inputs", site, f"{rows}x{columns}")
            families.append(Family((site,), site.numel // (rows * columns), rows * columns))
        return families

    def fits(self, site: Site, rows: int) -> bool:
        return not site.transposed and self.rows is not None and rows % self.rows == 0

    def sums(self, site: Site, values: Tensor) -> Tensor:
        outputs, inputs = values.shape
        rows, columns = self._shape(site)
        blocks = values.reshape(outputs // rows, rows, inputs // columns, columns)
        return blocks.sum((1, 3), dtype=torch.float64).view(-1)

    def spread(self, site: Site, kept: Tensor) -> Tensor:
        outputs, inputs = outward(site, site.part)
        rows, columns = self._shape(site)
        blocks = kept.view(outputs // rows, 1, inputs // columns, 1)
        return blocks.expand(-1, rows, -1, columns).reshape(outputs, inputs)

    def _shape(self, site: Site) -> tuple[int, int]:
        outputs, inputs = outward(site)
        return self.rows or outputs, self.columns or inputs


def parse(text: str) -> Pattern:
    """The pattern of a name."""
    if text == UNSTRUCTURED:
        return Unstructured()
    if text == "heads":
        from pinscher.prune.heads import Heads

        return Heads()
    if text == "rows":
        return Block(1, None)
    if text == "columns":
        return Block(None, 1)
    if found := re.fullmatch(r"(\d+):(\d+)", text):
        n, m = int(found[1]), int(found[2])
        if not 0 < n < m:
            raise ValueError(f"pattern {text!r}: of every {m} weights between 1 and {m - 1} can be kept, not {n}")
        return NofM(n, m)
    if found := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text):
        return Block(int(found[1]), int(found[2]))
    raise ValueError(
        f"unknown pattern {text!r}. Known: unstructured, N:M (2:4, 4:8), RxC blocks of outputs by inputs "
        "(4x1, 1x4, 16x16), rows, columns, heads"
    )


class Layout:
    """The units of a model, in lists that are ranked together: those of one scope and one size.

    Units of different sizes are never ranked against each other, because larger ones have larger sums. So the number of
    units of each size that are kept does not depend on scores.
    """

    def __init__(self, pattern: Pattern, scope: str, sites: Sequence[Site], model: nn.Module) -> None:
        self.pattern = pattern
        families = pattern.families(sites, model)
        self.sites = [site for site in sites if any(site in family.sites for family in families)]
        lists: dict[str, list[Family]] = {}
        for family in families:
            lists.setdefault(_scope_of(family.sites[0], scope), []).append(family)
        self.lists = [
            [family for family in members if family.size == size]
            for members in lists.values()
            for size in sorted({family.size for family in members}, reverse=True)
        ]

    def refuse_cut(self, name: str) -> None:
        """Refuses matrices whose sharding cuts units of the pattern `name`."""
        for site in self.sites:
            if not is_sharded(site.owner) and self.pattern.groups:
                raise ValueError("units need whole matrices or DTensors, which say how they are cut")
            rows = site.stride * site.shape[0] // max(1, site.numel)
            if not self.pattern.fits(site, rows):
                stored = f"{rows} {'inputs' if site.transposed else 'outputs'}"
                raise ValueError(
                    f"pattern {name} does not fit the sharded {site.name}: each process holds {stored} of it, and its "
                    "units must lie within them. Use pattern='unstructured', N:M or 1xC; RxC where the outputs of a "
                    "process are a multiple of R; or train without sharding (DDP)."
                )

    def keeps(self, density: float) -> list[int]:
        """How many units of each list are kept.

        The running total over all lists is rounded, not each list, so the sum is as close to density * d as the size
        of the last list's units allows; with a single list it is floor(density * units + 0.5).
        """
        seen, kept, counts = 0, 0, []
        for members in self.lists:
            size, units = members[0].size, sum(family.units for family in members)
            fixed = sum(family.fixed for family in members)
            seen += units * size + fixed
            if size == 1:
                count = math.floor(density * seen + 0.5) - kept - fixed
            else:
                count = math.floor(density * (seen / size) - (kept + fixed) / size + 0.5)
            counts.append(min(max(count, 0), units))
            kept += counts[-1] * size + fixed
        return counts

    def count(self, density: float) -> int:
        """How many weights are kept."""
        fixed = sum(family.fixed for members in self.lists for family in members)
        return fixed + sum(
            count * members[0].size for members, count in zip(self.lists, self.keeps(density), strict=True)
        )


def outward(site: Site, shape: torch.Size | None = None) -> tuple[int, int]:
    """Outputs and inputs of a matrix; or of a part of it, given its shape as stored."""
    first, second = site.shape if shape is None else shape
    return (second, first) if site.transposed else (first, second)


def oriented(site: Site, flat: Tensor) -> Tensor:
    """Flat values of this rank's part of a site, as [outputs, inputs]."""
    values = flat.view(site.part)
    return values.T if site.transposed else values


def inward(site: Site, values: Tensor) -> Tensor:
    """Values [outputs, inputs] in the layout of the site, flat."""
    return (values.T if site.transposed else values).reshape(-1)


def _scope_of(site: Site, scope: str) -> str:
    """A key that is equal for sites that are ranked together."""
    return {"global": "", "matrix": site.name, "layer": site.block or site.name, "kind": site.kind}[scope]


def _divides(size: int, whole: int, what: str, site: Site, pattern: str) -> None:
    # No kernel for the pattern could use a smaller unit at the edge.
    if whole % size:
        raise ValueError(
            f"pattern {pattern} does not fit {site.name}: its {whole} {what} are no multiple of {size}. Choose another "
            "pattern, or leave the matrix out with exclude_modules."
        )
