"""Weights as small integers: W[i, j] ≈ scale[i] · code[i, j], symmetric, one scale for each output row.

    code = round(W / scale),  |code| ≤ 127 (int8), 63 (int7), 31 (int6), 7 (int4)

The scale of a row is close to its largest weight over the largest code. Among several candidates it is the one with the
least squared error of the row, each input weighted by its mean square if there is calibration data. Scales are bfloat16
numbers, and codes are computed with the stored scale, so its rounding costs nothing. Zeros stay zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pinscher import native
from pinscher.errors import InputError

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
BLOCK = 1 << 20  # weights looked at together


class Quantized(NamedTuple):
    codes: Tensor  # int8 [rows, columns]
    scale: Tensor  # float32 [rows], every value exact in bfloat16


def quantize(
    weight: Tensor, values: str = "int8", importance: Tensor | None = None, *, search: bool = True
) -> Quantized:
    """Codes and scales of a matrix [rows, columns].

    Args:
        weight: the matrix, output rows first.
        values: "int8", "int7", "int6" or "int4".
        importance: mean square of each input [columns]; without it all inputs are equal.
        search: search for the best scale; otherwise the row's largest weight becomes the largest code.

    Raises:
        InputError: for weights that are not finite.
    """
    weight = weight.detach().float().cpu()
    if not torch.isfinite(weight).all():
        raise InputError("it holds values that are not finite (NaN or infinity)")
    rows, columns = weight.shape
    codes = torch.empty(rows, columns, dtype=torch.int8)
    scale = torch.empty(rows, dtype=torch.float32)
    step = max(1, BLOCK // max(columns, 1))
    for start in range(0, rows, step):
        part = slice(start, start + step)
        scale[part] = _scales(weight[part], values, importance, search)
        codes[part] = _codes(weight[part], scale[part], values)
    return Quantized(codes, scale)


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    """The weights in fp32, for int8 codes [rows, columns] and scales [rows]."""
    core = native.core()
    if core is None:
        return codes.float().mul_(scale[:, None])
    out = torch.empty(codes.shape, dtype=torch.float32)
    core.dequantize(codes.numpy(), scale.numpy(), out.numpy())
    return out


def _scales(weight: Tensor, values: str, importance: Tensor | None, search: bool) -> Tensor:
    if not weight.numel():
        return torch.zeros(len(weight), dtype=torch.float32)
    full = weight.abs().amax(1) / LARGEST[values]
    best = full.bfloat16().float()
    if not search:
        return best
    least = torch.full_like(full, torch.inf)
    unit = torch.where(full > 0, full, 1)[:, None]  # squares of tiny weights would vanish
    for share in TRIED[values]:
        scale = (full * share).bfloat16().float()
        error = ((weight - _codes(weight, scale, values) * scale[:, None]) / unit).square_()
        hurt = error.sum(1) if importance is None else error @ importance.float()
        better = hurt < least
        best, least = torch.where(better, scale, best), torch.where(better, hurt, least)
    return best


def _codes(weight: Tensor, scale: Tensor, values: str) -> Tensor:
    most = LARGEST[values]
    # A row of zeros, or one too small for bfloat16, has scale 0: its codes are 0.
    steps = torch.where(scale[:, None] > 0, weight / scale[:, None], 0)
    return torch.round(steps.clamp_(-most, most)).to(torch.int8)
