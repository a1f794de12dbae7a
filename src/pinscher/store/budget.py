"""Which sparsity makes the small file fit a size."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from torch import Tensor

from pinscher.errors import InputError
from pinscher.store.small import is_packed, matrix_bytes

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
ENTRY = 160  # bytes of the file's header for each tensor, generously


def parse(text: str) -> int:
    """Bytes from 20MB, 1.5GiB, 300000."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in UNITS:
        raise InputError(f"--target-size must be a size such as 20MB, not {text!r}.")
    return int(float(match[1]) * UNITS[match[2].upper()])


def file_bytes(state: Mapping[str, Tensor], prunable: Collection[str], sparsity: float) -> int:
    """The size of the small file if the prunable matrices had this sparsity, all alike."""
    total, seen = 0, set()
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tensor.shape)
        if key in seen:
            continue
        seen.add(key)
        if is_packed(tensor):
            kept = round((1 - sparsity) * tensor.numel()) if name in prunable else tensor.numel()
            rows, columns = tensor.shape
            total += matrix_bytes(rows, columns, kept) + 3 * ENTRY
        else:
            total += tensor.numel() * tensor.element_size() + ENTRY
    return total


def sparsity_for(size: int, state: Mapping[str, Tensor], prunable: Collection[str]) -> float:
    """The lowest sparsity, in steps of 0.1 %, with which the file is no larger than `size` bytes."""
    for per_mille in range(1000):
        if file_bytes(state, prunable, per_mille / 1000) <= size:
            return per_mille / 1000
    least = file_bytes(state, prunable, 0.999)
    raise InputError(
        f"--target-size {size / 1e6:.1f} MB is out of reach: with nearly all prunable weights gone the file still has "
        f"{least / 1e6:.1f} MB, most of it embeddings. Ask for more, or take a smaller model."
    )
