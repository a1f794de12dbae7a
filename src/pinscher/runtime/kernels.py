"""Weights in the kernels' layout, and products with them."""

from __future__ import annotations

import functools
import sys
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pinscher import native
from pinscher.errors import InputError
from pinscher.runtime import cpus
from pinscher.store import integers
from pinscher.store.integers import Coded

Array = NDArray[Any]
QUAD = 4  # inputs of a group
MOST_THREADS = 1024  # far beyond that OpenMP ends the process, since the system refuses


def core() -> Any:
    """The extension; only asked for where it is known to be there."""
    found = native.core()
    if found is None:
        raise InputError("the sparse runtime needs pinscher's native code: reinstall it with a C++ compiler at hand.")
    return found


def threads_of(threads: int | None) -> int:
    """As many threads as were asked for, or as torch uses if it is there; never more than there are CPUs.

    Threads wait awake for each other: two on one CPU would take it from each other.
    """
    if threads is None:
        torch, most = sys.modules.get("torch"), cpus.sustained()
        return most if torch is None else min(torch.get_num_threads(), most)
    most = cpus.allowed()
    if not isinstance(threads, int) or isinstance(threads, bool) or not 1 <= threads <= MOST_THREADS:
        raise InputError(f"threads {threads!r} is not possible: give a number from 1 to {MOST_THREADS}.")
    if threads > most:
        plural = "" if most == 1 else "s"
        given = f"this process may use {most} CPU{plural}: the model gets {most} thread{plural}"
        warnings.warn(f"threads={threads}, but {given}.", stacklevel=_level_of_caller())
    return min(threads, most)


def _level_of_caller() -> int:
    """How many calls above the function that asks this is the first one from outside pinscher."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "pinscher":
        frame, level = frame.f_back, level + 1
    return level


class OutOfRangeError(InputError, IndexError):
    """An index beyond its table; an IndexError too, since that is what PyTorch raises."""


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

    dense: Array | None = None  # fp32
    codes: Coded | None = None

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self._some().shape
        return rows, columns

    def _some(self) -> Array:
        some = self.dense if self.codes is None else self.codes.codes
        assert some is not None
        return some

    @functools.cached_property
    def counts(self) -> Counts:
        kept = self._some() != 0
        rows, columns = kept.shape
        whole = np.ascontiguousarray(kept[:, : columns // QUAD * QUAD]).view(np.uint32)  # four booleans each
        groups = np.count_nonzero(whole) + np.count_nonzero(kept[:, columns // QUAD * QUAD :].any(1))
        return Counts(int(np.count_nonzero(kept)), int(groups), kept.size, rows * -(-columns // QUAD))

    def as_codes(self) -> Coded:
        return self.codes if self.codes is not None else integers.coded(self._numbers())

    def _numbers(self) -> Array:
        if self.dense is not None:
            return self.dense
        assert self.codes is not None
        return integers.numbers(*self.codes)

    def pack(self, kind: str) -> Any:
        """The matrix as the kernels want it: one of KINDS."""
        if KINDS[kind].coded:
            made = self.as_codes()
            return core().Matrix.from_i8(_plain(made.codes, np.int8), _plain(made.scale, np.float32), kind)
        return core().Matrix.from_f32(_plain(self._numbers(), np.float32), kind)


def _plain(array: Array, kind: Any) -> Array:
    return np.ascontiguousarray(array, dtype=kind)


def stacked(parts: list[Weights]) -> Weights:
    """Matrices with the same inputs as one, row after row."""
    if len(parts) == 1:
        return parts[0]
    if all(part.codes is not None for part in parts):
        codes = [part.as_codes() for part in parts]
        return Weights(codes=Coded(np.concatenate([c.codes for c in codes]), np.concatenate([c.scale for c in codes])))
    return Weights(dense=np.concatenate([part._numbers() for part in parts]))


def multiply(matrix: Any, x: Array, bias: Array | None, threads: int, then: str = "none") -> Array:
    """Of x [tokens, inputs], in fp32: [tokens, outputs]."""
    out = np.empty((x.shape[0], matrix.rows), np.float32)
    if x.shape[0]:
        matrix.multiply(native.pool(threads), native.isa(), x, bias, then, out)
    return out
