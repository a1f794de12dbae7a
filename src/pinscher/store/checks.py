"""What every reader of a stored folder checks, with torch or without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pinscher.errors import InputError
from pinscher.models import folders
from pinscher.store.archive import VERSION, Archive
from pinscher.store.streams import DamagedError


def check_version(settings: Any, path: Path) -> None:
    """Refuses a format that this version cannot read; `settings` describe the file in the config.json at `path`."""
    version = settings.get("version") if isinstance(settings, dict) else None
    if type(version) is not int or version != VERSION:
        raise InputError(
            f"{path} says that the model has format version {str(version)[:20]!r}, this pinscher reads {VERSION}: "
            "update pinscher."
        )


def check_format(settings: Any, folder: Path) -> dict[str, Any]:
    """What a config.json says about the file (its `quantization_config`), if the file is one of ours.

    Raises:
        InputError: if it is not.
    """
    if not isinstance(settings, dict) or settings.get("quant_method") != "pinscher":
        raise InputError(f"{folder} is not stored in pinscher's format: load it with transformers and accelerate it.")
    check_version(settings, folder / folders.CONFIG)
    return settings


def check_fits(
    archive: Archive, name: str, shape: tuple[int, ...], *, is_float: bool = True, transposed: bool = False
) -> None:
    """Refuses a stored tensor that is not what the model has in its place.

    Raises:
        InputError: for another shape or type; it names file and tensor.
    """
    found, raw = archive.head(name), archive.stored(name)
    held = found.shape if found else raw.shape
    if held != shape:
        raise InputError(
            f"{archive.path(name)}: {name} is stored as {list(held)}, the model to load has {list(shape)}. For "
            "a head of another size load the model as it is and replace its head, or fine-prune it with --new-head."
        )
    if (found.is_float if found else raw.is_float) != is_float:
        raise InputError(f"{archive.path(name)}: {name} is stored in another type than the model has.")
    if found and found.transposed != transposed:
        raise DamagedError(f"{archive.path(name)}: {name} is stored the other way round than the model has it")


def check_finite(archive: Archive, name: str, values: Any) -> None:
    """Refuses NaN and infinity in what is not a matrix of a block (those are checked where they are packed)."""
    if not np.isfinite(values).all():
        raise InputError(
            f"{archive.path(name)} holds values that are not finite (NaN or infinity) in {name}, which no model is "
            "stored with: copy it again."
        )
