"""The global threshold of a masking: the score of the last weight that is kept.

`threshold` finds the exact k-th largest score over many matrices without sorting them, copying them together, or
`kthvalue`. It works in three steps, each of which only needs *counts* from other ranks:

1. a strided sample gives a bracket (low, high] that holds the k-th largest score almost surely;
2. one pass over all scores, cache-sized parts at a time, counts what lies above `low` and collects the groups of
   neighbours that hold a score inside the bracket;
3. radix selection among those (histograms of 16-bit digits) gives the exact score.

If the bracket missed, or holds too many scores to collect, the same radix selection runs over everything: slower,
with constant memory, and never wrong. Ties are broken by (site, flat index), so exactly `keep` positions survive.

`kept_reference` is the slow, obvious version that the tests compare with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pinscher import native

PART = 12 << 15  # scores processed together: 1.5 MB of fp32, so that every temporary stays in the cache
GROUP = 32  # neighbours folded into one minimum when looking for the few scores inside the bracket
SAMPLE = 1 << 18  # scores sampled to place the bracket
SIGMAS = 3.0  # half-width of the bracket: a miss costs a slower second pass, a wider bracket costs time in every call
COLLECT = 1 << 23  # maximum number of scores that are collected (32 MB)
DIGIT = 16  # bits of one radix step


@dataclass(frozen=True)
class Ranks:
    """The processes that each hold a part of every site, in the order of flat indices.

    Args:
        index: the rank of this process.
        size: the number of processes.
        add: sums an integer tensor over all of them.
    """

    index: int
    size: int
    add: Callable[[Tensor], Tensor]

    def count(self, number: int) -> int:
        return int(self.add(torch.tensor([number]))[0])


ALONE = Ranks(0, 1, lambda counts: counts)


class Scores:
    """The scores of one site, computed part by part from its tensors, so that they are never held as a whole.

    Args:
        tensors: contiguous tensors of one shape, from which scores are computed.
        combine: an elementwise function, called as combine(*pieces, out=buffer): returns the scores of matching pieces
            of the tensors, in the buffer or not. None if there is one tensor that holds the scores themselves.
    """

    def __init__(self, *tensors: Tensor, combine: Callable[..., Tensor] | None = None) -> None:
        self.tensors = tuple(tensor.detach().reshape(-1) for tensor in tensors)
        self.combine = combine
        self.numel = self.tensors[0].numel()
        self.native = torch.float64 if self.tensors[0].dtype == torch.float64 else torch.float32
        self.dtype = self.native

    def to(self, dtype: torch.dtype) -> Scores:
        """The same scores in another precision."""
        same = Scores(*self.tensors, combine=self.combine)
        same.dtype = dtype
        return same

    def read(self, at: slice) -> Tensor:
        """The scores of a flat slice, 1-D, fp32 or fp64; not to be written to."""
        return self._score([tensor[at] for tensor in self.tensors])

    def groups(self, rows: Tensor) -> Tensor:
        """The scores of whole groups of GROUP neighbours, 1-D."""
        whole = self.numel // GROUP * GROUP
        return self._score([t[:whole].view(-1, GROUP).index_select(0, rows).view(-1) for t in self.tensors])

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Cache-sized slices and their scores, each valid until the next one is requested."""
        # One buffer for all parts: allocating memory again costs more than the arithmetic.
        buffer = self.tensors[0].new_empty(min(PART, self.numel), dtype=self.native)
        for at in parts(self.numel):
            yield at, self._score([tensor[at] for tensor in self.tensors], buffer[: at.stop - at.start])

    def _score(self, pieces: list[Tensor], buffer: Tensor | None = None) -> Tensor:
        if self.combine is None:
            return pieces[0].to(self.dtype)
        if buffer is None:
            buffer = torch.empty_like(pieces[0], dtype=self.native)
        # bf16 and fp16 are computed in fp32; masks among the tensors keep their type.
        pieces = [piece.to(self.native) if piece.is_floating_point() else piece for piece in pieces]
        return self.combine(*pieces, out=buffer).to(self.dtype)


