"""Every promise of docs/promises.md names the test files that hold it, and they exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = [line for line in (ROOT / "docs" / "promises.md").read_text().splitlines() if line.startswith("| ")]
PROMISES = [line for line in ROWS if not line.startswith("| promise |")]


def test_there_are_promises():
    assert len(PROMISES) >= 20
    assert len(ROWS) - len(PROMISES) == 5  # exactness, resume, files, threads, errors


@pytest.mark.parametrize("row", PROMISES)
def test_a_promise_names_tests_that_exist(row):
    named = re.findall(r"`(tests/[^`]+)`", row.split("|")[2])
    assert named, "no test holds this promise"
    for path in named:
        assert (ROOT / path).is_file(), path
        assert re.search(r"^\s*def test_", (ROOT / path).read_text(), re.MULTILINE), f"{path} tests nothing"
