"""A run that starts from a dense fine-tuned model, which is its teacher too."""

from __future__ import annotations

import json

import torch
from safetensors.torch import load_file
from transformers import BertConfig, BertForSequenceClassification

from pinscher.runfolder import RunFolder
from pinscher.train import pretrained
from tiny_command import SHORT

TAUGHT = ["--dense-start", "--objective", "knowledge-distillation", "--hidden-weight", "1", "--temperature", "2"]


def test_the_dense_model_is_the_start_and_the_teacher(command, sst2, monkeypatch, tmp_path):
    loaded = []
    real = pretrained.load_model
    monkeypatch.setattr(pretrained, "load_model", lambda model, *rest: loaded.append(model) or real(model, *rest))
    code, said, err = command("prune", *sst2, *SHORT, *TAUGHT, "--output", "run", "--no-export")
    assert code == 0, err
    folder = RunFolder(tmp_path / "run")
    assert folder.dense.is_finished
    assert loaded == [sst2[1]]  # the dense run trains it; what is pruned is a copy of the dense run's own
    assert folder.read_result()["metrics"]["dense"] == folder.dense.read_result()["metrics"]["pruned"]
    events = [event for event in folder.events() if event and "loss_hidden" in event]
    assert events
    assert "dense" in said


def test_the_default_starts_from_a_dense_run(command, sst2, tmp_path):
    flags = [*sst2, "--max-steps", "6", "--batch-size", "8", "--no-export"]
    code, said, err = command("prune", *flags, "--output", "run")
    assert code == 0, err
    assert "Made by best/standard" in said
    folder = RunFolder(tmp_path / "run")
    settings = folder.read_config()["run"]
    assert (settings["recipe"], settings["dense_start"], settings["hidden_weight"]) == ("best/standard", True, 1.0)
    dense = folder.dense.read_config()["run"]
    assert (dense["learning_rate"], settings["learning_rate"]) == (1e-4, 3e-4)
    assert not (folder.dense.path / "dense").exists()


def test_dropout_is_for_the_pruning_not_for_the_dense_run(command, sst2, tmp_path):
    for folder, told in (("as-it-is", ["--dropout", "0.1"]), ("none", ["--dropout", "0"])):
        code, _, err = command("prune", *sst2, *SHORT, *TAUGHT, *told, "--output", folder, "--no-export")
        assert code == 0, err

    def bytes_of(part):
        return [(tmp_path / run / part / "model.safetensors").read_bytes() for run in ("as-it-is", "none")]

    dense, pruned = bytes_of("dense/model"), bytes_of("model")
    assert dense[0] == dense[1]
    assert pruned[0] != pruned[1]
    config = RunFolder(tmp_path / "none").model / "config.json"
    assert json.loads(config.read_text())["hidden_dropout_prob"] == 0.1


def test_a_teacher_is_where_a_dense_start_starts(command, sst2, tmp_path):
    flags = [*sst2, "--max-steps", "6", "--batch-size", "8", "--no-export"]
    assert command("prune", *flags, "--method", "dense", "--output", "dense")[0] == 0
    told = ["--dense-start", "--objective", "knowledge-distillation", "--teacher", "dense/model"]
    code, _, err = command("prune", *flags, *told, "--learning-rate", "1e-12", "--sparsity", "0.1", "--output", "run")
    assert code == 0, err
    assert not RunFolder(tmp_path / "run").dense.is_run
    dense, pruned = (load_file(tmp_path / run / "model" / "model.safetensors") for run in ("dense", "run"))
    kept = {name: weights.abs() > 1e-9 for name, weights in pruned.items()}  # one that returned has moved by 1e-12
    assert all(torch.allclose(pruned[name][kept[name]], dense[name][kept[name]]) for name in dense)


def test_a_teacher_of_another_shape_is_no_start(command, sst2, tmp_path):
    other = BertConfig(vocab_size=200, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    BertForSequenceClassification(other).save_pretrained(tmp_path / "other")
    told = ["--dense-start", "--objective", "knowledge-distillation", "--teacher", "other"]
    code, _, err = command("prune", *sst2, *SHORT, *told, "--output", "run")
    assert code == 2
    assert "give a teacher of the same architecture" in err
    assert not (tmp_path / "run").exists()


def test_average_is_refused_where_masks_are_learned(command, sst2):
    code, _, err = command("prune", *sst2, *SHORT, "--method", "smvp", "--average")
    assert code == 2
    assert "--average does not go with --method smvp" in err


def test_bf16_attends_without_the_fused_kernel(command, sst2, monkeypatch, tmp_path):
    """Its backward pass is slower in bfloat16 on a CPU than plain products are."""
    fused = torch.nn.functional.scaled_dot_product_attention
    asked = []
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda query, *rest, **named: asked.append(query.requires_grad) or fused(query, *rest, **named),
    )
    for told, trained in (([], True), (["--bf16"], False)):
        asked.clear()
        code, _, err = command("prune", *sst2, *SHORT, *told, "--output", f"run{trained}", "--no-export")
        assert code == 0, err
        assert (True in asked) == trained
