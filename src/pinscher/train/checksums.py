"""The checksums of a checkpoint: one file that lists the size and the hash of every other file of the folder.

Disks and copies flip bits. A checkpoint is hashed when it is written and again before anything of it is loaded, so a
run never continues from weights other than it saved. Those of a finished model are in the run's result.json, because
its folder is an ordinary model folder.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from pinscher.errors import InputError

NAME = "checksums.json"
FORMAT = 1
CHUNK = 1 << 20  # bytes read at a time: checkpoints can be larger than memory


class DamagedError(InputError):
    """A file differs from what was written; the message names the file and the damage."""


def write(folder: Path) -> None:
    """Writes the checksums of a folder's files."""
    (folder / NAME).write_text(json.dumps(manifest(folder), indent=1) + "\n")


def manifest(folder: Path) -> dict[str, Any]:
    """The checksums as plain data."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != NAME)
    listed = {path.relative_to(folder).as_posix(): _described(path) for path in files}
    return {"format": FORMAT, "files": listed}


def verify(folder: Path) -> None:
    """Compares a folder's files with what was written; a folder that was written without checksums is not checked.

    Raises:
        DamagedError: for the first file that is missing or differs, and for weights that do not belong to the folder.
    """
    try:
        found = json.loads((folder / NAME).read_text())
    except FileNotFoundError:
        return
    except (OSError, ValueError, RecursionError):
        found = None
    compare(folder, found, folder / NAME)


def compare(folder: Path, manifest: Any, place: Path) -> None:
    """Compares a folder's files with a manifest, which was found in the file `place`.

    Raises:
        DamagedError: as `verify`.
    """
    try:
        listed = _listed(manifest)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DamagedError(f"{place} is damaged: it does not list files with their checksums") from None
    for name, said in listed.items():
        path = folder / name
        if not path.is_file():
            raise DamagedError(f"{path} is missing")
        size = path.stat().st_size
        if size != said["size"]:
            raise DamagedError(f"{path} is damaged: it has {size:,} bytes instead of {said['size']:,}")
        if hash_of(path) != said["blake2b"]:
            raise DamagedError(f"{path} is damaged: its checksum differs from the one it was written with")
    for path in sorted(folder.glob("*.safetensors")):
        if path.name not in listed:
            raise DamagedError(f"{path} is not part of what was written")


def _listed(manifest: Any) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = manifest["files"]
    if manifest["format"] != FORMAT or not found or any(Path(name).is_absolute() or ".." in name for name in found):
        raise ValueError
    if not all(isinstance(said["size"], int) and isinstance(said["blake2b"], str) for said in found.values()):
        raise TypeError
    return found


def _described(path: Path) -> dict[str, Any]:
    return {"size": path.stat().st_size, "blake2b": hash_of(path)}


def hash_of(path: str | os.PathLike[str]) -> str:
    """The hash of a file's bytes."""
    digest = hashlib.blake2b(digest_size=32)
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
