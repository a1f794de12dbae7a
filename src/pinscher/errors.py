"""Errors that the user can fix: one sentence with the cause and the remedy."""

from __future__ import annotations


class InputError(ValueError):
    """Bad input: the command prints this sentence alone and ends with code 2."""


def first_line(error: BaseException) -> str:
    """The first line of an error's text that is not empty; else the error's name."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
