"""The native parts of an encoder, from token ids to logits, with numpy alone: what all of its faces stand on.

Arrays go in and come out. Engine hands them its own, encoder.py and heads.py hand them those of torch's tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pinscher import native
from pinscher.errors import InputError
from pinscher.models.families import ACTIVATIONS, Family, family_of, first_position
from pinscher.runtime import kernels
from pinscher.runtime.packing import Rows

Array = NDArray[Any]
Parameters = Callable[
    [str], "Array | None"
]  # a parameter in fp32 by its name below the base model; None if there is none
LEAST_BUCKETS = 4  # rows of such a table: one for a single distance, one for all others, on each side
FAR = 128  # tokens apart from which on all are equally far for a table of relative biases


class States(NamedTuple):
    """What a run gives."""

    last: Array  # [tokens, width], or one vector for each row, or what the tail makes of them
    every: Array | None  # [layers + 1, tokens, width]


class Core:
    """Embeddings and layers."""

    def __init__(self, encoder: Any, packed: list[list[Any]], config: Any, threads: int) -> None:
        self.encoder, self.packed, self.threads = encoder, packed, threads
        family = family_of(config)
        assert family is not None
        self.width, self.count = int(getattr(config, family.width)), len(packed)
        self.has_types = family.has_token_types
        self.padding = first_position(config) - 1 if family.counts_from_padding else None

    def indices(self, ids: Array, types: Array | None) -> list[Array]:
        """For each table of embeddings the rows of a batch's tokens [rows, tokens]."""
        if self.padding is None:
            positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
        else:
            real = ids != self.padding
            positions = real.cumsum(1) * real + self.padding
        return self._with_types(ids, positions, types)

    def ragged_indices(self, rows: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None) -> list[Array]:
        """The same for rows of any lengths, one behind the other."""
        parts = [self.indices(np.asarray(row, np.int64)[None], None)[1][0] for row in rows]
        ids = np.concatenate([np.asarray(row, np.int64) for row in rows])
        some = None if types is None else np.concatenate([np.asarray(row, np.int64) for row in types])
        return self._with_types(ids, np.concatenate(parts), some)

    def _with_types(self, ids: Array, positions: Array, types: Array | None) -> list[Array]:
        if not self.has_types:
            return [ids, positions]
        return [ids, positions, np.zeros_like(ids) if types is None else np.broadcast_to(types, ids.shape)]

    def run(
        self,
        hidden: Array | None,
        indices: list[Array],
        rows: Rows,
        every: bool = False,
        first: bool = False,
        tail: Tail | None = None,
    ) -> States:
        """The last hidden state of all computed tokens, or what the tail makes of it.

        Args:
            hidden: the first one instead of indices, fp32 [*rows.shape, width].
            indices: one for each table of embeddings, [*rows.shape], or [tokens] where rows were never padded.
            rows: which tokens are computed.
            every: whether all layers' outputs are wanted.
            first: whether each row's first token will do; most of the last layer is not computed then.
            tail: what comes after it.
        """
        tokens = rows.tokens
        first = first and not every and tokens > 0 and self.count > 0 and rows.are_all
        given = None if hidden is None else _plain(rows.picked(hidden), np.float32)
        chosen = [_plain(index if index.ndim == 1 else rows.picked(index), np.int64) for index in indices]
        whole = tail is None or tail.pooling == "none"
        count = len(rows.lengths) if first or not whole else tokens
        out = np.empty((count, self.width if tail is None else tail.features), np.float32)
        states = np.empty(((self.count + 1) * tokens, self.width), np.float32) if every else None
        if tokens:
            ends = None if tail is None else tail.made
            pool, isa = native.pool(self.threads), native.isa()
            self.encoder.run(pool, isa, given, chosen, rows.lengths, out, states, first, rows.hides, ends)
        return States(out, None if states is None else states.reshape(self.count + 1, tokens, self.width))


