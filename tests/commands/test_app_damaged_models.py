"""Damaged model files, and outputs that cannot be written: one sentence with file and cause, whatever the command."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import pinscher
import tiny_tasks
from pinscher.store import file
from tiny_command import SHORT, complaint, outcome
from tiny_store import vector, write_tensors

QUERY = "bert.encoder.layer.0.attention.self.query.weight"


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """The files of a task, a plain model for it and the same one stored."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    root = tmp_path_factory.mktemp("damaged")
    tiny_tasks.write_files("sst2", root / "data")
    tiny_tasks.tiny_model("sst2", root / "model")
    model = AutoModelForSequenceClassification.from_pretrained(root / "model", num_labels=2)
    model.save_pretrained(root / "plain")
    tokenizer = AutoTokenizer.from_pretrained(root / "model")
    tokenizer.save_pretrained(root / "plain")
    pinscher.save_pretrained(model, root / "stored", tokenizer=tokenizer)
    return root


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def garble(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:8] + b"\xff" * 200 + data[208:])


def blank(path: Path) -> None:
    path.write_bytes(b"")


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def become_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def become_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def unknown_type(path: Path) -> None:
    data = path.read_bytes()
    kind = b'"F32"' if b'"F32"' in data else b'"U8"'
    path.write_bytes(data.replace(kind, b'"F99"'[: len(kind)].ljust(len(kind), b"x"), 1))


def reshape(path: Path) -> None:
    rewrite(path, torch.ones(3, 5))


def lack(path: Path) -> None:
    rewrite(path, None)


def rewrite(path: Path, tensor: torch.Tensor | None) -> None:
    """Another matrix in place of one, or none."""
    held = load_file(path)
    is_stored = held[QUERY].dtype == torch.uint8
    del held[QUERY]
    if tensor is not None:
        held[QUERY] = vector(file.payload.pack(tensor)) if is_stored else tensor
    if is_stored:
        write_tensors(path, held)
    else:
        save_file(held, path, metadata={"format": "pt"})


DAMAGE = [cut, garble, blank, zero, become_folder, become_pipe, unknown_type, reshape, lack]


def words(name: str, folder: Path, root: Path, output: Path) -> list[object]:
    task = ["--task", "sst2", "--data", root / "data"]
    return {
        "prune": ["prune", "--model", folder, *task, "--output", output, *SHORT],
        "eval": ["eval", folder, *task, "--output", output],
        "export": ["export", folder, "--output", output],
        "bench": ["bench", folder, "--output", output],
        "inspect": ["inspect", folder, "--no-rank"],
    }[name]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("kind", ["plain", "stored"])
@pytest.mark.parametrize("name", ["prune", "eval", "export", "bench", "inspect"])
def test_a_damaged_model_file_is_told_in_one_sentence(root, tmp_path, capsys, name, kind, damage):
    folder = Path(shutil.copytree(root / kind, tmp_path / "model"))
    damage(folder / file.SINGLE)
    if name == "inspect" and damage in (reshape, lack):
        return  # it looks at whatever matrices are there
    said = complaint(outcome(words(name, folder, root, tmp_path / "out"), capsys))
    assert str(folder) in said
    assert QUERY in said if damage in (reshape, lack) else "model.safetensors" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("damage", [cut, garble, blank, zero, become_pipe], ids=lambda damage: damage.__name__)
def test_damaged_settings_are_told_in_one_sentence(root, tmp_path, capsys, name, damage):
    folder = Path(shutil.copytree(root / "plain", tmp_path / "model"))
    damage(folder / name)
    said = complaint(outcome(words("eval", folder, root, tmp_path / "out"), capsys))
    assert str(folder) in said


@pytest.mark.parametrize("names", ["Trainer", ["Trainer"], [3], ["NoSuchModel"]])
def test_a_class_that_is_no_model_is_told(root, tmp_path, capsys, names):
    folder = Path(shutil.copytree(root / "plain", tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": names}))
    assert str(folder) in complaint(outcome(words("export", folder, root, tmp_path / "out"), capsys))


# ------------------------------------------------------------ outputs


def test_a_folder_is_no_place_for_a_json_file(root, tmp_path, capsys):
    (tmp_path / "taken").mkdir()
    words = ["inspect", root / "plain", "--no-rank", "--json", tmp_path / "taken"]
    assert f"{tmp_path / 'taken'} is a folder" in complaint(outcome(words, capsys))
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize("place", ["file/below.json", "file"])
def test_a_file_is_no_place_for_a_file_below_it(root, tmp_path, capsys, place):
    (tmp_path / "file").write_text("mine")
    if place == "file":
        words = ["bench", root / "plain", "--output", tmp_path / place]
    else:
        words = ["inspect", root / "plain", "--no-rank", "--json", tmp_path / place]
    assert str(tmp_path / "file") in complaint(outcome(words, capsys))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("name", ["export", "bench", "eval"])
def test_an_output_folder_that_is_a_file_is_told_first(root, tmp_path, capsys, name):
    (tmp_path / "out").write_text("mine")
    said = complaint(outcome(words(name, root / "plain", root, tmp_path / "out"), capsys))
    assert str(tmp_path / "out") in said
    assert (tmp_path / "out").read_text() == "mine"


def test_overwriting_through_a_link_leaves_nothing_of_the_old_run(root, tmp_path, capsys):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    run = [*words("prune", root / "model", root, tmp_path / "link"), "--no-export"]
    assert outcome(run, capsys)[0] == 0
    (tmp_path / "real" / "bench.json").write_text("{}")
    assert outcome([*run, "--overwrite"], capsys)[0] == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "result.json").exists()
    assert not (tmp_path / "real" / "bench.json").exists()


@pytest.mark.parametrize("name", [QUERY, "bert.embeddings.word_embeddings.weight", "classifier.bias"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused(root, tmp_path, capsys, name, value):
    model = Path(shutil.copytree(root / "plain", tmp_path / "model"))
    held = load_file(model / "model.safetensors")
    held[name].view(-1)[-1] = value
    save_file(held, model / "model.safetensors", metadata={"format": "pt"})
    for words in (
        ["prune", "--model", model, "--task", "sst2", "--data", root / "data", *SHORT, "--output", tmp_path / "out"],
        ["eval", model, "--task", "sst2", "--data", root / "data", "--output", tmp_path / "out"],
        ["export", model, "--output", tmp_path / "out"],
    ):
        line = complaint(outcome(words, capsys))
        assert f"{model / 'model.safetensors'} holds values that are not finite (NaN or infinity) in {name}" in line
    assert not (tmp_path / "out").exists()
