"""Errors that the user can fix: one sentence with the cause and the remedy."""

from __future__ import annotations


class InputError(ValueError):
    """Bad input: the command prints this sentence alone and ends with code 2."""


def first_line(error: BaseException) -> str:
    """The first line of an error's text that says anything, with the next one if it only announces that; the error's
    name if none does.
    """
    if type(error) is KeyError:  # its text is the key alone
        return f"there is no {error}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1]) or type(error).__name__
