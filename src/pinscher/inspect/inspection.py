"""Analyses the matrices of any checkpoint: zeros, pattern, dead rows and columns, rank, size in each codec.

inspect(checkpoint, tensors, places, sizes) -> Inspection          said(inspection) -> what to do with it, in words
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from pinscher.errors import InputError
from pinscher.files import readable
from pinscher.inspect import patterns
from pinscher.inspect.sources import Checkpoint
from pinscher.models.names import Place, head_axis, head_size, short_blocks
from pinscher.models.rank import rank as numerical_rank

Sizes = Callable[[Tensor], dict[str, int]]


@dataclass(frozen=True)
class Matrix:
    """One matrix, outputs first. `rank` is None if it was not requested, `sizes` is empty if the matrix holds NaN."""

    name: str
    layer: str
    kind: str
    shape: tuple[int, int]
    zeros: int
    pattern: patterns.Pattern
    rank: int | None
    sizes: dict[str, int]
    is_finite: bool = True

    @property
    def weights(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def sparsity(self) -> float:
        return self.zeros / max(1, self.weights)

    @property
    def full_rank(self) -> int:
        return min(self.shape)


@dataclass
class Inspection:
    """The analysis of a checkpoint."""

    model: str
    matrices: list[Matrix]
    tensors: int  # in the whole checkpoint
    parameters: int
    can_export: bool
    notes: list[str] = field(default_factory=list)
    sensitivity: dict[str, Any] | None = None

    def totals(self, key: Callable[[Matrix], str]) -> dict[str, dict[str, Any]]:
        """Sums over the matrices with the same key, in order."""
        groups: dict[str, list[Matrix]] = {}
        for matrix in self.matrices:
            groups.setdefault(key(matrix), []).append(matrix)
        return {name: total(members) for name, members in groups.items()}

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for a file."""
        rows = [asdict(m) | {"sparsity": m.sparsity, "full_rank": m.full_rank} for m in self.matrices]
        return {
            "model": self.model,
            "matrices": rows,
            "kinds": self.totals(lambda m: m.kind),
            "layers": self.totals(lambda m: m.layer),
            "whole": total(self.matrices),
            "notes": self.notes,
            "words": said(self),
            "sensitivity": self.sensitivity,
        }


def total(members: Sequence[Matrix]) -> dict[str, Any]:
    """Sums over some matrices."""
    weights, zeros = sum(m.weights for m in members), sum(m.zeros for m in members)
    sizes: dict[str, int] = {}
    for matrix in members:
        for name, size in matrix.sizes.items():
            sizes[name] = sizes.get(name, 0) + size
    ranks = [(m.rank, m.full_rank) for m in members if m.rank is not None]
    return {
        "matrices": len(members),
        "weights": weights,
        "zeros": zeros,
        "sparsity": zeros / max(1, weights),
        "patterns": _counted(m.pattern.name for m in members),
        "dead_rows": sum(m.pattern.dead_rows for m in members),
        "dead_columns": sum(m.pattern.dead_columns for m in members),
        "rank": sum(r for r, _ in ranks) / max(1, sum(full for _, full in ranks)) if ranks else None,
        "sizes": sizes,
    }


