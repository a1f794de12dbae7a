"""The command `pinscher report`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console


def command(
    runs: Annotated[list[str], typer.Argument(help="Folders of runs.", metavar="RUN [RUN…]", show_default=False)],
    output: Annotated[
        str | None,
        typer.Option(help="Page to write; by default RUN/report.html, for several report.html.", show_default=False),
    ] = None,
    figures: Annotated[
        str | None, typer.Option(help="Folder for every figure as PNG and SVG.", show_default=False)
    ] = None,
    matrix: Annotated[
        str | None, typer.Option(help="Matrix of the pattern's figure, by the end of its name.", show_default=False)
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Rewrite the page until the runs have finished.")] = False,
    every: Annotated[float, typer.Option(help="Seconds between two rewritings, with --watch.")] = 5.0,
) -> None:
    """Show what pruning did, on one page: one run, or several side by side."""
    from pinscher.report import command as reports

    console = Console()
    for line in reports.run(runs, output, figures, matrix, every if watch else None):
        console.print(line, highlight=False, soft_wrap=True)
