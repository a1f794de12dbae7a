"""`pinscher eval`: score any checkpoint on a task's test set."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from pinscher.commands.console import hush, say, text
from pinscher.commands.flags import WHOLE, given, number
from pinscher.settings import COUNT

if TYPE_CHECKING:
    from pinscher.train.scoring import Scored

# The settings of a run's data that are flags here.
DATA = ("data", "test_file", "text_column", "label_column", "max_length", "stride", "beams", "bleurt")


def command(
    model: Annotated[str, typer.Argument(help="Hub id, model folder or run folder.", show_default=False)],
    task: Annotated[str | None, text("Task; by default that of the run.")] = None,
    split: Annotated[
        str | None, text("Split to answer instead of the test set: train, validation, or another that the data has.")
    ] = None,
    rows: Annotated[str | None, text("Maximum number of test rows.", WHOLE)] = None,
    batch_size: Annotated[str | None, text("Examples in a batch; by default that of the run, else 64.", WHOLE)] = None,
    output: Annotated[str | None, text("Folder for the predictions and scores.json.")] = None,
    **flags: Any,
) -> None:
    """Score any checkpoint on a task's test set, and write its predictions in the benchmark's own format."""
    settings = given({"task": task, "test_rows": number(COUNT, rows, "--rows"), **flags})
    examples = number(COUNT, batch_size, "--batch-size")
    from pinscher.train import scoring

    hush()
    for line in _lines(scoring.score(model, settings, split=split, batch_size=examples, output=output)):
        say(line)


def _lines(found: Scored) -> list[str]:
    zeros = "" if found.sparsity is None else f", {found.sparsity:.1%} of its prunable weights are zero"
    return [
        f"{found.model} on {found.rows:,} rows of {found.task}{zeros}",
        *(f"  {name:14} {value:7.2f}" for name, value in found.scores.items()),
        *([] if found.scores else ["  no scores: these rows have no labels"]),
        *(f"  predictions in {path}" for path in found.files),
    ]
