"""The native score update is the torch path, to the last bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pinscher import native
from pinscher.prune.criteria import CRITERIA, Smoothed
from pinscher.prune.sites import Site

FUSED = [("pins", {}), ("platon", {}), ("platon", {"timing": "before"}), ("pins", {"beta1": 0.6, "beta2": 0.9})]


def after(criterion: Smoothed, shape: tuple[int, int], lr: float, seed: int, fused: bool) -> dict[str, torch.Tensor]:
    """The state of a site after two windows of three steps."""
    generator = torch.Generator().manual_seed(seed)
    module = nn.Linear(shape[1], shape[0], bias=False)
    module.weight.data = torch.randn(shape, generator=generator)
    site = Site("here", module, lr=lr)
    criterion.prepare(site, torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        if not fused:
            patch.setattr(native, "core", lambda: None)
        for t in range(6):
            module.weight.grad = torch.randn(shape, generator=generator) * 10.0 ** (t - 4)
            criterion.observe(site, t, 3 if t % 3 == 2 else 0)
            module.weight.data -= lr * module.weight.grad
    return site.state


@pytest.mark.parametrize(("method", "options"), FUSED, ids=str)
@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 70),
    columns=st.integers(1, 70),
    lr=st.sampled_from([0.0, 5e-5, 1e-4, 0.1]),
    seed=st.integers(0, 99),
)
def test_fused_is_the_torch_path_to_the_last_bit(method, options, rows, columns, lr, seed):
    criterion = CRITERIA[method](**options)
    fast = after(criterion, (rows, columns), lr, seed, fused=True)
    slow = after(criterion, (rows, columns), lr, seed, fused=False)
    for name, value in slow.items():
        assert torch.equal(fast[name], value), name


@pytest.mark.parametrize(("method", "options"), FUSED, ids=str)
def test_most_weights_are_done_natively(method, options):
    """Large enough for several pieces and threads."""
    criterion = CRITERIA[method](**options)
    site = Site("here", nn.Linear(300, 501, bias=False), lr=0.1)
    criterion.prepare(site, torch.float32)
    site.module.weight.grad = torch.randn(501, 300)
    assert criterion._observe_natively(site, 0) == 501 * 300 // 16 * 16
    fast, slow = (after(criterion, (501, 300), 1e-3, 0, fused) for fused in (True, False))
    assert all(torch.equal(fast[name], slow[name]) for name in slow)


@pytest.mark.parametrize(
    ("method", "options", "dtype"),
    [
        ("pins", {"smoothing": "ema"}, torch.float32),
        ("platon", {"smoothing": "ema"}, torch.float32),
        ("pins", {"beta1": 0.3}, torch.float32),
        ("pins", {}, torch.bfloat16),
        ("pins", {}, torch.float64),
    ],
    ids=str,
)
def test_whatever_native_code_does_not_know_is_left_to_torch(method, options, dtype):
    criterion = CRITERIA[method](**options)
    module = nn.Linear(64, 64, bias=False)
    if dtype == torch.float64:
        module.double()
    site = Site("here", module)
    criterion.prepare(site, torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
    module.weight.grad = torch.randn_like(module.weight)
    assert criterion._observe_natively(site, 0) == 0
