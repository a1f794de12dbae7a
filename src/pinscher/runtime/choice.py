"""Chooses the kernel of each matrix: the fastest on this machine, unless it would cost too much accuracy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pinscher import native
from pinscher.errors import InputError
from pinscher.models.families import max_positions
from pinscher.runtime import packing
from pinscher.runtime.core import Core
from pinscher.runtime.kernels import KINDS, Weights, core
from pinscher.store.streams import DamagedError

Array = NDArray[Any]
Lazy = Callable[[], Weights]  # a matrix, read when it is asked for
BITS = {"auto": 8, "int8": 16, "w8a8": 8, "fp32": 32}  # of activations, at least
GUARDED = ("auto",)  # modes in which a matrix that suffers gets more bits
LIMIT = 0.02  # how far int8 may move the last hidden state; see docs/runtime.md for what that means for predictions
MODES = tuple(BITS)
SAMPLE = 64  # tokens that are looked at for it


def kind_of(weights: Weights, bits: int) -> str:
    """The fastest kind whose activations have that many bits at least.

    What a nonzero, a group or a weight costs is in native/isas.inc.
    """
    costs, counts = core().costs(native.isa()), weights.counts
    least = bits if weights.shape[1] <= core().MOST_INPUTS else max(bits, 16)
    allowed = [name for name, kind in KINDS.items() if kind.bits >= least]
    return min(allowed, key=lambda name: costs[name] * getattr(counts, KINDS[name].units))


def gains(weights: Iterable[Weights], bits: int, mode: str) -> bool:
    """Whether a model has a matrix to make fast. Without zeros only int8 activations do, where they are asked for."""
    least = max(bits, 16) if mode in GUARDED else bits
    return any(kind_of(some, least) != "dense" for some in weights)


def bits_for(model: Any, mode: str) -> int:
    """The fewest bits of activations in a model.

    What generates multiplies one token at a time, mostly: groups of inputs have nothing to gain then.
    """
    return max(BITS[mode], 16) if getattr(model, "can_generate", lambda: False)() else BITS[mode]


def packed_as(name: str, weights: Lazy, bits: int) -> Any:
    """A matrix in the kernels' layout; only its own numbers are in memory meanwhile."""
    try:
        found = weights()
        return found.pack(kind_of(found, bits))
    except DamagedError:
        raise  # which names the file and the matrix
    except InputError as error:
        raise InputError(f"{name}: {error}") from None


def chosen_layers(
    config: Any, layers: list[list[tuple[str, Lazy]]], mode: str, make: Callable[[list[list[Any]]], Core]
) -> Core:
    """The native layers of a model; each matrix, named and read in its turn, as the kind that suits it.

    Args:
        config: of the model.
        layers: the matrices of each layer.
        mode: one of MODES.
        make: makes the layers from packed matrices.
    """
    flat = [one for layer in layers for one in layer]
    packed = [packed_as(name, weights, BITS[mode]) for name, weights in flat]

    def made_of(matrices: list[Any]) -> Core:
        some = iter(matrices)
        return make([[next(some) for _ in layer] for layer in layers])

    if mode in GUARDED:
        tokens = sample(config)
        rows = packing.whole((1, tokens.shape[1]))

        def hidden(mixed: list[Any]) -> Array:
            core = made_of(mixed)
            return core.run(None, core.indices(tokens, None), rows).last

        correct_(packed, [weights for _, weights in flat], hidden)
    return made_of(packed)


def correct_(packed: list[Any], weights: list[Lazy], hidden: Callable[[list[Any]], Array]) -> None:
    """Replaces matrices by more precise ones until the hidden states of a sample are off by LIMIT at most.

    First int8 activations become int16, then int16 ones and the weights fp32. The matrices go first that hurt most for
    the time which their replacement costs: how far each alone puts the hidden states off is measured, and such errors
    add up as squares.

    Args:
        packed: the model's matrices.
        weights: where each comes from.
        hidden: the last hidden states of the sample, with these matrices.
    """
    if all(KINDS[matrix.kind].bits == 32 for matrix in packed):
        return
    exact = [
        matrix if KINDS[matrix.kind].bits == 32 else _precise(some, 32)
        for matrix, some in zip(packed, weights, strict=True)
    ]
    wanted = hidden(exact)

    def off(mixed: list[Any], by: Array) -> float:
        return float(np.linalg.norm(hidden(mixed) - by) / np.linalg.norm(wanted))

    for bits in (16, 32):
        if off(packed, wanted) <= LIMIT:
            return
        places = [number for number, matrix in enumerate(packed) if KINDS[matrix.kind].bits < bits]
        if bits == 32:
            better = exact
        else:
            better = [_precise(weights[n], bits) if n in places else matrix for n, matrix in enumerate(packed)]
        best, gain = hidden(better), {}
        for number in places:
            hurt = off([*better[:number], packed[number], *better[number + 1 :]], best)
            cost = _cost(better[number]) - _cost(packed[number])
            gain[number] = hurt**2 / max(cost, 1e-3 * _cost(packed[number]))
        for number in sorted(places, key=lambda number: -gain[number]):
            packed[number] = better[number]
            if off(packed, wanted) <= LIMIT:
                return


def _precise(weights: Lazy, bits: int) -> Any:
    found = weights()
    return found.pack(kind_of(found, bits))


def _cost(matrix: Any) -> float:
    """What a product with it takes, where a weight of a dense fp32 one takes 1."""
    cost: float = core().costs(native.isa())[matrix.kind] * matrix.units
    return cost


def sample(config: Any) -> Array:
    """Random tokens [1, some], always the same."""
    count = min(SAMPLE, max_positions(config))
    return np.random.RandomState(0).randint(0, config.vocab_size, (1, count), dtype=np.int64)
