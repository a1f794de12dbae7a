"""`pinscher compare`: plan, run and print a comparison of methods."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pinscher import compare as comparing
from pinscher.commands.console import console, duration, hush, say, table
from pinscher.commands.flags import WHOLE, given, halves, number
from pinscher.errors import InputError
from pinscher.settings import Number

if TYPE_CHECKING:
    from pinscher.compare.ray_cluster import Cluster
    from pinscher.compare.session import Session

# Settings of a run that are not flags here: the comparison decides them.
DECIDED = ("task", "method", *comparing.DECIDED)
OUTPUT = "runs/comparison"
RAY = re.compile(r"auto|local|(ray://)?[^\s/]+:\d+")
JOBS = Number(1, most=1024)


def _axis(help: str, default: bool = False, metavar: str | None = None) -> Any:
    return typer.Option(help=help, show_default=default, metavar=metavar, rich_help_panel="Comparison")


def command(
    methods: Annotated[str | None, _axis("Methods, separated by commas; dense is one of them.")] = None,
    tasks: Annotated[str | None, _axis("Tasks, separated by commas.")] = None,
    sparsity: Annotated[str | None, _axis("Sparsities, separated by commas; by default 0.8.")] = None,
    seeds: Annotated[str | None, _axis("Number of seeds (42, 1, 2, …), or the seeds, separated by commas.")] = None,
    ablation: Annotated[
        str | None,
        _axis("Compare variants of pins: objective, teacher, smoothing, score, regrow, interval or hold."),
    ] = None,
    tune: Annotated[
        list[str] | None,
        _axis("NAME=A,B: try these values in every cell and pick by validation score; several make a grid."),
    ] = None,
    search: Annotated[
        bool | None,
        typer.Option(
            "--search",
            help="Choose every method's main setting from two values, by validation score.",
            rich_help_panel="Comparison",
        ),
    ] = None,
    paper: Annotated[
        str | None, _axis("Model of the paper to show beside ours, or none; by default the nearest one.")
    ] = None,
    recipe: Annotated[
        str | None, _axis("A whole table of the paper, for example paper/table1; list shows all. Flags restrict it.")
    ] = None,
    config: Annotated[str | None, _axis("YAML file with these settings; flags override it.")] = None,
    output: Annotated[str, _axis("Folder of the comparison.", True)] = OUTPUT,
    jobs: Annotated[str, _axis("Number of runs side by side; they share the cores.", True, WHOLE)] = "1",
    shard: Annotated[str, _axis("I/N: run only the I-th of N parts, a different one on each machine.", True)] = "1/1",
    ray: Annotated[
        str | None,
        _axis("Make the runs on this Ray cluster: HOST:PORT, auto or local. All nodes must share the output folder."),
    ] = None,
    cpus_per_run: Annotated[
        str | None,
        _axis("With --ray: CPUs of a run; by default the smallest node's, divided by --jobs.", metavar=WHOLE),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    **flags: Any,
) -> None:
    """Compare methods on tasks at several sparsities and seeds. Resumes, and never repeats a finished run."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError("compare starts its runs itself: without torchrun, with --jobs N or --shard I/N.")
    if recipe == "list":
        _show_tables()
        return
    at_once, cpus = number(JOBS, jobs, "--jobs"), number(JOBS, cpus_per_run, "--cpus-per-run")
    if cpus is not None and ray is None:
        raise InputError("--cpus-per-run goes with --ray.")
    if ray is not None and not RAY.fullmatch(ray):
        raise InputError(f"--ray takes HOST:PORT, auto or local, not {ray!r}.")
    hush()
    axes = {"methods": methods, "tasks": tasks, "sparsity": sparsity, "seeds": seeds, "search": search, "paper": paper}
    source = {"path": config, "ablation": ablation, "recipe": recipe}
    session = _session(given({**axes, **flags}), tune or [], source, Path(output), _part(shard))
    if dry_run or session.todo():
        _show_plan(session, at_once)
    if dry_run:
        return
    if ray is None or not session.todo():
        _run(session, at_once)
        return
    from pinscher.compare import ray_cluster

    same = f" --ray {ray}" + (f" --cpus-per-run {cpus}" if cpus else "")
    with ray_cluster.connected(ray, session.output, at_once, cpus) as cluster:
        _run(session, at_once, cluster, same)


