"""Which weights are prunable: architectures, patterns, tied weights, wrappers, and the exact sparsity."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.nn.utils import parametrize

import pinscher
from pinscher import Pruner, PruningConfig
from pinscher.prune.sites import clean_name, find_sites, is_conv1d

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


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def case(request: pytest.FixtureRequest) -> tuple[Case, nn.Module]:
    return request.param, request.param.build()


# ---------------------------------------------------------------- architectures


def test_every_block_has_exactly_its_matrices(case: tuple[Case, nn.Module]) -> None:
    expected, model = case
    found: dict[str, Shapes] = {}
    for site in find_sites(model):
        assert site.name == f"{site.block}.{site.kind}"
        assert site.kind not in found.setdefault(site.block, {})
        found[site.block][site.kind] = tuple(site.shape)
    assert {block: dict(sorted(kinds.items())) for block, kinds in found.items()} == {
        block: dict(sorted(kinds.items())) for block, kinds in expected.blocks.items()
    }
    assert list(found) == list(expected.blocks)


def test_the_number_of_weights_is_what_the_config_says(case: tuple[Case, nn.Module]) -> None:
    expected, model = case
    sites = find_sites(model)
    assert sum(site.numel for site in sites) == expected.weights
    assert len(sites) == sum(len(kinds) for kinds in expected.blocks.values())


def test_nothing_else_is_a_site(case: tuple[Case, nn.Module]) -> None:
    expected, model = case
    sites = find_sites(model)
    owners = {id(site.owner) for site in sites}
    assert len(owners) == len(sites)
    rest = {name: p for name, p in model.named_parameters() if id(p) not in owners}
    assert sorted(n.removesuffix(".weight") for n, p in rest.items() if p.dim() > 1) == sorted(expected.others)
    assert not any(name.endswith(".bias") for name, p in model.named_parameters() if id(p) in owners)
    for module in model.modules():
        if "Norm" in type(module).__name__ or isinstance(module, nn.Embedding | nn.Conv1d | nn.Conv2d):
            assert not any(id(p) in owners for p in module.parameters())


def test_sites_follow_the_order_of_the_modules(case: tuple[Case, nn.Module]) -> None:
    _, model = case
    place = {name: i for i, (name, _) in enumerate(model.named_modules())}
    order = [place[site.name] for site in find_sites(model)]
    assert order == sorted(order)


def test_only_conv1d_is_transposed(case: tuple[Case, nn.Module]) -> None:
    expected, model = case
    for site in find_sites(model):
        assert site.transposed == expected.transposed
        assert is_conv1d(site.module) == expected.transposed
        assert isinstance(site.module, nn.Linear) != expected.transposed
        if expected.transposed:
            assert isinstance(site.module, transformers.pytorch_utils.Conv1D)


def test_a_fresh_model_has_no_zeros_in_its_matrices(case: tuple[Case, nn.Module]) -> None:
    _, model = case
    assert pinscher.sparsity(model) == 0.0


@pytest.mark.parametrize(
    ("model", "config", "matrices", "weights"),
    [
        (CLASSIFIER, "BertConfig", 72, 84_934_656),
        (CLASSIFIER, "RobertaConfig", 72, 84_934_656),
        (CLASSIFIER, "DistilBertConfig", 36, 42_467_328),
        (CAUSAL, "GPT2Config", 48, 84_934_656),
        ("AutoModelForImageClassification", "ViTConfig", 72, 84_934_656),
    ],
)
def test_models_of_the_usual_size(model: str, config: str, matrices: int, weights: int) -> None:
    with torch.device("meta"):
        built = getattr(transformers, model).from_config(getattr(transformers, config)())
    sites = find_sites(built)
    assert len(sites) == matrices
    assert sum(site.numel for site in sites) == weights
    assert all(site.owner.is_meta for site in sites)


def test_albert_has_one_block_that_all_layers_share() -> None:
    config = transformers.AlbertConfig(**ENCODER, **TOKENS, embedding_size=EMBEDDED)
    sites = find_sites(transformers.AutoModelForSequenceClassification.from_config(config))
    assert {site.block for site in sites} == {"albert.encoder.albert_layer_groups.0"}
    assert [site.kind for site in sites] == [
        "albert_layers.0.attention.query",
        "albert_layers.0.attention.key",
        "albert_layers.0.attention.value",
        "albert_layers.0.attention.dense",
        "albert_layers.0.ffn",
        "albert_layers.0.ffn_output",
    ]
    assert sum(site.numel for site in sites) == 4 * WIDTH * WIDTH + 2 * WIDTH * INNER


# ---------------------------------------------------------------- small models


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


def test_a_small_model_of_ones_own() -> None:
    sites = find_sites(Net())
    assert [site.name for site in sites] == NAMES
    assert {site.block for site in sites} == {"layers.0", "layers.1"}
    assert not any(site.transposed or site.shared_with for site in sites)


def test_the_eleventh_block_is_not_the_first() -> None:
    sites = find_sites(Net(12))
    assert len({site.block for site in sites}) == 12
    assert all(site.name.startswith(site.block + ".") for site in sites)
    assert {site.kind for site in sites} == {"attention.query", "attention.key", "dense"}
    assert names(Net(12), "1.dense") == ["layers.1.dense"]


def test_blocks_may_be_a_sequential_of_one_class() -> None:
    net = Net()
    net.layers = nn.Sequential(Layer(), Layer())
    assert names(net) == NAMES


def test_the_container_itself_may_be_the_model() -> None:
    assert names(nn.ModuleList([Layer(), Layer()])) == [name.removeprefix("layers.") for name in NAMES]
    assert names(nn.Sequential(Layer(), Layer())) == [name.removeprefix("layers.") for name in NAMES]


def test_a_sequential_head_is_no_list_of_blocks() -> None:
    net = Net()
    net.head = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    assert names(net) == NAMES


@pytest.mark.parametrize("head", [lambda: (Attention(), Layer()), lambda: (nn.Dropout(), Attention())])
def test_a_sequential_of_unlike_or_single_modules_is_no_list_of_blocks(head: Any) -> None:
    net = Net()
    net.head = nn.Sequential(*head())
    assert names(net) == NAMES


def test_a_list_of_bare_attentions_is_no_list_of_blocks() -> None:
    net = Net()
    net.pooler = nn.ModuleList([nn.MultiheadAttention(4, 2), nn.MultiheadAttention(4, 2)])
    assert names(net) == NAMES


def test_lists_inside_of_a_block_belong_to_that_block() -> None:
    net = Net(1)
    net.layers[0].experts = nn.ModuleList([Attention(), Attention()])
    net.layers[0].mlp = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    sites = find_sites(net)
    assert {site.block for site in sites} == {"layers.0"}
    assert [site.kind for site in sites][3:] == [
        *(f"experts.{i}.{kind}" for i in range(2) for kind in ("query", "key")),
        "mlp.0",
        "mlp.2",
    ]


def test_the_sites_of_torchs_own_encoder() -> None:
    layer = nn.TransformerEncoderLayer(d_model=4, nhead=2, dim_feedforward=6, batch_first=True)
    sites = find_sites(nn.TransformerEncoder(layer, num_layers=2))
    shapes = {"self_attn.in_proj_weight": (12, 4), "self_attn.out_proj": (4, 4), "linear1": (6, 4), "linear2": (4, 6)}
    assert [(site.block, site.kind, tuple(site.shape)) for site in sites] == [
        (f"layers.{i}", kind, shape) for i in range(2) for kind, shape in shapes.items()
    ]
    assert sites[0].name == "layers.0.self_attn.in_proj_weight"
    assert sites[0].parameter == "in_proj_weight"
    assert sum(site.numel for site in sites) == 2 * (4 * 4 * 4 + 2 * 4 * 6)


def test_the_sites_of_torchs_own_decoder() -> None:
    layer = nn.TransformerDecoderLayer(d_model=4, nhead=2, dim_feedforward=6)
    sites = find_sites(nn.TransformerDecoder(layer, num_layers=1))
    assert [site.kind for site in sites] == [
        "self_attn.in_proj_weight",
        "self_attn.out_proj",
        "multihead_attn.in_proj_weight",
        "multihead_attn.out_proj",
        "linear1",
        "linear2",
    ]


def test_torchs_attention_with_separate_projections() -> None:
    block = nn.Module()
    block.attention = nn.MultiheadAttention(4, 2, kdim=3, vdim=5, add_bias_kv=True)
    sites = find_sites(nn.ModuleList([block]))
    assert {site.kind.removeprefix("attention."): tuple(site.shape) for site in sites} == {
        "q_proj_weight": (4, 4),
        "k_proj_weight": (4, 3),
        "v_proj_weight": (4, 5),
        "out_proj": (4, 4),
    }


def test_torchs_attention_is_named_by_its_module() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 6, batch_first=True), num_layers=2)
    assert names(encoder, "self_attn") == [f"layers.{i}.self_attn.in_proj_weight" for i in range(2)]
    assert names(encoder, None, "self_attn") == [
        f"layers.{i}.{kind}" for i in range(2) for kind in ("self_attn.out_proj", "linear1", "linear2")
    ]


def test_a_class_that_is_only_called_conv1d_is_none() -> None:
    assert is_conv1d(transformers.pytorch_utils.Conv1D(6, 4))
    assert not is_conv1d(nn.Conv1d(4, 6, 1))
    assert not is_conv1d(type("Conv1D", (nn.Module,), {})())


# ---------------------------------------------------------------- a site


def test_a_site_gives_the_weight_flat_and_writable() -> None:
    net = Net()
    site = find_sites(net)[2]
    weight = net.layers[0].dense.weight
    assert site.owner is weight
    assert site.effective is weight
    assert site.weight.shape == (24,)
    assert not site.weight.requires_grad
    site.weight[5] = 7.0
    assert weight[1, 1] == 7.0


def test_a_site_gives_the_gradient_flat_once_there_is_one() -> None:
    net = Net()
    site = find_sites(net)[2]
    assert site.grad is None
    net.layers[0].dense(torch.ones(1, 4)).sum().backward()
    assert torch.equal(site.grad, torch.ones(24))


def test_a_site_follows_a_parameter_that_is_replaced() -> None:
    net = Net()
    site = find_sites(net)[2]
    net.layers[0].dense.weight = nn.Parameter(torch.zeros(6, 4))
    assert torch.equal(site.weight, torch.zeros(24))


class Half(nn.Module):
    """Closes the first half of a weight."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        open_ = torch.arange(weight.numel()) >= weight.numel() // 2
        return weight * open_.view_as(weight)


