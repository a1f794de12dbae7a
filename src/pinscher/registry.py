"""Registries of things chosen by name: a dict that refuses duplicates and suggests the closest name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import TypeVar

T = TypeVar("T")


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """A question that suggests the known name closest to a wrong one; empty if none is close."""
    close = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.4)
    return f" Did you mean {close[0]!r}?" if close else ""


def unknown(noun: str, name: object, known: Iterable[str]) -> str:
    """The message for an unknown name: the closest known one, and all of them."""
    names = list(known)
    return f"unknown {noun} {name!r}.{did_you_mean(name, names)} Known: {', '.join(names)}"


class UnknownError(KeyError, ValueError):
    """A name that a registry does not have. It is a KeyError so that `in` and `get` work as with any mapping."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would quote it


class Registry(MutableMapping[str, T]):
    """Entries by name, in the order in which they came."""

    def __init__(self, noun: str) -> None:
        self.noun = noun
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """A decorator that registers the decorated object."""

        def add(entry: T) -> T:
            self[name] = entry
            return entry

        return add

    def __setitem__(self, name: str, entry: T) -> None:
        if name in self._entries:
            raise ValueError(f"{self.noun} {name!r} is registered twice")
        self._entries[name] = entry

    def __getitem__(self, name: str) -> T:
        if name not in self._entries:
            raise UnknownError(unknown(self.noun, name, self))
        return self._entries[name]

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
