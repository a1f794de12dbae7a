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
@pytest.mark.parametrize("sparse", [True, False])
@settings(max_examples=40, deadline=None)
@given(**SHAPES)
def test_products_in_fp32(isa, sparse, rows, columns, tokens, density, seed):
    weight, x = pruned(rows, columns, density, seed), inputs(tokens, columns, seed)
    bias = inputs(1, rows, seed + 1)[0]
    matrix = CORE.Matrix.from_f32(weight, sparse)
    wanted = x.astype(np.float64) @ weight.T.astype(np.float64) + bias
    size = np.abs(x) @ np.abs(weight).T + 1
    assert (np.abs(product(matrix, x, bias, isa=isa) - wanted) <= 1e-6 * size * 8).all()
    assert matrix.nonzeros == (np.count_nonzero(weight) if sparse else weight.size)


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=40, deadline=None)
@given(**{**SHAPES, "columns": st.integers(1, 900)})
def test_products_in_int8(isa, rows, columns, tokens, density, seed):
    """Against the same codes in double precision: what is lost are roundings of products to 1 in about 32,767."""
    codes, scale = quantize(torch.from_numpy(pruned(rows, columns, density, seed)), search=False)
    x = inputs(tokens, columns, seed)
    x[0] *= 1e-3  # tokens have scales of their own
    matrix = CORE.Matrix.from_i8(codes.numpy(), scale.numpy())
    weight = codes.numpy().astype(np.float64) * scale.numpy()[:, None]
    wanted = x.astype(np.float64) @ weight.T
    found = product(matrix, x, isa=isa)
    lengths = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(weight, axis=1).max()
    assert (np.abs(found - wanted) <= 2e-3 * lengths + 1e-6).all()


@pytest.mark.parametrize("isa", [name for name in ISAS if name != "scalar"])
def test_every_set_of_int8_kernels_agrees(isa):
    """Up to one unit of an int16: the length of a token may differ in its last bit."""
    codes, scale = quantize(torch.from_numpy(pruned(200, 700, 0.2)))
    matrix, x = CORE.Matrix.from_i8(codes.numpy(), scale.numpy()), inputs(130, 700)
    a, b = product(matrix, x, isa=isa), product(matrix, x, isa="scalar")
    assert np.abs(a - b).max() <= 3e-4 * np.abs(b).max()


@pytest.mark.parametrize("isa", ISAS)
def test_sums_in_int16_never_overflow(isa):
    """The worst case: every row points the way of the token."""
    for columns in (768, 1536, 3072):
        weight = np.ones((130, columns), np.float32)
        codes, scale = quantize(torch.from_numpy(weight), search=False)
        matrix = CORE.Matrix.from_i8(codes.numpy(), scale.numpy())
        x = np.ones((3, columns), np.float32)
        x[1] *= -1
        found = product(matrix, x, isa=isa)
        wanted = x @ (codes.numpy() * scale.numpy()[:, None]).T
        assert np.abs(found / wanted - 1).max() < 0.01


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["f32", "i8", "dense"])
def test_a_token_that_is_not_finite_spoils_no_other(isa, kind):
    weight = pruned(140, 260, 0.3)
    codes, scale = quantize(torch.from_numpy(weight))
    if kind == "i8":
        matrix = CORE.Matrix.from_i8(codes.numpy(), scale.numpy())
    else:
        matrix = CORE.Matrix.from_f32(weight, kind == "f32")
    x = inputs(40, 260)
    clean = product(matrix, x, isa=isa)
    for bad in (np.nan, np.inf, -np.inf):
        spoilt = x.copy()
        spoilt[7] = bad
        found = product(matrix, spoilt, isa=isa)
        assert not np.isfinite(found[7, 2])
        others = np.arange(40) != 7
        assert (found[others] == clean[others]).all()


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
    matrix = CORE.Matrix.from_f32(weight, True)
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
    matrix = CORE.Matrix.from_f32(pruned(30, 40, 0.5), True)
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
    matrix = CORE.Matrix.from_f32(pruned(30, 40, 0.5), True)
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
        CORE.Matrix.from_i8(np.full((2, 2), -128, np.int8), np.ones(2, np.float32))


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