@dataclass(frozen=True)
class Threshold:
    """Keep every score above `value`, and of those equal to it the first `quotas[i]` of site i.

    `quotas` is None when every score equal to `value` is kept, which is the usual case: then the mask is a single
    comparison.
    """

    value: float
    quotas: tuple[int, ...] | None = None

    def keeps(self, scores: Scores, site: int) -> Iterator[tuple[slice, Tensor]]:
        """(flat slice, 1 where the weight is kept and 0 where not, as int32) for one site, part by part.

        A part is valid until the next one is requested.
        """
        left = 0 if self.quotas is None else self.quotas[site]
        buffer = scores.tensors[0].new_empty(min(PART, scores.numel), dtype=torch.int32)
        for at, values in scores.parts():
            kept = buffer[: values.numel()]
            if self.quotas is None:
                yield at, torch.ge(values, self.value, out=kept)
                continue
            equal = values == self.value
            first = equal & (equal.cumsum(0) <= left)
            left -= int(first.sum())
            yield at, torch.gt(values, self.value, out=kept).add_(first)


def zero_(weight: Tensor, kept: Tensor) -> None:
    """Sets weights to +0.0 where `kept` (int32, used up) is 0, whatever they are: NaN and infinities too.

    On a CPU clearing bits is faster than torch's masked_fill_, which is not vectorised.
    """
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()]
    weight.view(integer).bitwise_and_(kept.neg_().to(integer))


def parts(numel: int) -> Iterator[slice]:
    """Cuts range(numel) into slices that fit the cache."""
    for start in range(0, numel, PART):
        yield slice(start, min(start + PART, numel))


def threshold(scores: Sequence[Scores], keep: int, ranks: Ranks = ALONE) -> Threshold:
    """Finds the exact score of the `keep`-th largest of all scores together.

    Args:
        scores: one entry a site. Infinities are ordinary scores, NaN ranks below everything and is never kept; only the
            largest finite float itself is reserved.
        keep: how many positions survive, over all sites (and all ranks).
        ranks: the processes that hold the scores together.

    Raises:
        ValueError: if `keep` is negative, or more than the scores that are not NaN.
    """
    total = ranks.count(sum(s.numel for s in scores))
    if keep < 0 or keep > total:
        raise ValueError(f"cannot keep {keep} of {total} scores")
    if keep == 0:
        return Threshold(float("inf"), (0,) * len(scores))
    dtype = torch.float64 if any(s.dtype == torch.float64 for s in scores) else torch.float32
    scores = [s.to(dtype) for s in scores]
    found = _candidates(scores, keep, total, dtype, ranks)
    if found is None:
        inside, larger = scores, 0
        value, above, equal = _select(_Keys(scores), keep, dtype, ranks)
    else:
        inside, larger = found
        value, above, equal = _select(
            [_keys(torch.cat([s.read(slice(None)) for s in inside]))], keep - larger, dtype, ranks
        )
    if math.isnan(value):
        raise ValueError("too many scores are NaN to rank them. Did training diverge? Try a lower learning rate.")
    ties = keep - larger - above
    return Threshold(value, None if ties == equal else _quotas(inside, value, ties, ranks))


def kept_reference(scores: Sequence[Tensor], keep: int) -> list[Tensor]:
    """The slow, obvious version: sorts everything together and returns the masks (True is kept)."""
    flat = torch.cat([s.reshape(-1) for s in scores]).double()
    order = torch.sort(flat.masked_fill(flat.isnan(), -torch.inf), descending=True, stable=True)
    mask = torch.zeros(flat.numel(), dtype=torch.bool)
    mask[order.indices[:keep]] = True
    pieces = torch.split(mask, [s.numel() for s in scores])
    return [piece.view(s.shape) for piece, s in zip(pieces, scores, strict=True)]


# ---------------------------------------------------------------- the bracket


