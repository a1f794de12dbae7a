"""Which kernel each matrix gets: what is fastest on this machine, unless it would cost too much accuracy."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from pinscher.runtime import kernels
from pinscher.runtime.encoder import Layers, native_layers
from pinscher.runtime.families import Family
from pinscher.runtime.kernels import Weights

MODES = ("auto", "int8", "fp32")


def kind_of(weights: Weights, mode: str) -> str:
    """"int8", "fp32" or "dense", whichever the mode allows and is faster for this density."""
    kind = "fp32" if mode == "fp32" else "int8"
    return kind if weights.density < break_even(kind) else "dense"


@functools.cache
def break_even(kind: str) -> float:
    """The density at which a dense product is as fast as a sparse one, measured on this machine."""
    rows, columns, tokens, density = 384, 768, 128, 0.25
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=generator)
    weight *= torch.rand(weight.shape, generator=generator) < density
    x = torch.randn(tokens, columns, generator=generator)
    sparse, dense = (Weights(dense=weight).pack(some) for some in (kind, "dense"))
    took = _medians([lambda: kernels.multiply(sparse, x, None, 1), lambda: kernels.multiply(dense, x, None, 1)])
    return min(1.0, density * took[1] / took[0])


def _medians(jobs: list[Callable[[], Any]], turns: int = 9) -> list[float]:
    """Seconds of each, taking turns."""
    took: list[list[float]] = [[] for _ in jobs]
    for turn in range(turns + 1):
        for place, job in enumerate(jobs):
            started = time.perf_counter()
            job()
            if turn:
                took[place].append(time.perf_counter() - started)
    return [statistics.median(times) for times in took]


def chosen_layers(base: Any, family: Family, layers: list[list[Weights]], mode: str, threads: int) -> Layers:
    """The native layers of a base model, each matrix as the kind that suits it."""
    packed = [[weights.pack(kind_of(weights, mode)) for weights in layer] for layer in layers]
    return native_layers(base, family, packed, threads)
