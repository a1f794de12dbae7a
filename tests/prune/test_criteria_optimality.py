"""PINS (signed, unsmoothed) keeps the best of all masks for the paper's integer program."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pinscher import Pruner, PruningConfig


class OneMatrix(nn.Module):
    """A block with a single matrix, whose gradient a test sets by hand."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        block = nn.Module()
        block.dense = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
        block.dense.weight.data.copy_(weight)
        self.blocks = nn.ModuleList([block])


def change_of_loss(mask, weight, grad, lr):
    """The paper's first-order change of the loss: sum of g (x dθ - (1 - x) θ) with dθ = -lr g."""
    return sum(g * (-lr * g if x else -w) for x, w, g in zip(mask, weight, grad, strict=True))


numbers = st.floats(-2, 2).map(lambda x: round(x, 3))


@given(
    st.lists(st.tuples(numbers, numbers), min_size=2, max_size=10),
    st.floats(0.01, 2.0),
    st.data(),
)
@settings(max_examples=150, deadline=None)
def test_mask_is_the_brute_force_optimum(pairs, lr, data):
    weight = torch.tensor([[w for w, _ in pairs]], dtype=torch.float64)
    grad = torch.tensor([[g for _, g in pairs]], dtype=torch.float64)
    d = len(pairs)
    r = data.draw(st.integers(1, d - 1))
    model = OneMatrix(weight)
    options = {"score": "signed", "smoothing": "none"}
    config = PruningConfig(
        method="pins", options=options, sparsity=1 - r / d, total_steps=1, warmup=0, cooldown=0, interval=1,
        initial_sparsity=0.0,
    )  # fmt: skip
    pruner = Pruner(model, config)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    pruner.attach(optimizer)
    matrix = model.blocks[0].dense.weight
    matrix.grad = grad.clone()
    optimizer.step()

    mask = pruner.mask("blocks.0.dense").view(-1).tolist()
    assert sum(mask) == r
    w, g = weight.view(-1).tolist(), grad.view(-1).tolist()
    best = min(
        change_of_loss([i in chosen for i in range(d)], w, g, lr) for chosen in itertools.combinations(range(d), r)
    )
    assert change_of_loss(mask, w, g, lr) == pytest.approx(best, abs=1e-12)
    # θ <- (θ - lr g) * M
    expected = torch.where(torch.tensor(mask), weight - lr * grad, 0.0)
    torch.testing.assert_close(matrix.detach(), expected, rtol=1e-12, atol=1e-12)
    assert not matrix[~torch.tensor([mask])].any()
