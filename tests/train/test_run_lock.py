"""One process at a time works in a run folder. The lock names its holder, and ends with it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from pathlib import Path

import pytest

import tiny_tasks
from pinscher import locks, runfolder
from pinscher.commands import bench
from pinscher.errors import InputError
from pinscher.runfolder import LOCK, RunFolder
from pinscher.store import saving
from pinscher.train import scoring
from tiny_command import SHORT, complaint, finished_run, outcome


def hold(path: Path, ready: Path) -> None:
    with RunFolder(path).locked():
        ready.touch()
        time.sleep(600)


@pytest.fixture
def living(tmp_path, monkeypatch):
    """Another process that holds the lock of a run folder."""
    monkeypatch.setattr(runfolder, "PATIENCE", 0.3)
    (tmp_path / "run").mkdir()
    process = multiprocessing.get_context("fork").Process(target=hold, args=(tmp_path / "run", tmp_path / "ready"))
    process.start()
    while not (tmp_path / "ready").exists():
        assert process.is_alive()
        time.sleep(0.02)
    yield process
    process.kill()
    process.join()


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    root = tmp_path_factory.mktemp("lock")
    tiny_tasks.write_files("sst2", root / "data")
    tiny_tasks.tiny_model("sst2", root / "model")
    flags = ["--model", root / "model", "--task", "sst2", "--data", root / "data", "--no-export"]
    return ["prune", *flags, *SHORT]


def test_a_folder_is_locked_once_and_the_holder_is_named(living, tmp_path):
    with pytest.raises(InputError, match=f"process {living.pid} on {socket.gethostname()}"):
        RunFolder(tmp_path / "run").locked().__enter__()
    with pytest.raises(InputError, match="process"):  # by any other name
        RunFolder(tmp_path / "run" / ".." / "run").locked().__enter__()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_lock_ends_with_its_process(living, number, tmp_path):
    os.kill(living.pid, number)
    with RunFolder(tmp_path / "run").locked():
        assert locks.holder(tmp_path / "run" / LOCK) == f"process {os.getpid()} on {socket.gethostname()}"
    assert not (tmp_path / "run" / LOCK).exists()


def test_who_holds_a_lock_may_lock_again(tmp_path):
    folder = RunFolder(tmp_path / "a" / "run")
    with folder.locked():
        with RunFolder(folder.path).locked():
            pass
        assert (folder.path / LOCK).exists()
    assert list(tmp_path.iterdir()) == []  # nothing was put into it


def test_a_folder_with_something_in_it_stays(tmp_path):
    folder = RunFolder(tmp_path / "a" / "run")
    with folder.locked():
        folder.log.touch()
    assert [path.name for path in folder.path.iterdir()] == ["log.jsonl"]


def test_a_removed_lock_file_is_nobodys_lock(tmp_path):
    """One that waits for the lock must not get it by a file that is gone, while a third gets it by the new file."""
    path = tmp_path / "lock"
    with locks.locked(path, 0.0, keep=False), pytest.raises(locks.HeldError):
        locks.locked(path, 0.0).__enter__()
    old = open(path, "a")  # noqa: SIM115
    path.unlink()
    assert not locks._is_at(old, path)
    path.touch()
    assert not locks._is_at(old, path)
    old.close()


def test_where_there_are_no_locks_everything_works(tmp_path, monkeypatch):
    import errno
    import fcntl

    def refuse(file, how):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locks.locked(tmp_path / "lock"):
        pass


def test_a_run_that_lives_is_neither_resumed_nor_overwritten(words, tmp_path, living, capsys):
    run = tmp_path / "run"
    (run / "config.yaml").write_text("run: {model: x, task: sst2}\n")
    for more in ([*words, "--output", run, "--overwrite"], [*words, "--output", run], ["prune", "--resume", run]):
        line = complaint(outcome(more, capsys))
        assert f"{run} is being worked on by process {living.pid} on {socket.gethostname()}" in line
    assert (run / "config.yaml").exists()


def test_a_run_that_lives_is_neither_exported_nor_scored_nor_timed(tmp_path, living, capsys):
    run = tmp_path / "run"
    (run / "config.yaml").write_text("run: {model: x, task: sst2}\n")
    (run / "inside").symlink_to(run / "export")
    (tmp_path / "link").symlink_to(run / "inside")
    elsewhere = ["--output", tmp_path / "elsewhere"]
    before = sorted(run.iterdir())
    for words in (
        ["export", run],
        ["export", run, "--format", "onnx"],
        ["export", run, *elsewhere, "--score"],  # whose scores are kept with the run
        ["export", "any/model", "--output", run / "small"],
        ["export", "any/model", "--output", tmp_path / "link"],
        ["eval", run],
        ["eval", "any/model", "--task", "sst2", "--output", run / "eval"],
        ["bench", run],
        ["bench", "any/model", "--output", run],
    ):
        line = complaint(outcome(words, capsys))
        assert f"{run} is being worked on by process {living.pid} on {socket.gethostname()}" in line
    for words in (["export", run, *elsewhere], ["eval", run, *elsewhere], ["bench", run, *elsewhere]):
        assert "has no model yet" in complaint(outcome(words, capsys))  # it is only read
    assert sorted(run.iterdir()) == before


def test_what_is_made_of_a_run_is_made_under_its_lock(tmp_path, capsys, monkeypatch):
    run, seen = finished_run(tmp_path), []

    def looking(function):
        def look(*given, **named):
            seen.append((run / LOCK).exists())
            return function(*given, **named)

        return look

    monkeypatch.setattr(saving, "save_pretrained", looking(saving.save_pretrained))
    monkeypatch.setattr(scoring, "evaluate", looking(scoring.evaluate))
    monkeypatch.setattr(bench, "run", looking(lambda *_: {"latency": {}, "scores": {}, "memory": {}, "advice": ""}))
    for words in (["export", run, "--score"], ["eval", run], ["bench", run]):
        assert outcome(words, capsys)[0] == 0
    assert seen == [True] * 4
    assert not (run / LOCK).exists()


def test_overwriting_keeps_the_lock(words, tmp_path, capsys, monkeypatch):
    """Between two runs in a folder nobody else gets in."""
    run = tmp_path / "run"
    assert outcome([*words, "--output", run])[0] == 0
    seen = []
    create = RunFolder.create

    def look(self, config, overwrite=False):
        create(self, config, overwrite)
        seen.append(sorted(path.name for path in self.path.iterdir()))

    monkeypatch.setattr(RunFolder, "create", look)
    assert outcome([*words, "--output", run, "--overwrite"])[0] == 0
    assert seen == [[LOCK, "config.yaml"]]
    assert not (run / LOCK).exists()


def test_the_dense_run_is_locked_too(words, tmp_path, capsys, monkeypatch):
    seen = []
    create = RunFolder.create

    def look(self, config, overwrite=False):
        create(self, config, overwrite)
        seen.append((self.path.name, (self.path / LOCK).exists()))

    monkeypatch.setattr(RunFolder, "create", look)
    assert outcome([*words, "--output", tmp_path / "run", "--baseline"])[0] == 0
    assert seen == [("run", True), ("dense", True)]
    assert list(tmp_path.rglob(LOCK)) == []


def test_what_a_kill_before_the_start_leaves_is_not_in_the_way(words, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK).write_text("process 1 on nowhere")
    assert outcome([*words, "--output", tmp_path / "run"])[0] == 0
