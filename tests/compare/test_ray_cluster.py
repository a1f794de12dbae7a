"""Runs on a Ray cluster of two nodes: the same rows, the same failures and locks, and Ctrl-C leaves what can go on."""

import os
import signal
import socket
import sys
import threading

import pytest
import yaml
from ray.cluster_utils import Cluster

from pinscher.compare import ray_cluster
from pinscher.compare import session as sessions
from pinscher.errors import InputError
from tiny_command import outcome
from tiny_comparison import FEW, ONE, complaint, table_of, wait_for

STEPS = ("600", "2400")  # more than can be made while a signal is on its way, as a rule
STORE = 80 * 2**20  # bytes; the least that Ray takes, about


@pytest.fixture(scope="module")
def address():
    """Two nodes with a CPU each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        small = {"num_cpus": 1, "object_store_memory": STORE, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=small)
        cluster.add_node(num_cpus=1, object_store_memory=STORE)
        yield cluster.address
        cluster.shutdown()


def test_rows_failures_and_locks_are_those_of_one_machine(address, root, finished, tmp_path, capsys):
    settings = dict(zip([flag.removeprefix("--") for flag in FEW[::2]], map(int, FEW[1::2]), strict=True))
    told = {
        **settings,
        "model": str(root / "model"),
        "tasks": {"sst2": {"data": str(root / "data" / "sst2")}},
        "methods": {"magnitude": {}, "lost": {"method": "magnitude", "data": str(tmp_path / "nowhere")}, "pins": {}},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(told, sort_keys=False))
    out = tmp_path / "out"
    words = ["compare", "--config", tmp_path / "c.yaml", "--output", out, "--ray", address]
    capsys.readouterr()
    with sessions.claimed(out / sessions.CLAIMS / "sst2-pins-80-seed42", "held"):
        code, said, _ = outcome(words, capsys)
    assert code == 1
    lines = said.splitlines()
    assert lines.index("2 of 3: sst2-lost-80-seed42") < min(
        i for i, line in enumerate(lines) if line.startswith(("finished", "failed"))
    )  # two at once, one on each node
    assert f"failed: sst2-lost-80-seed42: {tmp_path / 'nowhere'}" in said
    assert f"failed: sst2-pins-80-seed42: another comparison in {out} is making it" in said
    assert not (out / "cells" / "sst2-pins-80-seed42").exists()
    (magnitude,) = table_of(out)  # with one thread, as a node has one CPU
    assert magnitude == next(row for row in table_of(finished) if row["folder"] == magnitude["folder"])
    assert not list(out.glob(".ray-*"))


def interrupted(told, out, capsys):
    """What a comparison says that gets a Ctrl-C at its first checkpoint."""

    def interrupt() -> None:
        wait_for(lambda: list(out.glob("cells/*/checkpoints/checkpoint-*")))
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    capsys.readouterr()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest's workers ignore it
    try:
        code, said, err = outcome(told, capsys)
    finally:
        signal.signal(signal.SIGINT, before)
    assert code == 130, err
    return said


def test_ctrl_c_stops_the_runs_and_they_go_on(address, words, finished, tmp_path, capsys):
    for steps in STEPS:  # a busy machine may end the runs while the signal is on its way
        out = tmp_path / steps
        told = [*words, *ONE, "--max-steps", steps, "--output", out, "--ray", address, "--cpus-per-run", "1"]
        said = interrupted(told, out, capsys)
        assert f"pinscher compare --output {out} --ray {address} --cpus-per-run 1\n" in said
        if not list(out.glob("cells/*/model")):
            break
    else:
        pytest.fail("the runs ended before they could be interrupted")
    folders = [path.parent.parent for path in out.glob("cells/*/checkpoints/checkpoint-*")]
    assert folders  # saved when it was asked to stop
    for folder in folders:  # nobody holds them any more
        with sessions.claimed(out / sessions.CLAIMS / folder.name, "its process goes on"):
            assert yaml.safe_load((folder / "result.json").read_text())["status"] == "interrupted"
    code, said, _ = outcome(["compare", "--output", out], capsys)  # here or there
    assert code == 0
    assert [row["steps"] for row in table_of(out)] == [steps, steps]


# ------------------------------------------------------------ without a cluster


def test_mistakes_are_one_line(words, tmp_path, monkeypatch, capsys):
    told = [*words, *ONE, "--output", tmp_path / "out"]
    assert "--cpus-per-run goes with --ray" in complaint([*told, "--cpus-per-run", "2"], capsys)
    assert "at least 1, not 0" in complaint([*told, "--ray", "auto", "--cpus-per-run", "0"], capsys)
    with socket.socket() as free:  # a port at which nobody listens
        free.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{free.getsockname()[1]}"
        assert f"cannot connect to a Ray cluster at {nobody}" in complaint([*told, "--ray", nobody], capsys)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert complaint([*told, "--ray", "auto"], capsys).endswith("pip install 'pinscher[ray]'")
    assert not (tmp_path / "out").exists()


def test_the_cpus_of_a_run():
    assert ray_cluster._cpus_of_run([8, 64], 1, None) == 8  # a run gets the smallest node whole
    assert ray_cluster._cpus_of_run([8, 64], 3, None) == 2
    assert ray_cluster._cpus_of_run([2], 4, None) == 1
    assert ray_cluster._cpus_of_run([8, 64], 1, 32) == 32  # on the large one only
    with pytest.raises(InputError, match="--cpus-per-run 65 fits no node: the largest has 64 CPUs"):
        ray_cluster._cpus_of_run([8, 64], 1, 65)
    with pytest.raises(InputError, match="has no CPUs"):
        ray_cluster._cpus_of_run([], 1, None)


def test_a_node_that_does_not_share_the_folder_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(sessions, "PATIENCE", 0.3)
    status, why = ray_cluster.perform({"sign": str(tmp_path / "out" / ".ray-1")})
    assert status == "failed"
    assert f"does not see {tmp_path / 'out'}: --ray needs a folder that all nodes share" in why
