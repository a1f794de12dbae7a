"""Which weights are prunable: every matrix of a transformer's blocks, and nothing else.

No architecture is named here. A transformer keeps its blocks in a `ModuleList` (or a `Sequential` of one class); what
lies outside (embeddings, pooler, head) is left alone. Inside a block every `nn.Linear`, every GPT-2 `Conv1D` (stored
transposed) and the projections of `nn.MultiheadAttention` are sites; norms, biases and embeddings are not matrices of
that kind and so never are.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from pinscher.prune import sharding
from pinscher.prune.sharding import local

Patterns = str | Iterable[str] | None

_WRAPPERS = re.compile(
    r"(^base_model\.model(?=\.))|(^|\.)(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|base_layer)(?=\.|$)"
)
_ADAPTERS = re.compile(r"(^|\.)(lora_\w+|original_module)(\.|$)")


class Moving(Protocol):
    """What stands above a frozen weight: its value with all that trains, and the gradient of that."""

    pull: Tensor | None

    def updated(self, weight: Tensor) -> Tensor: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


@dataclass(eq=False)
class Site:
    """One prunable matrix, and what a criterion needs to know of it at this step.

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
    moving: Moving | None = None  # what makes it move while it is frozen itself
    lr: float = 0.0  # learning rate of its parameter group at this step
    grad_scale: float = 1.0  # what its gradient is still multiplied by (GradScaler with a fused optimiser)
    state: dict[str, Tensor] = field(default_factory=dict)  # the criterion's own

    @property
    def owner(self) -> Tensor:
        """The parameter that the optimiser updates (below any gate)."""
        if parametrize.is_parametrized(self.module, self.parameter):
            original = self.module.parametrizations[self.parameter].original  # type: ignore[union-attr, index]
            assert isinstance(original, Tensor)
            return original
        return self.effective

    @property
    def effective(self) -> Tensor:
        """The weight that the forward pass uses (above any gate)."""
        weight = getattr(self.module, self.parameter)
        assert isinstance(weight, Tensor)
        return weight

    @property
    def settled(self) -> Tensor:
        """The weight at test time: random gates show what they come to, and no random number is drawn."""
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
        """The flat index that this rank's first weight has in the whole matrix."""
        return sharding.start_of(self.owner)

    @property
    def stride(self) -> int:
        """Weights of a full rank's part: the whole matrix is cut at multiples of it."""
        return sharding.rows_each(self.owner) * (self.numel // max(1, self.shape[0]))

    @property
    def part(self) -> torch.Size:
        """The shape of what this rank holds of the matrix."""
        return local(self.owner).shape

    @property
    def shape(self) -> torch.Size:
        return self.owner.shape

    @property
    def numel(self) -> int:
        return self.owner.numel()


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts every module into evaluation mode for a while, and each back into its own."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def find_sites(model: nn.Module, target_modules: Patterns = None, exclude_modules: Patterns = None) -> list[Site]:
    """Finds the prunable matrices of a model, in the order of its modules, each parameter once.

    Args:
        model: any module; the wrappers of DDP, FSDP and torch.compile are seen through.
        target_modules: names or regular expressions of the modules to prune instead of the blocks' matrices. A name
            matches the end of a module's path ("query"); an expression matches the whole path.
        exclude_modules: the same, for modules to leave alone.

    Raises:
        ValueError: if nothing is found, or a pattern matches nothing; the message lists what was seen.
    """
    matrices = list(_matrices(model))
    blocks = list(_blocks(model))
    candidates = {}
    for name, _ in matrices:
        block = next((b for b in blocks if name.startswith(b + ".")), "")
        if target_modules is not None or block:
            candidates[name] = block
    chosen = set(candidates) if target_modules is None else _matching(candidates, target_modules, "target_modules")
    if exclude_modules is not None and chosen:
        chosen -= _matching([name for name, _ in matrices], exclude_modules, "exclude_modules")
    sites: dict[int, Site] = {}
    adapted = {id(m.base_layer): m for m in model.modules() if is_adapted(m)}
    embedded = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for name, module in matrices:
        for parameter in _parameters(module) if name in chosen else ():
            site = _site(name, module, parameter, candidates[name])
            site.adapter = adapted.get(id(module))
            if id(site.owner) in sites:
                sites[id(site.owner)].shared_with.append(module)
            elif id(site.owner) not in embedded:
                sites[id(site.owner)] = site
    if not sites:
        raise ValueError(_nothing_found(model, [name for name, _ in matrices], bool(candidates)))
    return list(sites.values())


def sparsity(model: nn.Module, target_modules: Patterns = None, exclude_modules: Patterns = None) -> float:
    """The exact fraction of zeros over the prunable weights of a model."""
    zeros, total = 0, 0
    for site in find_sites(model, target_modules, exclude_modules):
        total += site.numel
        zeros += site.zeros()
    return zeros / total


def is_conv1d(module: nn.Module) -> bool:
    """GPT-2's Conv1D, recognised without importing transformers: a matrix stored [in, out] with `nf` outputs."""
    kinds = type(module).__mro__  # gates and FSDP2 make subclasses
    return any(kind.__name__ == "Conv1D" for kind in kinds) and hasattr(module, "nf")


def is_matrix(module: nn.Module) -> bool:
    """Whether a module is of a kind whose weight can be a site."""
    return bool(_parameters(module))


def is_adapted(module: nn.Module) -> bool:
    """A peft layer that adds a low-rank adapter to the matrix inside it, recognised without importing peft."""
    return hasattr(module, "base_layer") and hasattr(module, "lora_A")


def clean_name(name: str) -> str:
    """A module's path without the prefixes that wrappers add."""
    return _WRAPPERS.sub("", name).lstrip(".")


def _parameters(module: nn.Module) -> list[str]:
    """The names of the matrices that a module of a known kind owns."""
    if isinstance(module, nn.MultiheadAttention):
        names = ["in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"]
        return [n for n in names if getattr(module, n, None) is not None]
    return ["weight"] if isinstance(module, nn.Linear) or is_conv1d(module) else []


def _matrices(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if _parameters(module) and not _ADAPTERS.search(name):
            yield clean_name(name), module


def _blocks(model: nn.Module) -> Iterator[str]:
    """The paths of the transformer blocks: what the outermost lists of composite modules hold."""
    inside: list[str] = []
    for name, container in model.named_modules():
        if not isinstance(container, nn.ModuleList | nn.Sequential) or any(name.startswith(p) for p in inside):
            continue
        single = {n for n, m in container.named_children() if _parameters(m) or is_adapted(m)}
        composite = {n: m for n, m in container.named_children() if n not in single and any(_matrices(m))}
        if isinstance(container, nn.Sequential) and (len(composite) < 2 or len({*map(type, composite.values())}) > 1):
            continue
        if composite:
            inside.append(name + "." if name else "")
            yield from (clean_name(f"{name}.{child}") for child in composite)


def _site(name: str, module: nn.Module, parameter: str, block: str) -> Site:
    kind = name[len(block) + 1 :] if block else name
    suffix = "" if parameter == "weight" else f".{parameter}"
    return Site(name + suffix, module, parameter, block, kind + suffix, transposed=is_conv1d(module))


def _matching(names: Iterable[str], patterns: Patterns, field_name: str) -> set[str]:
    """The names that any of the patterns matches; a pattern without a match is an error, for it is a typing slip."""
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
