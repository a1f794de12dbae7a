"""Writes the page and the figures of some runs, and rewrites the page until the runs have finished."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from pinscher import files
from pinscher.errors import InputError
from pinscher.report import page, plots
from pinscher.report.facts import Facts, gather
from pinscher.runfolder import RunFolder, check_writable

LOOK = 0.5  # seconds between two looks at the folders


def run(
    folders: Sequence[str],
    output: str | None = None,
    figures: str | None = None,
    matrix: str | None = None,
    every: float | None = None,
) -> Iterator[str]:
    """Writes the page and, on request, the figures; yields one line for each thing written.

    Args:
        folders: the runs.
        output: the page; by default report.html in the run's folder, or in the current one for several runs.
        figures: a folder for every figure as PNG and SVG.
        matrix: the matrix whose pattern is drawn among the figures, by the end of its name.
        every: seconds between two rewrites of the page, until all runs have finished.
    """
    if matrix is not None and figures is None:
        raise InputError("--matrix chooses the pattern that --figures DIR draws.")
    if every is not None and not every > 0:
        raise InputError(f"--every takes seconds, not {every:g}.")
    path = Path(output) if output else Path(folders[0] if len(folders) == 1 else ".") / "report.html"
    files.check_file(path, "--output")
    if figures is not None:
        check_writable(Path(figures), "--figures")
    facts = gather(folders, watching=every is not None)
    if figures is not None:
        plots.check(facts, matrix)
    page.write(facts, path, every)
    while every is not None and facts.data["watching"]:
        yield f"{path}: {_progress(facts)}"
        _wait(folders, every)
        facts = gather(folders, watching=True)
        page.write(facts, path, every)
    yield str(path)
    if figures is not None:
        yield f"{len(plots.write(facts, figures, matrix))} figures in {figures}"


def _progress(facts: Facts) -> str:
    return ", ".join(f"{table['name']} {table['status']}, step {table['steps']:,}" for table in facts.data["runs"])


def _wait(folders: Sequence[str], seconds: float) -> None:
    """Waits at least `seconds`, then until a run's files change, so that an idle run is not read repeatedly."""
    before, until = _stamp(folders), time.monotonic() + seconds
    while time.monotonic() < until or _stamp(folders) == before:
        time.sleep(min(LOOK, seconds))


def _stamp(folders: Sequence[str]) -> list[tuple[int, int]]:
    """Sizes and modification times of the files that change during a run."""
    runs = [run for folder in folders for run in (RunFolder(folder), RunFolder(folder).dense)]
    watched = [path for run in runs for path in (run.log, run.result)]
    return [(path.stat().st_size, path.stat().st_mtime_ns) if path.exists() else (0, 0) for path in watched]
