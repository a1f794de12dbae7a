"""Which weights are prunable in a model of one's own, and what a site gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils import parametrize

import pinscher
from pinscher import Pruner, PruningConfig
from pinscher.models.blocks import is_conv1d
from pinscher.prune.sites import find_sites
from tiny_sites import GPT2, NAMES, Attention, Layer, Net, names

# ---------------------------------------------------------------- small models


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
