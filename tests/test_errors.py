"""What an error says, in one line that says something."""

from __future__ import annotations

import pytest

from pinscher.errors import first_line
from pinscher.registry import UnknownError


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("a cause\nand more"), "a cause"),
        (ValueError("\n\n  a cause \n"), "a cause"),
        (ValueError("the field 'eps':\n    must be a number\nand more"), "the field 'eps': must be a number"),
        (ValueError("only announced:"), "only announced:"),
        (ValueError(), "ValueError"),
        (RuntimeError(" \n "), "RuntimeError"),
        (KeyError("gelu"), "there is no 'gelu'"),
        (UnknownError("unknown method 'x'"), "unknown method 'x'"),
    ],
)
def test_the_first_line_that_says_anything(error: Exception, line: str) -> None:
    assert first_line(error) == line
