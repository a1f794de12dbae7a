"""Weights in the kernels' layout, and products with them."""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pinscher import native
from pinscher.errors import InputError
from pinscher.runtime import cpus
from pinscher.store.quantize import Quantized, quantize

QUAD = 4  # inputs of a group
MOST_THREADS = 1024  # far beyond that OpenMP ends the process, since the system refuses


def core() -> Any:
    """The extension; only asked for where it is known to be there."""
    found = native.core()
    if found is None:
        raise InputError("the sparse runtime needs pinscher's native code: reinstall it with a C++ compiler at hand.")
    return found


def threads_of(threads: int | None) -> int:
    """As many threads as were asked for, or as torch uses; never more than there are CPUs.

    Threads wait awake for each other: two on one CPU would take it from each other.
    """
    most = cpus.allowed()
    if threads is None:
        return min(torch.get_num_threads(), cpus.sustained())
    if not isinstance(threads, int) or isinstance(threads, bool) or not 1 <= threads <= MOST_THREADS:
        raise InputError(f"threads {threads!r} is not possible: give a number from 1 to {MOST_THREADS}.")
    if threads > most:
        plural = "" if most == 1 else "s"
        given = f"this process may use {most} CPU{plural}: the model gets {most} thread{plural}"
        warnings.warn(f"threads={threads}, but {given}.", stacklevel=3)
    return min(threads, most)


class Counts(NamedTuple):
    """What the kinds of matrices are made of."""

    nonzeros: int
    groups: int  # of QUAD inputs of an output, not all of them zeros
    weights: int
    all_groups: int


@dataclass(frozen=True)
class Kind:
    """How the native code lays out a matrix and multiplies it; see native/matrix.h."""

    coded: bool  # whether weights are int8
    bits: int  # of the activations
    units: str  # the field of Counts that says how much work it is


KINDS = {
    "groups": Kind(coded=True, bits=8, units="groups"),
    "dense8": Kind(coded=True, bits=8, units="all_groups"),
    "i8": Kind(coded=True, bits=16, units="nonzeros"),
    "f32": Kind(coded=False, bits=32, units="nonzeros"),
    "dense": Kind(coded=False, bits=32, units="weights"),
}


@dataclass(frozen=True)
class Weights:
    """A matrix [outputs, inputs], as numbers or as the codes of a stored one."""

    dense: Tensor | None = None  # fp32
    codes: Quantized | None = None

    @property
    def shape(self) -> tuple[int, int]:
        some = self.dense if self.codes is None else self.codes.codes
        assert some is not None
        return some.shape[0], some.shape[1]

    @functools.cached_property
    def counts(self) -> Counts:
        some = self.dense if self.codes is None else self.codes.codes
        assert some is not None
        kept = some != 0
        rows, columns = kept.shape
        whole = kept[:, : columns // QUAD * QUAD].view(rows, -1, QUAD).any(2).sum()
        rest = kept[:, columns // QUAD * QUAD :].any(1).sum()
        return Counts(int(kept.sum()), int(whole + rest), kept.numel(), rows * -(-columns // QUAD))

    def as_codes(self) -> Quantized:
        return self.codes if self.codes is not None else quantize(self._numbers())

    def _numbers(self) -> Tensor:
        if self.dense is not None:
            return self.dense.detach().float()
        assert self.codes is not None
        return self.codes.codes.float().mul_(self.codes.scale[:, None])

    def pack(self, kind: str) -> Any:
        """The matrix as the kernels want it: one of KINDS."""
        if KINDS[kind].coded:
            made = self.as_codes()
            return core().Matrix.from_i8(made.codes.contiguous().numpy(), made.scale.contiguous().numpy(), kind)
        return core().Matrix.from_f32(self._numbers().contiguous().numpy(), kind)


def stacked(parts: list[Weights]) -> Weights:
    """Matrices with the same inputs as one, row after row."""
    if all(part.codes is not None for part in parts):
        codes = [part.as_codes() for part in parts]
        return Weights(codes=Quantized(torch.cat([c.codes for c in codes]), torch.cat([c.scale for c in codes])))
    return Weights(dense=torch.cat([part._numbers() for part in parts]))


def multiply(matrix: Any, x: Tensor, bias: Tensor | None, threads: int, then: str = "none") -> Tensor:
    """Of x [tokens, inputs], in fp32: [tokens, outputs]."""
    x = x.detach().float().contiguous()
    out = torch.empty(x.shape[0], matrix.rows, dtype=torch.float32)
    if x.shape[0]:
        add = None if bias is None else bias.detach().float().contiguous().numpy()
        matrix.multiply(native.pool(threads), native.isa(), x.numpy(), add, then, out.numpy())
    return out
