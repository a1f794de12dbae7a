"""Writes files and folders completely or not at all: under a temporary name, synced to disk, then renamed.

A process killed at any moment leaves the last whole version readable; what it left half-written is removed by the next
write.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from pinscher.errors import InputError


@contextlib.contextmanager
def whole(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """A fresh folder to write in; it takes the place of `folder`, synced to disk, when the block ends well.

    If the block raises, `folder` is left as it was.
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = fresh_name(folder)
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(fresh, ignore_errors=True)
    if folder.exists():  # otherwise `old` is the last whole one: a process was killed between two renames
        shutil.rmtree(old, ignore_errors=True)
    fresh.mkdir()
    try:
        yield fresh
        for path in [*sorted(fresh.rglob("*")), fresh]:
            _sync(path)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    _sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def fresh_name(folder: Path) -> Path:
    """The temporary folder that `whole` gives for `folder`."""
    return folder.with_name(f".{folder.name}.new")


def last_whole(folder: str | os.PathLike[str]) -> Path:
    """The folder, or its predecessor if a process was killed between two renames: that one is whole."""
    folder = Path(folder)
    old = folder.with_name(f".{folder.name}.old")
    return old if not folder.exists() and old.exists() else folder


def remove(folder: str | os.PathLike[str]) -> None:
    """Removes a folder; a process killed meanwhile leaves no half of it under its name."""
    folder = Path(folder)
    gone = folder.with_name(f".{folder.name}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def write_text(path: str | os.PathLike[str], text: str) -> Path:
    """Writes a text file that is whole or not there."""
    return write_bytes(path, text.encode())


def write_bytes(path: str | os.PathLike[str], content: bytes) -> Path:
    """Writes a file that is whole or not there."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.new")
    try:
        fresh.write_bytes(content)
        _sync(fresh)
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    return path


def check_file(path: str | os.PathLike[str], flag: str) -> None:
    """Raises InputError if a file cannot be written there, before any work is done for it."""
    path = Path(path)
    if path.is_dir():
        raise InputError(f"{path} is a folder: give {flag} the name of a file.")
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir():
        raise InputError(f"cannot write {path}: {above} is a file. Give {flag} another name.")
    if not os.access(path if path.exists() else above, os.W_OK):
        raise InputError(f"cannot write {path}: you may not write there. Give {flag} another name.")


def readable(count: float) -> str:
    """Bytes in kB or MB, with about three digits."""
    return f"{count / 1e6:.2f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
