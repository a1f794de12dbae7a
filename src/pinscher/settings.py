"""Settings: fields of a config that declare their help text and the values they take.

    @dataclass(frozen=True)
    class TrainingConfig:
        epochs: float | None = setting(None, "Passes over the training rows.", group="Training", takes=EPOCHS)

That line is all there is to a setting. Flags, YAML keys, config.yaml, the docs and the checks are made from it. `check`
converts the values of a config to the types of its fields, or raises an InputError that names the setting, the value
and what is allowed. There is one `Number` for each kind of number, and no number is checked in another way.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pinscher.errors import InputError
from pinscher.registry import Registry, unknown

LARGEST = 1e30  # no setting is a larger number; squares and products with it stay finite
MOST = 2**31 - 1  # nor a larger whole one: what fits the counters of torch and numpy on every system
SHOWN = 60  # characters of a wrong value in a message


# ------------------------------------------------------------ kinds of values


@dataclass(frozen=True)
class Number:
    """The numbers that a setting takes, and the words for it. nan and infinities are never among them.

    Args:
        low: the least one; with `above`, all are above it.
        high: the greatest one; with `below`, all are below it. It is named together with `low`.
        most: like `high`, for numbers that are never meant; it is named only if it is exceeded.
        words: what a value must be, instead of a sentence made from the bounds.
        asks: the same, for a value that is not a number.
        why: what follows from the value, appended to the message.
        steps: whether numbers from 1 on are steps, which are whole.
        hint: what was probably meant by a wrong value; empty if unknown.
    """

    low: float = -LARGEST
    high: float | None = None
    above: bool = False
    below: bool = False
    most: float | None = None
    words: str = ""
    asks: str = ""
    why: str = ""
    steps: bool = False
    hint: Callable[[str], str] | None = None

    def read(self, value: Any, whole: bool = False) -> Any:
        """The value as a number; a text is parsed.

        Raises:
            RefusedError: if it is not a number, or not one of these.
        """
        number = _number(value)
        if number is None or (whole and isinstance(number, float) and math.isfinite(number) and number % 1):
            asks = self.asks or f"must be a {'whole ' if whole else ''}number,"
            raise RefusedError(asks, value, hint=self._hint(value))
        most = self.most if self.most is not None else (MOST if whole else LARGEST)
        if self.high is None and number > most and not (self.words and number == math.inf):
            raise RefusedError(f"must be at most {most:.15g},", value)
        if number == math.inf or not self._holds(number):
            raise RefusedError(self.words or self._bounds(), value, self.why, self._hint(value))
        return int(number) if whole else float(number)

    def _holds(self, number: float) -> bool:
        if not (number > self.low if self.above else number >= self.low):  # false for nan too
            return False
        if self.high is not None and not (number < self.high if self.below else number <= self.high):
            return False
        return not self.steps or number < 1 or number % 1 == 0

    def _bounds(self) -> str:
        if self.high is None:
            if self.low == -LARGEST:
                return "must be a finite number,"
            return "must be positive," if self.above and self.low == 0 else f"must be at least {self.low:g},"
        if self.above and self.below:
            return f"must lie between {self.low:g} and {self.high:g},"
        return f"must lie in {'(' if self.above else '['}{self.low:g}, {self.high:.15g}{')' if self.below else ']'},"

    def _hint(self, value: Any) -> str:
        return self.hint(_shown(value)) if self.hint is not None else ""


class Names:
    """The names that a setting takes."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = names

    def read(self, value: Any, name: str, also: Sequence[str], flag: bool) -> str:
        known = [*also, *self.names]
        if isinstance(value, str) and value in known:
            return value
        if isinstance(value, str) and (flag or isinstance(self.names, Registry)):
            raise InputError(unknown(name, value, known) + ("." if flag else ""))
        raise RefusedError(f"must be one of {', '.join(known)},", value)


class RefusedError(ValueError):
    """A value that a setting does not take; the caller, who knows the setting's name, makes a sentence of it."""

    def __init__(self, words: str, value: Any, why: str = "", hint: str = "") -> None:
        self.words, self.value, self.why, self.hint = words, value, why, hint

    def sentence(self, label: str) -> InputError:
        text = f"{label} {self.words} not {_shown(self.value)}{self.why and ': ' + self.why}"
        end = "." if label.startswith("--") or self.hint else ""
        return InputError(f"{text}{end}{self.hint and ' ' + self.hint}")


def _percent(shown: str) -> str:
    number = _number(shown.strip("'% ")) or 0
    if not 1 < number < 100:
        return ""
    return f"80 % is 0.8: did you mean {number / 100:g}?" if "%" in shown else f"Did you mean {number / 100:g}?"


FINITE = Number()
POSITIVE = Number(0, above=True)
NOT_NEGATIVE = Number(0)
COUNT = Number(1)  # of a whole setting
FRACTION = Number(0, 1, below=True)
SPARSITY = Number(0, 1, below=True, hint=_percent)
SHARE = Number(0, 1, above=True, below=True)
STEPS = Number(0, most=MOST, steps=True, words="must be a number of steps, or a fraction below 1;")
RATE = Number(0, above=True, most=10)  # a learning rate: AdamW moves a weight about so far in a step
SEED = Number(0, 2**32 - 1)  # numpy's limit; torch takes more
SECONDS = Number(0, 86_400, above=True)  # at most a day


