"""Flags from a config: every field is one flag, with the field's help text and default; and settings from flags."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Container, Mapping
from typing import Annotated, Any, get_type_hints

import typer

from pinscher import settings
from pinscher.errors import InputError
from pinscher.settings import Number

# How a flag is read. Numbers are taken as text: the setting's own check parses them and explains what is wrong.
# A flag of any other type may be repeated.
KINDS: dict[str, Any] = {"str": str, "float": str, "int": str, "bool": bool}
WHOLE, FRACTIONAL = "<int>", "<float>"  # types of numbers in the help
SHOWN = {"float": FRACTIONAL, "int": WHOLE}
GROUPS = ("Run", "Data", "Training", "Pruning")  # the parts of the help, in order


def with_flags(
    function: Any, config: type[Any] | None, without: Container[str] = (), only: Container[str] | None = None
) -> Any:
    """A command with a flag added for every field of a config, or for some of them.

    Args:
        function: the command; its own parameters come first, and it receives the flags as keywords. A flag that is not
            given is None.
        config: a dataclass whose fields are made by `pinscher.settings.setting`; None adds no flags.
        without: names of fields that do not become flags.
        only: names of fields that do; None for all.
    """
    declared = () if config is None else dataclasses.fields(config)
    wanted = [field for field in declared if field.name not in without and (only is None or field.name in only)]
    fields = {field.name: field for field in wanted}
    hints = get_type_hints(function, include_extras=True)
    own = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    own = [p.replace(annotation=hints[p.name]) for p in own]
    flags = [_flag(field) for field in sorted(fields.values(), key=lambda f: GROUPS.index(f.metadata["group"]))]
    everything = [*own, *flags]

    @functools.wraps(function)
    def command(**words: Any) -> Any:
        for name, word in words.items():
            if name in fields and isinstance(word, str) and settings.kind(fields[name]) in SHOWN:
                words[name] = settings.checked(fields[name], word, flags=True)
        return function(**words)

    command.__signature__ = inspect.Signature(everything)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in everything}
    return command


def _flag(field: dataclasses.Field[Any]) -> inspect.Parameter:
    kind = settings.kind(field)
    name = settings.flag(field.name)
    shown = field.default if field.default not in (None, dataclasses.MISSING, False) else None
    option = typer.Option(
        f"{name}/--no-{name.removeprefix('--')}" if kind == "bool" else name,
        help=field.metadata["help"],
        rich_help_panel=field.metadata["group"],
        show_default=False if shown is None else str(shown),
        metavar=SHOWN.get(kind),
    )
    wanted: Any = KINDS.get(kind, list[str])
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[wanted | None, option]
    )


def number(takes: Number, word: str | None, flag: str, metavar: str = WHOLE) -> Any:
    """The value of a command's own flag as a number; None if it was not given.

    Raises:
        InputError: worded as for settings, if it is not a number or not one that the flag takes.
    """
    return None if word is None else settings.number(takes, word, flag, whole=metavar == WHOLE)


def given(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The flags that the user gave, as settings; --option NAME=VALUE becomes a mapping."""
    found = {name: value for name, value in flags.items() if value is not None and value != []}
    if "option" in found:
        found["option"] = dict(_pair(text) for text in found["option"])
    return found


def halves(text: str, flag: str, form: str) -> tuple[str, str]:
    """NAME and VALUE of a flag that takes NAME=VALUE; `form` is how an error describes that."""
    name, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"{flag} takes {form}, not {text!r}.")
    return name.strip(), value


def _pair(text: str) -> tuple[str, Any]:
    import yaml

    name, value = halves(text, "--option", "NAME=VALUE")
    try:
        return name, yaml.safe_load(value)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise InputError(f"--option {text}: {value!r} is not a value that YAML can read.") from None
