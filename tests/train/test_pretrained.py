"""A model as a run starts it, whatever it was trained for before."""

from __future__ import annotations

import json
import shutil

import pytest
import transformers

import tiny_tasks
from pinscher.train import pretrained
from pinscher.train.tasks import TASKS
from tiny_command import SHORT, complaint, outcome


@pytest.mark.parametrize("before", [None, "regression", "multi_label_classification", "nonsense"])
@pytest.mark.parametrize(
    ("task", "labels", "after"),
    [("sst2", ("bad", "good"), "single_label_classification"), ("stsb", (), "regression")],
)
def test_the_loss_is_the_tasks_whatever_the_model_was_trained_for(task, labels, after, before, tmp_path):
    tiny_tasks.tiny_model("sst2", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"problem_type": before}))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    model = pretrained.load_model(str(tmp_path), TASKS[task], labels, tokenizer)
    assert model.config.problem_type == after
    assert model.config.num_labels == max(1, len(labels))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("settings")
    tiny_tasks.write_files("sst2", root / "data")
    tiny_tasks.tiny_model("sst2", root / "model")
    return root


def prune(root, folder, capsys, **settings):
    """The outcome of a run of a model with other settings."""
    shutil.copytree(root / "model", folder / "model")
    path = folder / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    words = ["prune", "--model", folder / "model", "--task", "sst2", "--data", root / "data", *SHORT, "--no-export"]
    return outcome([*words, "--output", folder / "run"], capsys)


@pytest.mark.parametrize(
    "settings", [{"return_dict": False}, {"output_attentions": True}, {"output_hidden_states": True}], ids=str
)
def test_a_model_that_gives_other_outputs_by_default_is_trained_like_any(settings, root, tmp_path, capsys):
    assert prune(root, tmp_path, capsys, **settings)[0] == 0


def test_a_model_that_cannot_be_run_is_told_before_anything_is_written(root, tmp_path, capsys):
    said = complaint(prune(root, tmp_path, capsys, chunk_size_feed_forward=1000))
    assert "model cannot be trained: The dimension to be chunked" in said
    assert not (tmp_path / "run").exists()


def test_a_class_that_is_no_name_is_no_head_either(root, tmp_path, capsys):
    assert prune(root, tmp_path, capsys, architectures=[3])[0] == 0
