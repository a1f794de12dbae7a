"""What went wrong on the user's side: one sentence that names the cause and the remedy."""

from __future__ import annotations


class InputError(ValueError):
    """Bad input: the command prints this sentence alone and ends with code 2."""
