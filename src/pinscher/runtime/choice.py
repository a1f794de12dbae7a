"""Which kernel each matrix gets: what is fastest on this machine, unless it would cost too much accuracy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pinscher import native
from pinscher.runtime.encoder import Layers, embedded, native_layers
from pinscher.runtime.families import Family
from pinscher.runtime.kernels import Weights

MODES = ("auto", "int8", "fp32")
# The density from which on a dense product is as fast, on the slower of the shapes that benchmarks/latency.py times. A
# table, not a measurement at every start: the same model must give the same outputs every time. 0: fp32 is faster.
BREAK_EVEN = {
    "avx512": {"int8": 0.6, "fp32": 0.45},
    "avx2": {"int8": 0.75, "fp32": 0.6},
    "neon": {"int8": 0.75, "fp32": 0.6},
    "scalar": {"int8": 0.0, "fp32": 0.85},
}
LIMIT = 0.02  # how far int8 may move the last hidden state; see docs/runtime.md for what that means for predictions
SAMPLE = 64  # tokens that are looked at for it


def kind_of(weights: Weights, mode: str) -> str:
    """The kind that the mode allows and that is fastest for this density."""
    limits = BREAK_EVEN[native.isa()]
    kind = "int8" if mode != "fp32" and limits["int8"] else "fp32"
    return kind if weights.density < limits[kind] else "dense"


def chosen_layers(base: Any, family: Family, layers: list[list[Weights]], mode: str, threads: int) -> Layers:
    """The native layers of a base model, each matrix as the kind that suits it."""
    kinds = [[kind_of(weights, mode) for weights in layer] for layer in layers]
    packed = [[w.pack(kind) for w, kind in zip(*pair, strict=True)] for pair in zip(layers, kinds, strict=True)]
    if mode == "auto":
        _mend_(base, family, layers, kinds, packed, threads)
    return native_layers(base, family, packed, threads)


def _mend_(
    base: Any,
    family: Family,
    layers: list[list[Weights]],
    kinds: list[list[str]],
    packed: list[list[Any]],
    threads: int,
) -> None:
    """Replaces int8 matrices by fp32 ones until the hidden states of a sample are off by LIMIT at most.

    What is compared is the last hidden state of random tokens, as a whole and, if it is too far off, with one matrix
    of int8 at a time; those that hurt most go first.
    """
    sample = _sample(base)
    places = [(i, j) for i, layer in enumerate(kinds) for j, kind in enumerate(layer) if kind == "int8"]
    exact = [[m if k != "int8" else w.pack("fp32") for w, k, m in zip(*row, strict=True)]
             for row in zip(layers, kinds, packed, strict=True)]  # fmt: skip
    wanted = _hidden(base, family, exact, threads, sample)

    def off(mixed: list[list[Any]]) -> float:
        return float((_hidden(base, family, mixed, threads, sample) - wanted).norm() / wanted.norm())

    if not places or off(packed) <= LIMIT:
        return
    alone = {}
    for i, j in places:
        mixed = [list(layer) for layer in exact]
        mixed[i][j] = packed[i][j]
        alone[i, j] = off(mixed)
    for i, j in sorted(places, key=lambda place: -alone[place]):
        packed[i][j] = exact[i][j]
        if off(packed) <= LIMIT:
            return


def _sample(base: Any) -> Tensor:
    """Embeddings of random tokens, always the same."""
    generator = torch.Generator().manual_seed(0)
    longest = min(SAMPLE, base.config.max_position_embeddings - 2)
    ids = torch.randint(0, base.config.vocab_size, (1, max(1, longest)), generator=generator)
    with torch.no_grad():
        return embedded(base, ids, None, None, None).float()


def _hidden(base: Any, family: Family, packed: list[list[Any]], threads: int, sample: Tensor) -> Tensor:
    found: Tensor = native_layers(base, family, packed, threads)(sample, [], (1, sample.shape[1]), None, False)[0]
    return found
