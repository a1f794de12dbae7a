"""Packed matrices come back to the bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pinscher.prune.snapshot import Packed

BITS = {torch.float32: torch.int32, torch.float64: torch.int64, torch.float16: torch.int16, torch.bfloat16: torch.int16}


@settings(deadline=None, max_examples=150)
@given(
    rows=st.integers(0, 9),
    columns=st.integers(0, 21),
    density=st.sampled_from([0.0, 0.05, 0.3, 0.6, 0.85]),
    dtype=st.sampled_from(list(BITS)),
    transposed=st.booleans(),
    seed=st.integers(0, 10_000),
)
@example(rows=0, columns=5, density=0.3, dtype=torch.float32, transposed=False, seed=0)
@example(rows=5, columns=0, density=0.3, dtype=torch.bfloat16, transposed=True, seed=0)
@example(rows=1, columns=1, density=0.0, dtype=torch.float16, transposed=False, seed=0)
@example(rows=3, columns=3, density=0.0, dtype=torch.float64, transposed=False, seed=0)
def test_packing_is_bitwise(rows, columns, density, dtype, transposed, seed):
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(rows, columns, generator=generator).to(dtype)
    tensor[torch.rand(rows, columns, generator=generator) >= density] = 0
    tensor = tensor.T if transposed else tensor
    alive = int(torch.count_nonzero(tensor))
    packed = Packed.of(tensor)
    if packed is None:
        assert alive > 0.75 * tensor.numel()
        return
    expanded = packed.expand()
    assert (expanded.shape, expanded.dtype) == (tensor.shape, dtype)
    assert torch.equal(expanded.view(BITS[dtype]), tensor.contiguous().view(BITS[dtype]))
    assert packed.nbytes == alive * (packed.gaps.element_size() + tensor.element_size())
    assert torch.equal(packed.expand(), expanded)


@pytest.mark.parametrize("dtype", BITS, ids=str)
def test_packing_keeps_odd_values(dtype):
    info = torch.finfo(dtype)
    odd = [float("nan"), float("inf"), float("-inf"), info.max, info.min, info.tiny, -info.smallest_normal, info.eps]
    tensor = torch.zeros(5, 7, dtype=dtype)
    tensor.view(-1)[torch.arange(8) * 4] = torch.tensor(odd, dtype=dtype)
    tensor[1, 1] = torch.nextafter(torch.zeros((), dtype=dtype), torch.ones((), dtype=dtype))
    assert tensor[1, 1] != 0
    expanded = Packed.of(tensor).expand()
    assert torch.equal(expanded.view(BITS[dtype]), tensor.view(BITS[dtype]))


def test_a_negative_zero_counts_as_zero():
    """Masking a negative weight by multiplication leaves one; it must not cost memory."""
    tensor = torch.tensor([[-0.0, 1.0, -0.0], [0.0, -2.0, -0.0]])
    packed = Packed.of(tensor)
    assert packed.values.tolist() == [1.0, -2.0]
    assert torch.equal(packed.expand(), tensor)


@pytest.mark.parametrize("numel", [10, 80, 83])
def test_a_hardly_sparse_matrix_is_not_packed(numel):
    tensor = torch.ones(1, numel)
    assert Packed.of(tensor) is None
    tensor[0, : int(0.2 * numel)] = 0
    assert Packed.of(tensor) is None
    tensor[0, : int(0.3 * numel)] = 0
    assert Packed.of(tensor) is not None


def test_packing_does_not_share_memory():
    tensor = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    packed = Packed.of(tensor)
    tensor.fill_(7.0)
    assert packed.expand().tolist() == [[1.0, 0.0], [0.0, 2.0]]
    packed.expand().fill_(9.0)
    assert packed.expand().tolist() == [[1.0, 0.0], [0.0, 2.0]]
