"""Everything specific to a model family, in one row each: to add a family, add a row.

A family is what transformers calls `model_type`. Its row names the modules of a layer and states what the modules alone
do not show. Pruning and the small file need no row (blocks.py); whole native layers, `--shrink`, ONNX and
the number of positions do. No other module knows a family by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pinscher.errors import InputError
from pinscher.registry import Registry

# transformers' names of activations, and the kernels' names.
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
LEAST_KNOWN = 0.5  # of the embedding's rows, by a tokenizer: padding to a round number takes a small part of them
NO_LIMIT = 1 << 20  # positions of a model without a limit


@dataclass(frozen=True, kw_only=True)
class Family:
    """One row. Paths of modules are below the layer, or below the base model where that is said."""

    # The modules of a layer.
    layers: str  # the list of layers, below the base model
    attention: str  # the module that splits features into heads; its head_dim (attention_head_size) is a head's size
    qkv: tuple[str, ...]  # three matrices, or one that holds all three one after another
    out: str
    up: str
    down: str
    gate: str = ""  # the second matrix beside `up` in a gated feed-forward part
    attention_norm: str
    mlp_norm: str
    norms: str = "post"  # "post": a norm follows the residual sum of its part; "pre": it stands before its part

    # What the config calls these.
    width: str = "hidden_size"
    count: str = "num_hidden_layers"
    embedding_width: str = ""  # where embeddings have a width of their own
    epsilon: str | float = "layer_norm_eps"  # of the norms; or the number itself, if it is in no config
    inner: str = "intermediate_size"
    heads: str = "num_attention_heads"
    activation: str = "hidden_act"

    # Before the layers, below the base model.
    embeddings: tuple[str, ...]  # the tables of words, positions and token types, those that there are, in one module
    embeddings_norm: str = ""
    projection: str = ""  # projects embeddings of another width to that of the layers; a model may lack it
    relative_bias: str = ""  # the table of biases that are added to attention scores, by the distance of two tokens
    counts_from_padding: bool = False  # positions start at the padding token's id + 1, not at 0
    padding: int | None = None  # that id, if it is not the config's pad_token_id
    tokenizer_gives_types: bool = False  # its tokenizers return token types, and the model reads them

    # After the layers.
    causal: bool = False  # a token sees none behind it: a decoder
    pooling: str = "head"  # what picks a classifier's token: "pooler", "head", or the model: "first", "last"
    result: str  # the class of the base model's outputs
    pooler: str = ""  # the dense layer of the base model's pooler, if it has one
    # The dense layers of a classifier of whole rows, below the model, each with the activation behind it.
    classifier: tuple[tuple[str, str], ...] = (("classifier", "none"),)

    # For readers without transformers.
    prefix: str = ""  # the base model's name in a model with a head; "" where these readers do not know the family
    defaults: Mapping[str, Any] = field(default_factory=dict)  # settings that a config.json may leave out

    onnx_fusion: str = ""  # the name under which ONNX Runtime's optimiser knows the graph, if it does

    @property
    def products(self) -> tuple[tuple[str, ...], ...]:
        """The modules of a layer that multiply, those with the same input together."""
        return self.qkv, (self.out,), (self.gate, self.up) if self.gate else (self.up,), (self.down,)

    @property
    def has_token_types(self) -> bool:
        """Whether the model has an embedding of token types, even if there is only one type."""
        return len(self.embeddings) == 3

    @property
    def is_native(self) -> bool:
        """Whether native code computes its layers: bidirectional attention, sum, norm, MLP, sum, norm."""
        return self.norms == "post" and not self.causal and not self.gate

    @property
    def can_shrink(self) -> bool:
        """Whether heads and features can be taken out of its layers one by one."""
        return not self.gate and not self.relative_bias  # the table has a row for each head


BERT = Family(
    layers="encoder.layer",
    attention="attention.self",
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    out="attention.output.dense",
    up="intermediate.dense",
    down="output.dense",
    attention_norm="attention.output.LayerNorm",
    mlp_norm="output.LayerNorm",
    embeddings=("embeddings.word_embeddings", "embeddings.position_embeddings", "embeddings.token_type_embeddings"),
    embeddings_norm="embeddings.LayerNorm",
    tokenizer_gives_types=True,
    pooling="pooler",
    result="BaseModelOutputWithPoolingAndCrossAttentions",
    pooler="pooler.dense",
    prefix="bert",
    defaults={
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "type_vocab_size": 2,
    },
    onnx_fusion="bert",
)
HEAD = (("classifier.dense", "tanh"), ("classifier.out_proj", "none"))
ROBERTA = replace(
    BERT,
    counts_from_padding=True,
    tokenizer_gives_types=False,
    pooling="head",
    classifier=HEAD,
    prefix="roberta",
    defaults={**BERT.defaults, "pad_token_id": 1},
)
FAMILIES: Registry[Family] = Registry("model family")
FAMILIES["bert"] = BERT
FAMILIES["camembert"] = ROBERTA
FAMILIES["distilbert"] = Family(
    layers="transformer.layer",
    attention="attention",
    qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    out="attention.out_lin",
    up="ffn.lin1",
    down="ffn.lin2",
    attention_norm="sa_layer_norm",
    mlp_norm="output_layer_norm",
    width="dim",
    count="n_layers",
    epsilon=1e-12,
    inner="hidden_dim",
    heads="n_heads",
    activation="activation",
    embeddings=BERT.embeddings[:2],
    embeddings_norm="embeddings.LayerNorm",
    pooling="first",
    result="BaseModelOutput",
    classifier=(("pre_classifier", "relu"), ("classifier", "none")),
    prefix="distilbert",
    defaults={"activation": "gelu", "max_position_embeddings": 512, "pad_token_id": 0},
)
FAMILIES["electra"] = replace(
    BERT,
    projection="embeddings_project",
    embedding_width="embedding_size",
    pooling="head",
    result="BaseModelOutputWithPastAndCrossAttentions",
    pooler="",
    classifier=(("classifier.dense", "gelu"), ("classifier.out_proj", "none")),
    prefix="electra",
)
FAMILIES["gpt2"] = Family(
    layers="h",
    attention="attn",
    qkv=("attn.c_attn",),
    out="attn.c_proj",
    up="mlp.c_fc",
    down="mlp.c_proj",
    attention_norm="ln_1",
    mlp_norm="ln_2",
    norms="pre",
    inner="n_inner",
    heads="n_head",
    activation="activation_function",
    embeddings=("wte", "wpe"),
    causal=True,
    pooling="last",
    result="BaseModelOutputWithPastAndCrossAttentions",
)
FAMILIES["llama"] = Family(
    layers="layers",
    attention="self_attn",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.o_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
    gate="mlp.gate_proj",
    attention_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
    norms="pre",
    embeddings=("embed_tokens",),
    causal=True,
    pooling="last",
    result="BaseModelOutputWithPast",
)
FAMILIES["mpnet"] = replace(
    BERT,
    attention="attention.attn",
    qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
    out="attention.attn.o",
    attention_norm="attention.LayerNorm",
    embeddings=BERT.embeddings[:2],
    relative_bias="encoder.relative_attention_bias",
    counts_from_padding=True,
    padding=1,
    tokenizer_gives_types=False,
    pooling="head",
    result="BaseModelOutputWithPooling",
    classifier=HEAD,
    prefix="mpnet",
    defaults={
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 512,
        "pad_token_id": 1,
        "relative_attention_num_buckets": 32,
    },
    onnx_fusion="",
)
FAMILIES["roberta"] = ROBERTA
FAMILIES["xlm-roberta"] = ROBERTA


def type_of(config: Any) -> str:
    """The `model_type` of a config, or of the contents of config.json; "" if there is none."""
    told = config.get("model_type") if isinstance(config, Mapping) else getattr(config, "model_type", None)
    return told if isinstance(told, str) else ""


def family_of(model: Any) -> Family | None:
    """The row of a transformers model, or of its config; None for a family without one."""
    return FAMILIES.get(type_of(getattr(model, "config", model)))


def native_family(model: Any) -> Family | None:
    """The row of a model, or of its config, whose whole layers the native encoder computes; None for any other.

    The sizes of its layers are another matter (sizes.py).
    """
    config, family = getattr(model, "config", model), family_of(model)
    if family is None or not family.is_native:
        return None
    if getattr(config, "is_decoder", False) or getattr(config, "add_cross_attention", False):
        return None
    if getattr(config, "position_embedding_type", "absolute") != "absolute":
        return None
    return family if getattr(config, family.activation) in ACTIVATIONS else None


def shrinkable_family(model: Any) -> Family:
    """The row of a model whose heads and features can be taken out.

    Raises:
        InputError: if they cannot, or the family is not known.
    """
    family, kind = family_of(model), type_of(getattr(model, "config", None)) or "this model"
    known = ", ".join(name for name, row in FAMILIES.items() if row.can_shrink)
    if family is None:
        raise InputError(f"--shrink does not know where {kind} keeps its layers: it knows {known}.")
    if not family.can_shrink:
        raise InputError(f"--shrink cannot take heads and features out of {kind}: it can for {known}.")
    return family


def encoders() -> list[str]:
    return [name for name, family in FAMILIES.items() if not family.causal]


def decoders() -> list[str]:
    return [name for name, family in FAMILIES.items() if family.causal]


def max_positions(config: Any) -> int:
    """How many tokens a model has positions for; NO_LIMIT where its config does not say."""
    return int(getattr(config, "max_position_embeddings", None) or NO_LIMIT) - first_position(config)


def check_padding(config: Any, place: Any) -> None:
    """Refuses a padding token that leaves no position for any token.

    Raises:
        InputError: naming the place of the config.
    """
    family, told = family_of(config), getattr(config, "pad_token_id", None)
    if family is None or not family.counts_from_padding or family.padding is not None or told is None:
        return
    if type(told) is not int or not 0 <= told < config.vocab_size or max_positions(config) < 1:
        raise InputError(
            f"{place} has pad_token_id = {str(told)[:40]}: it must be a token of the vocabulary, and leave positions "
            "for tokens, which are counted from it."
        )


def first_position(config: Any) -> int:
    """The number of the first token's position."""
    family = family_of(config)
    if family is None or not family.counts_from_padding:
        return 0
    padding = getattr(config, "pad_token_id", None) if family.padding is None else family.padding
    return (padding or 0) + 1
