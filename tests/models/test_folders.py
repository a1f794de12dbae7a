"""A config.json that asks for more layers than there are weights for is refused before a model is made of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pinscher.errors import InputError
from pinscher.models import folders
from tiny_models import HEADS

BIN = "pytorch_model.bin"


@pytest.fixture(params=["zip", "legacy"])
def folder(request, tmp_path) -> Path:
    """A model with torch's files of weights instead of safetensors, in their old form or the present one."""
    model = HEADS["bert"].make()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / BIN, _use_new_zipfile_serialization=request.param == "zip")
    return tmp_path


def ask(folder: Path, **settings: int) -> None:
    path = folder / folders.CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def test_a_model_in_a_torch_file_is_let_through(folder):
    assert folders.check(folder)["num_hidden_layers"] == 2
    ask(folder, num_hidden_layers=folders.FREE_LAYERS)  # a model may use a layer again and again
    folders.check(folder)


@pytest.mark.parametrize("settings", [{"num_hidden_layers": 20_000}, {"vocab_size": 10**12}, {"num_labels": 10**9}])
def test_sizes_that_a_torch_file_cannot_hold_are_refused(folder, settings):
    ask(folder, **settings)
    with pytest.raises(InputError, match=rf"config\.json asks for {next(iter(settings))} = .*, but the model has only"):
        folders.check(folder)


def test_tensors_of_a_torch_file_are_counted(tmp_path):
    torch.save({f"layer.{i}": torch.zeros(3) for i in range(500)}, tmp_path / BIN)
    (tmp_path / folders.CONFIG).write_text("{}")
    ask(tmp_path, num_hidden_layers=500)
    folders.check(tmp_path)
    ask(tmp_path, num_hidden_layers=501)
    with pytest.raises(InputError, match="num_hidden_layers = 501, but the model has only 500 tensors"):
        folders.check(tmp_path)


@pytest.mark.parametrize("content", [b"", b"PK\x05\x06" + bytes(18), b"PK\x03\x04" * 99])
def test_a_broken_torch_file_is_left_to_its_reader(content, folder):
    (folder / BIN).write_bytes(content)
    folders.check(folder)
    ask(folder, num_hidden_layers=20_000)
    with pytest.raises(InputError, match="num_hidden_layers = 20000"):
        folders.check(folder)
