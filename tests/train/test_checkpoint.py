"""Checkpoints are whole or not there, hold what training needs, and say what is wrong with a bad one."""

import json
import os
import signal

import pytest
import torch

from pinscher import files
from pinscher.train import checkpoint, checksums

STATE = {
    "weights": {
        "a": torch.arange(6.0).view(2, 3),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "empty": torch.empty(0),
    },
    "optimizer": {"state": {0: {"step": torch.tensor(3.0)}, 1: {}}, "groups": [{"lr": 1e-3, "betas": (0.9, 0.999)}]},
    "best": None,
    "text": "ü",
    "flag": True,
    "infinite": float("-inf"),
}


def same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def test_round_trip_keeps_types_and_keys(tmp_path):
    checkpoint.save(tmp_path / "c", **STATE)
    assert same(checkpoint.load(tmp_path / "c"), STATE)


def test_shared_memory_is_stored(tmp_path):
    weight = torch.ones(4)
    checkpoint.save(tmp_path / "c", a=weight, b=weight, part=weight[:2])
    assert same(checkpoint.load(tmp_path / "c"), {"a": weight, "b": weight, "part": weight[:2]})


def test_saving_replaces_and_leaves_nothing_behind(tmp_path):
    for step in range(3):
        checkpoint.save(tmp_path / "c", step=step, tensor=torch.full((2,), step))
    assert checkpoint.load(tmp_path / "c")["step"] == 2
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_what_cannot_be_stored_is_named_and_nothing_is_written(tmp_path):
    checkpoint.save(tmp_path / "c", step=1)
    with pytest.raises(TypeError, match=r"optimizer/hook: a function"):
        checkpoint.save(tmp_path / "c", optimizer={"hook": lambda: None})
    assert checkpoint.load(tmp_path / "c") == {"step": 1}


# In the order in which save syncs: checksums, values, tensors, folder, then (after the renames) the parent folder.
@pytest.mark.parametrize("sync", [1, 2, 3, 4, 5])
def test_a_kill_during_save_leaves_a_whole_checkpoint(tmp_path, sync):
    folder = tmp_path / "c"
    checkpoint.save(folder, step=1)
    if (child := os.fork()) == 0:
        calls = iter(range(1, 6))
        plain = files._sync

        def die(path):
            os.kill(os.getpid(), signal.SIGKILL) if next(calls) == sync else plain(path)

        files._sync = die
        checkpoint.save(folder, step=2)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert checkpoint.exists(folder)
    assert checkpoint.load(folder) == {"step": 2 if sync == 5 else 1}
    checkpoint.save(folder, step=3)
    assert checkpoint.load(folder) == {"step": 3}
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_killed_between_the_two_renames(tmp_path):
    folder = checkpoint.save(tmp_path / "c", step=1)
    folder.rename(tmp_path / ".c.old")
    assert checkpoint.exists(folder)
    assert checkpoint.load(folder) == {"step": 1}
    checkpoint.save(folder, step=2)
    assert checkpoint.load(folder) == {"step": 2}


def test_damaged_checkpoints_say_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint in"):
        checkpoint.load(tmp_path / "nowhere")
    for name, content in ((checkpoint.VALUES, b"{"), (checkpoint.VALUES, b"\xff"), (checkpoint.TENSORS, b"short")):
        folder = checkpoint.save(tmp_path / "c", tensor=torch.ones(3))
        (folder / name).write_bytes(content)
        with pytest.raises(ValueError, match="damaged"):
            checkpoint.load(folder)
    folder = checkpoint.save(tmp_path / "c", step=1)
    (folder / checkpoint.VALUES).write_text(json.dumps({"format": 99}))
    checksums.write(folder)
    with pytest.raises(ValueError, match="format 99"):
        checkpoint.load(folder)