def test_a_site_tells_the_weight_below_a_gate_from_the_one_above() -> None:
    net = Net()
    below = net.layers[0].dense.weight
    parametrize.register_parametrization(net.layers[0].dense, "weight", Half())
    assert names(net) == NAMES
    site = find_sites(net)[2]
    assert site.owner is below
    assert int(torch.count_nonzero(site.owner)) == 24
    assert int(torch.count_nonzero(site.effective)) == 12
    assert pinscher.sparsity(net) == 12 / 112


def test_a_gated_conv1d_is_still_a_site() -> None:
    config = transformers.GPT2Config(**GPT2)
    model = transformers.AutoModelForCausalLM.from_config(config)
    before = [(site.name, site.transposed) for site in find_sites(model)]
    for site in find_sites(model):
        parametrize.register_parametrization(site.module, site.parameter, Half())
    assert [(site.name, site.transposed) for site in find_sites(model)] == before
    assert pinscher.sparsity(model) == 0.5


def test_a_model_can_be_measured_while_learned_masks_prune_it() -> None:
    config = transformers.GPT2Config(**GPT2)
    model = transformers.AutoModelForCausalLM.from_config(config)
    Pruner(model, PruningConfig(method="movement", total_steps=100))
    assert pinscher.sparsity(model) == 0.0


