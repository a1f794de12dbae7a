"""The prunable weights: every matrix of a model's blocks (models/blocks.py), or those selected by patterns."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from pinscher.models.blocks import Matrix, is_adapted, owner_of, untied, uses
from pinscher.models.inputs import evaluating
from pinscher.prune import sharding
from pinscher.prune.sharding import local

Patterns = str | Iterable[str] | None


class Moving(Protocol):
    """The effective weight: frozen base plus trainable adapter; and its gradient."""

    pull: Tensor | None

    def updated(self, weight: Tensor) -> Tensor: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


@dataclass(eq=False)
class Site:
    """One prunable matrix, and what a criterion needs to know about it at this step.

    The parameter is looked up through its module each time, because wrappers such as FSDP2 replace the object.
    """

    name: str
    module: nn.Module
    parameter: str = "weight"
    block: str = ""  # the transformer block it lies in, e.g. "bert.encoder.layer.3"
    kind: str = ""  # its place in that block, e.g. "attention.self.query"
    transposed: bool = False  # [in, out] instead of [out, in]
    shared_with: list[nn.Module] = field(default_factory=list)  # further modules that use the same parameter
    adapter: nn.Module | None = None  # the low-rank adapter around it, if there is one
    moving: Moving | None = None  # the effective weight, where the parameter itself is frozen
    lr: float = 0.0  # learning rate of its parameter group at this step
    grad_scale: float = 1.0  # the factor that its gradient still has (GradScaler with a fused optimiser)
    state: dict[str, Tensor] = field(default_factory=dict)  # the criterion's own

    @property
    def owner(self) -> Tensor:
        """The parameter that the optimiser updates (below any gate)."""
        return owner_of(self.module, self.parameter)

    @property
    def effective(self) -> Tensor:
        """The weight that the forward pass uses (above any gate)."""
        weight = getattr(self.module, self.parameter)
        assert isinstance(weight, Tensor)
        return weight

    @property
    def settled(self) -> Tensor:
        """The weight at test time: random gates have their deterministic value, and no random number is drawn."""
        with torch.no_grad(), evaluating(self.module):
            return self.effective

    def zeros(self) -> int:
        """How many weights are exactly zero at test time, over all ranks."""
        weight = self.settled
        return self.numel - sharding.count(weight, int((local(weight) != 0).sum()))

    @property
    def weight(self) -> Tensor:
        """This rank's part of the weight, flat and writable, without autograd; a copy if frozen below an adapter."""
        if self.moving is not None:
            return self.moving.updated(self.owner).detach().reshape(-1)
        return local(self.owner.detach()).view(-1)

    @property
    def grad(self) -> Tensor | None:
        """This rank's part of the gradient, flat."""
        grad = self.owner.grad if self.moving is None else self.moving.pull
        return None if grad is None else local(grad.detach()).reshape(-1)

    @property
    def start(self) -> int:
        """The flat index of this rank's first weight in the whole matrix."""
        return sharding.start_of(self.owner)

    @property
    def stride(self) -> int:
        """Weights of a full rank's part: the whole matrix is cut at multiples of it."""
        return sharding.rows_each(self.owner) * (self.numel // max(1, self.shape[0]))

    @property
    def part(self) -> torch.Size:
        """The shape of this rank's part of the matrix."""
        return local(self.owner).shape

    @property
    def shape(self) -> torch.Size:
        return self.owner.shape

    @property
    def numel(self) -> int:
        return self.owner.numel()


def find_sites(model: nn.Module, target_modules: Patterns = None, exclude_modules: Patterns = None) -> list[Site]:
    """Finds the prunable matrices of a model, in the order of its modules, each parameter once.

    Args:
        model: any module; wrappers of DDP, FSDP and torch.compile are ignored.
        target_modules: names or regular expressions of the modules to prune instead of the blocks' matrices. A name
            matches the end of a module's path ("query"); an expression matches the whole path.
        exclude_modules: the same, for modules to leave alone.

    Raises:
        ValueError: if nothing is found, or a pattern matches nothing; the message lists what was seen.
    """
    found = uses(model)
    linear = {use.place.name: use for use in found if use.role != "embedding"}
    candidates = [name for name, use in linear.items() if target_modules is not None or use.place.block]
    chosen = set(candidates) if target_modules is None else _matching(candidates, target_modules, "target_modules")
    if exclude_modules is not None and chosen:
        chosen -= _matching(linear, exclude_modules, "exclude_modules")
    embedded = {id(use.owner) for use in found if use.role == "embedding"}
    adapters = {id(m.base_layer): m for m in model.modules() if is_adapted(m)}
    wanted = [use for use in found if use.place.name in chosen and id(use.owner) not in embedded]
    sites = [_site(group, adapters) for group in untied(wanted)]
    if not sites:
        raise ValueError(_nothing_found(model, list(linear), bool(candidates)))
    return sites


def sparsity(model: nn.Module, target_modules: Patterns = None, exclude_modules: Patterns = None) -> float:
    """The exact fraction of zeros over the prunable weights of a model."""
    zeros, total = 0, 0
    for site in find_sites(model, target_modules, exclude_modules):
        total += site.numel
        zeros += site.zeros()
    return zeros / total


def _site(group: list[Matrix], adapters: dict[int, nn.Module]) -> Site:
    """One weight, used by one module or by several."""
    first, *others = group
    place = first.place
    shared = [other.module for other in others]
    adapter = adapters.get(id(first.module))
    return Site(first.name, first.module, first.parameter, place.block, place.kind, place.transposed, shared, adapter)


def _matching(names: Iterable[str], patterns: Patterns, field_name: str) -> set[str]:
    """The names that any of the patterns matches; a pattern without a match is an error, because it is a typo."""
    names = list(names)
    found: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns or ():
        try:
            expression = re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{field_name}: {pattern!r} is not a regular expression ({error})") from None
        hits = {n for n in names if n == pattern or n.endswith("." + pattern) or expression.fullmatch(n)}
        if not hits:
            seen = ", ".join(sorted({n.rsplit(".", 1)[-1] for n in names}))
            raise ValueError(f"{field_name}: {pattern!r} matches no module. Matrices seen end in: {seen or 'nothing'}")
        found |= hits
    return found


def _nothing_found(model: nn.Module, matrices: list[str], had_candidates: bool) -> str:
    kinds = Counter(type(m).__name__ for m in model.modules() if not any(m.children()))
    seen = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(8)) or "no modules at all"
    some = f"({', '.join(matrices[:6])}{', …' if len(matrices) > 6 else ''})"
    if had_candidates:
        why = f"Its matrices {some} were all left out: look at target_modules and exclude_modules, or at tied weights."
    elif matrices:
        why = f"It has matrices outside of any block {some}: name those to prune with target_modules."
    else:
        why = "Only nn.Linear, Conv1D and nn.MultiheadAttention inside blocks (a ModuleList) can be pruned."
    return f"{type(model).__name__} has no prunable matrix. Seen: {seen}. {why}"