# ------------------------------------------------------------ fields


def setting(default: Any, help: str = "", *, group: str = "", takes: Number | Names | None = None) -> Any:
    """A field of a config.

    Args:
        default: its value; of a mapping or list every config has its own.
        help: what it is for, in one sentence; the help text of its flag.
        group: the group of its flag in the help.
        takes: which values it takes, among those of its type.
    """
    metadata = {"help": help, "group": group, "takes": takes}
    if isinstance(default, dict | list):
        return dataclasses.field(default_factory=type(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def flag(name: str) -> str:
    """The flag of a setting."""
    return f"--{name.replace('_', '-')}"


def kind(field: dataclasses.Field[Any]) -> str:
    """The type of a field without `| None`, as it is written: float, list[str], …"""
    return " | ".join(part for part in _types(field) if part != "None")


def values(config: Any, kind: type[Any]) -> dict[str, Any]:
    """The settings of a config that a smaller config also has, by name."""
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(kind)}


def check(config: Any, *, flags: bool = False, also: Mapping[str, Sequence[str]] | None = None) -> None:
    """Checks every field of a dataclass, and converts each value to the type of its field.

    Args:
        config: the dataclass; it may be frozen, as this is called by its `__post_init__`.
        flags: whether messages name the settings by their flags.
        also: further names that settings take, besides those that their fields declare.

    Raises:
        InputError: for the first value that is not allowed.
    """
    for field in dataclasses.fields(config):
        value = checked(field, getattr(config, field.name), flags=flags, also=(also or {}).get(field.name, ()))
        object.__setattr__(config, field.name, value)


def checked(
    field: dataclasses.Field[Any], value: Any, *, label: str = "", flags: bool = False, also: Sequence[str] = ()
) -> Any:
    """The converted value of one field; see `check`. `label` is its name in messages."""
    label = label or (flag(field.name) if flags else field.name)
    takes = field.metadata.get("takes")
    if value is None and "None" in _types(field):
        return None
    try:
        if isinstance(takes, Names):
            return takes.read(value, field.name, also, flags)
        return _typed(kind(field), value, takes or FINITE)
    except RefusedError as refused:
        raise refused.sentence(label) from None


def number(takes: Number, value: Any, label: str, *, whole: bool = False) -> Any:
    """Checks a number that is not a field of a config as if it were."""
    try:
        return takes.read(value, whole)
    except RefusedError as refused:
        raise refused.sentence(label) from None


def numbers_in(takes: Number, words: Iterable[Any], label: str, *, whole: bool = False) -> list[Any]:
    """The numbers of a list separated by commas, without duplicates."""
    takes = dataclasses.replace(takes, asks=f"takes {'whole ' if whole else ''}numbers with commas between them,")
    return list(dict.fromkeys(number(takes, word, label, whole=whole) for word in words))


def _types(field: dataclasses.Field[Any]) -> list[str]:
    written = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", str(field.type))
    return [part.strip() for part in written.split("|")]


def _typed(wanted: str, value: Any, takes: Number) -> Any:
    if wanted in ("int", "float"):
        return takes.read(value, whole=wanted == "int")
    if wanted == "bool":
        if not isinstance(value, bool):
            raise RefusedError("must be true or false,", value)
    elif wanted == "str":
        if not isinstance(value, str | os.PathLike) or "\0" in str(value):  # which no path may hold
            raise RefusedError("must be text,", value)
        return os.fspath(value)
    elif wanted == "list[str]":
        return [] if value is None else _names(value)
    elif wanted == "str | tuple[str, ...]":
        return value if isinstance(value, str) else tuple(_names(value))
    elif wanted == "dict[str, Any]":
        if not isinstance(value, Mapping | None):
            raise RefusedError("must be values by name (NAME: VALUE),", value)
        return dict(value or {})
    return value


def _names(value: Any) -> list[str]:
    value = [value] if isinstance(value, str) else value
    found: list[Any] = list(value) if isinstance(value, Iterable) and not isinstance(value, Mapping) else [None]
    if not all(isinstance(name, str) and "\0" not in name for name in found):  # bytes are a list of numbers
        raise RefusedError("must be a name or a list of names,", value)
    return found


def _number(value: Any) -> float | None:
    """A value as a number, or None. YAML reads 1e-4 as text, and the values of flags are text."""
    if isinstance(value, str):
        for read in (int, float):
            try:
                return read(value)
            except ValueError:
                continue
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    if isinstance(value, numbers.Integral):
        return int(value)
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, value)


def _shown(value: Any) -> str:
    """A value for a message: numbers as written, anything else with `repr`, so that the type shows."""
    try:
        text = str(value) if _number(value) is not None else repr(value)
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__} too long to show"  # Python refuses to write numbers of many digits
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"
