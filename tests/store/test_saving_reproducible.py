"""The same model gives the same bytes, file by file, in any process."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pinscher
import tiny_tasks
from pinscher.store import file, payload
from tiny_models import HEADS
from tiny_store import vector

FORMATS = ("pinscher", "hf", "scipy", "onnx")
EXPORT = f"""
import sys
from pinscher.commands import app

output = sys.argv[1]
for name in {FORMATS}:
    sys.argv = ["pinscher", "export", "model", "--format", name, "--output", f"{{output}}/{{name}}"]
    try:
        app.main()
    except SystemExit as end:
        assert not end.code
"""


def digests(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_two_exports_are_the_same_bytes_in_any_process(tmp_path):
    tiny_tasks.tiny_model("sst2", tmp_path / "model")  # for its tokenizer
    HEADS["bert"].make().save_pretrained(tmp_path / "model")
    for number in range(2):
        environment = {**os.environ, "PYTHONHASHSEED": str(number), "HF_HUB_OFFLINE": "1"}
        words = [sys.executable, "-c", EXPORT, f"out{number}"]
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    first, second = digests(tmp_path / "out0"), digests(tmp_path / "out1")
    assert {name.partition("/")[0] for name in first} == set(FORMATS)
    assert first == second


def test_storing_twice_gives_the_same_bytes(tmp_path):
    for number in range(6):  # the order of safetensors' own metadata changes from file to file
        pinscher.save_pretrained(HEADS["gpt2-lm"].make(), tmp_path / str(number), max_shard_size="9KB")
    found = [digests(tmp_path / str(number)) for number in range(6)]
    assert len(found[0]) > 4
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize("name", ["a.weight", 'a "quoted\\ name', "naïve ü \U0001f642", "tab\tand\x1f\x7f", " spaces "])
def test_names_of_any_letters_survive(tmp_path, name):
    file.write(tmp_path, {name: torch.arange(3.0), "b": vector(payload.pack(torch.ones(2, 2)))})
    with file.Stored(file.files_of(tmp_path)) as stored:
        assert stored.names() == sorted([name, "b"])
        assert stored.tensor(name).tolist() == [0, 1, 2]
