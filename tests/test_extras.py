"""Without an extra, what needs it says in one line how to install it; what does not need it works."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from pinscher.extras import EXTRAS

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TRAIN = [library for library, extra in EXTRAS.items() if extra == "train"]
NAMES = {"sklearn": "scikit-learn"}  # of packages that are not called as their modules are


def without(libraries: list[str], code: str) -> subprocess.CompletedProcess[str]:
    block = f"import sys\nfor name in {libraries!r}: sys.modules[name] = None\n"
    return subprocess.run([sys.executable, "-c", block + code], capture_output=True, text=True, cwd=ROOT)


@pytest.mark.parametrize("library", EXTRAS)
def test_the_extra_brings_the_library(library):
    wanted = NAMES.get(library, library.replace("_", "-"))

    def brings(extra: str) -> set[str]:
        names = set()
        for one in PROJECT["optional-dependencies"][extra]:
            inner = re.match(r"pinscher\[(.*)\]", one)
            for other in inner[1].split(",") if inner else ():
                names |= brings(other)
            names.add(re.split(r"[\[<>=]", one)[0])
        return names

    assert wanted in brings(EXTRAS[library])
    assert wanted not in {re.split(r"[\[<>=]", one)[0] for one in PROJECT["dependencies"]}


COMMANDS = [
    ["prune", "--help"],
    ["compare", "--help"],
    ["eval", "."],
    ["export", "."],
    ["bench", "."],
    ["inspect", "."],
]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_commands_without_training(words):
    code = f"sys.argv = ['pinscher', *{words!r}]\nfrom pinscher.commands.app import main\nmain()"
    found = without(TRAIN, code)
    assert found.returncode == 2, found.stderr
    assert "Traceback" not in found.stderr
    pattern = r"error: .* needs \w+, which is not installed: pip install 'pinscher\[train\]'\."
    assert re.fullmatch(pattern, found.stderr.strip())


@pytest.mark.parametrize("name", ["load", "run", "Pruner", "PinsTrainer", "PruningConfig", "recipe", "sparsity"])
def test_names_without_training(name):
    found = without(TRAIN, f"import pinscher\ntry: pinscher.{name}\nexcept ImportError as error: print(error)")
    assert re.fullmatch(
        rf"pinscher\.{name} needs \w+, which is not installed: pip install 'pinscher\[train\]'\.\n", found.stdout
    ), found.stderr


@pytest.mark.parametrize("call", ["accelerate(None)", "save_pretrained(None, 'x')"])
def test_calls_without_training(call):
    found = without(TRAIN, f"import pinscher\ntry: pinscher.{call}\nexcept ImportError as error: print(error)")
    assert found.stdout.endswith("which is not installed: pip install 'pinscher[train]'.\n"), found.stderr


def test_other_missing_modules_stay_errors_of_their_own():
    found = without(["numpy"], "import pinscher\npinscher.Engine")
    assert "ModuleNotFoundError" in found.stderr
    assert "pinscher[" not in found.stderr


def test_serving_without_its_extra():
    code = "sys.argv = ['pinscher', 'serve', '.']\nfrom pinscher.commands.app import main\nmain()"
    found = without(["fastapi", "uvicorn"], code)
    assert found.returncode == 2
    wanted = "error: this command needs uvicorn, which is not installed: pip install 'pinscher[serve]'."
    assert found.stderr.strip() == wanted