# ---------------------------------------------------------------- patterns


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ("query", [NAMES[0], NAMES[3]]),
        ("attention.query", [NAMES[0], NAMES[3]]),
        ("0.attention.query", [NAMES[0]]),
        ("layers.1.attention.key", [NAMES[4]]),
        (["query"], [NAMES[0], NAMES[3]]),
        (("key", "query"), [NAMES[0], NAMES[1], NAMES[3], NAMES[4]]),
        (iter(["dense"]), [NAMES[2], NAMES[5]]),
        (r".*\.attention\..*", [NAMES[0], NAMES[1], NAMES[3], NAMES[4]]),
        (r"layers\.0\..*", NAMES[:3]),
        (r"layers\.\d+\.(dense|attention\.key)", [NAMES[1], NAMES[2], NAMES[4], NAMES[5]]),
        (["layers.0.dense", r".*query"], [NAMES[0], NAMES[2], NAMES[3]]),
        (["query", "query", r".*query"], [NAMES[0], NAMES[3]]),
        ("head", ["head"]),
        (["pooler", "dense"], [NAMES[2], NAMES[5], "pooler"]),
        (".*", [*NAMES, "pooler", "head"]),
    ],
)
def test_targets_by_name_by_ending_and_by_expression(patterns: Any, expected: list[str]) -> None:
    assert names(Net(), patterns) == expected


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ("query", [NAMES[1], NAMES[2], NAMES[4], NAMES[5]]),
        (["query", "key"], [NAMES[2], NAMES[5]]),
        ("layers.0.dense", [*NAMES[:2], *NAMES[3:]]),
        (r"layers\.0\..*", NAMES[3:]),
        ((r"layers\.1\..*", "dense"), NAMES[:2]),
        ([], NAMES),
    ],
)
def test_exclusions_by_name_by_ending_and_by_expression(patterns: Any, expected: list[str]) -> None:
    assert names(Net(), None, patterns) == expected


