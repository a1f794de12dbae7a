"""Tied weights are found once, and wrappers do not change names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pinscher
from pinscher.models.names import clean_name
from pinscher.prune.sites import find_sites
from tiny_sites import CASES, NAMES, Net, names

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
