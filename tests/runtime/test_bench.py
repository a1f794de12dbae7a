"""`pinscher bench`: engines in processes of their own, timed in turns, compared and drawn."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from pinscher.errors import InputError
from pinscher.runtime import bench, engines
from tiny_command import finished_run, outcome

REPORT = {
    "latency": {
        "batch 1, 8 tokens": {
            "torch": {"p50_ms": 4.0, "p95_ms": 5.0, "rows_per_second": 250.0},
            "pinscher": {"p50_ms": 2.0, "p95_ms": 2.5, "rows_per_second": 500.0},
            "other": {"p50_ms": 1.0, "p95_ms": 1.5, "rows_per_second": 1000.0},
        }
    },
    "agreement": {"torch": {"same": 1.0}, "pinscher": {"same": 0.996}, "other": {"same": 0.9}},
}


def test_messages_come_through_as_they_are():
    pipe = io.BytesIO()
    arrays = {"a": np.arange(6).reshape(2, 3), "b": np.zeros((0, 4), np.float32), "c": np.float32(2).reshape(())}
    engines.send(pipe, {"outputs": True}, arrays)
    pipe.seek(0)
    message, found = engines.receive(pipe)
    assert message["outputs"] is True
    for name, value in arrays.items():
        assert found[name].dtype == value.dtype
        assert np.array_equal(found[name], value)
    assert engines.receive(pipe) is None


def test_advice_never_names_an_engine_that_answers_otherwise():
    words = bench.advice(REPORT)
    assert "pinscher, 2.0 times as fast" in words
    assert "Not recommended" in words
    assert words.endswith("other.")
    alone = {"latency": {"x": {"torch": {"p50_ms": 1.0}}}, "agreement": {"torch": {"same": 1.0}}}
    assert "stay with PyTorch" in bench.advice(alone)


def test_advice_names_the_best_dense_engine_too():
    times = {"torch": 8.0, "torch-bf16": 4.0, "openvino-int8": 3.0, "onnxruntime-int8": 2.0, "pinscher": 1.5}
    agreement = {name: {"same": 0.9 if name == "onnxruntime-int8" else 1.0} for name in times}
    report = {"latency": {"x": {name: {"p50_ms": ms} for name, ms in times.items()}}, "agreement": agreement}
    words = bench.advice(report)
    assert "x: pinscher, 5.3 times as fast as PyTorch, and 2.0 times as openvino-int8, the fastest dense one." in words
    report["latency"]["x"]["pinscher"]["p50_ms"] = 3.5
    assert "x: openvino-int8, a dense engine, 2.7 times as fast as PyTorch." in bench.advice(report)


def test_engines_that_are_missing_are_named_with_what_they_need(monkeypatch):
    monkeypatch.setattr(
        bench, "_missing", lambda name: [p for p in engines.PACKAGES.get(name, ()) if p != "onnxruntime"]
    )
    said = bench.left_out()
    assert said.startswith("not installed: torch-int8, openvino, openvino-bf16, openvino-int8 (pip install ")
    assert said.endswith("(pip install torchao openvino nncf)")
    monkeypatch.setattr(bench, "_missing", lambda _: [])
    assert not bench.left_out()


def test_the_picture_is_drawn(tmp_path):
    bench.draw(REPORT, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").stat().st_size > 5000


def test_unknown_engines_are_refused():
    with pytest.raises(InputError, match="unknown engine 'steam'"):
        bench.available(["steam"])


def test_a_worker_that_cannot_start_says_why(tmp_path):
    with pytest.raises(InputError, match="the engine torch failed"):
        engines.start("torch", tmp_path, 1)


def test_the_same_answer_of_a_regression_is_a_near_one():
    wanted = [0.0, 1.0, 4.0, 5.0]
    assert list(bench.are_close([0.09, 1.2, 4.0, 5.1], wanted)) == [True, False, True, True]


def test_a_worker_may_say_a_lot():
    talker = "import sys; sys.stderr.write('x' * 200000 + '\\nthe last word'); sys.exit(3)"
    with pytest.raises(InputError, match="the engine talker failed: the last word"):
        engines.Worker("talker", [sys.executable, "-c", talker])


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return finished_run(tmp_path_factory.mktemp("run"))


def test_the_command_times_compares_and_advises(run, capsys):
    told = ["bench", run, "--batch", "1,2", "--length", "8", "--seconds", "0.1", "--threads", "1"]
    code, out, err = outcome([*told, "--engine", "pinscher", "--engine", "pinscher-fp32"], capsys)
    assert code == 0, err
    report = json.loads((run / "bench.json").read_text())
    assert list(report["latency"]) == ["batch 1, 8 tokens", "batch 2, 8 tokens"]
    assert set(report["memory"]) == set(report["scores"]) == {"torch", "pinscher", "pinscher-fp32"}
    assert report["agreement"]["pinscher-fp32"]["same"] == 1
    assert report["agreement"]["pinscher-fp32"]["largest_difference"] < 1e-4
    assert report["scores"]["pinscher-fp32"] == report["scores"]["torch"]
    assert report["bytes"]["pinscher"] < report["bytes"]["torch"]
    assert (run / "bench.png").exists()
    assert "× torch" in out
    assert "tokens: " in out


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "whole numbers"),
        ("0", "--batch must be at least 1, not 0"),
        ("eight", "whole numbers"),
        ("1,,2", "whole numbers"),
        ("-1", "--batch must be at least 1, not -1"),
    ],
)
def test_odd_sizes_are_one_line(text, says, capsys):
    code, _, err = outcome(["bench", "nowhere", f"--batch={text}"], capsys)
    assert code == 2
    assert says in err
    assert len(err.strip().splitlines()) == 1


def test_engines_are_compared_round_by_round():
    """The second round was slow for both, which the ratio of their medians would not know."""
    fast, slow = {"turns_ms": [1.0, 10.0, 1.0]}, {"turns_ms": [3.0, 30.0, 4.0]}
    assert bench.times_as_fast(fast, slow) == 3.0
