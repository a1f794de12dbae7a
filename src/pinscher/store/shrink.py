"""Removes dead features and heads from a model: a smaller dense model with the same outputs.

A feature of the feed-forward part is dead if nothing reads it (its column in the second matrix is zero) or if it is the
same for every input (its row in the first matrix is zero): then it is activation(bias), and its constant contribution
to the second matrix's output is added to the second bias. A head is dead if nothing reads it, or if its values are only
their bias: attention weights sum to one, so it always gives that bias, which is added to the output's bias likewise.

A plain config.json has one feed-forward width for all layers, and cannot change the number of heads without their size.
So a `plain` shrunk model has the width that its widest layer needs, and all heads. The small file records the sizes of
every layer (models/sizes.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pinscher.models.blocks import outputs_first
from pinscher.models.families import Family, shrinkable_family
from pinscher.models.sizes import Sizes, keep_features, keep_heads, sizes_in, sizes_of


@dataclass(frozen=True)
class Shrunk:
    """What was removed, and what is dead but had to stay."""

    plain: bool  # whether an ordinary config had to describe the result
    before: int  # parameters
    after: int
    layers: tuple[tuple[Sizes, Sizes], ...]  # of every layer, before and after
    heads_left: int  # dead heads that are still there
    features_left: int  # dead features that are still there
    lines_left: int  # dead rows and columns of other kinds

    def told(self) -> list[str]:
        """Lines of text for the user."""
        was, now = (sum(sizes[i].inner for sizes in self.layers) for i in (0, 1))
        had, has = (sum(sizes[i].heads for sizes in self.layers) for i in (0, 1))
        say = [
            f"  shrunk from {self.before:,} to {self.after:,} parameters: {was - now:,} of {was:,} feed-forward "
            f"features and {had - has:,} of {had:,} heads removed"
        ]
        if self.plain and self.features_left:
            say.append(
                f"  dead features that stay as zeros: {self.features_left:,}; a plain config has one width, that of "
                "the widest layer (--format pinscher removes them)"
            )
        if self.plain and self.heads_left:
            say.append(
                f"  dead heads that stay as zeros: {self.heads_left:,}; a plain config has one number of heads for "
                "all layers (--format pinscher removes them)"
            )
        if not self.plain and self.features_left + self.heads_left:
            say.append(
                f"  dead features that stay as zeros: {self.features_left:,}, dead heads: {self.heads_left:,}; a layer "
                "keeps at least one of each"
            )
        if self.lines_left:
            say.append(
                f"  dead rows and columns elsewhere: {self.lines_left:,}; they stay, because all layers share the "
                "width of the model, and all heads their size"
            )
        return say


@torch.no_grad()
def shrink_(model: Any, plain: bool) -> Shrunk:
    """Removes dead features and heads from a model, in place.

    Args:
        model: a transformers model of a known family.
        plain: whether an ordinary config has to describe the result.
    """
    from transformers.activations import ACT2FN

    family = shrinkable_family(model)
    before, act = model.num_parameters(), ACT2FN[getattr(model.config, family.activation)]
    layers = list(model.base_model.get_submodule(family.layers))
    was = sizes_of(model)
    features = [_needed_features(layer, family, act) for layer in layers]
    heads = [_needed_heads(layer, family, sizes.heads) for layer, sizes in zip(layers, was, strict=True)]
    width = max([1, *(int(needed.sum()) for needed in features)])
    now, dead_features, dead_lines = [], 0, 0
    for layer, needed, living in zip(layers, features, heads, strict=True):
        count = width if plain else max(1, int(needed.sum()))
        _clear_(layer, family, needed, living)
        keep_features(layer, family, needed, count)
        if not plain:
            keep_heads(layer, family, living)
        now.append(sizes_in(layer, family))
        dead_features += now[-1].inner - int(needed.sum())
        size = outputs_first(layer.get_submodule(family.out)).shape[1] // now[-1].heads
        dead_lines += 4 * size * (now[-1].heads - int(living.sum()))
    if plain and layers:
        setattr(model.config, family.inner, now[0].inner)
    return Shrunk(
        plain,
        before,
        model.num_parameters(),
        tuple(zip(was, now, strict=True)),
        sum(sizes.heads for sizes in now) - sum(int(living.sum()) for living in heads),
        dead_features,
        _dead_lines(model) - 2 * dead_features - dead_lines,
    )


# ------------------------------------------------------------ what is needed


def _needed_features(layer: nn.Module, family: Family, act: Any) -> Tensor:
    """Which features of the feed-forward part are needed; constant ones are added to the second bias."""
    up, down = layer.get_submodule(family.up), layer.get_submodule(family.down)
    rows, columns = outputs_first(up), outputs_first(down)
    read, alive = (columns != 0).any(0), (rows != 0).any(1)
    constant = act(_bias(up, len(rows)).float())
    _fold_(down, columns, torch.where(read & ~alive, constant, 0.0))
    return read & alive


def _needed_heads(layer: nn.Module, family: Family, heads: int) -> Tensor:
    """Which heads are needed; the values of constant ones are added to the output's bias."""
    out, values = layer.get_submodule(family.out), layer.get_submodule(family.qkv[-1])
    columns, rows = outputs_first(out), outputs_first(values)
    start = len(rows) - columns.shape[1]  # where one matrix holds all three, values are the last third
    read = (columns != 0).any(0).view(heads, -1).any(1)
    alive = (rows[start:] != 0).any(1).view(heads, -1).any(1)
    constant = (read & ~alive).repeat_interleave(columns.shape[1] // heads)
    _fold_(out, columns, torch.where(constant, _bias(values, len(rows))[start:], 0.0))
    return read & alive


def _fold_(module: nn.Module, columns: Tensor, constant: Tensor) -> None:
    """Adds a matrix's output for a constant input to its bias."""
    if bool((constant != 0).any()):
        assert isinstance(module.bias, nn.Parameter)  # every known family has it
        module.bias.data += (columns.double() @ constant.double()).to(module.bias.dtype)


def _clear_(layer: nn.Module, family: Family, needed: Tensor, living: Tensor) -> None:
    """Sets what is not needed to zero, because some of it may have to stay."""
    out = layer.get_submodule(family.out)
    places = living.repeat_interleave(outputs_first(out).shape[1] // len(living))
    outputs_first(out)[:, ~places] = 0.0
    for name in family.qkv:
        three = places.repeat(3 if len(family.qkv) == 1 else 1)
        outputs_first(layer.get_submodule(name))[~three] = 0.0
    outputs_first(layer.get_submodule(family.up))[~needed] = 0.0
    outputs_first(layer.get_submodule(family.down))[:, ~needed] = 0.0


def _dead_lines(model: Any) -> int:
    """Rows and columns of the layers' matrices that are all zero."""
    family, count = shrinkable_family(model), 0
    for layer in model.base_model.get_submodule(family.layers):
        for name in (*family.qkv, family.out, family.up, family.down):
            alive = outputs_first(layer.get_submodule(name)) != 0
            count += sum(int((~alive.any(dim)).sum()) for dim in (0, 1))
    return count


def _bias(module: Any, size: int) -> Tensor:
    bias: Tensor = module.weight.new_zeros(size) if module.bias is None else module.bias.detach()
    return bias
