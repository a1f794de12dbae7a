"""What a small file may cost: memory in proportion to its bytes, no waiting, no class but a model's."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import pinscher
from pinscher.commands import export, inspect
from pinscher.errors import InputError
from pinscher.store import file, payload
from pinscher.store.streams import DamagedError, varint
from pinscher.train import pretrained
from tiny_models import HEADS
from tiny_store import MB, confined, sealed, vector, write_tensors

READERS = {
    "load": pinscher.load,
    "Engine": pinscher.Engine,
    "from_pretrained": transformers.AutoModelForSequenceClassification.from_pretrained,
    "export": lambda folder: export.load(str(folder)),
    "inspect": lambda folder: inspect.look(str(folder), rank=False),
    "config": lambda folder: pretrained.load_config(str(folder)),
}
OURS = [name for name in READERS if name != "from_pretrained"]  # transformers has read config.json before we are asked


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bounds") / "small"
    pinscher.save_pretrained(HEADS["bert"].make(), folder)
    pinscher.load(folder)  # so that children find everything imported
    transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    inspect.look(str(folder), rank=False)
    export.load(str(folder))
    return folder


@pytest.fixture
def small(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "small"))


def configure(folder: Path, **settings: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))


def empty(rows: int, columns: int) -> torch.Tensor:
    """A matrix of zeros, in some 30 bytes."""
    return vector(sealed(4, 1, 0, rows, columns, varint(0) * 7))


def read(path: Path) -> int:
    with file.Stored([path]) as stored:
        return sum(tensor.numel() for _, tensor in stored.items())


# ------------------------------------------------------------ weights in proportion to the file


def test_many_empty_matrices_share_one_allowance(tmp_path):
    """Each alone could be real; together they are gigabytes in a few kilobytes."""
    path = write_tensors(tmp_path / file.SINGLE, {f"m{i}.weight": empty(2048, 2048) for i in range(100)})
    assert path.stat().st_size < 30_000
    kind, message = confined(lambda: read(path), 256 * MB)
    assert kind == "raised DamagedError", message
    assert str(path.parent) in message
    assert "more than" in message


def test_one_empty_matrix_is_read(tmp_path):
    path = write_tensors(tmp_path / file.SINGLE, {"m.weight": empty(2048, 2048)})
    assert read(path) == 2048 * 2048


@pytest.mark.parametrize("density", [0.001, 0.0001, 0.0])
def test_what_is_almost_all_zeros_is_written_so_that_it_can_be_read(tmp_path, density):
    """Forty matrices of 4 MB, and nothing else in the file."""
    generator = np.random.default_rng(0)
    made = {}
    for number in range(40):
        weight = torch.from_numpy(generator.normal(0, 1, (1024, 1024)).astype(np.float32))
        weight *= torch.from_numpy(generator.random((1024, 1024)) < density)
        made[f"m{number}.weight"] = vector(payload.pack(weight, "int8", codecs=("delta",), search=False))
    file.write(tmp_path, made)
    with file.Stored(file.files_of(tmp_path)) as stored:
        for name in list(made)[::13]:
            found, wanted = stored.tensor(name), payload.unpack(made[name])
            assert torch.equal(found, wanted)


def test_a_deep_real_model_of_999_thousandths_zeros_loads(tmp_path):
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=512, num_hidden_layers=8, num_attention_heads=8, intermediate_size=2048
    )
    model = transformers.BertForSequenceClassification(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.bert.encoder.parameters():
            if parameter.dim() == 2:
                parameter *= torch.rand(parameter.shape, generator=generator) < 0.001
    pinscher.save_pretrained(model, tmp_path / "small", codecs=("delta",), embeddings="int8")
    assert pinscher.load(tmp_path / "small") is not None
    found = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "small")
    name = "bert.encoder.layer.7.output.dense.weight"
    kept, wanted = found.state_dict()[name] != 0, model.state_dict()[name] != 0
    assert 0.9 * wanted.sum() < (kept & wanted).sum() == kept.sum()  # INT8 rounds some to zero


# ------------------------------------------------------------ sizes that config.json claims


@pytest.mark.parametrize("reader", READERS)
def test_layers_that_the_file_does_not_hold_are_not_built(small, reader):
    configure(small, num_hidden_layers=20_000)
    kind, message = confined(lambda: READERS[reader](small), 512 * MB, 30)
    assert kind in ("raised InputError", "raised DamagedError"), message
    assert str(small) in message
    assert "num_hidden_layers" in message


def test_a_class_of_its_own_does_not_build_them_either(small):
    """transformers has not told us yet where the files are."""
    configure(small, num_hidden_layers=20_000)
    kind, message = confined(lambda: transformers.BertForSequenceClassification.from_pretrained(small), 512 * MB, 30)
    assert kind == "raised InputError", message
    assert "num_hidden_layers = 20000" in message


@pytest.mark.parametrize("reader", OURS)
def test_labels_that_the_file_does_not_hold_are_not_listed(small, reader):
    config = json.loads((small / "config.json").read_text())
    for name in ("id2label", "label2id"):
        config.pop(name, None)
    (small / "config.json").write_text(json.dumps(config | {"num_labels": 100_000_000}))
    kind, message = confined(lambda: READERS[reader](small), 512 * MB, 30)
    assert kind in ("raised InputError", "raised DamagedError"), message
    assert str(small) in message
    assert "num_labels" in message


@pytest.mark.parametrize("reader", ["load", "from_pretrained"])
@pytest.mark.parametrize("name", ["vocab_size", "max_position_embeddings", "intermediate_size", "hidden_size"])
@pytest.mark.parametrize("size", [10**9, 10**12])
def test_huge_sizes_make_no_room(small, reader, name, size):
    configure(small, **{name: size})
    kind, message = confined(lambda: READERS[reader](small), 512 * MB, 30)
    assert kind in ("raised InputError", "raised DamagedError"), f"{kind}: {message}"
    assert str(small) in message


def test_modules_without_end_are_stopped(small):
    """Whatever the setting is called."""
    configure(small, num_hidden_layers=250)
    kind, message = confined(lambda: pinscher.load(small), 512 * MB, 30)
    assert kind in ("raised InputError", "raised DamagedError"), message
    assert str(small) in message


# ------------------------------------------------------------ things that are no files


@pytest.mark.parametrize("reader", OURS)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "model.safetensors.index.json"])
def test_a_pipe_is_refused_at_once(small, reader, name):
    (small / name).unlink(missing_ok=True)
    os.mkfifo(small / name)
    kind, message = confined(lambda: READERS[reader](small), 512 * MB, 20)
    assert kind in ("raised InputError", "raised DamagedError"), message
    assert str(small / name) in message


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("thing", ["pipe", "device", "folder"])
def test_a_model_file_that_is_no_file_is_refused(small, reader, thing):
    path = small / file.SINGLE
    path.unlink()
    if thing == "pipe":
        os.mkfifo(path)
    elif thing == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    if reader == "config":
        reader = "load"
    kind, message = confined(lambda: READERS[reader](small), 512 * MB, 20)
    assert kind in ("raised InputError", "raised DamagedError") or thing == "folder", message
    assert kind != "died", message
    assert str(small) in message


def test_a_pipe_among_the_files_of_a_stored_model_is_refused(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    for work in (lambda: file.Stored([tmp_path / file.SINGLE]), lambda: file.Stored(file.files_of(tmp_path))):
        assert confined(work, 256 * MB, 20)[0] == "raised DamagedError"


# ------------------------------------------------------------ classes


@pytest.mark.parametrize("name", ["AutoConfig", "Trainer", "pipeline", "BertConfig", "PreTrainedModel", "AutoModel"])
def test_only_a_model_class_is_taken_from_the_config(small, name):
    configure(small, architectures=[name])
    for reader in ("load", "export"):
        with pytest.raises(InputError, match=name) as told:
            READERS[reader](small)
        assert str(small) in str(told.value)


@pytest.mark.parametrize("names", ["BertForSequenceClassification", [7], [None], {"a": 1}, [["x"]], ["__class__"], 3])
def test_architectures_of_any_other_kind_are_refused(small, names):
    configure(small, architectures=names)
    for reader in ("load", "export"):
        with pytest.raises(InputError) as told:
            READERS[reader](small)
        assert str(small) in str(told.value)


def test_the_bound_is_one_for_all_shards(tmp_path):
    """A shard may hold what is empty, and another what is not."""
    made = {f"m{i}.weight": vector(payload.pack(torch.zeros(1024, 1024), "int8", codecs=("delta",))) for i in range(8)}
    made |= {"n.weight": torch.randn(200, 200)}
    file.write(tmp_path, made, max_shard_size="2KB")
    assert len(file.files_of(tmp_path)) > 1
    with file.Stored(file.files_of(tmp_path)) as stored:
        assert stored.tensor("m3.weight").shape == (1024, 1024)
    with pytest.raises(DamagedError):
        file.Stored(file.files_of(tmp_path)[:1])
