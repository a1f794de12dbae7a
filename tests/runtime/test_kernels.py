"""The native kernels against numpy: every instruction set of this machine, ragged shapes, every density."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pinscher
from pinscher import native
from pinscher.errors import InputError
from pinscher.runtime import kernels
from pinscher.store.quantize import quantize
from tiny_accelerated import batch, model_of

CORE = native.core()
ISAS = CORE.isas()
POOL = CORE.Pool(2)


def pruned(rows: int, columns: int, density: float, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    weight = random.standard_normal((rows, columns)).astype(np.float32)
    weight[random.random((rows, columns)) >= density] = 0
    if rows > 2:
        weight[1] = 0  # an empty row, and a full one
        weight[2] = random.standard_normal(columns)
    return weight


def product(matrix, x, bias=None, then="none", isa="") -> np.ndarray:
    out = np.full((len(x), matrix.rows), np.nan, np.float32)
    matrix.multiply(POOL, isa, x, bias, then, out)
    return out


def inputs(tokens: int, columns: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((tokens, columns)).astype(np.float32)


SHAPES = {
    "rows": st.integers(1, 300),
    "columns": st.integers(1, 300),
    "tokens": st.integers(1, 200),
    "density": st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]),
    "seed": st.integers(0, 1000),
}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["f32", "dense"])
@settings(max_examples=40, deadline=None)
@given(**SHAPES)
def test_products_in_fp32(isa, kind, rows, columns, tokens, density, seed):
    weight, x = pruned(rows, columns, density, seed), inputs(tokens, columns, seed)
    bias = inputs(1, rows, seed + 1)[0]
    matrix = CORE.Matrix.from_f32(weight, kind)
    wanted = x.astype(np.float64) @ weight.T.astype(np.float64) + bias
    size = np.abs(x) @ np.abs(weight).T + 1
    assert (np.abs(product(matrix, x, bias, isa=isa) - wanted) <= 1e-6 * size * 8).all()
    assert matrix.nonzeros == (np.count_nonzero(weight) if kind == "f32" else weight.size)


def coded(weight: np.ndarray, kind: str, search: bool = False) -> tuple[object, np.ndarray]:
    """The matrix, and the weights that it stands for."""
    codes, scale = quantize(torch.from_numpy(weight), search=search)
    made = CORE.Matrix.from_i8(codes.numpy(), scale.numpy(), kind)
    return made, codes.numpy().astype(np.float64) * scale.numpy()[:, None]


CODED = [name for name, kind in kernels.KINDS.items() if kind.coded]
IN_BYTES = [name for name in CODED if kernels.KINDS[name].bits == 8]


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=40, deadline=None)
@given(**{**SHAPES, "columns": st.integers(1, 900)})
def test_products_of_codes_and_int16(isa, rows, columns, tokens, density, seed):
    """Against the same codes in double precision: what is lost are roundings of products to 1 in about 32,767."""
    matrix, weight = coded(pruned(rows, columns, density, seed), "i8")
    x = inputs(tokens, columns, seed)
    x[0] *= 1e-3  # tokens have scales of their own
    wanted = x.astype(np.float64) @ weight.T
    found = product(matrix, x, isa=isa)
    lengths = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(weight, axis=1).max()
    assert (np.abs(found - wanted) <= 2e-3 * lengths + 1e-6).all()


def as_bytes(x: np.ndarray) -> np.ndarray:
    """What 255 levels leave of each token: the middle of its range, and steps of a 254th of it."""
    low, high = x.min(1, keepdims=True), x.max(1, keepdims=True)
    middle, width = np.float32(0.5) * low + np.float32(0.5) * high, high - low
    factor = np.divide(np.float32(254), width, out=np.zeros_like(width), where=width > 1e-30)
    codes = np.rint((x - middle) * factor)
    assert np.abs(codes).max() <= 127
    return codes.astype(np.float64) * (width / np.float32(254)) + middle


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", IN_BYTES)
@settings(max_examples=40, deadline=None)
@given(**{**SHAPES, "columns": st.integers(1, 900)})
def test_products_of_bytes(isa, kind, rows, columns, tokens, density, seed):
    """To the last digits of fp32 those of the same bytes in double precision: nothing is lost in the sums.

    A token's middle times a row's total is added at the end, in fp32: the rounding goes with the largest input times
    all weights, even where they cancel.
    """
    matrix, weight = coded(pruned(rows, columns, density, seed), kind)
    x = inputs(tokens, columns, seed) + np.float32(0.7)
    x[0] *= 1e-3
    x[tokens // 2] = np.float32(-0.3)  # all the same: exact
    bias = inputs(1, rows, seed + 1)[0]
    seen = as_bytes(x)
    size = np.abs(x).max(1)[:, None] * np.abs(weight).sum(1) + np.abs(bias) + 1e-6
    found = product(matrix, x, bias, isa=isa)
    assert (np.abs(found - (seen @ weight.T + bias)) <= 1e-6 * size).all()
    assert matrix.nonzeros == (np.count_nonzero(weight) if kind == "groups" else weight.size)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", IN_BYTES)
def test_bytes_are_close_to_what_they_stand_for(isa, kind):
    matrix, weight = coded(pruned(200, 768, 0.3), kind)
    x = inputs(70, 768)
    wanted = x @ weight.T
    assert np.linalg.norm(product(matrix, x, isa=isa) - wanted) < 1.2e-2 * np.linalg.norm(wanted)


@pytest.mark.parametrize("isa", [name for name in ISAS if name != "scalar"])
def test_every_set_of_int16_kernels_agrees(isa):
    """Up to one unit of an int16: the length of a token may differ in its last bit."""
    matrix, x = coded(pruned(200, 700, 0.2), "i8", search=True)[0], inputs(130, 700)
    a, b = product(matrix, x, isa=isa), product(matrix, x, isa="scalar")
    assert np.abs(a - b).max() <= 3e-4 * np.abs(b).max()


@pytest.mark.parametrize("isa", [name for name in ISAS if name != "scalar"])
@pytest.mark.parametrize("kind", IN_BYTES)
def test_every_set_of_byte_kernels_agrees(isa, kind):
    """Sums are the same numbers; only their last rounding may differ, where a set has fused multiply-add."""
    matrix, x = coded(pruned(200, 700, 0.2), kind, search=True)[0], inputs(130, 700)
    a, b = product(matrix, x, isa=isa), product(matrix, x, isa="scalar")
    assert np.abs(a - b).max() <= 3e-7 * np.abs(b).max()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", CODED)
def test_sums_never_overflow(isa, kind):
    """The worst case: every row points the way of the token."""
    for columns in (768, 1536, 3072):
        matrix, weight = coded(np.ones((130, columns), np.float32), kind)
        x = np.ones((5, columns), np.float32)
        x[1] *= -1
        x[3:, ::4] *= -1  # both ends of the range
        x[4] *= -1
        found = product(matrix, x, isa=isa)
        wanted = x @ weight.T
        assert np.abs(found / wanted - 1).max() < 0.01


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", IN_BYTES)
def test_pairs_of_the_largest_bytes_are_exact(isa, kind):
    """All signs of weights and activations at the ends of their ranges, in every place of a group."""
    signs = np.array([[1 - 2 * (n >> bit & 1) for bit in range(8)] for n in range(256)], np.int8)
    codes = np.ascontiguousarray(np.tile(127 * signs, (1, 12)))
    matrix = CORE.Matrix.from_i8(codes, np.ones(256, np.float32), kind)
    x = np.ascontiguousarray(np.tile(127 * signs, (1, 12)).astype(np.float32)[1:-1])  # of each some of either sign
    assert (product(matrix, x, isa=isa) == x @ codes.T.astype(np.float32)).all()


@pytest.mark.parametrize("kind", IN_BYTES)
def test_more_inputs_than_sums_have_room_for_are_refused(kind):
    most = 131072
    full = np.full((1, most), 127, np.int8)
    x = np.stack([np.full(most, value, np.float32) for value in (1, -1)])
    x[:, 0] *= -1
    found = product(CORE.Matrix.from_i8(full, np.ones(1, np.float32), kind), x)
    assert np.allclose(found[:, 0], [127 * (most - 2), -127 * (most - 2)], rtol=1e-5)
    with pytest.raises(ValueError, match="too many inputs"):
        CORE.Matrix.from_i8(np.zeros((1, most + 1), np.int8), np.ones(1, np.float32), kind)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", kernels.KINDS)
def test_a_token_that_is_not_finite_spoils_no_other(isa, kind):
    weight = pruned(140, 260, 0.3)
    matrix = coded(weight, kind)[0] if kind in CODED else CORE.Matrix.from_f32(weight, kind)
    x = inputs(40, 260)
    clean = product(matrix, x, isa=isa)
    for bad in (np.nan, np.inf, -np.inf):
        for where in (np.s_[7], np.s_[7, 0], np.s_[7, 100]):
            spoilt = x.copy()
            spoilt[where] = bad
            found = product(matrix, spoilt, isa=isa)
            assert not np.isfinite(found[7, 2])
            others = np.arange(40) != 7
            assert (found[others] == clean[others]).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", CODED)
@pytest.mark.parametrize("columns", [50, 201, 770])
def test_one_token_is_multiplied_in_fp32(isa, kind, columns):
    matrix, weight = coded(pruned(140, columns, 0.3), kind)
    x, bias = inputs(1, columns), inputs(1, 140, 2)[0]
    wanted = x.astype(np.float64) @ weight.T + bias
    assert np.abs(product(matrix, x, bias, isa=isa) - wanted).max() <= 3e-6 * np.abs(x @ weight.T).max() + 1e-5


def gelu(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (1 + np.array([math.erf(v / math.sqrt(2)) for v in x]))


REFERENCE = {
    "gelu": gelu,
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "relu": lambda x: np.maximum(x, 0),
    "none": lambda x: x,
}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", REFERENCE)
def test_activations(isa, name):
    x = np.concatenate([np.linspace(-12, 12, 4001), np.linspace(-80, 80, 999)]).astype(np.float32)
    found = x.copy()
    CORE.activate(isa, name, found)
    assert np.abs(found - REFERENCE[name](x.astype(np.float64))).max() <= 2e-6 * 12
    odd = np.array([np.nan, 0.0, 1e30, -1e30], np.float32)
    CORE.activate(isa, name, odd)
    assert np.isnan(odd[0])
    assert odd[1] == 0
    assert odd[2] == np.float32(1e30)
    assert odd[3] == np.float32(-1e30) if name == "none" else abs(odd[3]) < 1e-6


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("then", [name for name in REFERENCE if name != "none"])
@pytest.mark.parametrize("tokens", [1, 33])
def test_a_product_is_followed_by_its_activation(isa, then, tokens):
    weight, x = pruned(37, 50, 0.4), inputs(tokens, 50)
    matrix = CORE.Matrix.from_f32(weight, "f32")
    plain = product(matrix, x, isa=isa).astype(np.float64)
    wanted = REFERENCE[then](plain.ravel()).reshape(plain.shape)
    assert np.abs(product(matrix, x, then=then, isa=isa) - wanted).max() < 1e-5


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(0, 5000),
    low=st.sampled_from([-math.inf, -1.0, 0.0, 0.3]),
    width=st.sampled_from([0.0, 0.01, 0.5, math.inf]),
    seed=st.integers(0, 99),
)
def test_the_bracket_of_a_threshold(isa, count, low, width, seed):
    random = np.random.default_rng(seed)
    scores = random.standard_normal(count).astype(np.float32)
    scores[random.random(count) < 0.1] = 0.3
    scores[random.random(count) < 0.02] = math.inf
    low, high = float(np.float32(low)), float(np.float32(low + width))
    wanted = scores[(scores > low) & (scores <= high)]
    above, inside = CORE.bracket(POOL, isa, scores, low, high, count)
    assert above == (scores > low).sum()
    assert (inside == wanted).all()
    assert len(inside) == len(wanted)
    if len(wanted):
        assert CORE.bracket(POOL, isa, scores, low, high, len(wanted) - 1) is None
    if count:
        scores[count // 2] = math.nan
        assert CORE.bracket(POOL, isa, scores, low, high, count) is None


def test_work_is_counted():
    matrix = CORE.Matrix.from_f32(pruned(30, 40, 0.5), "f32")
    product(matrix, inputs(7, 40))
    product(matrix, inputs(1, 40))
    assert matrix.work == 8 * matrix.nonzeros


@pytest.mark.parametrize(
    "change",
    [
        {"x": np.zeros((3, 41), np.float32)},
        {"x": np.zeros((3, 40), np.float64)},
        {"x": np.zeros((40, 3), np.float32).T},
        {"x": np.zeros((3, 40), np.int64)},
        {"x": np.zeros(40, np.float32)},
        {"out": np.zeros((3, 31), np.float32)},
        {"out": np.zeros((2, 30), np.float32)},
        {"bias": np.zeros(31, np.float32)},
        {"then": "sine"},
        {"isa": "abacus"},
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(change):
    matrix = CORE.Matrix.from_f32(pruned(30, 40, 0.5), "f32")
    given = {
        "isa": "",
        "x": np.zeros((3, 40), np.float32),
        "bias": None,
        "then": "none",
        "out": np.zeros((3, 30), np.float32),
    } | change
    with pytest.raises((ValueError, TypeError)):
        matrix.multiply(POOL, *(given[name] for name in ("isa", "x", "bias", "then", "out")))


def test_codes_below_the_least_are_refused():
    with pytest.raises(ValueError, match="below -127"):
        CORE.Matrix.from_i8(np.full((2, 2), -128, np.int8), np.ones(2, np.float32), "i8")


def test_a_kind_that_does_not_fit_is_refused():
    numbers, scale = np.ones((2, 2), np.float32), np.ones(2, np.float32)
    with pytest.raises(ValueError, match="made of codes"):
        CORE.Matrix.from_f32(numbers, "groups")
    with pytest.raises(ValueError, match="made of numbers"):
        CORE.Matrix.from_i8(numbers.astype(np.int8), scale, "f32")
    with pytest.raises(ValueError, match="no such kind"):
        CORE.Matrix.from_i8(numbers.astype(np.int8), scale, "abacus")
    assert [CORE.Matrix.from_f32(numbers, kind).kind for kind in ("f32", "dense")] == ["f32", "dense"]


def test_a_pool_of_nobody_is_refused():
    with pytest.raises(ValueError, match="one thread at least"):
        CORE.Pool(0)


@pytest.mark.parametrize("isa", kernels.core().isas())
def test_every_instruction_set_runs_whole_models(isa, monkeypatch):
    monkeypatch.setenv("PINSCHER_ISA", isa)
    model = model_of("bert")
    fast = pinscher.accelerate(model, mode="fp32")
    assert torch.allclose(fast(**batch()).logits, model(**batch()).logits, atol=2e-5)


def test_an_unknown_instruction_set_is_refused(monkeypatch):
    monkeypatch.setenv("PINSCHER_ISA", "abacus")
    with pytest.raises(InputError, match="this machine has"):
        pinscher.accelerate(model_of("bert"))
