"""Codes and scales: symmetric, a scale a row, exact in bfloat16; the search never makes a layer's output worse."""

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pinscher import native
from pinscher.errors import InputError
from pinscher.store import integers
from pinscher.store.quantize import LARGEST, TRIED, Quantized, dequantize, quantize
from tiny_store import bits, identical

KINDS = list(LARGEST)


def weights(rows: int, columns: int, seed: int = 0, density: float = 0.6, heavy: bool = False) -> torch.Tensor:
    random = np.random.default_rng(seed)
    made = random.standard_t(2, (rows, columns)) if heavy else random.normal(0, 1, (rows, columns))
    made *= np.exp(random.normal(0, 2, (rows, 1)))
    return torch.from_numpy((made * (random.random((rows, columns)) < density)).astype(np.float32))


def hurt(weight: torch.Tensor, made: Quantized, importance: torch.Tensor | None = None) -> np.ndarray:
    """The squared error of each row [rows], every input by its importance, in double precision."""
    error = weight.double().numpy() - made.codes.double().numpy() * made.scale.double().numpy()[:, None]
    weighed = np.ones(weight.shape[1]) if importance is None else importance.double().numpy()
    return (error**2) @ weighed


@st.composite
def tensors(draw: st.DrawFn, columns: int = 40) -> torch.Tensor:
    shape = draw(st.integers(1, 12)), draw(st.integers(1, columns))
    made = weights(*shape, draw(st.integers(0, 2**31)), draw(st.sampled_from([0.1, 0.5, 1.0])), draw(st.booleans()))
    return made * 10.0 ** draw(st.integers(-20, 15))


@pytest.mark.parametrize("values", KINDS)
@pytest.mark.parametrize("search", [True, False])
@settings(max_examples=60, deadline=None)
@given(weight=tensors())
def test_codes_and_scales_are_what_the_file_can_hold(values, search, weight):
    before = weight.clone()
    codes, scale = quantize(weight, values, search=search)
    assert codes.dtype == torch.int8
    assert codes.shape == weight.shape
    assert int(codes.abs().max()) <= LARGEST[values]
    assert scale.dtype == torch.float32
    assert scale.shape == weight.shape[:1]
    assert torch.equal(scale, scale.bfloat16().float())
    assert (scale >= 0).all()
    assert (codes[weight == 0] == 0).all()
    assert (codes.sign() * weight.sign() >= 0).all()
    assert identical(weight, before)


@pytest.mark.parametrize("values", KINDS)
@settings(max_examples=100, deadline=None)
@given(weight=tensors())
def test_without_search_the_largest_weight_of_a_row_is_the_largest_code(values, weight):
    """bfloat16 rounds the scale by up to 0.2 %: 127 must not become 126 or overflow."""
    codes, scale = quantize(weight, values, search=False)
    largest = weight.abs().argmax(1)
    rows = torch.arange(len(weight))[weight.abs().amax(1) > 0]
    assert (codes[rows, largest[rows]].abs() == LARGEST[values]).all()
    error = (weight.double() - codes.double() * scale.double()[:, None]).abs()
    assert (error <= scale.double()[:, None] * 0.5001).all()  # every code is the nearest one


@pytest.mark.parametrize("values", KINDS)
def test_rounding_the_scale_up_or_down_keeps_the_largest_code(values):
    """Largest weights between two bfloat16 numbers, all the way through."""
    weight = torch.linspace(1.0, 2.0, 3001)[:, None]
    codes, scale = quantize(weight, values, search=False)
    assert (codes == LARGEST[values]).all()
    assert len(set(scale.tolist())) > 100
    assert (scale * LARGEST[values] > weight[:, 0]).any()
    assert (scale * LARGEST[values] < weight[:, 0]).any()


@pytest.mark.parametrize("values", KINDS)
@pytest.mark.parametrize("weighed", [False, True])
@settings(max_examples=60, deadline=None)
@given(weight=tensors(), seed=st.integers(0, 1000))
def test_the_search_is_never_worse_than_no_search(values, weighed, weight, seed):
    importance = torch.from_numpy(np.random.default_rng(seed).exponential(1, weight.shape[1]) ** 3) if weighed else None
    found = hurt(weight, quantize(weight, values, importance), importance)
    plain = hurt(weight, quantize(weight, values, search=False), importance)
    assert (found <= plain * (1 + 1e-5)).all()


@pytest.mark.parametrize("values", KINDS)
@pytest.mark.parametrize("weighed", [False, True])
def test_the_search_finds_the_best_of_what_it_tries(values, weighed):
    """Against every scale that may be tried, in double precision, one row at a time."""
    weight = weights(30, 64, seed=3, heavy=True)
    importance = torch.rand(64, generator=torch.Generator().manual_seed(0)) ** 4 if weighed else None
    found = hurt(weight, quantize(weight, values, importance), importance)
    most = LARGEST[values]
    for row, least in zip(weight, found, strict=True):
        tried = []
        for share in TRIED[values]:
            scale = (row.abs().max() / most * share).bfloat16().double()
            codes = torch.round(row.double() / scale).clamp(-most, most) if scale > 0 else torch.zeros(64)
            made = Quantized(codes[None], scale[None])
            tried.append(hurt(row[None], made, importance)[0])
        assert least <= min(tried) * (1 + 1e-5)


