"""`pinscher eval`: score any checkpoint on a task's test set."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from pinscher.commands.console import hush, say, text
from pinscher.commands.flags import WHOLE, given, number
from pinscher.settings import COUNT, NOT_NEGATIVE

if TYPE_CHECKING:
    from pinscher.train.scoring import Scored


def command(
    model: Annotated[str, typer.Argument(help="Hub id, model folder or run folder.", show_default=False)],
    task: Annotated[str | None, text("Task; by default that of the run.")] = None,
    data: Annotated[str | None, text("Folder with the task's files.")] = None,
    test_file: Annotated[str | None, text("File with the test rows.")] = None,
    text_column: Annotated[list[str] | None, text("Column with the text; give it twice for pairs.")] = None,
    label_column: Annotated[str | None, text("Column with the label.")] = None,
    split: Annotated[
        str | None, text("Split to answer instead of the test set: train, validation, or another that the data has.")
    ] = None,
    rows: Annotated[str | None, text("Maximum number of test rows.", WHOLE)] = None,
    max_length: Annotated[str | None, text("Maximum number of tokens of an example.", WHOLE)] = None,
    stride: Annotated[str | None, text("Overlap of the windows of long contexts (qa).", WHOLE)] = None,
    beams: Annotated[str | None, text("Number of beams when generating text.", WHOLE)] = None,
    bleurt: Annotated[str | None, text("BLEURT checkpoint, for data-to-text.")] = None,
    batch_size: Annotated[str | None, text("Examples in a batch; by default that of the run, else 64.", WHOLE)] = None,
    output: Annotated[str | None, text("Folder for the predictions and scores.json.")] = None,
) -> None:
    """Score any checkpoint on a task's test set, and write its predictions in the benchmark's own format."""
    settings = given(
        {
            "task": task,
            "data": data,
            "test_file": test_file,
            "text_column": text_column,
            "label_column": label_column,
            "test_rows": number(COUNT, rows, "--rows"),
            "max_length": number(COUNT, max_length, "--max-length"),
            "stride": number(NOT_NEGATIVE, stride, "--stride"),
            "beams": number(COUNT, beams, "--beams"),
            "bleurt": bleurt,
        }
    )
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