def test_targets_and_exclusions_together() -> None:
    assert names(Net(), [".*attention.*", "head"], r"layers\.1.*") == [NAMES[0], NAMES[1], "head"]


def test_a_target_outside_of_the_blocks_is_its_own_kind() -> None:
    (site,) = find_sites(Net(), "head")
    assert (site.name, site.block, site.kind) == ("head", "", "head")
    inside, _ = find_sites(Net(), "query")
    assert (inside.block, inside.kind) == ("layers.0", "attention.query")


def test_targets_need_no_blocks() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    assert names(net, ["0", "2"]) == ["0", "2"]


@pytest.mark.parametrize("pattern", ["quary", "uery", "attention", "layers.0", "embedding", "norm", "layers", "QUERY"])
@pytest.mark.parametrize("field", ["target_modules", "exclude_modules"])
def test_a_pattern_without_a_match_is_named_with_what_there_is(field: str, pattern: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}: '{pattern}' matches no module") as error:
        find_sites(Net(), **{field: ["query", pattern]})
    assert "dense" in str(error.value)
    assert "key" in str(error.value)


@pytest.mark.parametrize("pattern", ["(", "*query", "[a-", "query)"])
@pytest.mark.parametrize("field", ["target_modules", "exclude_modules"])
def test_a_broken_expression_is_named(field: str, pattern: str) -> None:
    with pytest.raises(ValueError, match="is not a regular expression") as error:
        find_sites(Net(), **{field: pattern})
    assert str(error.value).startswith(f"{field}: {pattern!r}")


def test_sparsity_takes_the_same_patterns() -> None:
    net = Net()
    net.layers[0].attention.query.weight.data.zero_()
    net.head.weight.data.zero_()
    assert pinscher.sparsity(net, "query") == 0.5
    assert pinscher.sparsity(net, "head") == 1.0
    assert pinscher.sparsity(net, None, "query") == 0.0
    with pytest.raises(ValueError, match="'quary' matches no module"):
        pinscher.sparsity(net, "quary")


# ---------------------------------------------------------------- nothing found


def test_a_convolutional_network_says_what_was_seen() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU())
    with pytest.raises(ValueError, match="Sequential has no prunable matrix") as error:
        find_sites(net)
    for word in ("2 Conv2d", "1 BatchNorm2d", "2 ReLU", "nn.Linear", "Conv1D", "nn.MultiheadAttention", "ModuleList"):
        assert word in str(error.value)


def test_linears_outside_of_blocks_are_named_with_the_remedy() -> None:
    net = nn.Module()
    net.first, net.second = nn.Linear(4, 8), nn.Linear(8, 2)
    with pytest.raises(ValueError, match="no prunable matrix") as error:
        find_sites(net)
    for word in ("2 Linear", "outside of any block (first, second)", "target_modules"):
        assert word in str(error.value)


def test_a_long_list_of_linears_is_cut_short() -> None:
    net = nn.Sequential(*(nn.Linear(2, 2) for _ in range(20)))
    with pytest.raises(ValueError, match=r"\(0, 1, 2, 3, 4, 5, …\)"):
        find_sites(net)


def test_a_list_of_linears_is_not_a_list_of_blocks() -> None:
    with pytest.raises(ValueError, match=r"outside of any block \(0, 1\)"):
        find_sites(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))


@pytest.mark.parametrize("model", [nn.Module(), nn.ModuleList(), nn.Sequential(), nn.Identity(), nn.Embedding(3, 2)])
def test_a_model_without_matrices_is_an_error(model: nn.Module) -> None:
    for function in (find_sites, pinscher.sparsity):
        with pytest.raises(ValueError, match=f"^{type(model).__name__} has no prunable matrix"):
            function(model)


def test_to_exclude_everything_is_an_error_that_blames_the_exclusion() -> None:
    with pytest.raises(ValueError, match="no prunable matrix") as error:
        find_sites(Net(), exclude_modules=".*")
    assert "outside of any block (layers.0" not in str(error.value)
    assert "exclude_modules" in str(error.value)


