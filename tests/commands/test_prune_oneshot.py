"""The command without training, with calibration data, and with adapters."""

import json

import pytest
import torch
import transformers

import tiny_tasks
from pinscher import sparsity
from pinscher.prune import find_sites
from tiny_command import SHORT, outcome


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Tiny models and data of a classification and a text task."""
    root = tmp_path_factory.mktemp("files")
    found = {}
    for task in ("sst2", "e2e"):
        tiny_tasks.write_files(task, root / task / "data")
        tiny_tasks.tiny_model(task, root / task / "model")
        found[task] = ["--model", root / task / "model", "--task", task, "--data", root / task / "data"]
    return found


def finished(folder):
    result = json.loads((folder / "result.json").read_text())
    assert result["status"] == "finished"
    return result


@pytest.mark.parametrize("method", ["sparsegpt", "obert"])
def test_a_language_model_is_pruned_and_scored_without_training(files, tmp_path, method, capsys):
    options = ["--option", "gradients=4"] if method == "obert" else ["--option", "calibration=16"]
    how = [
        "--max-steps",
        "0",
        "--sparsity",
        "0.5",
        "--batch-size",
        "8",
        "--test-rows",
        "4",
        "--baseline",
        "--no-export",
    ]
    words = ["prune", *files["e2e"], "--method", method, *how, *options, "--output", tmp_path / "run"]
    assert outcome(words, capsys)[0] == 0
    result = finished(tmp_path / "run")
    assert result["steps"] == result["total_steps"] == 0
    assert result["sparsity"] == 0.5
    assert result["metrics"]["dense"].keys() == result["metrics"]["pruned"].keys() >= {"bleu"}
    kind = transformers.GPT2LMHeadModel
    start, dense, pruned = (
        kind.from_pretrained(p).state_dict()
        for p in (files["e2e"][1], tmp_path / "run" / "dense" / "model", tmp_path / "run" / "model")
    )
    assert all(torch.equal(tensor, dense[name]) for name, tensor in start.items())  # the baseline is as it was
    changed = {name for name, tensor in start.items() if not torch.equal(tensor, pruned[name])}
    assert changed
    assert all(".h." in name and name.endswith(".weight") and "ln" not in name for name in changed)
    assert sparsity(kind.from_pretrained(tmp_path / "run" / "model")) == 0.5
    again = ["prune", "--resume", tmp_path / "run"]
    assert "nothing to resume" in outcome(again, capsys)[2]


@pytest.mark.parametrize(
    ("task", "method", "flags"),
    [
        ("sst2", "wanda", ["--pattern", "2:4"]),
        ("e2e", "sparsegpt", ["--pattern", "2:4", "--scope", "layer"]),
        ("sst2", "magnitude", ["--pattern", "2:4"]),
    ],
)
def test_patterns_without_training(files, tmp_path, task, method, flags, capsys):
    how = ["--max-steps", "0", "--sparsity", "0.5", "--test-rows", "4", "--no-export", "--output", tmp_path / "run"]
    code, _, error = outcome(["prune", *files[task], "--method", method, *flags, *how], capsys)
    assert code == 0, error
    assert finished(tmp_path / "run")["sparsity"] == 0.5
    kind = transformers.AutoModelForSequenceClassification if task == "sst2" else transformers.AutoModelForCausalLM
    for site in find_sites(kind.from_pretrained(tmp_path / "run" / "model")):
        kept = (site.owner.T if site.transposed else site.owner) != 0
        assert bool((kept.reshape(-1, 4).sum(1) == 2).all()), site.name


def test_the_plan_of_a_run_without_training(files, tmp_path, capsys):
    words = ["prune", *files["e2e"], "--method", "wanda", "--max-steps", "0", "--dry-run", "--output", tmp_path / "run"]
    code, said, _ = outcome(words, capsys)
    assert code == 0
    assert "wanda to 80%, once, without training" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", ["wanda", "sparsegpt", "obert"])
def test_training_then_one_shot_then_recovery(files, tmp_path, method, capsys):
    options = ["--option", "gradients=3"] if method == "obert" else ["--option", "calibration=12"]
    words = ["prune", *files["sst2"], *SHORT, "--method", method, *options, "--no-export", "--output", tmp_path / "run"]
    assert outcome(words, capsys)[0] == 0
    assert abs(finished(tmp_path / "run")["sparsity"] - 0.8) < 1e-4
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    density = {line["step"]: line["density"] for line in log if "density" in line}
    assert density[12] == pytest.approx(0.2, abs=1e-4)
    if method != "obert":  # dense until the cool-down, which begins at step 8
        assert [d for t, d in density.items() if t < 8] == [1.0] * 7
        assert density[8] == density[12]


def test_adapters_end_as_an_ordinary_model(files, tmp_path, capsys):
    ends = []
    for task, kind in (("sst2", "AutoModelForSequenceClassification"), ("e2e", "AutoModelForCausalLM")):
        folder = tmp_path / task
        how = ["--lora-rank", "4", "--lora-alpha", "8", "--test-rows", "4", "--learning-rate", "1e-3"]
        code, _, error = outcome(["prune", *files[task], *SHORT, *how, "--output", folder], capsys)
        assert code == 0, error
        model = getattr(transformers, kind).from_pretrained(folder / "model")
        assert abs(sparsity(model) - 0.8) < 1e-4
        assert finished(folder)["sparsity"] == sparsity(model)
        assert (folder / "export" / "config.json").exists()
        assert not list((folder / "model").glob("adapter*"))
        ends.append(model)
    start = transformers.GPT2LMHeadModel.from_pretrained(files["e2e"][1]).state_dict()
    frozen = [name for name in start if "wte" in name or "ln" in name or name.endswith("bias")]
    assert all(torch.equal(ends[1].state_dict()[name], start[name]) for name in frozen)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--max-steps", "0"], "method 'pins' measures while it trains: --max-steps 0 goes with magnitude"),
        (["--max-steps", "-1"], "--max-steps must be positive, or 0"),
        (["--method", "wanda", "--option", "calibration=0"], "calibration must be at least 1"),
        (["--lora-alpha", "8"], "goes with --lora-rank"),
        (["--lora-rank", "0"], "--lora-rank must be at least 1"),
        (["--lora-rank", "1000000000"], "--lora-rank 1000000000 is more than the rank of"),
        (["--lora-rank", "4", "--method", "wanda", "--max-steps", "0"], "it needs steps"),
        (["--lora-rank", "4", "--method", "movement"], "cannot be used with adapters"),
        (["--lora-rank", "4", "--method", "sparsegpt"], "cannot be used with adapters"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(files, tmp_path, flags, says, capsys):
    code, _, error = outcome(["prune", *files["sst2"], *flags, "--output", tmp_path / "run"], capsys)
    assert code == 2
    assert says in error
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()
