"""The command as a person types it, and a run that it has finished."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import tiny_tasks
from pinscher.commands import app

STEPS = ["--max-steps", "12", "--eval-every", "4", "--save-every", "4", "--batch-size", "8"]
SHORT = [*STEPS, "--recipe", "none"]  # one training; the default is a dense one and then a pruning one


def finished_run(root: Path) -> Path:
    """A finished run of a tiny model, without its own export."""
    tiny_tasks.write_files("sst2", root / "data")
    tiny_tasks.tiny_model("sst2", root / "model")
    words = ["prune", "--model", root / "model", "--task", "sst2", "--data", root / "data", "--output", root / "run"]
    assert outcome([*words, *SHORT, "--no-export"])[0] == 0
    assert not (root / "run" / "export").exists()
    return root / "run"


def outcome(words: Sequence[Any], capsys: Any = None) -> tuple[Any, str, str]:
    """Exit code and what was printed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["pinscher", *map(str, words)])
        patch.setenv("COLUMNS", "200")
        code: Any = 0
        try:
            app.main()
        except SystemExit as end:
            code = end.code or 0
    said = capsys.readouterr() if capsys else None
    return code, (said.out if said else ""), (said.err if said else "")


def complaint(outcome: tuple[Any, str, str]) -> str:
    """The one line that a mistake gives."""
    code, _, err = outcome
    assert code == 2, err
    lines = err.strip().splitlines()
    assert len(lines) == 1, err
    assert "Traceback" not in err
    assert lines[0].startswith("error: ")
    return lines[0]
