"""Learning rates over a run, against transformers' own and against their corners."""

from __future__ import annotations

import pytest
import torch
from transformers import get_linear_schedule_with_warmup

from pinscher.train import rates


def test_without_rewinds_it_is_what_transformers_calls_linear():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = get_linear_schedule_with_warmup(optimizer, 7, 50)
    mine = rates.rewound(50, 7, [])
    for t in range(51):
        assert mine(t) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12), t
        optimizer.step()
        theirs.step()


def test_the_rate_rewinds_with_every_cycle_and_ends_at_zero():
    starts = rates.rewinds(3, warmup=10, settled=70)
    assert starts == [30, 50, 70]
    rate = rates.rewound(100, 5, starts)
    assert rate(0) == 0.0
    assert rate(5) == 1.0
    assert [rate(t) for t in starts] == [1.0] * 3
    assert all(rates.FLOOR < rate(t - 1) < 0.2 for t in starts)  # just before each rewind
    assert rate(100) == 0.0
    assert all(rate(t) > rate(t + 1) for t in range(70, 100))


def test_cycles_that_fall_into_the_warm_up_are_left_out():
    rate = rates.rewound(20, 12, [4, 12, 16])
    assert [rate(t) for t in (6, 12, 16, 20)] == [0.5, 1.0, 1.0, 0.0]
