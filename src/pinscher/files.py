"""Writes files and folders completely or not at all: under a temporary name, synced to disk, then renamed.

A process killed at any moment leaves the last whole version readable; what it left half-written is removed by the next
write.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from pinscher.errors import InputError

LONGEST = 2000  # bytes of a path; what is put beside and below it needs room too


@contextlib.contextmanager
def whole(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """A fresh folder to write in; it takes the place of `folder`, synced to disk, when the block ends well.

    If the block raises, `folder` is left as it was.
    """
    folder = _place(folder)
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
    folder = _place(folder)
    return folder.with_name(f".{folder.name}.new")


def last_whole(folder: str | os.PathLike[str]) -> Path:
    """The folder, or its predecessor if a process was killed between two renames: that one is whole."""
    folder = _place(folder)
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
    """Writes a file that is whole or not there.

    Raises:
        InputError: for what is no file, such as /dev/stdout: it would be replaced by one.
    """
    path = _place(path)
    if path.exists() and not path.is_file():
        raise InputError(f"cannot write {path}: it is a folder, a pipe or a device, not a file.")
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


def fill(folder: str | os.PathLike[str], contents: Mapping[str, bytes]) -> None:
    """Puts files into a folder that `whole` gave, by their paths in it."""
    for name, content in contents.items():
        assert not Path(name).is_absolute(), name
        assert ".." not in Path(name).parts, name
        path = Path(folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def check_file(path: str | os.PathLike[str], flag: str) -> None:
    """Raises InputError if a file cannot be written there, before any work is done for it."""
    path = Path(path)
    check_name(path, flag)
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "a pipe or a device"
        raise InputError(f"{path} is {what}: give {flag} the name of a file.")
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir():
        raise InputError(f"cannot write {path}: {above} is a file. Give {flag} another name.")
    if not os.access(path if path.exists() else above, os.W_OK):
        raise InputError(f"cannot write {path}: you may not write there. Give {flag} another name.")


def readable(count: float) -> str:
    """Bytes in kB or MB, with about three digits."""
    return f"{count / 1e6:.2f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"


def check_elsewhere(folder: Path) -> None:
    """Raises InputError for the folder that the process is in, or one around it: `whole` would take it away."""
    here = Path.cwd()
    if folder.resolve() in (here, *here.parents):
        raise InputError(f"{folder} is the folder that you are in, or one around it: give another one.")


def check_name(path: Path, flag: str) -> None:
    """Raises InputError for a name that not all can write who have to."""
    try:
        length = len(str(path.absolute()).encode())
    except UnicodeEncodeError:
        raise InputError(f"cannot write {str(path)!a}: the name is not UTF-8. Give {flag} another one.") from None
    if length > LONGEST:
        raise InputError(f"cannot write {str(path)[:60]}…: the name has {length} bytes. Give {flag} a shorter one.")


def _place(path: str | os.PathLike[str]) -> Path:
    """Where something is put: what a link points to; and `.` has a name of its own."""
    path = Path(path)
    return path.resolve() if path.is_symlink() or path.name in ("", "..") else path


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
