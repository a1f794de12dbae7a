"""Malicious files: every one ends in one clear error, soon, and in no more memory than its size can justify."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import BertForSequenceClassification

from make_hostile import FILES, FOLDER, QUERY, SHARD
from pinscher.store import file, loading, payload
from tiny_models import HEADS
from tiny_store import MB, confined, vector, write_tensors

MEMORY, SECONDS = 256 * MB, 10  # for files below 20 kB; a reader may make room for weights of 16 MB for any file
OTHER = SHARD.replace("00001", "00002")
NAMES = sorted(path.name for path in FOLDER.iterdir())
PAYLOADS, MODELS, INDICES = (
    [name for name in NAMES if name.endswith(kind)] for kind in (".payload", ".safetensors", ".index.json")
)
LOADING = {"DamagedError", "InputError", "OSError", "RuntimeError", "SafetensorError"}
# transformers reads the index before anybody else and trusts what is in it.
READING_INDEX = LOADING | {"TypeError", "KeyError", "IndexError", "AttributeError", "ValueError"}
READING_INDEX |= {"UnicodeDecodeError", "JSONDecodeError", "RecursionError", "FileNotFoundError"}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A folder with two shards and the configuration of a BERT, to put hostile files in."""
    folder = tmp_path_factory.mktemp("hostile") / "model"
    config = HEADS["bert"].make().config
    config.dtype, config.architectures = "float32", ["BertForSequenceClassification"]
    config.quantization_config = {"quant_method": "pinscher", "version": 1}
    config.save_pretrained(folder)
    write_tensors(folder / SHARD, {QUERY: vector(payload.pack(torch.ones(16, 16)))})
    rest = {name: tensor for name, tensor in HEADS["bert"].make().state_dict().items() if name != QUERY}
    write_tensors(folder / OTHER, rest)
    shutil.copy(folder / SHARD, folder.parent / SHARD)  # what a way out of the folder would find
    assert loading.METHOD == "pinscher"
    return folder


def declared(data: bytes) -> tuple[int, int]:
    rows, columns = (int.from_bytes(data[place : place + 4], "little") for place in (8, 12))
    return (columns, rows) if data[7] & 1 else (rows, columns)


def load(folder: Path) -> str:
    return type(BertForSequenceClassification.from_pretrained(folder)).__name__


def test_the_folder_holds_what_the_script_makes_and_nothing_large():
    assert set(NAMES) == set(FILES)
    assert all((FOLDER / name).stat().st_size < 20_000 for name in NAMES)


@pytest.mark.parametrize("name", PAYLOADS)
def test_a_hostile_matrix_does_no_harm(name):
    data = (FOLDER / name).read_bytes()
    kind, message = confined(lambda: tuple(payload.unpack(data).shape), MEMORY, SECONDS)
    wanted = FILES[name][1]
    if wanted is None and kind == "returned":
        assert message == repr(declared(data))
    else:
        assert kind == "raised DamagedError", message
        assert re.search(wanted or "", message)
        assert len(message) < 300


def read(path: Path) -> str:
    with file.Stored([path]) as stored:
        return repr([tuple(tensor.shape) for _, tensor in stored.items()])


@pytest.mark.parametrize("name", MODELS)
def test_a_hostile_file_does_no_harm(model, name):
    kind, message = confined(lambda: read(FOLDER / name), MEMORY, SECONDS)
    wanted = FILES[name][1]
    assert kind == "raised DamagedError" or wanted is None, message
    assert kind != "died", message
    assert kind != "raised MemoryError", message
    if kind == "raised DamagedError":
        assert name in message
        assert re.search(wanted or "", message)


@pytest.mark.parametrize("name", MODELS)
def test_a_hostile_file_gives_no_model(model, tmp_path, name):
    shutil.copy(model / "config.json", tmp_path / "config.json")
    shutil.copy(FOLDER / name, tmp_path / file.SINGLE)
    kind, message = confined(lambda: load(tmp_path), 2 * MEMORY, 2 * SECONDS)
    assert kind.removeprefix("raised ") in LOADING, message


@pytest.mark.parametrize("name", INDICES)
def test_a_hostile_index_does_no_harm(model, name):
    shutil.copy(FOLDER / name, model / file.INDEX)
    kind, message = confined(lambda: read_folder(model), MEMORY, SECONDS)
    assert kind == "raised DamagedError", message
    assert str(model) in message
    assert re.search(FILES[name][1] or "", message)


def read_folder(folder: Path) -> list[str]:
    with file.Stored(file.files_of(folder)) as stored:
        return stored.names()


@pytest.mark.parametrize("name", INDICES)
def test_a_hostile_index_gives_no_model(model, name):
    shutil.copy(FOLDER / name, model / file.INDEX)
    kind, message = confined(lambda: load(model), 2 * MEMORY, 2 * SECONDS)
    assert kind.removeprefix("raised ") in READING_INDEX, f"{kind} {message}"


def test_the_shards_that_the_indices_are_put_before_are_themselves_whole(model):
    names = dict.fromkeys(HEADS["bert"].make().state_dict(), OTHER) | {QUERY: SHARD}
    (model / file.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    assert read_folder(model) == sorted(names)
    assert confined(lambda: load(model), 2 * MEMORY)[0] == "returned"
