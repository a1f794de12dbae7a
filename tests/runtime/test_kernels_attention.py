"""Attention in native code, in fp32 and in int16, against numpy; and encoders that go from one to the other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pinscher import native
from pinscher.runtime.kernels import KINDS
from pinscher.store.quantize import quantize

CORE = native.core()
ISAS = CORE.isas()
# Of the largest value: int16 rounds weights to 1 in 32,766, and scores to a little more.
LIMITS = [pytest.param(False, 2e-6, id="fp32"), pytest.param(True, 2e-3, id="int16")]


def attention(q, k, v, shorts: bool, isa: str = "", relative=None) -> np.ndarray:
    out = np.empty_like(q)
    CORE.attention(isa, shorts, q, k, v, relative, out)
    return out


def reference(q, k, v, relative=None) -> np.ndarray:
    scores = k.T.astype(np.float64) @ q.astype(np.float64)
    if relative is not None:
        keys, queries = scores.shape
        scores += relative[np.arange(queries)[None] - np.arange(keys)[:, None] + keys - 1]
    weights = np.exp(scores - scores.max(0))
    return v @ (weights / weights.sum(0))


def tokens_of(width: int, count: int, seed: int, size: float = 1.0) -> np.ndarray:
    return (size * np.random.default_rng(seed).standard_normal((width, count))).astype(np.float32)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("shorts", "limit"), LIMITS)
@settings(max_examples=50, deadline=None)
@given(
    width=st.integers(1, 80),
    queries=st.integers(1, 150),
    keys=st.integers(1, 150),
    size=st.sampled_from([0.0, 1e-20, 0.1, 1.0, 3.0]),
    seed=st.integers(0, 1000),
)
def test_any_shape_and_size(isa, shorts, limit, width, queries, keys, size, seed):
    q, k, v = tokens_of(width, queries, seed), tokens_of(width, keys, seed + 1, size), tokens_of(width, keys, seed + 2)
    q /= np.float32(np.sqrt(width))
    found = attention(q, k, v, shorts, isa)
    assert np.abs(found - reference(q, k, v)).max() <= limit * np.abs(v).max()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("shorts", "limit"), LIMITS)
@settings(max_examples=30, deadline=None)
@given(keys=st.integers(1, 150), least=st.sampled_from([1e-30, 1e-6, 0.01]), seed=st.integers(0, 1000))
@example(keys=1, least=1e-30, seed=416)  # one token, whose values are so small that their inverse is infinite
def test_values_of_very_different_tokens(isa, shorts, limit, keys, least, seed):
    """Each token has a scale of its own, which goes into the weights: small ones lose nothing that can be seen."""
    q, k, v = tokens_of(16, 30, seed), tokens_of(16, keys, seed + 1), tokens_of(16, keys, seed + 2)
    v *= np.exp(np.random.default_rng(seed).uniform(np.log(least), 0, keys)).astype(np.float32)
    assert np.abs(attention(q, k, v, shorts, isa) - reference(q, k, v)).max() <= limit * np.abs(v).max()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("times", "limit"), [(1, 2e-3), (10, 4e-3), (100, 1.5e-2)])
def test_a_large_feature_leaves_the_others_most_of_their_precision(isa, times, limit):
    q, k, v = tokens_of(64, 128, 0), tokens_of(64, 128, 1), tokens_of(64, 128, 2)
    q /= np.float32(8)
    v[5] *= times
    others = np.arange(64) != 5
    found, wanted = attention(q, k, v, True, isa)[others], reference(q, k, v)[others]
    assert np.linalg.norm(found - wanted) <= limit * np.linalg.norm(wanted)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shorts", [False, True])
def test_values_that_are_nothing_give_nothing(isa, shorts):
    q, k = tokens_of(8, 20, 0), tokens_of(8, 33, 1)
    assert (attention(q, k, np.zeros_like(k), shorts, isa) == 0).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("shorts", "limit"), LIMITS)
@pytest.mark.parametrize("count", [1, 7, 40, 129])
def test_distances_count(isa, shorts, limit, count):
    q, k, v = (tokens_of(20, count, seed, 0.5) for seed in range(3))
    relative = tokens_of(1, 2 * count - 1, 4, 2)[0]
    found = attention(q, k, v, shorts, isa, relative)
    assert np.abs(found - reference(q, k, v, relative)).max() <= limit * np.abs(v).max()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shorts", [False, True])
def test_one_key_takes_it_all(isa, shorts):
    """Scores so far apart that all weights but one are nothing: the value comes out, to the last unit."""
    k, v = tokens_of(16, 70, 0), tokens_of(16, 70, 1)
    k *= 30 / np.linalg.norm(k, axis=0)
    assert np.abs(attention(k, k, v, shorts, isa) - v).max() <= 2e-4


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_spoils_what_it_touches(isa, bad):
    clean = [tokens_of(10, 50, seed) for seed in range(3)]
    before = attention(*clean, True, isa)
    for which, spoilt in ((0, np.s_[:, 5]), (1, np.s_[:, :]), (2, np.s_[:, :])):  # a token's numbers have one scale
        inputs = [part.copy() for part in clean]
        inputs[which][3, 5] = bad
        found = attention(*inputs, True, isa)
        hit = np.zeros(found.shape, bool)
        hit[spoilt] = True
        assert np.isnan(found[hit]).all()
        assert (found[~hit] == before[~hit]).all()


def test_what_does_not_fit_is_refused():
    q = tokens_of(4, 6, 0)
    for k, v, relative in (
        (q[:3].copy(), q, None),
        (q, q[:, :5].copy(), None),
        (q[:, :0].copy(), q[:, :0].copy(), None),
        (q, q, np.zeros(10, np.float32)),
    ):
        with pytest.raises(ValueError, match="not fit"):
            attention(q, k, v, True, relative=relative)


@pytest.mark.parametrize("isa", ISAS)
def test_the_shorter_gelu(isa):
    x = np.concatenate([np.linspace(-12, 12, 4001), [-1e30, -100.0, 0.0, 100.0]]).astype(np.float32)
    found = x.copy()
    CORE.activate(isa, "gelu_short", found)
    wanted = torch.nn.functional.gelu(torch.from_numpy(x).double()).numpy()
    assert (np.abs(found - wanted) <= 5e-5 + 1.2e-5 * np.abs(wanted)).all()
    odd = np.array([np.nan], np.float32)
    CORE.activate(isa, "gelu_short", odd)
    assert np.isnan(odd).all()


WIDTH = 384


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shorts", [False, True])
def test_a_query_is_the_same_beside_any_others(isa, shorts):
    """Threads cut sequences anywhere, and kernels take as many queries at once as are left."""
    random = np.random.default_rng(0)
    for _ in range(40):
        q, k, v = (random.standard_normal((96, 192)).astype(np.float32) for _ in range(3))
        whole = attention(q / 10, k, v, shorts, isa)
        for some in (slice(0, 96), slice(96, 192), slice(16, 64)):
            assert (attention(np.ascontiguousarray(q[:, some] / 10), k, v, shorts, isa) == whole[:, some]).all()


def encoder_of(kinds: list[str], middle: int, heads: int, width: int = WIDTH) -> object:
    """Two layers; each kind is that of one of the four matrices."""
    random = np.random.default_rng(3)

    def matrix(rows: int, columns: int, kind: str) -> object:
        weight = random.standard_normal((rows, columns)).astype(np.float32) / np.float32(np.sqrt(0.2 * columns))
        weight[random.random(weight.shape) >= 0.2] = 0
        codes, scale = quantize(torch.from_numpy(weight))
        if KINDS[kind].coded:
            return CORE.Matrix.from_i8(codes.numpy(), scale.numpy(), kind)
        return CORE.Matrix.from_f32((codes * scale[:, None]).numpy(), kind)

    shapes = [(3 * width, width), (width, width), (middle, width), (width, middle)]
    norm = [np.ones(width, np.float32), np.zeros(width, np.float32)]
    layers = []
    for _ in range(2):
        made = [matrix(*shape, kind) for shape, kind in zip(shapes, kinds, strict=True)]
        layers.append(CORE.Layer(made, [None] * 4, norm * 2, 1e-5))
    return CORE.Encoder(width, heads, "gelu", layers)


def hidden_of(encoder, x: np.ndarray, lengths: list[int], threads: int, isa: str = "") -> np.ndarray:
    out = np.empty_like(x)
    encoder.run(CORE.Pool(threads), isa, x, [], lengths, out, None, False)
    return out


# The last three go round evenly: threads take whole sequences.
LENGTHS = [[1], [33], [128], [129], [40, 1, 90], [200, 256], [64] * 9, [30, 100, 5, 90, 128, 7, 60, 140]]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("heads", [6, 4])  # of 64 numbers, a whole number of which makes a block of rows; of 96
@pytest.mark.parametrize("kind", ["i8", "groups"])
def test_the_number_of_threads_changes_nothing(kind, lengths, heads):
    """One thread goes from a head's products to its attention at once, four do one after the other; or each takes some
    sequences, or some tokens, through all layers."""
    encoder = encoder_of([kind] * 4, 500, heads)
    x = tokens_of(sum(lengths), WIDTH, 0)
    one = hidden_of(encoder, x, lengths, 1)
    assert np.isfinite(one).all()
    for threads in (2, 4):
        assert (hidden_of(encoder, x, lengths, threads) == one).all()


@pytest.mark.parametrize("lengths", [[33], [40, 1, 60]], ids=str)
@pytest.mark.parametrize("kind", ["i8", "groups"])
def test_two_threads_go_from_wide_products_to_attention_at_once(kind, lengths):
    """Of 768 features there are blocks enough for both, and too few tokens to give each its own."""
    encoder = encoder_of([kind] * 4, 500, 12, 768)
    x = tokens_of(sum(lengths), 768, 0)
    assert (hidden_of(encoder, x, lengths, 2) == hidden_of(encoder, x, lengths, 1)).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("heads", [6, 4])
def test_first_tokens_alone_are_the_same(kind, lengths, heads):
    encoder = encoder_of([kind] * 4, 500, heads)
    x = tokens_of(sum(lengths), WIDTH, 5)
    starts = np.cumsum([0, *lengths[:-1]])
    for threads in (1, 2):
        firsts = np.full((len(lengths), WIDTH), np.nan, np.float32)
        encoder.run(CORE.Pool(threads), "", x, [], lengths, firsts, None, True)
        assert (firsts == hidden_of(encoder, x, lengths, threads)[starts]).all()


def test_first_tokens_alone_have_no_other_states():
    encoder, x = encoder_of(["f32"] * 4, 500, 6), tokens_of(9, WIDTH, 0)
    out, every = np.empty((1, WIDTH), np.float32), np.empty((27, WIDTH), np.float32)
    with pytest.raises(ValueError, match="first tokens alone"):
        encoder.run(CORE.Pool(1), "", x, [], [9], out, every, True)
    with pytest.raises(ValueError, match="do not fit"):
        encoder.run(CORE.Pool(1), "", x, [], [4, 5], out, None, True)


# Of the four matrices of a layer, and how far activations of their narrowest bits may put the last hidden state off.
MIXED = [
    (["i8"] * 4, 4e-3),
    (["i8", "f32"] * 2, 4e-3),
    (["f32", "i8"] * 2, 4e-3),
    (["dense", "f32", "i8", "f32"], 4e-3),
    (["groups"] * 4, 2.5e-2),
    (["dense8"] * 4, 2.5e-2),
    (["groups", "i8", "dense8", "f32"], 2e-2),
    (["f32", "groups", "i8", "dense8"], 2e-2),
    (["i8", "dense8", "f32", "groups"], 2e-2),
]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("kinds", "limit"), MIXED, ids=["-".join(kinds) for kinds, _ in MIXED])
@pytest.mark.parametrize("middle", [500, 1600])
def test_coded_layers_are_close_to_fp32(isa, kinds, limit, middle):
    """The weights are the same numbers; what differs are activations in int16 or int8."""
    x = tokens_of(150, WIDTH, 1)
    exact = hidden_of(encoder_of(["f32"] * 4, middle, 6), x, [100, 50], 1, isa)
    found = hidden_of(encoder_of(kinds, middle, 6), x, [100, 50], 1, isa)
    assert 0 < np.linalg.norm(found - exact) <= limit * np.linalg.norm(exact)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_that_is_not_finite_spoils_its_sequence_only(isa, kind):
    encoder = encoder_of([kind] * 4, 500, 6)
    x = tokens_of(90, WIDTH, 2)
    clean = hidden_of(encoder, x, [40, 50], 1, isa)
    for bad in (np.inf, -np.inf, np.nan):
        x[50, 3] = bad
        found = hidden_of(encoder, x, [40, 50], 1, isa)
        assert (found[:40] == clean[:40]).all()
        assert np.isnan(found[40:]).all()