def _session(
    asked: dict[str, Any], tune: list[str], source: dict[str, str | None], output: Path, shard: tuple[int, int]
) -> Session:
    """The comparison that flags and file describe; without any, the one that is in the folder."""
    from pinscher.compare import grid
    from pinscher.compare.session import RECORD, Session
    from pinscher.train import idle

    if tune:
        named = (halves(text, "--tune", "NAME=VALUE,VALUE") for text in tune)
        asked["tune"] = {name: values.split(",") for name, values in named}
    known = output / RECORD
    if not asked and not any(source.values()) and known.exists():
        source["path"] = str(known)
    session = Session(grid.read(flags=asked, **source), output, shard, console)
    idle.check(session.planned(), asked)
    return session


def _run(session: Session, jobs: int, cluster: Cluster | None = None, same: str = "") -> None:
    """Makes the runs, prints the table and the failures; exits with 130 if interrupted and 1 if a run failed.

    `same` are further flags for continuing an interrupted comparison.
    """
    from pinscher.compare import session as comparison
    from pinscher.compare import tables

    output, (part, parts) = session.output, session.shard
    made = comparison.run(session, jobs, cluster)
    console.print()
    tables.show(made, console)
    session.say(f"\nresults.csv, results.parquet, table.md, table.tex and table.html are in {output}.")
    if session.interrupted:
        same += "".join([f" --jobs {jobs}" if jobs > 1 else "", f" --shard {part}/{parts}" if parts > 1 else ""])
        session.say(f"stopped. Go on with the same command, or with: pinscher compare --output {output}{same}")
    for why, names in _by_cause(session.failed).items():
        session.say(f"failed: {', '.join(names)}: {why}")
    if session.interrupted:
        raise SystemExit(130)
    if session.failed:
        session.say(f"The same command tries them again; {output / comparison.ERRORS} has the details.")
        raise SystemExit(1)


def _show_tables() -> None:
    """Prints the tables of the paper, one per line."""
    from pinscher.compare import paper

    for name, one in paper.TABLES.items():
        methods = ", ".join(one.methods)
        at = ", ".join(map(str, one.sparsities))
        say(f"{name}  {one.title}: {', '.join(one.tasks)} at {at} %; {methods}", console)


def _show_plan(session: Session, jobs: int) -> None:
    """Prints one line for each method, task and sparsity, and the work that is left."""
    from pinscher.compare import forecast
    from pinscher.compare.grid import Cell
    from pinscher.compare.scoreboard import displayed
    from pinscher.runfolder import RunFolder

    kinds: dict[tuple[str, float, str], list[Cell]] = {}
    for cell in session.mine:
        kinds.setdefault((cell.task, cell.sparsity, cell.variant), []).append(cell)
    plan = table("task", "sparsity", left=2)
    plan.add_column("method", no_wrap=True, min_width=max([0, *(len(displayed(variant)) for *_, variant in kinds)]))
    plan.add_column("objective", min_width=len("regularization"))
    plan.add_column("done", no_wrap=True)
    plan.add_column("seeds")
    for (task, sparsity, variant), cells in kinds.items():
        trials = [trial for cell in cells for trial in cell.trials]
        done = sum(RunFolder(trial.config.folder).is_finished for trial in trials)
        seeds = ", ".join(str(cell.seed) for cell in cells)
        objective = cells[0].config.objective.replace("-", " ")  # a narrow terminal breaks it there
        plan.add_row(task, f"{100 * sparsity:g} %", displayed(variant), objective, f"{done} of {len(trials)}", seeds)
    console.print(plan)
    todo = session.todo()
    left = len({session.owner[trial.name].name for trial in todo})
    part, parts = session.shard
    share = f"shard {part} of {parts} of {len(session.cells)} cells: " if parts > 1 else ""
    count = len(session.mine)
    line = f"\n{share}{count} cell{'s' if count != 1 else ''}, {count - left} done, {left} to do"
    if not todo:
        session.say(f"{line}.")
        return
    runs = f" in {len(todo)} runs" if len(todo) != left else ""
    expected = forecast.forecast(session, todo, jobs)
    took = "time unknown" if not expected.seconds else f"about {duration(expected.seconds)} on this machine"
    session.say(f"{line}{runs}, {took}.")
    for what, why in expected.stuck.items():
        session.say(f"cannot start: {what}: {why}")


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
