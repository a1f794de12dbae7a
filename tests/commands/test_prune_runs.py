"""Whole runs: budgets, dense baselines, teachers, signals, several processes, and what a kill leaves."""

import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from pinscher.store.file import Stored
from pinscher.train.stopping import Stopping
from tiny_command import SHORT, complaint

LAUNCHERS = {
    "torchrun": "torch.distributed.run --nproc-per-node 2 --master-port 0 --rdzv-backend c10d "
    "--rdzv-endpoint localhost:0",
    "accelerate": "accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no "
    "--dynamo_backend no --main_process_port 0",  # without a GPU these are two processes on the CPU
}


def test_the_budget_is_kept(command, sst2, tmp_path):
    full = sum(p.stat().st_size for p in Path(sst2[1]).glob("*.safetensors"))
    target = full // 5
    code, out, err = command("prune", *sst2, *SHORT, "--output", "out", "--target-size", str(target))
    assert code == 0, err
    path = tmp_path / "out" / "export" / "model.safetensors"
    assert 0.8 * target <= path.stat().st_size <= target
    assert "needs a sparsity of" in out
    wanted = float(re.search(r"sparsity of ([\d.]+)%", out)[1]) / 100
    assert abs(json.loads((tmp_path / "out" / "result.json").read_text())["sparsity"] - wanted) < 1e-3
    with Stored([path]) as file:
        stored = dict(file.items())
    model = load_file(tmp_path / "out" / "model" / "model.safetensors")
    assert set(stored) == set(model)
    assert all(bool((stored[name][model[name] == 0] == 0).all()) for name in model)


def test_the_baseline_and_distillation_make_a_dense_run_first(command, sst2, tmp_path):
    flags = ["--objective", "knowledge-distillation", "--baseline", "--select", "best"]
    code, out, err = command("prune", *sst2, *SHORT, "--output", "out", *flags)
    assert code == 0, err
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    dense = json.loads((tmp_path / "out" / "dense" / "result.json").read_text())
    assert dense["method"] == "dense"
    assert dense["sparsity"] == 0.0
    assert result["metrics"]["dense"] == dense["metrics"]["pruned"]
    assert "of the dense accuracy" in " ".join(out.split())
    log = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert any("loss_sr" in line for line in log)


@pytest.mark.parametrize("lag", [[], ["--teacher-lag", "1"]])
def test_the_teacher_is_told_when_to_start_and_how_near_to_stay(lag, command, sst2, tmp_path):
    flags = ["--teacher-start", "0.5", "--eval-every", "2", *lag]
    code, _, err = command("prune", *sst2, *SHORT, "--output", "out", *flags)
    assert code == 0, err
    log = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in log if line["event"] == "teacher"]
    total = json.loads((tmp_path / "out" / "result.json").read_text())["total_steps"]
    assert min(steps) == math.ceil(round(0.5 * total) / 2) * 2
    evaluated = [line["step"] for line in log if line["event"] == "eval" and line["step"] >= min(steps)]
    density = {line["step"]: line["density"] for line in log if line["event"] == "train"}
    fallen = [step for before, step in itertools.pairwise(evaluated) if density[step] < density[before]]
    assert fallen
    assert set(fallen) <= set(steps) or not lag