class Tail:
    """Pooling, the dense layers of a head, and unit length."""

    def __init__(
        self,
        width: int,
        pooling: str,
        steps: Sequence[tuple[Array, Array | None, str]],
        threads: int,
        normalise: bool = False,
    ) -> None:
        matrices = [kernels.Weights(dense=weight).pack("dense") for weight, _, _ in steps]
        biases = [None if bias is None else _plain(bias, np.float32) for _, bias, _ in steps]
        activations = [ACTIVATIONS.get(activation, activation) for _, _, activation in steps]
        self.pooling, self.threads = pooling, threads
        self.made = kernels.core().Tail(width, pooling, matrices, biases, activations, normalise)
        self.features = int(self.made.features)

    def run(self, pooled: Array) -> Array:
        """What becomes of vectors that are pooled already, [vectors, features]."""
        out = np.empty((len(pooled), self.features), np.float32)
        self.made.run(native.pool(self.threads), native.isa(), _plain(pooled, np.float32), out)
        return out

    def __deepcopy__(self, _: Any) -> Tail:
        return self  # nothing in it is ever changed: copies may share it


class Norms(NamedTuple):
    """What is added to variances, by the norms that do it."""

    layers: float
    embeddings: float


def build(config: Any, family: Family, packed: list[list[Any]], get: Parameters, norms: Norms, threads: int) -> Core:
    """The core of a base model.

    Args:
        config: of the model.
        family: its row.
        packed: each layer's matrices in the order of `family.products`.
        get: the other parameters.
        norms: their epsilons.
        threads: how many to use.
    """
    made = []
    for number, matrices in enumerate(packed):
        layer = f"{family.layers}.{number}."
        biases = [_joined([get(f"{layer}{name}.bias") for name in names]) for names in family.products]
        named = [f"{layer}{name}.{part}" for name in (family.attention_norm, family.mlp_norm) for part in NORM]
        made.append(kernels.core().Layer(matrices, biases, [_there(get, name) for name in named], norms.layers))
    width, heads = getattr(config, family.width), getattr(config, family.heads)
    encoder = kernels.core().Encoder(width, heads, ACTIVATIONS[getattr(config, family.activation)], made)
    if family.relative_bias:
        table = _there(get, f"{family.relative_bias}.weight")
        if len(table) < LEAST_BUCKETS:
            raise InputError(f"{family.relative_bias} has {len(table)} rows: distances need {LEAST_BUCKETS} or more.")
        encoder.set_relative(relative_table(table, config.max_position_embeddings))
    tables = [_there(get, f"{name}.weight") for name in family.embeddings]
    scale, shift = (_there(get, f"{family.embeddings_norm}.{part}") for part in NORM)
    projection, bias = None, None
    if family.projection and (weight := get(f"{family.projection}.weight")) is not None:
        projection, bias = kernels.Weights(dense=weight).pack("dense"), get(f"{family.projection}.bias")
    encoder.set_embeddings(tables, scale, shift, norms.embeddings, projection, bias)
    return Core(encoder, packed, config, threads)


NORM = ("weight", "bias")


def relative_table(biases: Array, reach: int) -> Array:
    """What is added to each score, by how far apart the two tokens are: [heads, 2 · reach - 1].

    MPNet's and T5's rule: half of the buckets [buckets, heads] for keys behind the query. Half of those are for single
    distances, the others for ever longer stretches up to FAR.
    """
    ahead = np.arange(1 - reach, reach)
    half = len(biases) // 2
    single = half // 2
    apart = np.abs(ahead)
    with np.errstate(divide="ignore"):
        stretches = np.log(apart.astype(np.float32) / single) / math.log(FAR / single) * (half - single)
    far = np.minimum(single + np.where(apart < single, 0, stretches).astype(np.int64), half - 1)
    buckets = np.where(ahead < 0, half, 0) + np.where(apart < single, apart, far)
    return np.ascontiguousarray(biases[buckets].T)


def _there(get: Parameters, name: str) -> Array:
    found = get(name)
    assert found is not None, name
    return found


def _plain(array: Array, kind: Any) -> Array:
    return np.ascontiguousarray(array, dtype=kind)


def _joined(biases: list[Array | None]) -> Array | None:
    some = [bias for bias in biases if bias is not None]
    return np.concatenate(some) if len(some) == len(biases) else None
