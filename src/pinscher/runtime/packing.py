"""Which tokens of a batch are computed: those that the attention mask shows, row behind row, without padding."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Rows(NamedTuple):
    """The computed tokens of a batch."""

    shape: tuple[int, int]  # rows and tokens of the batch
    seen: Array | None  # bool, of that shape: what is computed; None for everything
    lengths: list[int]  # of each row that has computed tokens
    hides: list[int]  # how far a row's first visible token is in, where its first token is hidden; else 0

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def are_all(self) -> bool:
        """Whether every row has computed tokens."""
        return len(self.lengths) == self.shape[0]

    def picked(self, some: Array) -> Array:
        """Of something for every token, what is computed, one behind the other."""
        flat = (self.shape[0] * self.shape[1], *some.shape[2:])
        return some.reshape(flat) if self.seen is None else some[self.seen]

    def placed(self, some: Array) -> Array:
        """The opposite: [*shape, width], with zeros for what is not computed."""
        if self.seen is None:
            return some.reshape(*self.shape, some.shape[1])
        out = np.zeros((*self.shape, some.shape[1]), some.dtype)
        out[self.seen] = some
        return out


def whole(shape: tuple[int, int]) -> Rows:
    """Every token of a batch."""
    return Rows(shape, None, [shape[1]] * shape[0], [0] * shape[0])


def visible(mask: Array | None, shape: tuple[int, int]) -> Rows:
    """The tokens that a mask shows, and every row's first one, which poolers and heads read even where it is hidden.

    A row without a visible token has none: there is nothing to attend to.
    """
    seen = None if mask is None or mask.all() else mask.astype(bool)
    if seen is None:
        return whole(shape)
    any_seen = seen.any(1)
    hides = seen.argmax(1)[any_seen]
    seen = seen.copy()
    seen[:, 0] = any_seen
    return Rows(shape, seen, seen.sum(1)[any_seen].tolist(), hides.tolist())


def ragged(lengths: list[int]) -> Rows:
    """Rows of any lengths that were never padded."""
    return Rows((len(lengths), max(lengths, default=0)), None, lengths, [0] * len(lengths))
