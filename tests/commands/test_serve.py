"""The command: names of models, bad values, what is wrong with a folder."""

from __future__ import annotations

import pytest

from pinscher.commands.serve import named
from pinscher.errors import InputError
from tiny_command import outcome
from tiny_engine import store


def test_models_have_names():
    assert named(["runs/rte/export", "other=small", "runs/cola-pins"]) == {
        "rte": "runs/rte/export",
        "other": "small",
        "cola-pins": "runs/cola-pins",
    }
    with pytest.raises(InputError, match="two models are called rte: give names, as in first=runs/rte/export"):
        named(["runs/rte/export", "rte=x"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere/at/all"], "nowhere/at/all is not a folder"),
        ([".", "--port", "70000"], "--port"),
        ([".", "--workers", "0"], "--workers"),
        ([".", "--queue", "-1"], "--queue"),
        ([".", "--mode", "steam"], "unknown mode"),
    ],
)
def test_what_is_wrong_is_one_sentence(words, message, capsys):
    code, _, said = outcome(["serve", *words], capsys)
    assert code == 2
    assert message in said
    assert "Traceback" not in said


def test_models_for_tokens_are_not_served(tmp_path, capsys):
    store(tmp_path / "tags", "bert", "tokens")
    code, _, said = outcome(["serve", str(tmp_path / "tags")], capsys)
    assert code == 2
    assert "tags is for tokens" in said
