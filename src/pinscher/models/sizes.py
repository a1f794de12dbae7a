"""The sizes of a model's layers, and how to make a layer smaller.

The sizes of a layer are its attention heads and the features of its feed-forward part; a model whose layers have other
sizes than its config says carries them in the small file (`uneven`, `resize_`). Where a layer keeps its parts is
stated in its family's row (families.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pinscher.errors import InputError
from pinscher.models.blocks import is_conv1d, outputs_first
from pinscher.models.families import Family, family_of, shrinkable_family
from pinscher.models.names import HEAD_COUNTS


@dataclass(frozen=True)
class Sizes:
    """The sizes of one layer: attention heads, and features of the feed-forward part."""

    heads: int
    inner: int


def sizes_of(model: Any) -> list[Sizes]:
    """The sizes of a model's layers."""
    family = shrinkable_family(model)
    return [sizes_in(layer, family) for layer in model.base_model.get_submodule(family.layers)]


def uneven(model: Any) -> list[list[int]] | None:
    """The sizes [heads, inner] of the layers where the config does not describe them; else None."""
    family = family_of(model)
    if family is None or not family.can_shrink:
        return None
    wanted, found = _configured(model), sizes_of(model)
    return None if all(sizes == wanted for sizes in found) else [[sizes.heads, sizes.inner] for sizes in found]


def has_all_heads(model: Any) -> bool:
    """Whether the layers have as many heads as the config says; True for a model of an unknown family."""
    sizes = uneven(model) or []
    return all(heads == _configured(model).heads for heads, _ in sizes)


def resize_(model: Any, sizes: Any) -> None:
    """Gives an empty model the sizes that a file names, so that its weights fit.

    Raises:
        InputError: if these sizes do not fit the model.
    """
    family, most = shrinkable_family(model), _configured(model)
    layers = list(model.base_model.get_submodule(family.layers))
    good = isinstance(sizes, list) and len(sizes) == len(layers)
    for pair in sizes if good else ():
        good = good and isinstance(pair, list) and len(pair) == 2 and all(type(n) is int for n in pair)
        good = good and 1 <= pair[0] <= most.heads and 1 <= pair[1] <= most.inner
    if not good:
        raise InputError("the sizes of the layers in config.json do not fit the model: the file is damaged.")
    with torch.device("cpu"):  # from_pretrained makes models without memory, and indices need some
        for layer, (heads, inner) in zip(layers, sizes, strict=True):
            keep_features(layer, family, torch.arange(most.inner) < inner, inner)
            keep_heads(layer, family, torch.arange(most.heads) < heads)


def sizes_in(layer: nn.Module, family: Family) -> Sizes:
    attention: Any = layer.get_submodule(family.attention)
    size = getattr(attention, "attention_head_size", None) or attention.head_dim
    up, out = layer.get_submodule(family.up), layer.get_submodule(family.out)
    return Sizes(outputs_first(out).shape[1] // size, outputs_first(up).shape[0])


def _configured(model: Any) -> Sizes:
    family, config = shrinkable_family(model), model.config
    return Sizes(getattr(config, family.heads), getattr(config, family.inner) or 4 * config.hidden_size)


# ------------------------------------------------------------ cutting


def keep_features(layer: nn.Module, family: Family, needed: Tensor, count: int) -> None:
    """Keeps the needed features, filled up to `count` with dead ones."""
    up, down = layer.get_submodule(family.up), layer.get_submodule(family.down)
    places = torch.cat([needed.nonzero().view(-1), (~needed).nonzero().view(-1)])[:count].sort().values
    _cut_(up, 0, places)
    _cut_(down, 1, places)


def keep_heads(layer: nn.Module, family: Family, living: Tensor) -> None:
    """Keeps the living heads, at least one."""
    if not bool(living.any()):
        living = torch.arange(len(living)) == 0
    out = layer.get_submodule(family.out)
    size = outputs_first(out).shape[1] // len(living)
    places = living.repeat_interleave(size).nonzero().view(-1)
    thirds = 3 if len(family.qkv) == 1 else 1
    width = len(living) * size
    for name in family.qkv:
        _cut_(layer.get_submodule(name), 0, torch.cat([places + i * width for i in range(thirds)]))
    _cut_(out, 1, places)
    attention: Any = layer.get_submodule(family.attention)
    for name, number in (("all_head_size", len(places)), ("split_size", len(places))):
        if hasattr(attention, name):
            setattr(attention, name, number)
    for name in HEAD_COUNTS:
        if hasattr(attention, name):
            setattr(attention, name, int(living.sum()))


def _cut_(module: Any, dim: int, places: Tensor) -> None:
    """Keeps some outputs (dim 0) or inputs (dim 1) of a matrix, and the biases of the outputs."""
    flipped = is_conv1d(module)
    stored = (1 - dim) if flipped else dim
    places = places.to(module.weight.device)
    kept = module.weight.detach().index_select(stored, places).contiguous()
    module.weight = nn.Parameter(kept, requires_grad=module.weight.requires_grad)
    if dim == 0 and module.bias is not None:
        kept = module.bias.detach().index_select(0, places)
        module.bias = nn.Parameter(kept, requires_grad=module.bias.requires_grad)
    setattr(module, (("nf", "nx") if flipped else ("out_features", "in_features"))[dim], len(places))