def _counted(names: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return counts


# ------------------------------------------------------------ looking


def inspect(
    checkpoint: Checkpoint,
    found: Sequence[tuple[Place, Tensor]],
    sizes: Sizes,
    *,
    layers: str | None = None,
    rank: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Inspection:
    """Analyses every matrix.

    Args:
        checkpoint: where they come from.
        found: the matrices with their places.
        sizes: bytes of a matrix, outputs first, in each codec.
        layers: a regular expression; only matrices whose name matches it are analysed.
        rank: also compute the rank, which takes most of the time.
        progress: called with the numbers of matrices done and in total.
    """
    chosen = [pair for pair in found if layers is None or _expression(layers).search(pair[0].name)]
    if not chosen:
        seen = ", ".join(place.name for place, _ in list(found)[:4]) or "none"
        raise InputError(
            f"{checkpoint.place} has no matrix {f'that --layers {layers!r} names' if layers else 'to look at'}. "
            f"Matrices seen: {seen}{', …' if len(found) > 4 else ''}."
        )
    blocks = list(dict.fromkeys(place.block for place, _ in found))
    short = dict(zip(blocks, short_blocks(blocks), strict=True))
    head = head_size(checkpoint.config)
    matrices = []
    for number, (place, tensor) in enumerate(chosen, 1):
        matrices.append(_matrix(place, tensor, short[place.block], head, sizes, rank))
        if progress is not None:
            progress(number, len(chosen))
    tensors = checkpoint.tensors
    can_export = checkpoint.folder is not None and (checkpoint.folder / "config.json").exists()
    parameters = sum(tensor.numel() for tensor in tensors.values())
    return Inspection(checkpoint.place, matrices, len(tensors), parameters, can_export, list(checkpoint.notes))


def _expression(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise InputError(f"--layers {text!r} is not a regular expression ({error}).") from None


def _matrix(place: Place, tensor: Tensor, layer: str, head: int, sizes: Sizes, rank: bool) -> Matrix:
    weight = (tensor.T if place.transposed else tensor).detach().float()
    alive = weight != 0
    axis = head_axis(place.kind)
    pattern = patterns.find(alive.numpy(), 0 if axis is None else head, axis or 0)
    is_finite = bool(torch.isfinite(weight).all())
    return Matrix(
        name=place.name,
        layer=layer,
        kind=place.kind,
        shape=(weight.shape[0], weight.shape[1]),
        zeros=weight.numel() - int(alive.sum()),
        pattern=pattern,
        rank=numerical_rank(weight.numpy()) if rank and is_finite else None,
        sizes=sizes(weight.contiguous()) if is_finite else {},
        is_finite=is_finite,
    )


# ------------------------------------------------------------ in words


def said(found: Inspection) -> list[str]:
    """A summary in sentences, with the commands that use it."""
    whole = total(found.matrices)
    names = whole["patterns"]
    mix = ", ".join(f"{count} {name}" for name, count in names.items())
    lines = [
        f"{whole['zeros']:,} of {whole['weights']:,} weights in {whole['matrices']} matrices are zero "
        f"({whole['sparsity']:.1%}): {mix}."
    ]
    if set(names) == {"dense"}:
        lines.append("Nothing is pruned. `pinscher prune` prunes while it fine-tunes, `--sensitivity` says where.")
    lines += _said_of_sizes(found, whole)
    lines += _said_of_dead(found.matrices)
    if any(m.pattern.family == "n:m" for m in found.matrices):
        lines.append(
            "Sparse tensor cores of GPUs use N:M along inputs; pinscher's own kernels and codecs treat it like any "
            "other zeros."
        )
    thin = [m for m in found.matrices if m.rank is not None and m.rank * sum(m.shape) < m.weights - m.zeros]
    if thin:
        lines.append(
            f"{len(thin)} {'matrix has' if len(thin) == 1 else 'matrices have'} such a low rank that two thin factors "
            f"would have fewer numbers than weights are left, for example {thin[0].name} (rank {thin[0].rank})."
        )
    bad = [m.name for m in found.matrices if not m.is_finite]
    if bad:
        lines.append(f"{len(bad)} of them hold NaN or infinity, first {bad[0]}: they have no rank and no size.")
    return lines


def _said_of_sizes(found: Inspection, whole: Mapping[str, Any]) -> list[str]:
    sizes: dict[str, int] = whole["sizes"]
    if not sizes:
        return []
    best = min(sizes, key=lambda name: sizes[name])
    plain = 4 * sum(m.weights for m in found.matrices if m.is_finite)
    line = (
        f"In fp32 these matrices are {readable(plain)}, in INT8 with the codec {best} {readable(sizes[best])}, "
        f"{plain / sizes[best]:.1f} times smaller."
    )
    if found.can_export and whole["zeros"]:
        line += f" `pinscher export {found.model} --output DIR` writes that."
    return [line]


def _said_of_dead(matrices: Sequence[Matrix]) -> list[str]:
    lines = []
    empty = [m.name for m in matrices if m.pattern.name == "empty"]
    if empty:
        lines.append(f"{len(empty)} {'is' if len(empty) == 1 else 'are'} empty: only the bias is left of {empty[0]}.")
    heads = sum(m.pattern.dead_heads for m in matrices)
    if heads:
        lines.append(f"Dead attention heads, counted separately in each matrix: {heads}.")
    rows, columns = (sum(getattr(m.pattern, name) for m in matrices) for name in ("dead_rows", "dead_columns"))
    if rows or columns:
        lines.append(
            f"{rows:,} rows (outputs that are only their bias) and {columns:,} columns (inputs that nobody reads) are "
            "dead. They take almost no space in the small file; `pinscher export --shrink` removes dead features and "
            "heads."
        )
    return lines
