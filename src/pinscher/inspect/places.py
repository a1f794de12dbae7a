"""Finds the matrices of a known model among the tensors of a checkpoint. Otherwise models/names.py guesses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from pinscher.models.names import Place


def placed(tensors: Mapping[str, Tensor], places: Sequence[Place]) -> tuple[list[tuple[Place, Tensor]], int]:
    """The tensors of the model's matrices under the file's own names, and the number of matrices without one.

    These names may lack the model's prefix (`encoder.layer…` for `bert.encoder.layer…`), or have one more.
    """
    found, missing = [], 0
    for place in places:
        name = f"{place.name}.{place.parameter}"
        pieces = name.split(".")
        shorter = (".".join(pieces[cut:]) for cut in range(len(pieces) - 1) if any(map(str.isdigit, pieces[cut:])))
        hit = next((n for n in shorter if n in tensors), None)
        hit = hit or next((n for n in tensors if n.endswith(f".{name}")), None)
        if hit is None or tensors[hit].dim() != 2:
            missing += 1
        else:
            found.append((replace(place, name=hit.removesuffix(f".{place.parameter}")), tensors[hit]))
    return found, missing
