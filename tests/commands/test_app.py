"""The command as a whole: its subcommands, its help, its version."""

import os
import re
import subprocess
import sys
from pathlib import Path

from pinscher.commands import app

SHARED = {"__init__", "app", "console", "flags", "views"}  # what is no command


def test_help_cuts_nothing_on_a_narrow_terminal(tmp_path):
    environment = {**os.environ, "COLUMNS": "80"}
    for words in (["prune", "--help"], ["prune", "--recipe", "list"], ["eval", "--help"]):
        done = subprocess.run(
            [sys.executable, "-m", "pinscher", *words], env=environment, cwd=tmp_path, text=True, capture_output=True
        )
        assert done.returncode == 0, done.stderr
        assert not re.search(r"\w…", done.stdout)  # a name that was cut


def test_the_version_and_the_commands(command):
    import pinscher

    assert command("--version")[1].strip() == pinscher.__version__
    said = command("--help")[1]
    assert "Show the version and exit." in said
    files = {path.stem for path in Path(app.__file__).parent.glob("*.py")} - SHARED
    registered = {info.name: info.callback.__module__ for info in app.app.registered_commands}
    assert {module.rsplit(".")[-1] for module in registered.values()} == files
    assert all(f" {name} " in said for name in registered)
    assert set(registered) == {"prune", "eval", "compare", "export", "bench", "serve", "report", "inspect"}


def test_every_command_has_help_in_plain_sentences(command):
    """Each command and each of its flags says what it is for, and ends with a full stop."""
    group = app.complete()
    for name, one in group.commands.items():
        assert command(name, "--help")[0] == 0
        assert one.help[0].isupper(), name
        assert one.help.strip().endswith((".", "%.")), name
        for parameter in one.params:
            said = parameter.help or ""
            assert said.endswith("."), (name, parameter.name, said)


def test_help_of_inspect(command):
    assert "Analyse the sparsity of any checkpoint" in command("--help")[1]
