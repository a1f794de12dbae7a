"""Tiny comparisons: their flags, and what they leave in their folder."""

from __future__ import annotations

import csv
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tiny_command
import tiny_tasks
from tiny_command import STEPS, outcome

FEW = [*STEPS, "--warmup", "0", "--cooldown", "4"]
METHODS = ["--methods", "pins,magnitude", "--sparsity", "0.8"]
TWO = [*METHODS, "--tasks", "sst2", "--seeds", "2"]
ONE = [*METHODS, "--tasks", "sst2", "--seeds", "1"]
UNEQUAL = ("seconds",)  # what may differ between two comparisons that say the same


def write_world(root: Path) -> Path:
    """Writes a tiny model and the files of two tasks."""
    for task in ("sst2", "cola"):
        tiny_tasks.write_files(task, root / "data" / task)
    tiny_tasks.tiny_model("sst2", root / "model")
    return root


def words_for(root: Path) -> list[Any]:
    return ["compare", "--model", root / "model", "--data", root / "data", *FEW]


def complaint(words: list[Any], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a mistake gives."""
    capsys.readouterr()
    return tiny_command.complaint(outcome(words, capsys))


def table_of(folder: Path) -> list[dict[str, str]]:
    with open(folder / "results.csv", newline="") as file:
        return [{n: v for n, v in row.items() if n not in UNEQUAL} for row in csv.DictReader(file)]


def stamps(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in (folder / "cells").rglob("*")}


def wait_for(condition: Callable[[], Any], seconds: float = 300.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)
