"""The sparsity at which the small file fits a size, from the measured bytes of a weight."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import Tensor, nn

from pinscher.errors import InputError
from pinscher.store import payload
from pinscher.store.saving import matrices, untied

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
ENTRY = 120  # bytes of the file's header for each tensor: its name, type, place and checksum
MATRIX = 60  # bytes of a packed matrix beyond its entropy; its streams start and end, and small ones model worse
RESERVE = 1.01  # training changes what is packed
SAMPLE = 1 << 20  # weights that are packed to measure one


def parse(text: str) -> int:
    """Bytes from 20MB, 1.5GiB, 300000."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in UNITS:
        raise InputError(f"--target-size must be a size such as 20MB, not {text!r}.")
    return int(float(match[1]) * UNITS[match[2].upper()])


def sizer(model: nn.Module, prunable: set[str]) -> Callable[[float], int]:
    """A function from the sparsity of the prunable matrices to the bytes of the file, all matrices in INT8.

    A sample of each kind is packed and measured. Its zeros are random, which packs worse than the zeros of pruning, so
    the real file is a little smaller.
    """
    known, state = matrices(model), untied(model)
    fixed = 1000.0
    for name, tensor in state.items():
        fixed += ENTRY + (MATRIX + 0.5 * tensor.shape[0] if name in known else 0)
        if name not in known:
            fixed += tensor.numel() * tensor.element_size()
        elif name not in prunable:
            fixed += _bytes_a_weight(_sample([tensor])) * tensor.numel()
    sites = [state[name] for name in state if name in known and name in prunable]
    weights = sum(site.numel() for site in sites)
    sample = _sample(sites)
    order = torch.rand(sample.shape, generator=torch.Generator().manual_seed(0))

    def size(sparsity: float) -> int:
        return round(fixed + weights * _bytes_a_weight(sample * (order >= sparsity)))

    return size


def sparsity_for(size: int, model: nn.Module, prunable: set[str]) -> float:
    """The lowest sparsity, in steps of 0.1 %, with which the file is no larger than `size` bytes."""
    bytes_at = sizer(model, prunable)
    low, high = 0, 999
    if bytes_at(high / 1000) > size:
        raise InputError(
            f"--target-size {size / 1e6:.1f} MB is out of reach: with nearly all prunable weights gone the file still "
            f"has {bytes_at(high / 1000) / 1e6:.1f} MB, most of it embeddings. Ask for more, or take a smaller model."
        )
    while low < high:
        middle = (low + high) // 2
        if bytes_at(middle / 1000) <= size:
            high = middle
        else:
            low = middle + 1
    return low / 1000


def _sample(weights: list[Tensor]) -> Tensor:
    """Some rows of each matrix, from all over it, cut to the narrowest; at most SAMPLE weights in all."""
    columns = min(weight.shape[1] for weight in weights)
    rows = max(1, SAMPLE // (columns * len(weights)))
    spread = [weight[:: max(1, -(-len(weight) // rows)), :columns] for weight in weights]
    return torch.cat([some.detach().float().cpu() for some in spread])


def _bytes_a_weight(sample: Tensor) -> float:
    return RESERVE * len(payload.pack(sample, "int8", codecs=("entropy",))) / sample.numel()
