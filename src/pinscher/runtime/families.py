"""Where the parts of an encoder layer are, family by family; adding a family is one row.

Every family here computes the same layer: attention, residual, norm, MLP, residual, norm.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from pinscher.store import anatomy
from pinscher.store.anatomy import Anatomy, has_all_heads

# What transformers calls an activation, and what the kernels call it.
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


@dataclass(frozen=True, kw_only=True)
class Family(Anatomy):
    """The names of a layer's modules, below the layer, and of what comes out of the model."""

    after_attention: str
    after_mlp: str
    result: str  # the class of the base model's outputs

    @property
    def products(self) -> tuple[tuple[str, ...], ...]:
        """The modules of a layer that multiply, those with the same input together."""
        return self.qkv, (self.out,), (self.up,), (self.down,)

    @property
    def norms(self) -> tuple[str, str]:
        return self.after_attention, self.after_mlp


def _family(known: Anatomy, **more: Any) -> Family:
    return Family(**{part.name: getattr(known, part.name) for part in fields(known)}, **more)


BERT = _family(
    anatomy.BERT,
    after_attention="attention.output.LayerNorm",
    after_mlp="output.LayerNorm",
    result="BaseModelOutputWithPoolingAndCrossAttentions",
)
ELECTRA = replace(BERT, result="BaseModelOutputWithPastAndCrossAttentions")
DISTILBERT = _family(
    anatomy.DISTILBERT,
    after_attention="sa_layer_norm",
    after_mlp="output_layer_norm",
    result="BaseModelOutput",
)
MPNET = replace(
    BERT,
    attention="attention.attn",
    qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
    out="attention.attn.o",
    after_attention="attention.LayerNorm",
    result="BaseModelOutputWithPooling",
)
FAMILIES = {
    "bert": BERT,
    "camembert": BERT,
    "distilbert": DISTILBERT,
    "electra": ELECTRA,
    "mpnet": MPNET,
    "roberta": BERT,
    "xlm-roberta": BERT,
}


def family_of(model: Any) -> Family | None:
    """The family of a transformers model whose layers the native encoder computes; None for any other."""
    config = getattr(model, "config", None)
    family = FAMILIES.get(getattr(config, "model_type", ""))
    if family is None or getattr(config, "is_decoder", False) or getattr(config, "add_cross_attention", False):
        return None
    if getattr(config, "position_embedding_type", "absolute") != "absolute":
        return None
    if not has_all_heads(model):
        return None
    return family if getattr(config, family.activation) in ACTIVATIONS else None


def relative_table(base: Any) -> Tensor | None:
    """MPNet adds a number to each score, by how far apart the two tokens are: [heads, 2 · longest - 1]."""
    bias = getattr(getattr(base, "encoder", None), "relative_attention_bias", None)
    if bias is None:
        return None
    reach = base.config.max_position_embeddings
    buckets = base.encoder.relative_position_bucket(
        -torch.arange(1 - reach, reach), num_buckets=base.config.relative_attention_num_buckets
    )
    table: Tensor = bias.weight.detach().float()[buckets].T.contiguous()
    return table
