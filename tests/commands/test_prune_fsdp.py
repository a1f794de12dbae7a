"""`pinscher prune --fsdp` under torchrun, accelerate launch and by itself: trained, killed, resumed, stored."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

import tiny_sharded as ranks
import tiny_tasks
from pinscher.errors import InputError
from pinscher.train import pretrained
from pinscher.train.config import RunConfig
from pinscher.train.tasks import TASKS

TORCHRUN = "torch.distributed.run --nproc-per-node 2 --master-port 0 --rdzv-backend c10d --rdzv-endpoint localhost:0"
ACCELERATE = (
    "accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no "
    "--dynamo_backend no --main_process_port 0"  # without a GPU these are two processes on the CPU
)
PATIENCE = 300  # seconds


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    def make(root):
        tiny_tasks.write_files("sst2", root / "data")
        tiny_tasks.tiny_model("sst2", root / "model")

    return ranks.once(tmp_path_factory, "fsdp-command", make)


def launch(place, launcher, *words):
    before = [sys.executable, *(["-m", *launcher.split()] if launcher else []), "-m", "pinscher", "prune", *words]
    return subprocess.Popen(
        before,
        cwd=place,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def finish(process):
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    return out


def flags(output):
    sizes = ["--max-steps", "12", "--eval-every", "4", "--save-every", "4", "--batch-size", "4", "--no-export"]
    return ["--fsdp", "--model", "model", "--task", "sst2", "--data", "data", *sizes, "--output", output]


def result(folder):
    return json.loads((folder / "result.json").read_text())


@pytest.fixture(scope="module")
def whole(place, tmp_path_factory):
    """An unbroken run that accelerate has started."""

    def make(folder):
        out = finish(launch(place, ACCELERATE, *flags(str(folder / "run"))))
        assert out.count("testing on") == 1

    return ranks.once(tmp_path_factory, "fsdp-command/whole", make) / "run"


@pytest.fixture(scope="module")
def killed(place, tmp_path_factory):
    """A run under torchrun that was killed after its first checkpoint, and the same run elsewhere."""

    def make(folder):
        process = launch(place, TORCHRUN, *flags(str(folder / "run")))
        ends = time.time() + PATIENCE
        while not (folder / "run" / "checkpoints" / "checkpoint-4" / "sharded.json").exists():
            assert process.poll() is None, process.communicate()[1]
            assert time.time() < ends
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert not (folder / "run" / "result.json").exists()
        shutil.copytree(folder / "run", folder / "moved")

    return ranks.once(tmp_path_factory, "fsdp-command/killed", make)


def test_a_run_ends_as_any_other(whole):
    found = result(whole)
    assert (found["status"], found["steps"]) == ("finished", 12)
    assert abs(found["sparsity"] - 0.8) < 1e-3
    assert not (whole / "checkpoints").exists()
    assert (whole / "model" / "config.json").exists()


def test_killed_and_resumed_it_is_bit_identical(place, killed, whole):
    run = killed / "run"
    finish(launch(place, TORCHRUN, "--resume", str(run)))
    one, other = (folder / "model" / "model.safetensors" for folder in (run, whole))
    assert one.read_bytes() == other.read_bytes()
    assert result(run)["metrics"] == result(whole)["metrics"]


def test_two_processes_began_and_one_ends_it(place, killed):
    out = finish(launch(place, "", "--resume", str(killed / "moved")))
    assert "processes was 2, now 1" in out
    found = result(killed / "moved")
    assert (found["status"], found["steps"]) == ("finished", 12)
    assert abs(found["sparsity"] - 0.8) < 1e-3


def test_replicas_of_the_whole_end_as_one_that_is_spread(place, whole, tmp_path):
    finish(launch(place, TORCHRUN, *flags(str(tmp_path / "run")), "--fsdp-replicas", "2"))
    assert result(tmp_path / "run")["sparsity"] == result(whole)["sparsity"]
    one, other = (load_file(folder / "model" / "model.safetensors") for folder in (tmp_path / "run", whole))
    assert one.keys() == other.keys()
    for name, tensor in one.items():  # gradients are summed in another order
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=1e-4)


def test_more_replicas_than_processes_are_refused(place, tmp_path):
    process = launch(place, "", *flags(str(tmp_path / "run")), "--fsdp-replicas", "2")
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert "1 processes cannot hold 2 copies" in err.replace("\n", " ")


def own_memory() -> int:
    """Bytes of this process that no file stands behind."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"RssAnon:\s+(\d+)", status)[1])


def test_a_checkpoint_is_mapped_and_not_read(tmp_path):
    """So that no process holds the whole model before it is sharded."""
    shape = {"hidden_size": 768, "num_hidden_layers": 2, "num_attention_heads": 12, "intermediate_size": 3072}
    transformers.BertForSequenceClassification(transformers.BertConfig(**shape)).save_pretrained(tmp_path)
    weights = (tmp_path / "model.safetensors").stat().st_size
    task = TASKS["sst2"]
    pretrained.load_model(str(tmp_path), task, ["no", "yes"], None)  # what is loaded with the first model is no matter
    before = own_memory()
    model = pretrained.load_model(str(tmp_path), task, ["no", "yes"], None)
    assert own_memory() - before < 0.2 * weights
    assert sum(p.numel() for p in model.parameters()) * 4 > 0.99 * weights


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"fsdp_replicas": 2}, "--fsdp-replicas 2 goes with --fsdp"),
        ({"fsdp": True, "fsdp_replicas": 0}, "--fsdp-replicas must be at least 1, not 0"),
    ],
)
def test_replicas_go_with_shards(wrong, says):
    with pytest.raises(InputError, match=says):
        RunConfig(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"method": "wanda"},
        {"method": "pst"},
        {"pattern": "columns"},
        {"pattern": "heads"},
        {"lora_rank": 4},
        {"max_steps": 0, "method": "magnitude"},
        {"compile": True},
    ],
)
def test_what_does_not_go_with_shards(wrong):
    with pytest.raises(InputError, match="--fsdp does not go with"):
        RunConfig(fsdp=True, **wrong)
