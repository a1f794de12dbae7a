"""A comparison is run, goes on after failures, kills and Ctrl-C, and is never run twice."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pinscher.compare import session as sessions
from pinscher.compare import worker
from pinscher.train import run as experiment
from pinscher.train.config import RunConfig
from pinscher.train.stopping import Stopping
from tiny_command import outcome
from tiny_comparison import FEW, ONE, TWO, stamps, table_of, wait_for


def test_a_finished_comparison_is_only_printed(finished, words, capsys):
    before, rows = stamps(finished), table_of(finished)
    capsys.readouterr()
    code, out, _ = outcome([*words, *TWO, "--output", finished], capsys)
    assert code == 0
    assert stamps(finished) == before
    assert "pins" in out
    assert "1 of " not in out
    assert table_of(finished) == rows
    code, again, _ = outcome(["compare", "--output", finished], capsys)  # it knows what it compares
    assert (code, again) == (0, out)
    assert stamps(finished) == before


def test_one_failure_does_not_stop_the_others(root, words, tmp_path, capsys):
    data = tmp_path / "data"
    data.mkdir()
    (data / "sst2").symlink_to(root / "data" / "sst2")
    told = ["compare", "--model", root / "model", "--data", data, *FEW, "--methods", "magnitude"]
    told += ["--tasks", "cola,sst2", "--output", tmp_path / "out"]
    capsys.readouterr()
    code, out, _ = outcome(told, capsys)
    assert code == 1
    last = [line for line in out.splitlines() if line.startswith("failed: cola-magnitude-80-seed42: ")][-1]
    assert str(data / "cola") in last
    assert [row["task"] for row in table_of(tmp_path / "out")] == ["sst2"]
    assert "1 of 2 cells are not finished" in out
    assert (tmp_path / "out" / "errors" / "cola-magnitude-80-seed42.txt").read_text().startswith(last.split(": ", 2)[2])
    before = stamps(tmp_path / "out")
    (data / "cola").symlink_to(root / "data" / "cola")
    assert outcome(told)[0] == 0
    assert [row["task"] for row in table_of(tmp_path / "out")] == ["cola", "sst2"]
    assert not list((tmp_path / "out" / "errors").iterdir())
    after = stamps(tmp_path / "out")
    assert all(after[path] == stamp for path, stamp in before.items() if "/sst2-" in path)


def checkpoints(out: Path) -> list[Path]:
    return list(out.glob("cells/*/checkpoints/checkpoint-*"))


def test_killed_with_all_its_processes_it_ends_with_the_same_rows(finished, words, tmp_path):
    out = tmp_path / "out"
    told = [*map(str, words), *TWO, "--output", str(out)]
    going = subprocess.Popen([sys.executable, "-m", "pinscher", *told, "--jobs", "2"], stdout=subprocess.DEVNULL)
    wait_for(lambda: checkpoints(out))
    os.kill(going.pid, signal.SIGKILL)
    going.wait()
    with sessions.claimed(out / ".running-1-of-1", "its processes go on"):  # they end with it
        assert checkpoints(out)  # so it was in the middle of a run
    done = [path.parent for path in out.glob("cells/*/result.json")]
    assert len(done) < 4
    assert outcome(told)[0] == 0
    assert table_of(out) == table_of(finished)
    assert not checkpoints(out)


def test_ctrl_c_ends_cleanly_and_says_how_to_go_on(finished, words, tmp_path, capsys):
    out = tmp_path / "out"

    def interrupt() -> None:
        wait_for(lambda: checkpoints(out))
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    capsys.readouterr()
    code, said, _ = outcome([*words, *ONE, "--output", out], capsys)
    assert code == 130
    assert f"Go on with the same command, or with: pinscher compare --output {out}" in said
    assert len(list(out.glob("cells/*/result.json"))) < 2
    assert outcome(["compare", "--output", out])[0] == 0
    assert table_of(out) == table_of(finished)[:2]


@pytest.mark.parametrize("testing", [False, True])
def test_a_signal_at_the_very_end_of_a_run_stops_what_would_follow(testing, finished, words, tmp_path, monkeypatch):
    """In the last step nothing of the run is left to stop, while it is tested nobody listens for its sake."""
    place, name = (experiment, "_test") if testing else (Stopping, "on_step_end")
    whole = getattr(place, name)

    def interrupt(*args, **kwargs):
        if testing or args[2].global_step == args[2].max_steps:
            os.kill(os.getpid(), signal.SIGTERM)
        return whole(*args, **kwargs)

    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(place, name, interrupt)
        assert outcome([*words, *ONE, "--output", out])[0] == 130
    assert len(list((out / "cells").iterdir())) == 1
    assert len(list(out.glob("cells/*/result.json"))) == (not testing)
    assert len(table_of(out)) == (not testing)
    assert outcome(["compare", "--output", out])[0] == 0
    assert table_of(out) == table_of(finished)[:2]


def test_a_process_that_is_killed_is_a_failure_with_a_reason(root, tmp_path):
    config = RunConfig(
        model=str(root / "model"), task="sst2", data=str(root / "data" / "sst2"), output=str(tmp_path / "r")
    )
    process = worker.start(config, tmp_path / "why.txt", 1)
    process.child.kill()
    wait_for(lambda: process.status() is not None, 30)
    assert process.status() == worker.FAILED
    assert "signal 9" in worker.told(tmp_path / "why.txt")
    process.end()
