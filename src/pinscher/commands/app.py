"""The command line: each file of this folder is one subcommand.

`prune` and `compare` have a flag for every setting of a run. These are loaded only when one of the two is called,
because they need torch, and `pinscher --help` should not.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Container
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from pinscher import __version__
from pinscher.commands import bench, compare, evaluate, export, inspect, prune, report, serve
from pinscher.commands.console import plainly
from pinscher.commands.flags import with_flags
from pinscher.extras import naming_extras
from pinscher.train.subject import DataConfig

WIDE = 100  # columns; a narrower terminal would cut the names of flags in the coloured help

# Commands with the settings of a run as flags, and the settings that are not flags there.
WITH_SETTINGS: dict[str, tuple[Callable[..., None], Container[str]]] = {
    "prune": (prune.command, ()),
    "compare": (compare.command, compare.DECIDED),
}


class LightGroup(TyperGroup):
    """Adds the flags to a command when it is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, complete().commands[name] if name in WITH_SETTINGS else command, rest


def make(group: type[TyperGroup], settings: type[Any] | None) -> typer.Typer:
    """The command line; without `settings`, prune and compare lack their flags."""
    app = typer.Typer(
        cls=group,
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich" if shutil.get_terminal_size().columns >= WIDE else None,
        help="Fine-tune a transformer while pruning it, then store it small and run it fast on a CPU.",
    )
    app.callback()(_root)
    commands = {name: with_flags(function, settings, without) for name, (function, without) in WITH_SETTINGS.items()}
    commands |= {
        "eval": with_flags(evaluate.command, DataConfig, only=evaluate.DATA),
        "export": export.command,
        "bench": bench.command,
        "serve": serve.command,
        "report": report.command,
        "inspect": with_flags(inspect.command, DataConfig, only=inspect.DATA),
    }
    for name in ("prune", "eval", "compare", "export", "bench", "serve", "report", "inspect"):
        app.command(name=name)(commands[name])
    return app


def complete() -> Any:
    """The command line with all flags, as typer's group of commands."""
    from pinscher.train.config import RunConfig

    return typer.main.get_command(make(TyperGroup, RunConfig))


def main() -> None:
    """The entry point of `pinscher`."""
    with plainly(), naming_extras("this command"):
        app()


def _version(value: bool) -> None:
    if value:
        print(__version__)
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None: ...


app = make(LightGroup, None)


if __name__ == "__main__":
    main()
