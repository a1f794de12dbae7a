"""A table of sparsity by layer and kind of matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pinscher.models.names import short_blocks, short_names


@dataclass(frozen=True)
class Count:
    """The zeros and weights of a site."""

    block: str
    kind: str
    zeros: int
    total: int


def table(counts: Sequence[Count], title: str) -> str:
    """Sparsity in percent, a row for each block, a column for each kind of matrix, and the whole."""
    kinds = list(dict.fromkeys(c.kind for c in counts))
    blocks = list(dict.fromkeys(c.block for c in counts))
    header = ["layer", *short_names(kinds), "layer whole"]
    rows = [
        [short, *_cells([c for c in counts if c.block == block], kinds)]
        for block, short in zip(blocks, short_blocks(blocks), strict=True)
    ]
    rows.append(["all", *_cells(counts, kinds)])
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [
        "  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
        for row in [header, *rows]
    ]
    rule = "-" * len(lines[0])
    return "\n".join([title, rule, lines[0], rule, *lines[1:-1], rule, lines[-1]])


def _cells(counts: Sequence[Count], kinds: Sequence[str]) -> list[str]:
    return [_percent([c for c in counts if c.kind == kind]) for kind in kinds] + [_percent(counts)]


def _percent(counts: Sequence[Count]) -> str:
    total = sum(c.total for c in counts)
    return f"{100 * sum(c.zeros for c in counts) / total:.1f} %" if total else "-"
