"""Modules are chosen by name, ending or expression; to find nothing is an error."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import pinscher
from pinscher.prune.sites import find_sites
from tiny_sites import NAMES, Net, names

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