# ---------------------------------------------------------------- tied weights


def test_a_parameter_of_two_modules_is_found_once() -> None:
    net = Net()
    net.layers[1].dense.weight = net.layers[0].dense.weight
    sites = find_sites(net)
    assert [site.name for site in sites] == NAMES[:5]
    assert [site.shared_with for site in sites] == [[], [], [net.layers[1].dense], [], []]
    assert sum(site.numel for site in sites) == 4 * 16 + 24


def test_a_parameter_of_three_modules_knows_them_all() -> None:
    net = Net(3)
    for layer in net.layers[1:]:
        layer.dense.weight = net.layers[0].dense.weight
    sites = {site.name: site for site in find_sites(net)}
    assert sites["layers.0.dense"].shared_with == [net.layers[1].dense, net.layers[2].dense]
    assert len(sites) == 7


def test_zeros_of_a_tied_weight_count_once() -> None:
    net = Net()
    net.layers[1].dense.weight = net.layers[0].dense.weight
    net.layers[0].dense.weight.data.zero_()
    assert pinscher.sparsity(net) == 24 / (4 * 16 + 24)


def test_a_block_that_is_used_again_is_found_once() -> None:
    net = Net(1)
    net.layers = nn.ModuleList([net.layers[0]] * 4)
    sites = find_sites(net)
    assert [site.name for site in sites] == NAMES[:3]
    assert not any(site.shared_with for site in sites)


def test_a_matrix_that_is_used_again_is_found_once() -> None:
    net = Net()
    net.layers[1].dense = net.layers[0].dense
    assert names(net) == NAMES[:5]


@pytest.mark.parametrize("where", ["first", "last"])
def test_a_linear_tied_to_an_embedding_is_never_a_site(where: str) -> None:
    net = Net()
    embedding = net.embedding
    net.layers[1].dense.weight = net.head.weight = embedding.weight
    if where == "last":  # found only after the matrices that share it
        del net.embedding
        net.embedding = embedding
    assert names(net) == NAMES[:5]
    assert names(net, ["dense", "head"]) == [NAMES[2]]
    with pytest.raises(ValueError, match="no prunable matrix"):
        find_sites(net, "head")


def test_the_tied_head_of_a_language_model_is_never_a_site() -> None:
    model = CASES["gpt2"].build()
    assert model.lm_head.weight is model.transformer.wte.weight
    with pytest.raises(ValueError, match="no prunable matrix"):
        find_sites(model, "lm_head")
    assert names(CASES["gpt2-untied"].build(), "lm_head") == ["lm_head"]


# ---------------------------------------------------------------- wrappers


class Wrapper(nn.Module):
    """What DistributedDataParallel looks like from the outside."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class Sharded(nn.Module):
    """What FullyShardedDataParallel looks like from the outside."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._fsdp_wrapped_module = module


def with_wrapped_blocks(wrap: Any) -> nn.Module:
    net = Net()
    for i, layer in enumerate(net.layers):
        net.layers[i] = wrap(layer)
    return net


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda: Wrapper(Net()),
        lambda: nn.DataParallel(Net()),
        lambda: Sharded(Net()),
        lambda: torch.compile(Net()),
        lambda: torch.compile(Wrapper(Net())),
        lambda: Wrapper(torch.compile(Net())),
        lambda: Wrapper(Wrapper(Sharded(Net()))),
        lambda: with_wrapped_blocks(torch.compile),
        lambda: with_wrapped_blocks(Sharded),
        lambda: Sharded(with_wrapped_blocks(Sharded)),
        lambda: torch.compile(Wrapper(with_wrapped_blocks(lambda layer: torch.compile(Sharded(layer))))),
    ],
    ids=[
        "ddp",
        "data-parallel",
        "fsdp",
        "compile",
        "compile-ddp",
        "ddp-compile",
        "nested",
        "compiled-blocks",
        "fsdp-blocks",
        "fsdp-fsdp-blocks",
        "everything",
    ],
)
def test_names_are_the_same_behind_wrappers(wrapped: Any) -> None:
    model = wrapped()
    plain = [(site.name, site.block, site.kind) for site in find_sites(Net())]
    assert [(site.name, site.block, site.kind) for site in find_sites(model)] == plain
    assert names(model, r"layers\.0\..*") == NAMES[:3]
    assert names(model, "layers.1.dense") == [NAMES[5]]
    assert names(model, None, "query") == [NAMES[1], NAMES[2], NAMES[4], NAMES[5]]
    assert names(model, "head") == ["head"]


