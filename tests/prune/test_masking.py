"""The exact threshold against a plain stable sort: shapes, ties, NaN, infinities, empty sites, tiny parts."""

import contextlib
import math
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pinscher import native
from pinscher.prune import masking
from pinscher.prune.masking import Ranks, Scores, kept_reference, threshold

LARGEST = torch.finfo(torch.float32).max


def kept(scores: list[torch.Tensor], keep: int, **more: object) -> list[torch.Tensor]:
    cut = threshold([Scores(s) for s in scores], keep, **more)
    masks = []
    for i, s in enumerate(scores):
        mask = torch.zeros(s.numel(), dtype=torch.bool)
        for at, stays in cut.keeps(Scores(s), i):
            mask[at] = stays.bool()
        masks.append(mask.view(s.shape))
    return masks


def check(scores: list[torch.Tensor], keep: int) -> None:
    """With native code and without: both are the stable sort."""
    reference = kept_reference(scores, keep)
    for core in (native.core(), None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "core", lambda core=core: core)
            ours = kept(scores, keep)
        assert sum(int(m.sum()) for m in ours) == keep
        for mine, theirs in zip(ours, reference, strict=True):
            assert torch.equal(mine, theirs)


@contextlib.contextmanager
def parts_of(size: int):
    """Parts, samples and groups so small that every path is walked with little data."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("PART", size), ("SAMPLE", 40), ("GROUP", 4)):
            patch.setattr(masking, name, value)
        yield


@pytest.fixture
def small_parts():
    with parts_of(64):
        yield


few_values = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 1e-38, 1e-45, -1e-45, 3e38, math.inf, -math.inf])
any_value = st.floats(width=32, allow_nan=False).filter(lambda x: abs(x) != LARGEST)
sites = st.lists(st.lists(st.one_of(few_values, any_value), max_size=40), min_size=1, max_size=4)


@given(sites, st.floats(0, 1), st.sampled_from([torch.float32, torch.float64]))
@settings(max_examples=300, deadline=None)
def test_equals_a_stable_sort(values, fraction, dtype):
    scores = [torch.tensor(v, dtype=dtype) for v in values]
    check(scores, round(fraction * sum(s.numel() for s in scores)))


@given(sites, st.floats(0, 1))
@settings(max_examples=200, deadline=None)
def test_equals_a_stable_sort_in_small_parts(values, fraction):
    with parts_of(16):
        scores = [torch.tensor(v * 5, dtype=torch.float32) for v in values]
        check(scores, round(fraction * sum(s.numel() for s in scores)))


@pytest.mark.parametrize("density", [0.0, 0.001, 0.1, 0.5, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("draw", ["normal", "log", "equal", "few", "half-zero", "outlier"])
def test_many_scores(small_parts, density, draw):
    generator = torch.Generator().manual_seed(3)
    scores = []
    for shape in [(37, 53), (5, 7), (0, 4), (1, 1), (64, 64)]:
        normal = torch.randn(shape, generator=generator)
        scores.append(
            {
                "normal": normal,
                "log": normal.exp().pow(6),
                "equal": torch.full(shape, 0.25),
                "few": normal.sign() + normal.abs().round(),
                "half-zero": normal.relu(),
                "outlier": normal * torch.where(torch.rand(shape, generator=generator) < 0.01, 1e30, 1e-30),
            }[draw]
        )
    check(scores, math.floor(density * sum(s.numel() for s in scores) + 0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_precisions(dtype):
    scores = [torch.randn(300, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(3)]
    check(scores, 200)


def test_default_parts_with_many_scores():
    generator = torch.Generator().manual_seed(0)
    scores = [torch.randn(n, generator=generator) for n in (700_001, 1_200_000, 31)]
    for keep in (1, 17, 380_006, 1_900_031):
        check(scores, keep)


def test_a_sample_that_misleads(small_parts):
    """The bracket misses: all large scores sit where the sample does not look."""
    scores = torch.zeros(4000)
    scores[1::2] = torch.rand(2000, generator=torch.Generator().manual_seed(2))
    for keep in (10, 1000, 3000):
        check([scores], keep)


def test_nan_is_never_kept(small_parts):
    scores = [torch.randn(300, generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    scores[0][::7] = math.nan
    scores[1][-1] = math.nan
    real = sum(int((~s.isnan()).sum()) for s in scores)
    for keep in (1, 100, real):
        masks = kept(scores, keep)
        assert sum(int(m.sum()) for m in masks) == keep
        assert not any(bool((m & s.isnan()).any()) for m, s in zip(masks, scores, strict=True))
    with pytest.raises(ValueError, match="NaN"):
        kept(scores, real + 1)


def test_nan_in_one_site_does_not_disturb_the_others(small_parts):
    generator = torch.Generator().manual_seed(1)
    scores = [torch.randn(64, generator=generator), torch.randn(4096, generator=generator)]
    scores[0][5] = math.nan
    for keep in (10, 3000):
        check(scores, keep)


def test_mixed_precisions():
    check([torch.rand(50), torch.rand(50).double()], 40)


def test_keep_must_be_possible():
    for keep in (-1, 4):
        with pytest.raises(ValueError, match="cannot keep"):
            kept([torch.ones(3)], keep)


def test_scores_are_combined_part_by_part(small_parts):
    a, b = torch.rand(1000), torch.rand(1000)
    sizes = []

    def product(x, y, out):
        sizes.append(x.numel())
        return torch.mul(x, y, out=out)

    cut = threshold([Scores(a, b, combine=product)], 300)
    assert max(sizes) < 1000
    assert torch.equal(a * b >= cut.value, kept_reference([a * b], 300)[0])


@pytest.mark.parametrize("draw", ["normal", "equal", "few"])
def test_ranks_only_share_counts(small_parts, draw):
    """Two ranks hold half of every site and exchange nothing but summed counts: together they keep the same weights."""
    generator = torch.Generator().manual_seed(5)
    sites = [torch.randn(n, generator=generator) for n in (400, 90)]
    if draw != "normal":
        sites = [torch.ones_like(s) if draw == "equal" else s.round() for s in sites]
    keep = 130
    shards = [[s[: s.numel() // 3] for s in sites], [s[s.numel() // 3 :] for s in sites]]
    barrier, board, found = threading.Barrier(2, timeout=60), [None, None], [None, None]

    def rank(i):
        def add(counts):
            board[i] = counts
            barrier.wait()
            total = board[0] + board[1]
            barrier.wait()
            return total

        cut = threshold([Scores(s) for s in shards[i]], keep, Ranks(i, 2, add))
        found[i] = [torch.cat([kept.bool() for _, kept in cut.keeps(Scores(s), k)]) for k, s in enumerate(shards[i])]

    threads = [threading.Thread(target=rank, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    together = [torch.cat(pieces) for pieces in zip(*found, strict=True)]
    assert all(map(torch.equal, together, kept_reference(sites, keep)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_pruned_weights_become_plus_zero_whatever_they_were(dtype):
    weight = torch.tensor([1.5, -2.0, math.nan, math.inf, -math.inf, -0.0, 3.0, -1.0], dtype=dtype)
    kept = torch.tensor([1, 0, 0, 0, 0, 0, 0, 1], dtype=torch.int32)
    masking.zero_(weight, kept)
    assert weight.tolist() == [1.5, 0, 0, 0, 0, 0, 0, -1.0]
    assert not torch.signbit(weight[1:7]).any()
