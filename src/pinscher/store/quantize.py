"""The codes of tensors: integers.py for torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pinscher.store import integers
from pinscher.store.integers import LARGEST, TRIED


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
    weighed = None if importance is None else importance.detach().cpu().float().numpy()
    made = integers.coded(weight.detach().cpu().float().numpy(), values, weighed, search=search)
    return Quantized(torch.from_numpy(made.codes), torch.from_numpy(made.scale))


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    """The weights in fp32, for int8 codes [rows, columns] and scales [rows]."""
    return torch.from_numpy(integers.numbers(codes.numpy(), scale.numpy()))


__all__ = ["LARGEST", "TRIED", "Quantized", "dequantize", "quantize"]
