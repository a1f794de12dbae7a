"""`pinscher report`: one HTML page about one run or several."""

from __future__ import annotations

from typing import Annotated

import typer

from pinscher.commands.console import say, shown, text
from pinscher.commands.flags import FRACTIONAL, number
from pinscher.settings import SECONDS


def command(
    runs: Annotated[list[str], typer.Argument(help="Run folders.", metavar="RUN [RUN…]", show_default=False)],
    output: Annotated[
        str | None, text("Page to write; by default RUN/report.html, or report.html for several runs.")
    ] = None,
    figures: Annotated[str | None, text("Also write every figure as PNG and SVG into this folder.")] = None,
    matrix: Annotated[str | None, text("Matrix whose pattern to draw, given by the end of its name.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Rewrite the page until all runs have finished.")] = False,
    every: Annotated[str, shown("Seconds between two rewrites, with --watch.", FRACTIONAL)] = "5",
) -> None:
    """Show what pruning did on one HTML page, for one run or several side by side."""
    seconds = number(SECONDS, every, "--every", FRACTIONAL)
    from pinscher.report import writing

    for line in writing.run(runs, output, figures, matrix, seconds if watch else None):
        say(line)