def test_a_wrapped_bert_has_clean_names() -> None:
    model = CASES["bert"].build()
    plain = names(model)
    assert names(Wrapper(torch.compile(model))) == plain
    assert plain[0] == "bert.encoder.layer.0.attention.self.query"


@pytest.mark.parametrize(
    ("wrapped", "clean"),
    [
        ("module.bert.pooler", "bert.pooler"),
        ("_orig_mod.module.bert.pooler", "bert.pooler"),
        ("module._orig_mod.layers.0._fsdp_wrapped_module.dense", "layers.0.dense"),
        ("layers.0._orig_mod", "layers.0"),
        ("module", ""),
        ("", ""),
        ("submodule.dense", "submodule.dense"),
        ("module_list.dense", "module_list.dense"),
        ("a_module.module2.dense", "a_module.module2.dense"),
        ("layers.0.dense", "layers.0.dense"),
    ],
)
def test_clean_names(wrapped: str, clean: str) -> None:
    assert clean_name(wrapped) == clean


# ---------------------------------------------------------------- exact sparsity


def put_zeros(model: nn.Module, pattern: list[bool]) -> None:
    at = 0
    for site in find_sites(model):
        zeros = torch.tensor(pattern[at : at + site.numel])
        site.weight.copy_(torch.where(zeros, 0.0, 1e-30))
        at += site.numel


@settings(max_examples=50, deadline=None)
@given(st.lists(st.booleans(), min_size=112, max_size=112))
def test_sparsity_is_exact(pattern: list[bool]) -> None:
    net = Net()
    put_zeros(net, pattern)
    assert pinscher.sparsity(net) == sum(pattern) / 112


def test_zeros_elsewhere_do_not_count() -> None:
    net = Net()
    for parameter in (net.embedding.weight, net.pooler.weight, net.head.weight, net.layers[0].dense.bias):
        parameter.data.zero_()
    assert pinscher.sparsity(net) == 0.0


def test_sparsity_of_all_and_of_a_single_zero() -> None:
    net = Net()
    put_zeros(net, [True] * 112)
    assert pinscher.sparsity(net) == 1.0
    put_zeros(net, [True] + [False] * 111)
    assert pinscher.sparsity(net) == 1 / 112


def test_a_negative_zero_is_a_zero_and_nan_is_none() -> None:
    net = Net()
    put_zeros(net, [False] * 112)
    net.layers[0].dense.weight.data.fill_(-0.0)
    net.layers[1].dense.weight.data.fill_(torch.nan)
    assert pinscher.sparsity(net) == 24 / 112


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_sparsity_in_any_precision(dtype: torch.dtype) -> None:
    net = Net().to(dtype)
    for site in find_sites(net):
        site.weight.fill_(torch.finfo(dtype).tiny)
    net.layers[0].attention.query.weight.data[:2].zero_()
    assert pinscher.sparsity(net) == 8 / 112


def test_sparsity_of_a_real_architecture() -> None:
    model = CASES["t5"].build()
    sites = find_sites(model)
    for i, site in enumerate(sites):
        site.weight.fill_(1.0)
        site.weight[:i] = 0.0
    assert pinscher.sparsity(model) == sum(range(len(sites))) / CASES["t5"].weights


def test_to_measure_changes_nothing() -> None:
    net = Net()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    pinscher.sparsity(net)
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())


def measure_shards(rank: int, folder: str) -> None:
    """One of two ranks, each with half the rows of every matrix: zeros in one row of the first rank's first matrix."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    net = Net()
    for site in find_sites(net):
        rows = torch.ones(site.shape[0] // 2, site.shape[1])
        if rank == 0 and site.name == NAMES[0]:
            rows[0] = 0.0
        site.module.weight = nn.Parameter(DTensor.from_local(rows, mesh, [Shard(0)]))
    Path(folder, f"sparsity{rank}").write_text(repr(pinscher.sparsity(net)))
    dist.destroy_process_group()


def test_sparsity_of_shards_is_that_of_the_whole_on_every_rank(tmp_path: Path) -> None:
    mp.spawn(measure_shards, (str(tmp_path),), nprocs=2)
    assert [float((tmp_path / f"sparsity{rank}").read_text()) for rank in range(2)] == [4 / 112, 4 / 112]
