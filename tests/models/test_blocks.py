"""One definition of a matrix of a block, and all rooms agree on it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils import parametrize

import pinscher
from pinscher.models import blocks, names, surgery
from pinscher.prune import find_sites, prune_once
from pinscher.store import saving
from tiny_models import HEADS


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)
        self.up, self.norm = nn.Linear(8, 12), nn.LayerNorm(8)
        self.down = transformers.pytorch_utils.Conv1D(8, 12)
        self.distances = nn.Embedding(3, 2)


class Net(nn.Module):
    """Two blocks between embeddings and heads, a list of heads among them."""

    def __init__(self, container: Any = nn.ModuleList) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 8)
        self.layers = container(*([[Block(), Block()]] if container is nn.ModuleList else [Block(), Block()]))
        self.heads = nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 4)])
        self.output = nn.Linear(8, 10, bias=False)


def told(model: nn.Module) -> dict[str, tuple[str, str, bool]]:
    """Of each matrix its role, block and which way round it is stored."""
    return {m.name: (m.role, m.place.block, m.transposed) for m in blocks.matrices(model)}


IN_A_BLOCK = {
    "attention.in_proj_weight": False,
    "attention.out_proj": False,
    "up": False,
    "down": True,
}


@pytest.mark.parametrize("container", [nn.ModuleList, nn.Sequential])
def test_every_matrix_has_its_role_block_and_kind(container):
    found = told(Net(container))
    wanted: dict[str, tuple[str, str, bool]] = {"words": ("embedding", "", False), "output": ("head", "", False)}
    wanted |= {f"heads.{i}": ("head", "", False) for i in range(2)}
    for block in ("layers.0", "layers.1"):
        wanted[f"{block}.distances"] = ("embedding", block, False)
        wanted |= {f"{block}.{kind}": ("matrix", block, transposed) for kind, transposed in IN_A_BLOCK.items()}
    assert found == wanted
    kinds = [matrix.place.kind for matrix in blocks.block_matrices(Net(container))]
    assert sorted(kinds) == sorted([*IN_A_BLOCK] * 2)


def test_a_shared_weight_is_one_matrix_and_its_role_the_first_of_its_uses():
    net = Net()
    net.output.weight = net.words.weight
    net.layers[1].up.weight = net.layers[0].up.weight
    net.heads[1] = nn.Linear(12, 8)
    net.heads[1].weight = net.layers[0].down.weight
    found = told(net)
    assert "output" not in found
    assert "layers.1.up" not in found
    assert "heads.1" not in found
    assert found["words"][0] == "embedding"
    assert found["layers.0.down"] == ("matrix", "layers.0", True)
    (group,) = (g for g in blocks.untied(blocks.uses(net)) if g[0].name == "layers.0.up")
    assert [use.name for use in group] == ["layers.0.up", "layers.1.up"]
    turned = nn.ModuleDict({"a": nn.Linear(4, 6), "b": nn.ModuleList([nn.Sequential(nn.Linear(4, 6))])})
    turned["a"].weight = turned["b"][0][0].weight
    assert told(turned) == {"b.0.0": ("matrix", "b.0", False)}


class Twice(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def test_gates_change_nothing():
    net = Net()
    before = told(net)
    for block in net.layers:
        parametrize.register_parametrization(block.up, "weight", Twice())
        parametrize.register_parametrization(block.down, "weight", Twice())
    assert told(net) == before
    up = net.layers[0].up
    assert blocks.owner_of(up, "weight") is up.parametrizations.weight.original
    assert blocks.is_conv1d(net.layers[0].down)  # its class has become a subclass
    assert torch.equal(blocks.outputs_first(net.layers[0].down), 2 * blocks.owner_of(net.layers[0].down, "weight").T)


def test_adapters_are_seen_through():
    model = HEADS["gpt2"].make()
    before = told(model)
    settings = peft.LoraConfig(r=2, target_modules=["c_attn"], modules_to_save=["score"], fan_in_fan_out=True)
    found = told(peft.get_peft_model(model, settings))
    assert {name: of for name, of in found.items() if of[0] == "matrix"} == {
        name: of for name, of in before.items() if of[0] == "matrix"
    }
    assert not any("lora" in name or "original_module" in name for name in found)


def test_writing_to_outputs_first_changes_the_module():
    conv = transformers.pytorch_utils.Conv1D(6, 4)
    blocks.outputs_first(conv)[5] = 3.0
    assert (conv.weight[:, 5] == 3.0).all()
    assert blocks.outputs_first(conv).shape == (6, 4)


@pytest.mark.parametrize("name", HEADS)
def test_pruning_storing_and_running_mean_the_same_matrices(name):
    model = HEADS[name].make()
    sites = {site.name: site.transposed for site in find_sites(model)}
    stored = {m.name: m.transposed for m in saving.matrices(model).values() if m.role == "matrix"}
    assert sites == stored == {m.name: m.transposed for m in blocks.block_matrices(model)}
    state = model.state_dict()
    assert all(state[key] is not None for key in saving.matrices(model))


def test_blocks_in_a_sequential_are_stored_as_blocks():
    """The store once knew blocks by their list alone."""
    net = Net(nn.Sequential)
    roles = {name: matrix.role for name, matrix in saving.matrices(net).items()}
    assert roles["layers.0.up.weight"] == "matrix"
    assert roles["heads.0.weight"] == "head"  # a list of single matrices is no list of blocks
    assert "layers.0.attention.in_proj_weight" not in roles  # not called weight: stored as it is


# ------------------------------------------------------------ names


@pytest.mark.parametrize(
    ("wrapped", "clean"),
    [
        ("_forward_module.model.layers.0.up", "model.layers.0.up"),
        ("base_model.model.h.0.attn.c_attn.base_layer", "h.0.attn.c_attn"),
        ("layers.0._checkpoint_wrapped_module.up", "layers.0.up"),
    ],
)
def test_wrappers_are_cleaned_away(wrapped, clean):
    assert names.clean_name(wrapped) == clean


@pytest.mark.parametrize(
    ("paths", "short"),
    [
        (["bert.layer.0", "bert.layer.11"], ["0", "11"]),
        (["encoder.block.0", "decoder.block.0"], ["encoder.block.0", "decoder.block.0"]),
        (["h.3"], ["3"]),
        (["h.3", "h.3"], ["3", "3"]),
        ([""], ["-"]),
        (["", "layers.0"], ["-", "layers.0"]),
        ([], []),
    ],
)
def test_blocks_are_called_by_what_tells_them_apart(paths, short):
    assert names.short_blocks(paths) == short


def test_names_alone_need_no_torch():
    """Reports read run folders where there is none."""
    code = "import sys, pinscher.models.names, pinscher.models.families as f; f.FAMILIES; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


# ------------------------------------------------------------ classes


class Loud:
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)  # type: ignore[misc]


def test_a_module_becomes_another_and_is_what_it_was():
    linear, x = nn.Linear(2, 2), torch.ones(1, 2)
    plain, kind = linear(x), surgery.subclass(nn.Linear, Loud)
    surgery.become_(linear, kind)
    assert torch.equal(linear(x), 2 * plain)
    assert isinstance(linear, nn.Linear)
    told = [(k.__name__, k.__qualname__, k.__module__, k.__doc__) for k in (type(linear), nn.Linear)]
    assert told[0] == told[1]
    assert surgery.subclass(nn.Linear, Loud) is kind
    surgery.become_(linear, nn.Linear)
    assert torch.equal(linear(x), plain)
    with pytest.raises(AssertionError):
        surgery.become_(linear, nn.Bilinear)


def test_models_that_are_run_fast_share_their_classes():
    model = prune_once(HEADS["bert"].make(), "magnitude", sparsity=0.8)
    one, other = pinscher.accelerate(model), pinscher.accelerate(model)
    assert type(one) is type(other)
    assert type(one.bert) is type(other.bert) is not transformers.BertModel
    assert isinstance(one.bert, transformers.BertModel)
