"""Which weights are prunable in the architectures of transformers."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

import pinscher
from pinscher.models.blocks import is_conv1d
from pinscher.prune.sites import find_sites
from tiny_sites import CASES, CAUSAL, CLASSIFIER, EMBEDDED, ENCODER, INNER, TOKENS, WIDTH, Case, Shapes


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def case(request: pytest.FixtureRequest) -> tuple[Case, nn.Module]:
    return request.param, request.param.build()


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