def test_the_search_is_better_where_codes_are_coarse():
    weight = weights(64, 256, seed=1, density=1.0)
    for values, share in {"int8": 1.0, "int6": 0.999, "int4": 0.85}.items():
        found, plain = quantize(weight, values), quantize(weight, values, search=False)
        assert (hurt(weight, found) / hurt(weight, plain)).mean() <= share


def test_the_search_serves_the_inputs_that_matter():
    """A large weight on an input that is always zero should not take the range from the others."""
    weight = torch.full((1, 65), 0.037)
    weight[0, ::3] = -0.021
    weight[0, 64] = 1.0
    importance = torch.ones(65)
    importance[64] = 0.0
    blind, seeing = quantize(weight, "int4"), quantize(weight, "int4", importance)
    assert seeing.scale < blind.scale
    assert hurt(weight, seeing, importance)[0] < hurt(weight, blind, importance)[0]
    assert identical(quantize(weight, "int4", torch.full((65,), 7.0)).codes, blind.codes)  # all alike: as without


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("values", KINDS)
def test_weights_that_are_not_finite_are_refused(bad, values):
    weight = torch.ones(3, 4)
    weight[1, 2] = bad
    with pytest.raises(InputError, match="not finite"):
        quantize(weight, values)


@pytest.mark.parametrize("values", KINDS)
@pytest.mark.parametrize("search", [True, False])
def test_rows_of_zeros_and_empty_matrices_are_no_trouble(values, search):
    weight = weights(5, 9, density=1.0)
    weight[2] = 0
    codes, scale = quantize(weight, values, search=search)
    assert not codes[2].any()
    assert scale[2] == 0
    assert identical(dequantize(codes, scale)[2], torch.zeros(9))
    for shape in ((0, 0), (0, 4), (4, 0)):
        made = quantize(torch.empty(shape), values, search=search)
        assert dequantize(*made).shape == shape


@pytest.mark.parametrize("search", [True, False])
@pytest.mark.parametrize("largest", [1e-37, 2e-38, 1e-39, 1e-41, 1.5e-45])
def test_rows_too_small_for_a_scale_stay_near_what_they_were(largest, search):
    """bfloat16 has few digits below 1e-38 and none below 1e-40, but a code is never a wrong one."""
    weight = torch.zeros(2, 40)
    weight[:, :3] = torch.tensor([largest, largest / 2, -largest / 7])
    codes, scale = quantize(weight, "int8", search=search)
    assert (codes[weight == 0] == 0).all()
    error = (weight.double() - codes.double() * scale.double()[:, None]).abs()
    reach = torch.maximum(scale.double() * 0.5001, torch.tensor(127 * 2.0**-134, dtype=torch.float64))
    clipped = codes.abs() == 127
    assert (error[~clipped] <= reach[:, None].expand_as(error)[~clipped]).all()
    assert not clipped[:, 1:].any()  # half of the largest weight is not the largest code


@pytest.mark.parametrize("values", KINDS)
@pytest.mark.parametrize("search", [True, False])
@pytest.mark.parametrize("share", [1.0, 0.999, 0.998, 0.996, 0.99, 0.5])
def test_the_largest_numbers_there_are_stay_finite(values, search, share):
    weight = torch.tensor([[1.0, -0.5, 0.25, 0.0]]) * torch.finfo(torch.float32).max * share
    made = quantize(weight, values, search=search)
    back = dequantize(*made)
    assert torch.isfinite(back).all()
    assert ((back - weight).abs() <= weight.abs().max() / LARGEST[values] * 0.6).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_any_type_are_taken_at_their_value(dtype):
    weight = weights(6, 20, seed=2).to(dtype)
    assert identical(quantize(weight).codes, quantize(weight.float()).codes)


def test_looking_at_few_rows_at_a_time_changes_nothing():
    weight = weights(50, 33, seed=4)
    importance = torch.rand(33)
    whole = quantize(weight, "int6", importance)
    for block in (1, 33, 100):
        with mock.patch.object(integers, "BLOCK", block):
            parts = quantize(weight, "int6", importance)
        assert identical(parts.codes, whole.codes)
        assert identical(parts.scale, whole.scale)


@settings(max_examples=150, deadline=None)
@given(
    shape=st.tuples(st.integers(0, 20), st.integers(0, 70)),
    power=st.integers(-149, 127),
    seed=st.integers(0, 2**31),
)
def test_native_dequantising_is_the_reference(shape, power, seed):
    random = np.random.default_rng(seed)
    codes = torch.from_numpy(random.integers(-128, 128, shape).astype(np.int8))
    scale = torch.from_numpy(np.ldexp(random.uniform(0, 2, shape[0]), power).astype(np.float32))
    fast = dequantize(codes, scale)
    with mock.patch.object(native, "core", return_value=None):
        slow = dequantize(codes, scale)
    with np.errstate(over="ignore"):
        by_hand = codes.numpy().astype(np.float32) * scale.numpy()[:, None]
    assert native.core() is not None
    assert identical(fast, slow)
    assert bits(fast) == by_hand.tobytes()
