"""The command `pinscher compare`: flags and file become a comparison, which is planned, run and shown."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from pinscher.errors import InputError

# Settings of a run that the comparison decides, so that they are no flags here.
DECIDED = (
    "task",
    "method",
    "sparsity",
    "seed",
    "output",
    "overwrite",
    "recipe",
    "target_size",
    "export",
    "baseline",
)
OUTPUT = "runs/comparison"


def _axis(help: str, default: bool = False) -> Any:
    return typer.Option(help=help, show_default=default, rich_help_panel="Comparison")


def compare(
    methods: Annotated[str | None, _axis("Methods with commas between them; dense is one of them.")] = None,
    tasks: Annotated[str | None, _axis("Tasks with commas between them.")] = None,
    sparsity: Annotated[str | None, _axis("Sparsities with commas between them; by default 0.8.")] = None,
    seeds: Annotated[str | None, _axis("How many seeds (42, 1, 2, …), or the seeds with commas between them.")] = None,
    ablation: Annotated[
        str | None, _axis("Variants of pins instead: objective, teacher, smoothing, score, regrow, interval or hold.")
    ] = None,
    tune: Annotated[
        list[str] | None,
        _axis("NAME=A,B: try these in every cell and pick by validation score; several make a grid."),
    ] = None,
    paper: Annotated[
        str | None, _axis("The paper's model to show beside ours, or none; by default the nearest one.")
    ] = None,
    config: Annotated[str | None, _axis("YAML file with all of this; flags win.")] = None,
    output: Annotated[str, _axis("Folder of the comparison.", True)] = OUTPUT,
    jobs: Annotated[int, _axis("Runs side by side, sharing the cores.", True)] = 1,
    shard: Annotated[str, _axis("I/N: make only the I-th of N parts, on each machine another.", True)] = "1/1",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    **flags: Any,
) -> None:
    """Compare methods on tasks at sparsities over seeds; resumes, and never repeats a finished run."""
    from pinscher import cli
    from pinscher.train import compare as comparison
    from pinscher.train import forecast, grid, tables

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError("compare starts its runs itself: without torchrun, with --jobs N or --shard I/N.")
    cli._hush()
    console = Console()
    axes = {"methods": methods, "tasks": tasks, "sparsity": sparsity, "seeds": seeds, "paper": paper}
    given = {name: value for name, value in {**axes, **flags}.items() if value is not None and value != []}
    if "option" in given:
        given["option"] = dict(cli._pair(text) for text in given["option"])
    if tune:
        given["tune"] = {name: values.split(",") for name, values in map(_halves, tune)}
    known = Path(output) / comparison.RECORD
    if not given and config is None and ablation is None and known.exists():
        config = str(known)
    if jobs < 1:
        raise InputError(f"--jobs must be at least 1, not {jobs}.")
    session = comparison.Session(grid.read(config, given, ablation), Path(output), _part(shard), console)
    if dry_run or session.todo():
        forecast.show(session, jobs)
    if dry_run:
        return
    table = comparison.run(session, jobs)
    console.print()
    tables.show(table, console)
    session.say(f"\nresults.csv, results.parquet, table.md, table.tex and table.html are in {output}.")
    if session.interrupted:
        same = "".join([f" --jobs {jobs}" if jobs > 1 else "", f" --shard {shard}" if session.shard[1] > 1 else ""])
        session.say(f"stopped. Go on with the same command, or with: pinscher compare --output {output}{same}")
    for why, names in _by_cause(session.failed).items():
        session.say(f"failed: {', '.join(names)}: {why}")
    if session.interrupted:
        raise SystemExit(130)
    if session.failed:
        session.say(f"The same command tries them again; {Path(output) / comparison.ERRORS} has the details.")
        raise SystemExit(1)


def _by_cause(failed: dict[str, str]) -> dict[str, list[str]]:
    causes: dict[str, list[str]] = {}
    for name, why in failed.items():
        causes.setdefault(why, []).append(name)
    return causes


def _part(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise InputError(f"--shard takes I/N with I from 1 to N, for example 1/2, not {text!r}.")
    return int(found[1]), int(found[2])


def _halves(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"--tune takes NAME=VALUE,VALUE, not {text!r}.")
    return name.strip(), value
