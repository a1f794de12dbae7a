"""The mean of the weights, against the mean written out."""

from __future__ import annotations

import copy

import torch
from torch import nn

from pinscher.prune.averaging import WeightAverage
from pinscher.train import checkpoint


def steps(model: nn.Module, average: WeightAverage, first: int, last: int) -> list[torch.Tensor]:
    seen = []
    for t in range(first, last + 1):
        torch.manual_seed(t)
        with torch.no_grad():
            model.weight.add_(torch.randn_like(model.weight))
        average.update(t)
        seen.append(model.weight.detach().clone())
    return seen


def test_it_is_the_mean_of_the_last_steps_and_keeps_zeros():
    model = nn.Linear(6, 4)
    average = WeightAverage(model, start=5)
    seen = steps(model, average, 1, 10)
    with torch.no_grad():
        model.weight[0] = 0.0
    average.apply_()
    wanted = torch.stack(seen[4:]).mean(0)
    wanted[0] = 0.0
    assert torch.allclose(model.weight, wanted, atol=1e-6)
    assert bool((model.weight[0] == 0).all())


def test_nothing_changes_before_the_first_step_that_counts():
    model = nn.Linear(3, 3)
    average = WeightAverage(model, start=100)
    steps(model, average, 1, 10)
    before = copy.deepcopy(model.weight)
    average.apply_()
    assert torch.equal(model.weight, before)


def test_it_goes_on_bit_by_bit_from_a_checkpoint(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    average = WeightAverage(model, start=3)
    steps(model, average, 1, 6)
    checkpoint.save(tmp_path / "state", average=average.state_dict())
    other = copy.deepcopy(model)
    steps(model, average, 7, 12)
    average.apply_()
    again = WeightAverage(other, start=3)
    again.load_state_dict(checkpoint.load(tmp_path / "state")["average"])
    steps(other, again, 7, 12)
    again.apply_()
    assert torch.equal(model.weight, other.weight)