def test_a_signal_in_the_last_step_of_the_dense_run_starts_no_other(command, sst2, tmp_path, monkeypatch):
    whole = Stopping.on_step_end

    def interrupt(self, args, state, control, **kwargs):
        if state.global_step == state.max_steps:
            os.kill(os.getpid(), signal.SIGTERM)
        return whole(self, args, state, control, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(Stopping, "on_step_end", interrupt)
        code, out, err = command("prune", *sst2, *SHORT, "--output", "out", "--baseline")
    assert code == 130, err
    assert "Continue with: pinscher prune --resume out" in out
    assert json.loads((tmp_path / "out" / "dense" / "result.json").read_text())["status"] == "finished"
    assert not (tmp_path / "out" / "log.jsonl").exists()
    assert command("prune", "--resume", "out")[0] == 0
    assert json.loads((tmp_path / "out" / "result.json").read_text())["status"] == "finished"


def test_a_term_signal_saves_and_the_resumed_run_is_the_same(sst2, tmp_path):
    """A real process, a real signal."""
    flags = [*sst2, "--max-steps", "60", "--eval-every", "10", "--save-every", "100", "--batch-size", "8"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    start = [sys.executable, "-m", "pinscher", "prune"]
    with subprocess.Popen(
        [*start, *flags, "--output", "cut"], cwd=tmp_path, env=environment, text=True, stdout=subprocess.PIPE
    ) as process:
        log = tmp_path / "cut" / "log.jsonl"
        while process.poll() is None and not (log.exists() and len(log.read_text().splitlines()) > 15):
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        out = process.communicate()[0]
    assert process.returncode == 130, out
    assert "Continue with: pinscher prune --resume cut" in out
    assert json.loads((tmp_path / "cut" / "result.json").read_text())["status"] == "interrupted"
    subprocess.run([*start, "--resume", "cut"], cwd=tmp_path, env=environment, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(
        [*start, *flags, "--output", "whole"], cwd=tmp_path, env=environment, check=True, stdout=subprocess.DEVNULL
    )
    cut, whole = (tmp_path / name / "model" / "model.safetensors" for name in ("cut", "whole"))
    assert cut.read_bytes() == whole.read_bytes()
    steps = [
        [
            json.loads(line)["step"]
            for line in (tmp_path / name / "log.jsonl").read_text().splitlines()
            if json.loads(line)["event"] == "train"
        ]
        for name in ("cut", "whole")
    ]
    assert steps[0] == steps[1]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_processes(launcher, sst2, tmp_path):
    """DDP on two gloo processes, the default recipe: one writer, one log."""
    launch = [sys.executable, "-m", *LAUNCHERS[launcher].split(), "-m", "pinscher", "prune"]
    flags = [
        *sst2,
        "--max-steps",
        "12",
        "--eval-every",
        "4",
        "--save-every",
        "4",
        "--batch-size",
        "4",
        "--output",
        "two",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launch, *flags], cwd=tmp_path, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "two" / "result.json").read_text())
    assert (result["status"], result["steps"]) == ("finished", 12)
    assert abs(result["sparsity"] - 0.8) < 1e-3
    steps = [
        json.loads(line)["step"]
        for line in (tmp_path / "two" / "log.jsonl").read_text().splitlines()
        if json.loads(line)["event"] == "train"
    ]
    assert steps == sorted(set(steps))
    assert done.stdout.count("testing on") == 2  # the dense run, and the pruned one


def test_what_a_kill_at_the_very_end_left_is_made_up_for(command, sst2, tmp_path):
    flags = ["prune", *sst2, *SHORT, "--output", "out", "--target-size", "1MB"]
    assert command(*flags)[0] == 0
    shutil.rmtree(tmp_path / "out" / "export")
    (tmp_path / "out" / "checkpoints" / "checkpoint-12").mkdir(parents=True)
    assert command("prune", "--resume", "out")[0] == 0
    assert (tmp_path / "out" / "export" / "model.safetensors").exists()
    assert not (tmp_path / "out" / "checkpoints").exists()
    assert "nothing to resume" in complaint(command("prune", "--resume", "out"))


def test_a_kill_at_the_very_start_leaves_nothing_in_the_way(command, sst2, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".config.yaml.new").write_text("run:")
    assert command("prune", *sst2, *SHORT, "--output", "out")[0] == 0


def test_tensorboard_logs_stay(command, sst2, tmp_path):
    assert command("prune", *sst2, *SHORT, "--output", "out", "--report-to", "tensorboard")[0] == 0
    assert list((tmp_path / "out" / "tensorboard").glob("events*"))
