"""A bad number is one sentence that names its flag: for every flag of every command, before any work is done."""

from __future__ import annotations

from typing import Any, get_type_hints

import pytest
from typer.core import TyperGroup

from pinscher.commands import app
from pinscher.commands.console import plainly
from pinscher.commands.flags import FRACTIONAL, WHOLE
from pinscher.train.config import RunConfig
from tiny_command import complaint

BAD = ["nan", "-1", "inf", "1e300", "many", ""]
ARGUMENTS = {"prune": [], "compare": []}  # of all others: a place that is not there
# Lists of numbers, which are texts to the command line.
LISTS = {("bench", "batch"), ("bench", "length"), ("compare", "sparsity"), ("compare", "seeds"), ("inspect", "levels")}
SIGNED = {("inspect", "mask_threshold")}  # may be -1
GRID = ["--methods", "pins", "--tasks", "rte", "--output", "out"]
NEEDS = {
    ("inspect", "levels"): ["--sensitivity"],
    ("inspect", "rows"): ["--sensitivity"],
    ("compare", "sparsity"): GRID,
    ("compare", "seeds"): GRID,
}
GROUP = app.complete()


def numeric(name: str) -> list[Any]:
    return [p for p in GROUP.commands[name].params if p.metavar in (WHOLE, FRACTIONAL) or (name, p.name) in LISTS]


def run(words: list[str], capsys: Any) -> tuple[Any, str, str]:
    """As `tiny_command.outcome`, without putting the command line together each time."""
    code: Any = 0
    try:
        with plainly():
            GROUP(words)
    except SystemExit as end:
        code = end.code or 0
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.parametrize("name", GROUP.commands)
def test_bad_numbers_are_one_sentence(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    flags = numeric(name)
    assert flags
    for flag in flags:
        for value in BAD:
            if value == "-1" and (name, flag.name) in SIGNED:
                continue
            words = [name, *ARGUMENTS.get(name, ["./nowhere"]), *NEEDS.get((name, flag.name), []), flag.opts[0], value]
            line = complaint(run(words, capsys))
            assert flag.opts[0] in line, words
            assert "nowhere" not in line, words
    assert list(tmp_path.iterdir()) == []


def test_numbers_reach_the_commands_as_text():
    """The command line's own reading of a number complains in a box, and takes nan."""
    for one in app.make(TyperGroup, RunConfig).registered_commands:
        for name, kind in get_type_hints(one.callback).items():
            assert "int" not in str(kind), (one.name, name, kind)
            assert "float" not in str(kind), (one.name, name, kind)


def test_every_number_of_a_run_is_among_them():
    found = {p.name for p in numeric("prune")}
    assert {"sparsity", "lora_rank", "max_length", "learning_rate", "seed"} <= found
    assert {p.name for p in numeric("eval")} == {"rows", "max_length", "stride", "beams", "batch_size"}
