"""The sparsity of a model is exact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

import pinscher
from pinscher.prune.sites import find_sites
from tiny_sites import CASES, NAMES, Net


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
