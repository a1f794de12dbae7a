"""Weights as small integers, with numpy alone: W[i, j] ≈ scale[i] · code[i, j], symmetric, one scale a row.

    code = round(W / scale),  |code| ≤ 127 (int8), 63 (int7), 31 (int6), 7 (int4)

The scale of a row is close to its largest weight over the largest code. Among several candidates it is the one with the
least squared error of the row, each input weighted by its mean square if there is calibration data. Scales are bfloat16
numbers, and codes are computed with the stored scale, so its rounding costs nothing. Zeros stay zeros.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pinscher import native
from pinscher.errors import InputError

Array = NDArray[Any]
LARGEST = {"int8": 127, "int7": 63, "int6": 31, "int4": 7}
# Shares of the row's largest weight that are tried as the end of the range: coarse codes gain more by cutting off the
# tail.
_FINE = (1.0, 0.97, 0.94, 0.9, 0.85)
TRIED = {
    "int8": _FINE,
    "int7": _FINE,
    "int6": (1.0, 0.95, 0.9, 0.85, 0.8, 0.7),
    "int4": tuple(share / 100 for share in range(100, 34, -5)),
}
BLOCK = 1 << 15  # weights looked at together: what is made of them stays in the caches


class Coded(NamedTuple):
    codes: Array  # int8 [rows, columns]
    scale: Array  # float32 [rows], every value exact in bfloat16


def coded(weight: Array, values: str = "int8", importance: Array | None = None, *, search: bool = True) -> Coded:
    """Codes and scales of a float32 matrix [rows, columns], output rows first; for the arguments see `quantize`.

    Raises:
        InputError: for weights that are not finite.
    """
    rows, columns = weight.shape
    codes = np.empty((rows, columns), np.int8)
    scale = np.empty(rows, np.float32)
    step = max(1, BLOCK // max(columns, 1))
    # A weight far below its scale may vanish, and a scale beyond what fp32 can hold becomes infinite: both are meant.
    with np.errstate(all="ignore"):
        for start in range(0, rows, step):
            part = slice(start, start + step)
            some = np.ascontiguousarray(weight[part], dtype=np.float32)
            if not np.isfinite(some).all():
                raise InputError("it holds values that are not finite (NaN or infinity)")
            scale[part] = _scales(some, values, importance, search)
            codes[part] = _codes(some, scale[part], values)
    return Coded(codes, scale)


def numbers(codes: Array, scale: Array) -> Array:
    """The weights in fp32, for int8 codes [rows, columns] and scales [rows]."""
    out = np.empty(codes.shape, np.float32)
    core = native.core()
    if core is None:
        with np.errstate(over="ignore"):
            np.multiply(codes, scale[:, None], out=out, dtype=np.float32)
    else:
        core.dequantize(np.ascontiguousarray(codes), np.ascontiguousarray(scale), out)
    return out


def to_bfloat16(values: Array) -> Array:
    """The nearest bfloat16 numbers, ties to even, as their 16 bits; `values` are finite or infinite float32."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def from_bfloat16(bits: Array) -> Array:
    """The float32 numbers of 16 bits each."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _rounded(values: Array) -> Array:
    return from_bfloat16(to_bfloat16(values))


def _scales(weight: Array, values: str, importance: Array | None, search: bool) -> Array:
    if not weight.size:
        return np.zeros(len(weight), np.float32)
    full = np.abs(weight).max(1) / np.float32(LARGEST[values])
    best = _rounded(full)
    if not search:
        return best
    least = np.full_like(full, np.inf)
    unit = np.where(full > 0, full, np.float32(1))[:, None]  # squares of tiny weights would vanish
    for share in TRIED[values]:
        scale = _rounded(full * np.float32(share))
        error = _steps(weight, scale, values)
        error *= scale[:, None]
        np.subtract(weight, error, out=error)
        error /= unit
        error *= error
        hurt = error.sum(1) if importance is None else error @ importance
        better = hurt < least
        best, least = np.where(better, scale, best), np.where(better, hurt, least)
    return best


def _codes(weight: Array, scale: Array, values: str) -> Array:
    return _steps(weight, scale, values).astype(np.int8)


def _steps(weight: Array, scale: Array, values: str) -> Array:
    """The codes, still as floats."""
    most = np.float32(LARGEST[values])
    # A row of zeros, or one too small for bfloat16, has scale 0: its codes are 0.
    steps = np.divide(weight, scale[:, None], out=np.zeros_like(weight), where=scale[:, None] > 0)
    np.clip(steps, -most, most, out=steps)
    return np.rint(steps, out=steps)
