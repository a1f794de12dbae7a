"""A new setting is one field of a config, checked there: its flag, its help and its key in YAML follow from it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from pinscher.commands import app, evaluate, inspect
from pinscher.commands.flags import given, with_flags
from pinscher.errors import InputError
from pinscher.settings import setting
from pinscher.train.config import RunConfig
from pinscher.train.subject import DataConfig


@dataclass(frozen=True)
class Extended(RunConfig):
    """What RunConfig would be with one field more."""

    patience: int | None = setting(3, "Evaluations without progress.", group="Training")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.patience is not None and self.patience < 1:
            raise InputError(f"--patience must be at least 1, not {self.patience}.")


def outcome_of(*words: str) -> tuple[Any, dict[str, Any]]:
    """What a command whose flags are those of `Extended` prints, and the settings that it was given."""
    seen: dict[str, Any] = {}

    def command(**flags: Any) -> None:
        """Show the settings."""
        seen.update(given(flags))

    made = typer.Typer()
    made.command()(with_flags(command, Extended, without=("recipe",)))
    return CliRunner().invoke(made, list(words), env={"COLUMNS": "200"}), seen


def test_a_field_is_a_flag_with_its_help_and_default():
    shown, _ = outcome_of("--help")
    [line] = [line for line in shown.output.splitlines() if "--patience" in line]
    assert "Evaluations without progress." in line
    assert "[default: (3)]" in line
    assert "--recipe" not in shown.output  # which was left out


def test_a_flag_is_a_setting_of_the_fields_type():
    done, settings = outcome_of("--patience", "5", "--sparsity", "0.5")
    assert done.exit_code == 0, done.output
    assert settings == {"patience": 5, "sparsity": 0.5}
    assert Extended(**settings).patience == 5
    done, _ = outcome_of("--patience", "much")
    assert isinstance(done.exception, InputError)
    assert str(done.exception) == "--patience must be a whole number, not 'much'."


def test_a_field_is_a_key_of_the_plain_data_and_checked_there():
    assert Extended.from_dict({"task": "rte", "patience": 7}).patience == 7
    with pytest.raises(InputError, match="--patience must be at least 1, not 0"):
        Extended.from_dict({"task": "rte", "patience": 0})
    with pytest.raises(InputError, match="Did you mean 'patience'"):
        Extended.from_dict({"patiense": 7})
    with pytest.raises(InputError, match="patience"):
        RunConfig.from_dict({"patience": 7})


@pytest.mark.parametrize(("name", "wanted"), [("eval", evaluate.DATA), ("inspect", inspect.DATA)])
def test_a_command_takes_some_fields_as_they_are_declared(name, wanted):
    flags = {parameter.name: parameter for parameter in app.complete().commands[name].params}
    declared = {field.name: field for field in dataclasses.fields(DataConfig)}
    assert {flag: flags[flag].help for flag in wanted} == {flag: declared[flag].metadata["help"] for flag in wanted}
    assert not {*declared} - {*wanted, "rows"} & {*flags}


def test_every_field_of_a_run_is_a_flag_of_prune():
    command = app.complete().commands["prune"]
    flags = {parameter.name: parameter for parameter in command.params}
    for one in dataclasses.fields(RunConfig):
        assert flags[one.name].help == one.metadata["help"]
        assert f"--{one.name.replace('_', '-')}" in flags[one.name].opts
