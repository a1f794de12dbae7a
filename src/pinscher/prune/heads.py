"""Attention heads as units: rows of query, key and value, and columns of the output, that belong together.

No architecture is named. An attention is a module with matrices whose names begin with q, k and v (or one matrix that
holds all three, where their order is known: GPT-2's `Conv1D`, `nn.MultiheadAttention`), followed by one that reads as
many inputs as the values have outputs. The number of heads is an attribute of the module or of its configuration.
Where several query heads read one key and value (grouped queries), they are one unit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pinscher.models.blocks import is_conv1d
from pinscher.models.names import HEAD_COUNTS, clean_name
from pinscher.prune.patterns import Family, Pattern, outward
from pinscher.prune.sites import Site

ROLES = {"q": r"(to_)?w?q(uery)?(_.*)?", "k": r"(to_)?w?k(ey)?(_.*)?", "v": r"(to_)?w?v(alue)?(_.*)?"}
OUTPUT = r"(to_)?w?o(ut)?(put)?(_.*)?|c_proj|proj|dense"
FUSED = r".*q.*k.*v.*|c_attn|in_proj_weight"


class Heads(Pattern):
    """A unit is a head."""

    def __init__(self) -> None:
        # For each site: the dimension of [outputs, inputs] along which units lie, and the unit of each position there.
        self.places: dict[str, tuple[int, Tensor]] = {}

    def families(self, sites: Sequence[Site], model: nn.Module) -> list[Family]:
        modules = {clean_name(name): module for name, module in model.named_modules()}
        families = [self._family(members, modules) for members in _attentions(sites)]
        if not families:
            seen = ", ".join(sorted({_leaf(site) for site in sites}))
            raise ValueError(
                f"pattern heads finds no attention: no matrices for query, key and value among {seen}. Choose another "
                "pattern."
            )
        return families

    def sums(self, site: Site, values: Tensor) -> Tensor:
        dim, units = self.places[site.name]
        totals = values.new_zeros(int(units.max()) + 1, dtype=torch.float64)
        return totals.index_add_(0, units.to(values.device), values.sum(1 - dim, dtype=torch.float64))

    def spread(self, site: Site, kept: Tensor) -> Tensor:
        dim, units = self.places[site.name]
        places = kept[units.to(kept.device)]
        return (places[:, None] if dim == 0 else places[None, :]).expand(outward(site))

    def _family(self, members: dict[str, Site], modules: dict[str, nn.Module]) -> Family:
        """One attention, and the positions of its heads."""
        first = next(iter(members.values()))
        heads = _heads_of(first, modules)
        queries, keys, values = _outputs(members)
        inputs = outward(members["o"])[1]
        size = queries // heads
        shared = keys // max(size, 1)  # key and value heads, each shared by the same number of query heads
        fits = size and queries == heads * size and keys == shared * size and heads % shared == 0
        if not fits or values % shared or inputs != heads * (values // shared):
            raise ValueError(
                f"pattern heads cannot tell the heads of {first.name}: {heads} heads, {queries} query, {keys} key, "
                f"{values} value and {inputs} output features do not go together. Leave it out with exclude_modules."
            )
        rows = {role: torch.arange(n) // (n // shared) for role, n in (("q", queries), ("k", keys), ("v", values))}
        for role, site in members.items():
            if role == "o":
                self.places[site.name] = 1, torch.arange(inputs) // (inputs // shared)
            else:
                self.places[site.name] = 0, torch.cat([rows[part] for part in role])
        return Family(tuple(members.values()), shared, sum(site.numel for site in members.values()) // shared)


def _attentions(sites: Sequence[Site]) -> Iterator[dict[str, Site]]:
    """The matrices of each attention by role: q, k, v and o, or qkv and o."""
    for site in sites:
        parent = _parent(site)
        inside = [other for other in sites if _parent(other) == parent]
        if re.fullmatch(ROLES["q"], _leaf(site), re.I) and not re.fullmatch(FUSED, _leaf(site), re.I):
            members = {"q": site}
            for role in "kv":
                found = [other for other in inside if re.fullmatch(ROLES[role], _leaf(other), re.I)]
                members[role] = _only(found, site, {"k": "key", "v": "value"}[role])
        elif re.fullmatch(FUSED, _leaf(site), re.I):
            if not is_conv1d(site.module) and not isinstance(site.module, nn.MultiheadAttention):
                raise ValueError(
                    f"pattern heads cannot know in which order {site.name} holds query, key and value. Leave this "
                    "attention out with exclude_modules, or choose another pattern."
                )
            members = {"qkv": site}
        else:
            continue
        yield members | {"o": _output(sites, members, parent)}


def _output(sites: Sequence[Site], members: dict[str, Site], parent: str) -> Site:
    """The matrix that follows the values: in the same module, or else in its parent."""
    values, taken = _outputs(members)[2], list(members.values())
    first = taken[0]
    found: list[Site] = []
    for around in (parent, parent.rpartition(".")[0]):
        # Another attention below the same parent (self, cross) is not its output.
        near = [s for s in sites if s not in taken and s.name.startswith(around + ".") and s.block == first.block]
        found = [s for s in near if re.fullmatch(OUTPUT, _leaf(s), re.I)]
        if found:
            break
    fitting = [site for site in found if outward(site)[1] >= values]
    return _only(fitting, first, "output")


def _only(found: Sequence[Site], site: Site, what: str) -> Site:
    if len(found) != 1:
        seen = ", ".join(other.name for other in found) or "none"
        raise ValueError(
            f"pattern heads needs the {what} matrix that goes with {site.name}, and finds {seen}. Prune them together "
            "or leave all of them out with exclude_modules, or choose another pattern."
        )
    return found[0]


def _outputs(members: dict[str, Site]) -> tuple[int, int, int]:
    """How many features query, key and value have."""
    if "qkv" in members:
        third = outward(members["qkv"])[0] // 3
        return third, third, third
    queries, keys, values = (outward(members[role])[0] for role in "qkv")
    return queries, keys, values


def _heads_of(site: Site, modules: dict[str, nn.Module]) -> int:
    """The number of heads, from the attention around a matrix or from its configuration."""
    path = _parent(site)
    while path:
        module: Any = modules.get(path)
        for holder in (module, getattr(module, "config", None)):
            for name in HEAD_COUNTS:
                if isinstance(count := getattr(holder, name, None), int) and count > 0:
                    return count
        if path == site.block:
            break
        path = path.rpartition(".")[0]
    raise ValueError(
        f"pattern heads cannot know how many heads {site.name} has: no module around it has {', '.join(HEAD_COUNTS)}. "
        "Choose another pattern."
    )


def _leaf(site: Site) -> str:
    return site.name.rpartition(".")[2]


def _parent(site: Site) -> str:
    return site.name.rpartition(".")[0]
