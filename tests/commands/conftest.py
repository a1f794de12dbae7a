"""A tiny task, and the command as a person types it."""

import sys

import pytest

import tiny_tasks
from pinscher.commands import app


@pytest.fixture(scope="session")
def sst2(tmp_path_factory):
    """The flags for a tiny model and tiny files of one task."""
    root = tmp_path_factory.mktemp("sst2")
    tiny_tasks.write_files("sst2", root / "data")
    tiny_tasks.tiny_model("sst2", root / "model")
    return ["--model", str(root / "model"), "--task", "sst2", "--data", str(root / "data")]


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """Runs the command in an empty folder; gives its exit code and what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["pinscher", *map(str, words)])
        code = 0
        try:
            app.main()
        except SystemExit as end:
            code = end.code or 0
        said = capsys.readouterr()
        return code, said.out, said.err

    return run
