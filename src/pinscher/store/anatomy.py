"""Where the layers of a model keep their parts, family by family, and how such a layer is made smaller.

Adding a family is one row. The sizes of a layer are its attention heads and the features of its feed-forward part; a
model whose layers have other sizes than its config says carries them in the small file (`uneven`, `resize_`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from pinscher.errors import InputError


@dataclass(frozen=True)
class Anatomy:
    """The names of a layer's parts, below the layer, and of what the config says about them."""

    layers: str  # the list of layers, below the base model
    attention: str  # the module that splits features into heads
    qkv: tuple[str, ...]  # three matrices, or one that holds all three one after another
    out: str
    up: str
    down: str
    inner: str = "intermediate_size"
    heads: str = "num_attention_heads"
    activation: str = "hidden_act"


BERT = Anatomy(
    layers="encoder.layer",
    attention="attention.self",
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    out="attention.output.dense",
    up="intermediate.dense",
    down="output.dense",
)
DISTILBERT = Anatomy(
    layers="transformer.layer",
    attention="attention",
    qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    out="attention.out_lin",
    up="ffn.lin1",
    down="ffn.lin2",
    inner="hidden_dim",
    heads="n_heads",
    activation="activation",
)
GPT2 = replace(
    DISTILBERT,
    layers="h",
    attention="attn",
    qkv=("attn.c_attn",),
    out="attn.c_proj",
    up="mlp.c_fc",
    down="mlp.c_proj",
    inner="n_inner",
    heads="n_head",
    activation="activation_function",
)
FAMILIES = {
    "bert": BERT,
    "camembert": BERT,
    "distilbert": DISTILBERT,
    "electra": BERT,
    "gpt2": GPT2,
    "roberta": BERT,
    "xlm-roberta": BERT,
}


@dataclass(frozen=True)
class Sizes:
    """What one layer has: attention heads, and features of the feed-forward part."""

    heads: int
    inner: int


def anatomy_of(model: Any) -> Anatomy:
    """The anatomy of a transformers model.

    Raises:
        InputError: if it is of a family that is not known here.
    """
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in FAMILIES:
        raise InputError(
            f"--shrink does not know where {kind or 'this model'} keeps its layers: it knows {', '.join(FAMILIES)}."
        )
    return FAMILIES[kind]


def sizes_of(model: Any) -> list[Sizes]:
    """The sizes of a model's layers."""
    anatomy = anatomy_of(model)
    return [sizes_in(layer, anatomy) for layer in model.base_model.get_submodule(anatomy.layers)]


def uneven(model: Any) -> list[list[int]] | None:
    """The sizes [heads, inner] of the layers where the config does not describe them; else None."""
    if getattr(getattr(model, "config", None), "model_type", None) not in FAMILIES:
        return None
    wanted, found = _configured(model), sizes_of(model)
    return None if all(sizes == wanted for sizes in found) else [[sizes.heads, sizes.inner] for sizes in found]


def has_all_heads(model: Any) -> bool:
    """Whether the layers have as many heads as the config says; a model of an unknown family has."""
    sizes = uneven(model) or []
    return all(heads == _configured(model).heads for heads, _ in sizes)


def resize_(model: Any, sizes: Any) -> None:
    """Gives an empty model the sizes that a file names, so that its weights fit.

    Raises:
        InputError: if these are no sizes for this model.
    """
    anatomy, most = anatomy_of(model), _configured(model)
    layers = list(model.base_model.get_submodule(anatomy.layers))
    good = isinstance(sizes, list) and len(sizes) == len(layers)
    for pair in sizes if good else ():
        good = good and isinstance(pair, list) and len(pair) == 2 and all(type(n) is int for n in pair)
        good = good and 1 <= pair[0] <= most.heads and 1 <= pair[1] <= most.inner
    if not good:
        raise InputError("the sizes of the layers in config.json do not fit the model: the file is damaged.")
    with torch.device("cpu"):  # from_pretrained makes models without memory, and indices need some
        for layer, (heads, inner) in zip(layers, sizes, strict=True):
            keep_features(layer, anatomy, torch.arange(most.inner) < inner, inner)
            keep_heads(layer, anatomy, torch.arange(most.heads) < heads)


def sizes_in(layer: nn.Module, anatomy: Anatomy) -> Sizes:
    attention: Any = layer.get_submodule(anatomy.attention)
    size = getattr(attention, "attention_head_size", None) or attention.head_dim
    up, out = layer.get_submodule(anatomy.up), layer.get_submodule(anatomy.out)
    return Sizes(matrix_of(out).shape[1] // size, matrix_of(up).shape[0])


def _configured(model: Any) -> Sizes:
    anatomy, config = anatomy_of(model), model.config
    return Sizes(getattr(config, anatomy.heads), getattr(config, anatomy.inner) or 4 * config.hidden_size)


# ------------------------------------------------------------ cutting


def keep_features(layer: nn.Module, anatomy: Anatomy, needed: Tensor, count: int) -> None:
    """Keeps the needed features and as many zeros as make `count` of them."""
    up, down = layer.get_submodule(anatomy.up), layer.get_submodule(anatomy.down)
    places = torch.cat([needed.nonzero().view(-1), (~needed).nonzero().view(-1)])[:count].sort().values
    _cut_(up, 0, places)
    _cut_(down, 1, places)


def keep_heads(layer: nn.Module, anatomy: Anatomy, living: Tensor) -> None:
    """Keeps the living heads, at least one."""
    if not bool(living.any()):
        living = torch.arange(len(living)) == 0
    out = layer.get_submodule(anatomy.out)
    size = matrix_of(out).shape[1] // len(living)
    places = living.repeat_interleave(size).nonzero().view(-1)
    thirds = 3 if len(anatomy.qkv) == 1 else 1
    width = len(living) * size
    for name in anatomy.qkv:
        _cut_(layer.get_submodule(name), 0, torch.cat([places + i * width for i in range(thirds)]))
    _cut_(out, 1, places)
    attention: Any = layer.get_submodule(anatomy.attention)
    for name, number in (("all_head_size", len(places)), ("split_size", len(places))):
        if hasattr(attention, name):
            setattr(attention, name, number)
    for name in ("num_attention_heads", "num_heads", "n_heads"):
        if hasattr(attention, name):
            setattr(attention, name, int(living.sum()))


def _cut_(module: Any, dim: int, places: Tensor) -> None:
    """Keeps some outputs (dim 0) or inputs (dim 1) of a matrix, and the biases of the outputs."""
    flipped = is_flipped(module)
    stored = (1 - dim) if flipped else dim
    places = places.to(module.weight.device)
    kept = module.weight.detach().index_select(stored, places).contiguous()
    module.weight = nn.Parameter(kept, requires_grad=module.weight.requires_grad)
    if dim == 0 and module.bias is not None:
        kept = module.bias.detach().index_select(0, places)
        module.bias = nn.Parameter(kept, requires_grad=module.bias.requires_grad)
    setattr(module, (("nf", "nx") if flipped else ("out_features", "in_features"))[dim], len(places))


def is_flipped(module: nn.Module) -> bool:
    """Whether a module keeps its matrix with inputs first, as GPT-2's do."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def matrix_of(module: Any) -> Tensor:
    """The weight as [outputs, inputs], without autograd; writing to it changes the module."""
    weight: Tensor = module.weight.detach()
    return weight.T if is_flipped(module) else weight
