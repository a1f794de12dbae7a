"""File locks for what only one process may write. A lock file names its holder, and ends with its processes.

The lock is the operating system's (flock), so a killed process leaves none. The file's text is for people only: it says
who holds the lock.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

LOOK = 0.2  # seconds between two attempts
PATIENCE = 10.0  # seconds to wait for processes that are about to end
NOT_OFFERED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # by some network file systems


class HeldError(Exception):
    """Another process holds the lock; `holder` says which."""

    def __init__(self, holder: str) -> None:
        super().__init__(holder)
        self.holder = holder


@contextlib.contextmanager
def locked(path: str | os.PathLike[str], patience: float = PATIENCE, keep: bool = True) -> Iterator[TextIO]:
    """Holds a lock while the block runs; its folder must exist. Gives the open lock file.

    Args:
        path: the lock file.
        patience: seconds to wait for another holder.
        keep: leave the file when the block ends; otherwise it is removed.

    Raises:
        HeldError: if another process keeps holding it.
    """
    file = _acquired(Path(path), patience)
    try:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield file
    finally:
        if not keep:
            Path(path).unlink(missing_ok=True)  # before others can get it: they look whether the file is still there
        file.close()


def holder(path: str | os.PathLike[str]) -> str:
    """Who holds a lock, as its file says."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return Path(path).read_text(encoding="utf-8").strip() or "another process"
    return "another process"


def _acquired(path: Path, patience: float) -> TextIO:
    until = time.monotonic() + patience
    while True:
        file = open(path, "a", encoding="utf-8")  # noqa: SIM115  (open as long as the lock is held)
        try:
            _lock(file)
            if _is_at(file, path):
                return file
        except BlockingIOError:
            if time.monotonic() > until:
                file.close()
                raise HeldError(holder(path)) from None
            time.sleep(LOOK)
        except BaseException:
            file.close()
            raise
        file.close()


def _is_at(file: TextIO, path: Path) -> bool:
    """Whether the open file is the one at the path: its holder may have removed it while we waited."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _lock(file: Any) -> None:
    """Takes the lock or raises BlockingIOError. Where there are no locks, everything works as if nobody held one."""
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno not in NOT_OFFERED:
            raise
