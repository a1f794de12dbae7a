"""Output shared by all commands: consoles, errors, progress bars, tables and units."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from pinscher.errors import InputError

console, complaints = Console(), Console(stderr=True)
DISK = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up", errno.EROFS: "read-only disk"}
PLACE = (errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG)


# ------------------------------------------------------------ output


def is_first_process() -> bool:
    """Whether this is the only process, or the first one that torchrun started."""
    return int(os.environ.get("RANK", "0")) == 0


def screen() -> Console:
    """The console in the first process; a silent one in the others."""
    return console if is_first_process() else Console(quiet=True)


def wide(columns: int) -> Console:
    """A console with at least this many columns, also if output goes to a file, so that no number is cut."""
    return Console(width=max(Console().width, columns))


def say(line: str, to: Console = console) -> None:
    """Prints one line as it is: no colours for numbers, no line breaks of our own."""
    to.print(line, highlight=False, markup=False, soft_wrap=True)


def hush(*, data: bool = True) -> None:
    """Switches off the progress bars and hints of transformers and, for commands that read data, of datasets."""
    import transformers

    logging: Any = transformers.utils.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if data:
        import datasets

        datasets.disable_progress_bars()


@contextlib.contextmanager
def bar(text: str, to: Console = console) -> Iterator[Any]:
    """A progress bar, on a terminal only; gives a function that takes the numbers done and total."""
    from rich.progress import Progress

    with Progress(console=to, transient=True, disable=not to.is_terminal) as progress:
        task = progress.add_task(text, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def table(*titles: str, left: int = 1) -> Table:
    """A plain table: the first columns hold names and are flush left, the others hold numbers."""
    made = Table(box=None, pad_edge=False)
    for place, title in enumerate(titles):
        made.add_column(title, justify="left" if place < left else "right")
    return made


# ------------------------------------------------------------ errors


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """Turns bad input, a full disk and Ctrl-C into one line and an exit code, instead of a traceback."""
    try:
        yield
    except InputError as error:
        complain(str(error))
    except KeyboardInterrupt:
        complaints.print("interrupted")
        raise SystemExit(130) from None
    except OSError as error:
        if error.errno not in (*DISK, *PLACE):
            raise
        complain(f"cannot write {error.filename or 'the run'}: {DISK.get(error.errno, error.strerror)}.")
    except Exception as error:
        if "No space left on device" not in str(error):  # safetensors wraps it
            raise
        complain(f"cannot write the run: {DISK[errno.ENOSPC]}.")


def complain(text: str) -> NoReturn:
    """Prints an error, once for all processes, and ends with code 2."""
    if is_first_process():
        line = " ".join(text.splitlines())  # a path may hold line breaks
        complaints.print(f"error: {line}", style="red", highlight=False, markup=False, soft_wrap=True)
    raise SystemExit(2) from None


# ------------------------------------------------------------ options


def text(help: str, metavar: str | None = None) -> Any:
    """An option whose help shows no default."""
    return typer.Option(help=help, show_default=False, metavar=metavar)


def shown(help: str, metavar: str | None = None) -> Any:
    """An option whose help shows its default."""
    return typer.Option(help=help, metavar=metavar)


# ------------------------------------------------------------ units


def duration(seconds: float) -> str:
    """Seconds in the usual unit for that duration."""
    if seconds < 90:
        return f"{max(2, round(seconds))} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def megabytes(count: float) -> str:
    return f"{count / 1e6:.1f} MB"
