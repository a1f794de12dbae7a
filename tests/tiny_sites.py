"""Models, and the prunable matrices that they must have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import transformers
from torch import nn

from pinscher.prune.sites import find_sites

# All sizes differ, so that a matrix of the wrong shape cannot pass for the right one.
LAYERS, WIDTH, INNER, VOCAB, EMBEDDED = 3, 8, 20, 40, 7
HEADS, KV_HEADS, HEAD = 4, 2, 6  # grouped heads that are not WIDTH // HEADS wide
Shapes = dict[str, tuple[int, int]]


@dataclass(frozen=True)
class Case:
    """A model, the sites of each of its blocks by kind, and the other parameters that are not vectors."""

    model: str  # a class of transformers with from_config
    config: str
    settings: dict[str, Any]
    blocks: dict[str, Shapes]
    weights: int
    others: tuple[str, ...]
    transposed: bool = False

    def build(self) -> nn.Module:
        config = getattr(transformers, self.config)(**self.settings)
        return getattr(transformers, self.model).from_config(config)


def blocks(path: str, shapes: Shapes) -> dict[str, Shapes]:
    return {f"{path}.{i}": shapes for i in range(LAYERS)}


ENCODER = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "intermediate_size": INNER,
    "vocab_size": VOCAB,
    "pad_token_id": 0,
}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2}
DECODER = ENCODER | TOKENS | {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD}
ENCODER_WEIGHTS = LAYERS * (4 * WIDTH * WIDTH + 2 * WIDTH * INNER)
DECODER_WEIGHTS = LAYERS * (2 * WIDTH * HEADS * HEAD + 2 * WIDTH * KV_HEADS * HEAD + 3 * WIDTH * INNER)
T5 = {"d_model": WIDTH, "d_kv": HEAD, "d_ff": INNER, "num_layers": LAYERS, "num_heads": HEADS, "vocab_size": VOCAB}
GPT2 = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": 2, "n_inner": INNER, "vocab_size": VOCAB} | TOKENS
SQUARE, UP, DOWN = (WIDTH, WIDTH), (INNER, WIDTH), (WIDTH, INNER)
BERT: Shapes = {
    "attention.self.query": SQUARE,
    "attention.self.key": SQUARE,
    "attention.self.value": SQUARE,
    "attention.output.dense": SQUARE,
    "intermediate.dense": UP,
    "output.dense": DOWN,
}
DEBERTA_SHARED: Shapes = {
    "attention.self.query_proj": SQUARE,
    "attention.self.key_proj": SQUARE,
    "attention.self.value_proj": SQUARE,
    "attention.output.dense": SQUARE,
    "intermediate.dense": UP,
    "output.dense": DOWN,
}
DEBERTA: Shapes = {
    "attention.self.query_proj": SQUARE,
    "attention.self.key_proj": SQUARE,
    "attention.self.value_proj": SQUARE,
    "attention.self.pos_key_proj": SQUARE,
    "attention.self.pos_query_proj": SQUARE,
    "attention.output.dense": SQUARE,
    "intermediate.dense": UP,
    "output.dense": DOWN,
}
LLAMA: Shapes = {
    "self_attn.q_proj": (HEADS * HEAD, WIDTH),
    "self_attn.k_proj": (KV_HEADS * HEAD, WIDTH),
    "self_attn.v_proj": (KV_HEADS * HEAD, WIDTH),
    "self_attn.o_proj": (WIDTH, HEADS * HEAD),
    "mlp.gate_proj": UP,
    "mlp.up_proj": UP,
    "mlp.down_proj": DOWN,
}
GPT: Shapes = {  # stored [in, out]
    "attn.c_attn": (WIDTH, 3 * WIDTH),
    "attn.c_proj": SQUARE,
    "mlp.c_fc": (WIDTH, INNER),
    "mlp.c_proj": (INNER, WIDTH),
}


def t5_attention(path: str) -> Shapes:
    into, out = (HEADS * HEAD, WIDTH), (WIDTH, HEADS * HEAD)
    return {f"{path}.q": into, f"{path}.k": into, f"{path}.v": into, f"{path}.o": out}


def t5_blocks(ups: tuple[str, ...]) -> dict[str, Shapes]:
    def dense(path: str) -> Shapes:
        return {**{f"{path}.{up}": UP for up in ups}, f"{path}.wo": DOWN}

    encoder = t5_attention("layer.0.SelfAttention") | dense("layer.1.DenseReluDense")
    cross = t5_attention("layer.1.EncDecAttention")
    decoder = t5_attention("layer.0.SelfAttention") | cross | dense("layer.2.DenseReluDense")
    return blocks("encoder.block", encoder) | blocks("decoder.block", decoder)


def bert_embeddings(path: str) -> tuple[str, ...]:
    return tuple(f"{path}.{kind}_embeddings" for kind in ("word", "position", "token_type"))


CLASSIFIER = "AutoModelForSequenceClassification"
CAUSAL = "AutoModelForCausalLM"
SEQ2SEQ = "AutoModelForSeq2SeqLM"
T5_OTHERS = (
    "shared",
    "encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
    "decoder.block.0.layer.0.SelfAttention.relative_attention_bias",
)
CASES = {
    "bert": Case(
        CLASSIFIER,
        "BertConfig",
        ENCODER,
        blocks("bert.encoder.layer", BERT),
        ENCODER_WEIGHTS,
        (*bert_embeddings("bert.embeddings"), "bert.pooler.dense", "classifier"),
    ),
    "bert-masked-lm": Case(
        "AutoModelForMaskedLM",
        "BertConfig",
        ENCODER,
        blocks("bert.encoder.layer", BERT),
        ENCODER_WEIGHTS,
        (*bert_embeddings("bert.embeddings"), "cls.predictions.transform.dense"),
    ),
    "bert-tokens": Case(
        "AutoModelForTokenClassification",
        "BertConfig",
        ENCODER,
        blocks("bert.encoder.layer", BERT),
        ENCODER_WEIGHTS,
        (*bert_embeddings("bert.embeddings"), "classifier"),
    ),
    "bert-questions": Case(
        "AutoModelForQuestionAnswering",
        "BertConfig",
        ENCODER,
        blocks("bert.encoder.layer", BERT),
        ENCODER_WEIGHTS,
        (*bert_embeddings("bert.embeddings"), "qa_outputs"),
    ),
    "electra": Case(
        CLASSIFIER,
        "ElectraConfig",
        ENCODER | {"embedding_size": EMBEDDED},
        blocks("electra.encoder.layer", BERT),
        ENCODER_WEIGHTS,
        (
            *bert_embeddings("electra.embeddings"),
            "electra.embeddings_project",
            "classifier.dense",
            "classifier.out_proj",
        ),
    ),
    "roberta": Case(
        CLASSIFIER,
        "RobertaConfig",
        ENCODER | TOKENS,
        blocks("roberta.encoder.layer", BERT),
        ENCODER_WEIGHTS,
        (*bert_embeddings("roberta.embeddings"), "classifier.dense", "classifier.out_proj"),
    ),
    "distilbert": Case(
        CLASSIFIER,
        "DistilBertConfig",
        {"dim": WIDTH, "n_layers": LAYERS, "n_heads": 2, "hidden_dim": INNER, "vocab_size": VOCAB},
        blocks(
            "distilbert.transformer.layer",
            {
                "attention.q_lin": SQUARE,
                "attention.k_lin": SQUARE,
                "attention.v_lin": SQUARE,
                "attention.out_lin": SQUARE,
                "ffn.lin1": UP,
                "ffn.lin2": DOWN,
            },
        ),
        ENCODER_WEIGHTS,
        (
            "distilbert.embeddings.word_embeddings",
            "distilbert.embeddings.position_embeddings",
            "pre_classifier",
            "classifier",
        ),
    ),
    "deberta-v2": Case(
        CLASSIFIER,
        "DebertaV2Config",
        ENCODER | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "conv_kernel_size": 3},
        blocks("deberta.encoder.layer", DEBERTA),
        ENCODER_WEIGHTS + LAYERS * 2 * WIDTH * WIDTH,
        (
            "deberta.embeddings.word_embeddings",
            "deberta.embeddings.position_embeddings",
            "deberta.encoder.rel_embeddings",
            "deberta.encoder.conv.conv",
            "pooler.dense",
            "classifier",
        ),
    ),
    "deberta-v3": Case(  # the second version with shared keys
        CLASSIFIER,
        "DebertaV2Config",
        ENCODER | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "share_att_key": True},
        blocks("deberta.encoder.layer", DEBERTA_SHARED),
        ENCODER_WEIGHTS,
        (
            "deberta.embeddings.word_embeddings",
            "deberta.embeddings.position_embeddings",
            "deberta.encoder.rel_embeddings",
            "pooler.dense",
            "classifier",
        ),
    ),
    "mpnet": Case(
        CLASSIFIER,
        "MPNetConfig",
        ENCODER | TOKENS,
        blocks(
            "mpnet.encoder.layer",
            {
                "attention.attn.q": SQUARE,
                "attention.attn.k": SQUARE,
                "attention.attn.v": SQUARE,
                "attention.attn.o": SQUARE,
                "intermediate.dense": UP,
                "output.dense": DOWN,
            },
        ),
        ENCODER_WEIGHTS,
        (
            "mpnet.embeddings.word_embeddings",
            "mpnet.embeddings.position_embeddings",
            "mpnet.encoder.relative_attention_bias",
            "classifier.dense",
            "classifier.out_proj",
        ),
    ),
    "modernbert": Case(
        CLASSIFIER,
        "ModernBertConfig",
        ENCODER | TOKENS | {"cls_token_id": 3, "sep_token_id": 4},
        blocks(
            "model.layers",
            {"attn.Wqkv": (3 * WIDTH, WIDTH), "attn.Wo": SQUARE, "mlp.Wi": (2 * INNER, WIDTH), "mlp.Wo": DOWN},
        ),
        LAYERS * (4 * WIDTH * WIDTH + 3 * WIDTH * INNER),
        ("model.embeddings.tok_embeddings", "head.dense", "classifier"),
    ),
    "gpt2": Case(
        CAUSAL,
        "GPT2Config",
        GPT2,
        blocks("transformer.h", GPT),
        ENCODER_WEIGHTS,
        ("transformer.wte", "transformer.wpe"),
        transposed=True,
    ),
    "gpt2-classifier": Case(
        CLASSIFIER,
        "GPT2Config",
        GPT2,
        blocks("transformer.h", GPT),
        ENCODER_WEIGHTS,
        ("transformer.wte", "transformer.wpe", "score"),
        transposed=True,
    ),
    "gpt2-untied": Case(
        CAUSAL,
        "GPT2Config",
        GPT2 | {"tie_word_embeddings": False},
        blocks("transformer.h", GPT),
        ENCODER_WEIGHTS,
        ("transformer.wte", "transformer.wpe", "lm_head"),
        transposed=True,
    ),
    "opt": Case(
        CAUSAL,
        "OPTConfig",
        ENCODER | TOKENS | {"ffn_dim": INNER, "word_embed_proj_dim": EMBEDDED},
        blocks(
            "model.decoder.layers",
            {
                "self_attn.k_proj": SQUARE,
                "self_attn.v_proj": SQUARE,
                "self_attn.q_proj": SQUARE,
                "self_attn.out_proj": SQUARE,
                "fc1": UP,
                "fc2": DOWN,
            },
        ),
        ENCODER_WEIGHTS,
        tuple(f"model.decoder.{name}" for name in ("embed_tokens", "embed_positions", "project_in", "project_out")),
    ),
    "llama": Case(
        CAUSAL,
        "LlamaConfig",
        DECODER,
        blocks("model.layers", LLAMA),
        DECODER_WEIGHTS,
        ("model.embed_tokens", "lm_head"),
    ),
    "llama-classifier": Case(
        CLASSIFIER,
        "LlamaConfig",
        DECODER,
        blocks("model.layers", LLAMA),
        DECODER_WEIGHTS,
        ("model.embed_tokens", "score"),
    ),
    "qwen2": Case(
        CAUSAL,
        "Qwen2Config",
        DECODER | {"tie_word_embeddings": True},
        blocks("model.layers", LLAMA),
        DECODER_WEIGHTS,
        ("model.embed_tokens",),
    ),
    "qwen3": Case(
        CAUSAL,
        "Qwen3Config",
        DECODER,
        blocks("model.layers", LLAMA),
        DECODER_WEIGHTS,
        ("model.embed_tokens", "lm_head"),
    ),
    "t5": Case(
        SEQ2SEQ,
        "T5Config",
        T5,
        t5_blocks(("wi",)),
        LAYERS * (3 * 4 * WIDTH * HEADS * HEAD + 2 * 2 * WIDTH * INNER),
        T5_OTHERS,
    ),
    "t5-gated": Case(
        SEQ2SEQ,
        "T5Config",
        T5 | {"feed_forward_proj": "gated-gelu"},
        t5_blocks(("wi_0", "wi_1")),
        LAYERS * (3 * 4 * WIDTH * HEADS * HEAD + 2 * 3 * WIDTH * INNER),
        T5_OTHERS,
    ),
    "vit": Case(
        "AutoModelForImageClassification",
        "ViTConfig",
        ENCODER | {"image_size": 8, "patch_size": 4},
        blocks(
            "vit.layers",
            {
                "attention.q_proj": SQUARE,
                "attention.k_proj": SQUARE,
                "attention.v_proj": SQUARE,
                "attention.o_proj": SQUARE,
                "mlp.fc1": UP,
                "mlp.fc2": DOWN,
            },
        ),
        ENCODER_WEIGHTS,
        (
            "vit.embeddings.cls_token",
            "vit.embeddings.position_embeddings",
            "vit.embeddings.patch_embeddings.projection",
            "classifier",
        ),
    ),
}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(4, 4), nn.Linear(4, 4)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.dense = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(6)


class Net(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.pooler = nn.Linear(6, 6)
        self.head = nn.Linear(4, 6)


NAMES = [f"layers.{i}.{kind}" for i in range(2) for kind in ("attention.query", "attention.key", "dense")]


def names(model: nn.Module, *patterns: Any) -> list[str]:
    return [site.name for site in find_sites(model, *patterns)]