def _candidates(
    scores: Sequence[Scores], keep: int, total: int, dtype: torch.dtype, ranks: Ranks
) -> tuple[list[Scores], int] | None:
    """The scores of each site inside the bracket and how many scores are larger; None if the bracket missed."""
    low, high = _bracket(scores, keep, total, dtype, ranks)
    scratch = scores[0].tensors[0].new_empty(min(PART, max(s.numel for s in scores)), dtype=dtype)
    above_low, count, useless, collected = 0, 0, 0, []
    for site in scores:
        looked = _look(site, low, high, scratch)
        if looked is None or count + looked[1].numel() > COLLECT:
            useless = 1
            break
        above_low, count = above_low + looked[0], count + looked[1].numel()
        collected.append(Scores(looked[1]))
    above_low, count, useless = ranks.add(torch.tensor([above_low, count, useless])).tolist()
    larger = above_low - count
    return None if useless or not larger < keep <= above_low else (collected, larger)


def _bracket(scores: Sequence[Scores], keep: int, total: int, dtype: torch.dtype, ranks: Ranks) -> tuple[float, float]:
    """Two scores between which the keep-th largest lies almost surely, from a strided sample."""
    # An odd stride shares few factors with the usual row lengths, so the sample is not confined to a few columns.
    stride = max(1, total // SAMPLE) | 1
    sample = _keys(torch.cat([s.read(slice(0, s.numel, stride)) for s in scores]))
    size = ranks.count(sample.numel())
    expected = keep / total * size
    slack = SIGMAS * (expected * (1 - keep / total)) ** 0.5 + 1
    highest, lowest = int(expected - slack), int(expected + slack) + 2
    high = _select([sample], highest, dtype, ranks)[0] if highest >= 1 else math.inf
    low = _select([sample], lowest, dtype, ranks)[0] if lowest <= size else -math.inf
    return low, high


def _look(site: Scores, low: float, high: float, scratch: Tensor) -> tuple[int, Tensor] | None:
    """How many scores of a site lie above `low`, and those of them that are at most `high`; None if one is NaN."""
    plain = scratch.dtype == torch.float32 and scratch.device.type == "cpu"
    core = native.core() if plain else None
    return _look_slowly(site, low, high, scratch) if core is None else _look_natively(core, site, low, high)


def _look_natively(core: Any, site: Scores, low: float, high: float) -> tuple[int, Tensor] | None:
    whole = site.combine is None and site.tensors[0].dtype == torch.float32
    above, pieces = 0, []
    for values in [site.tensors[0]] if whole else (values for _, values in site.parts()):
        threads = native.pool(torch.get_num_threads())
        looked = core.bracket(threads, native.isa(), values.numpy(), low, high, COLLECT)
        if looked is None:
            return None
        above += looked[0]
        pieces.append(torch.from_numpy(looked[1]))
    return above, torch.cat(pieces) if pieces else torch.empty(0)


def _look_slowly(site: Scores, low: float, high: float, scratch: Tensor) -> tuple[int, Tensor] | None:
    """The same without native code.

    What is not above `low` becomes the largest float, so that a group's minimum is its smallest score above `low`: only
    groups where that is at most `high` are looked at one by one. Indicators are floats because those are what torch
    compares and sums fastest.
    """
    largest = torch.finfo(scratch.dtype).max
    whole = site.numel // GROUP * GROUP
    smallest = scratch.new_empty(whole // GROUP)
    below = 0.0
    for at, values in site.parts():
        kept = scratch[: values.numel()]
        torch.ops.aten.threshold.out(values, low, largest, out=kept)
        end = min(at.stop, whole)
        torch.amin(kept[: end - at.start].view(-1, GROUP), 1, out=smallest[at.start // GROUP : end // GROUP])
        below += kept.eq_(largest).sum().item()
    rows = smallest.le(high).nonzero().view(-1)
    pieces = [site.groups(rows), site.read(slice(whole, site.numel))]
    # A NaN was counted as above `low`, but shows in its group's minimum. Radix selection knows how to rank it.
    if smallest.isnan().any() or pieces[1].isnan().any():
        return None
    return site.numel - int(below), torch.cat([p[p.gt(low).logical_and_(p.le(high))] for p in pieces])


def _quotas(scores: Sequence[Scores], value: float, ties: int, ranks: Ranks) -> tuple[int, ...]:
    """Distributes the places left for scores equal to `value`, in the order of sites and, within a site, of ranks."""
    equal = _equal(scores, value, ranks).view(-1)
    before = equal.cumsum(0) - equal
    mine = torch.minimum(equal, (ties - before).clamp(min=0)).view(len(scores), ranks.size)[:, ranks.index]
    return tuple(mine.tolist())


def shared_out(quotas: Sequence[int], scores: Sequence[Scores], value: float, ranks: Ranks) -> tuple[int, ...]:
    """This rank's part of each site's quota, however many ranks there were when the threshold was found."""
    equal = _equal(scores, value, ranks)
    before = equal.cumsum(1) - equal
    left = (torch.tensor(quotas)[:, None] - before).clamp(min=0)
    return tuple(torch.minimum(equal, left)[:, ranks.index].tolist())


def _equal(scores: Sequence[Scores], value: float, ranks: Ranks) -> Tensor:
    """How many scores of each site are `value`, on each rank: [sites, ranks]."""
    equal = torch.zeros(len(scores), ranks.size, dtype=torch.int64)
    for i, site in enumerate(scores):
        equal[i, ranks.index] = sum(int((values == value).sum()) for _, values in site.parts())
    return ranks.add(equal)


# ---------------------------------------------------------------- radix selection


def _select(source: Iterable[Tensor], rank: int, dtype: torch.dtype, ranks: Ranks) -> tuple[float, int, int]:
    """The score of the rank-th largest key (1 is the largest), how many are larger and how many are equal."""
    top = torch.finfo(dtype).bits - DIGIT
    prefix, above, equal = 0, 0, 0
    for shift in range(top, -1, -DIGIT):
        counts = torch.zeros(1 << DIGIT, dtype=torch.int64)
        for keys in source:
            digits = keys >> shift
            if shift == top:
                digits += 1 << (DIGIT - 1)  # the top digit is signed; shift it to start at zero
            else:
                digits = digits[(digits >> DIGIT) == prefix] & ((1 << DIGIT) - 1)
            counts += torch.bincount(digits, minlength=1 << DIGIT).to(counts.device)
        counts = ranks.add(counts)
        larger = counts.flip(0).cumsum(0)
        place = int(torch.searchsorted(larger, rank - above))
        digit = (1 << DIGIT) - 1 - place
        equal = int(counts[digit])
        above += int(larger[place]) - equal
        prefix = digit - (1 << (DIGIT - 1)) if shift == top else (prefix << DIGIT) | digit
    return _score_of(prefix, dtype), above, equal


class _Keys:
    """The keys of all scores, computed again in each iteration."""

    def __init__(self, scores: Sequence[Scores]) -> None:
        self.scores = scores

    def __iter__(self) -> Iterator[Tensor]:
        return (_keys(values) for site in self.scores for _, values in site.parts())


def _keys(values: Tensor) -> Tensor:
    """Maps floats to integers of the same width and order; NaN becomes the smallest, -0.0 equals 0.0."""
    integer = _integer(values.dtype)
    bits = (values + 0.0).view(integer)
    keys = bits ^ ((bits >> (torch.iinfo(integer).bits - 1)) & torch.iinfo(integer).max)
    return keys.masked_fill_(values.isnan(), torch.iinfo(integer).min)


def _score_of(key: int, dtype: torch.dtype) -> float:
    integer = _integer(dtype)
    if key == torch.iinfo(integer).min:
        return math.nan
    bits = key if key >= 0 else key ^ torch.iinfo(integer).max
    return float(torch.tensor(bits, dtype=integer).view(dtype))


def _integer(dtype: torch.dtype) -> torch.dtype:
    return torch.int64 if dtype == torch.float64 else torch.int32
