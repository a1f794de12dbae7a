"""Run folders in every state, and folders that cannot be read."""

import os
import shutil
import time

import numpy as np
import pytest

import tiny_reports
from pinscher.errors import InputError
from pinscher.report import runs
from pinscher.runfolder import RunFolder
from tiny_command import complaint, outcome


def test_a_run_that_is_resumed_is_running(tmp_path):
    run = tiny_reports.written(tmp_path / "run", log=[], result={"status": "interrupted"})
    later = time.time() + 5
    assert runs.read(run).status == "interrupted"
    os.utime(run / "log.jsonl", (later, later))
    assert runs.read(run).status == "running"


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda run: (run / "config.yaml").unlink(), "is not a run: it has no config.yaml"),
        (lambda run: (run / "config.yaml").write_text("a: [1"), "config.yaml is damaged"),
        (lambda run: (run / "config.yaml").write_text("a: 1"), "has no settings under `run`"),
        (lambda run: (run / "config.yaml").write_text("{run: {}, sites: [{tensor: a}]}"), "its sites lack 'block'"),
        (lambda run: (run / "result.json").write_text("{"), "result.json is damaged"),
        (lambda run: (run / "bench.json").write_text("[]"), "bench.json is damaged"),
        (lambda run: (run / "model" / "model.safetensors").write_bytes(b"x" * 40), "model.safetensors is damaged"),
        (lambda run: (run / "comparison.yaml").write_text(""), "is a comparison: give some of its runs"),
        (shutil.rmtree, "does not exist"),
    ],
)
def test_what_cannot_be_read_is_one_line(tmp_path, capsys, spoil, says):
    run = tiny_reports.written(tmp_path / "run", {"key": np.eye(3)}, [], {})
    spoil(run)
    code, _, err = outcome(["report", run, "--output", tmp_path / "page.html"], capsys)
    assert code == 2
    assert says in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "page.html").exists()


NAMES = ["config.yaml", "result.json", "log.jsonl", "bench.json", "model/model.safetensors"]


@pytest.mark.parametrize("made", [os.mkfifo, os.mkdir])
@pytest.mark.parametrize("name", NAMES)
def test_a_pipe_or_a_folder_in_place_of_a_file_is_one_line(tmp_path, capsys, name, made):
    """Nobody writes into the pipe: whoever opened it would wait for ever."""
    run = tiny_reports.written(tmp_path / "run", {"key": np.eye(3)}, [], {})
    (run / name).unlink(missing_ok=True)
    made(run / name)
    commands = [["report", run, "--output", tmp_path / "page.html"]]
    if name == "config.yaml":
        commands += [["prune", "--resume", run], ["eval", run]]
    if name == "result.json":
        commands += [["prune", "--resume", run]]
    for words in commands:
        assert f"{run / name} is a folder, a pipe or a device, not a file" in complaint(outcome(words, capsys))
    assert not (tmp_path / "page.html").exists()


def test_a_pipe_in_place_of_the_log_does_not_hang_a_resumed_run(tmp_path):
    run = RunFolder(tiny_reports.written(tmp_path / "run", {}, [], {}))
    run.log.unlink()
    os.mkfifo(run.log)
    with pytest.raises(InputError, match="not a file"):
        run.cut_log(3)
