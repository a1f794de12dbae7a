"""A run that is killed after training goes on where it was, and ends with the same files as an unbroken one."""

from __future__ import annotations

import os
import shutil

import pytest

from attack.kills import differences
from pinscher import files
from pinscher.commands import views
from pinscher.runfolder import RunFolder
from pinscher.store import saving
from pinscher.train import folder as record
from pinscher.train import run as experiment
from pinscher.train import scoring, storage
from pinscher.train.trainer import PinsTrainer
from tiny_command import SHORT, complaint, outcome


class Killed(BaseException):
    """What no handler of ours may swallow."""


def before(function):
    def die(*args, **kwargs):
        raise Killed

    return die


def after(function):
    def die(*args, **kwargs):
        function(*args, **kwargs)
        raise Killed

    return die


# Where a run is ended: the object, the function, before or after it.
STAGES = {
    "trained": (experiment, "_test", before),
    "saving the model": (storage.Whole, "save_model", before),
    "model saved": (storage.Whole, "save_model", after),
    "tested": (record, "write_result", before),
    "result written": (record, "write_result", after),
    "checkpoints removed": (RunFolder, "remove_checkpoints", after),
    "exporting": (saving, "save_pretrained", before),
    "exported": (saving, "save_pretrained", after),
    "scoring": (scoring, "score", before),
    "card": (saving, "rewrite_card", before),
    "scored": (saving, "rewrite_card", after),
    "summary": (views, "show_result", before),
}
FINAL = ("summary",)  # nothing is left to do


@pytest.fixture(scope="module")
def flags(sst2):
    return ["prune", *sst2, *SHORT, "--output", "out", "--overwrite"]


@pytest.fixture(scope="module")
def unbroken(flags, tmp_path_factory):
    root = tmp_path_factory.mktemp("unbroken")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        assert outcome(flags)[0] == 0
        (root / "pair").mkdir()
        patch.chdir(root / "pair")
        assert outcome([*flags, "--baseline", "--no-export"])[0] == 0
    return root


def end_at(place, name, when, patch):
    patch.setattr(place, name, when(getattr(place, name)))


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_is_resumed(stage, command, flags, unbroken, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        end_at(*STAGES[stage], patch)
        with pytest.raises(Killed):
            command(*flags)
    if stage not in FINAL:
        code, out, err = command("prune", "--resume", "out")
        assert code == 0, err
        assert "accuracy" in out
    assert differences(tmp_path / "out", unbroken / "out") == []
    assert "nothing to resume" in complaint(command("prune", "--resume", "out"))
    assert differences(tmp_path / "out", unbroken / "out") == []


def test_what_is_done_is_not_done_again(command, flags, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        end_at(*STAGES["scoring"], patch)
        with pytest.raises(Killed):
            command(*flags)
    written = (tmp_path / "out" / "export" / "model.safetensors").stat()
    with monkeypatch.context() as patch:
        patch.setattr(PinsTrainer, "train", before(None))
        patch.setattr(saving, "save_pretrained", before(None))
        assert command("prune", "--resume", "out")[0] == 0
    assert (tmp_path / "out" / "export" / "model.safetensors").stat().st_mtime_ns == written.st_mtime_ns


def test_the_dense_run_is_resumed_at_every_stage(command, flags, unbroken, tmp_path, monkeypatch):
    told = [*flags, "--baseline", "--no-export"]
    for stage in ("trained", "model saved", "result written", "checkpoints removed"):
        with monkeypatch.context() as patch:
            end_at(*STAGES[stage], patch)
            with pytest.raises(Killed):
                command(*told)
        assert (tmp_path / "out" / "dense").exists()
        assert not (tmp_path / "out" / "model").exists()
        code, _, err = command("prune", "--resume", "out")
        assert code == 0, err
        assert differences(tmp_path / "out", unbroken / "pair" / "out") == [], stage


def test_half_written_checkpoints_go_with_the_others(command, flags, unbroken, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        end_at(*STAGES["trained"], patch)
        with pytest.raises(Killed):
            command(*flags)
    for name in (".checkpoint-5.new", ".checkpoint-4.gone", ".best.old"):
        (tmp_path / "out" / "checkpoints" / name).mkdir()
        (tmp_path / "out" / "checkpoints" / name / "half").touch()
    assert command("prune", "--resume", "out")[0] == 0
    assert differences(tmp_path / "out", unbroken / "out") == []


def test_a_new_export_is_scored_anew(command, flags, unbroken, tmp_path, monkeypatch):
    """Scores of an earlier export are not taken for those of one that was killed while it was scored."""
    shutil.copytree(unbroken / "out", tmp_path / "out")
    with monkeypatch.context() as patch:
        end_at(*STAGES["scoring"], patch)
        with pytest.raises(Killed):
            command("export", "out", "--embeddings", "int8", "--head", "int8", "--score")
    assert not (RunFolder("out").export_scored / "scores.json").exists()
    assert command("prune", "--resume", "out")[0] == 0
    assert differences(tmp_path / "out", unbroken / "out") == []


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("how", ["cut", "removed"])
def test_a_damaged_export_is_made_again(name, how, command, unbroken, tmp_path):
    shutil.copytree(unbroken / "out", tmp_path / "out")
    path = tmp_path / "out" / "export" / name
    if how == "cut":
        os.truncate(path, path.stat().st_size // 2)
    else:
        path.unlink()
    code, out, err = command("prune", "--resume", "out")
    assert code == 0, err
    assert "accuracy" in out
    assert differences(tmp_path / "out", unbroken / "out") == []


def test_something_else_in_place_of_the_export_is_left_alone(command, unbroken, tmp_path):
    shutil.copytree(unbroken / "out", tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "export")
    (tmp_path / "out" / "export").mkdir()
    (tmp_path / "out" / "export" / "model.onnx").write_text("mine")
    assert "holds something else" in complaint(command("prune", "--resume", "out"))
    assert (tmp_path / "out" / "export" / "model.onnx").read_text() == "mine"


def test_an_export_is_not_made_of_a_damaged_model(command, unbroken, tmp_path):
    shutil.copytree(unbroken / "out", tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "export")
    path = tmp_path / "out" / "model" / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    said = complaint(command("prune", "--resume", "out"))
    assert "model/model.safetensors is damaged" in said
    assert "--overwrite" in said
    assert not (tmp_path / "out" / "export").exists()


def test_a_removed_folder_leaves_no_half(tmp_path, monkeypatch):
    folder = tmp_path / "checkpoint-4"
    folder.mkdir()
    (folder / "a").touch()
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path, ignore_errors: before(None)() if path.exists() else None)
        with pytest.raises(Killed):
            files.remove(folder)
    assert not folder.exists()
    folder.mkdir()
    files.remove(folder)
    assert list(tmp_path.iterdir()) == []
