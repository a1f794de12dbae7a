"""`pinscher export` as a person meets it: a run becomes a small folder, or one of another's format."""

import json
import re

import numpy as np
import pytest
import scipy.sparse
import torch
import transformers

from pinscher.commands import export
from pinscher.errors import InputError
from pinscher.store import saving
from pinscher.store.file import Stored, files_of
from tiny_command import finished_run, outcome


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return finished_run(tmp_path_factory.mktemp("run"))


def weights(folder):
    return transformers.AutoModelForSequenceClassification.from_pretrained(folder).state_dict()


def test_a_run_is_stored_small_and_loads(run, tmp_path, capsys):
    code, out, err = outcome(["export", run, "--output", tmp_path / "small", "--embeddings", "int8"], capsys)
    assert code == 0, err
    found = re.search(r"([\d.]+) MB; the dense weights are ([\d.]+) MB, ([\d.]+) times", out)
    dense, small = (run / "model" / "model.safetensors").stat().st_size, 0
    small = (tmp_path / "small" / "model.safetensors").stat().st_size
    assert abs(float(found[1]) - small / 1e6) < 0.06
    assert small < dense / 3
    before, after = weights(run / "model"), weights(tmp_path / "small")
    assert set(before) == set(after)
    for name, weight in before.items():
        assert bool((after[name][weight == 0] == 0).all()), name
        assert float((after[name] - weight).abs().max()) <= float(weight.abs().max()) / 127 + 1e-7, name
    card = (tmp_path / "small" / "README.md").read_text()
    result = json.loads((run / "result.json").read_text())
    assert f"{result['metrics']['pruned']['accuracy']:.2f}" in card
    assert "80.0%" in card
    assert (tmp_path / "small" / "density.png").read_bytes().startswith(b"\x89PNG")


def test_the_default_place_is_the_run_itself_and_an_earlier_export_is_replaced(run, capsys):
    for values in ("int8", "int4"):
        code, out, err = outcome(["export", run, "--values", values], capsys)
        assert code == 0, err
        config = json.loads((run / "export" / "config.json").read_text())
        assert config["quantization_config"]["values"] == values
        assert "--embeddings int8" in out
    assert not list(run.glob(".export*"))


def test_the_stored_model_is_scored_and_calibrated(run, tmp_path, capsys):
    flags = ["--score", "--calibrate", "8", "--embeddings", "int8", "--head", "int8"]
    code, out, err = outcome(["export", run, "--output", tmp_path / "small", *flags], capsys)
    assert code == 0, err
    scores = json.loads((run / "eval-export" / "scores.json").read_text())["metrics"]
    assert f"accuracy as stored {scores['accuracy']:.2f}" in out
    assert f"| accuracy (test), as stored |  | {scores['accuracy']:.2f} |" in (tmp_path / "small/README.md").read_text()
    words = ["eval", tmp_path / "small", "--task", "sst2", "--data", run.parent / "data", "--output", tmp_path / "said"]
    code, out, err = outcome(words, capsys)
    assert code == 0, err
    assert f"{scores['accuracy']:.2f}" in out


def test_calibration_chooses_other_scales(run):
    source = export.load(str(run))
    batches = export.calibration(source, 8)
    assert all("labels" not in batch for batch in batches)
    assert sum(len(batch["input_ids"]) for batch in batches) == 8
    plain, weighed = (saving.packed(source.model, dict.fromkeys(("matrix", "embedding", "head"), "int4"), calibration=c)
                      for c in (None, batches))  # fmt: skip
    assert any(not torch.equal(plain[name], weighed[name]) for name in plain)
    assert not source.model.training


def test_a_plain_folder_needs_no_pinscher(run, tmp_path, capsys):
    code, _, err = outcome(["export", run, "--output", tmp_path / "hf", "--format", "hf", "--values", "keep"], capsys)
    assert code == 0, err
    assert "quantization_config" not in json.loads((tmp_path / "hf" / "config.json").read_text())
    before, after = weights(run / "model"), weights(tmp_path / "hf")
    assert all(torch.equal(before[name], after[name]) for name in before)
    rounded, stored = tmp_path / "rounded", tmp_path / "small"
    assert outcome(["export", run, "--output", rounded, "--format", "hf"])[0] == 0
    assert outcome(["export", run, "--output", stored])[0] == 0
    capsys.readouterr()
    first, second = weights(rounded), weights(stored)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_scipy_reads_the_matrices(run, tmp_path, capsys):
    code, _, err = outcome(["export", run, "--output", tmp_path / "scipy", "--format", "scipy"], capsys)
    assert code == 0, err
    index = json.loads((tmp_path / "scipy" / "matrices.json").read_text())
    assert outcome(["export", run, "--output", tmp_path / "small"])[0] == 0
    with Stored(files_of(tmp_path / "small")) as stored:
        for name, place in index["matrices"].items():
            matrix = scipy.sparse.load_npz(tmp_path / "scipy" / place["file"])
            scale = np.load(tmp_path / "scipy" / place["file"])["scale"]
            assert matrix.dtype == np.int8
            dense = scipy.sparse.diags(scale) @ matrix.astype(np.float32)
            assert np.array_equal(dense.toarray().astype(np.float32), stored.tensor(name).numpy()), name
    rest = np.load(tmp_path / "scipy" / "rest.npz")
    assert set(rest) | set(index["matrices"]) == set(weights(run / "model"))


MISTAKES = {
    "--format onyx": "unknown format 'onyx'",
    "--values int9": "unknown values 'int9'",
    "--values bf16 --format scipy": "scipy has no bf16",
    "--format hf --push-to-hub me/mine": "--format pinscher",
    "--format hf --score": "--format pinscher",
    "--format hf --values int9": "unknown values 'int9'",
    "--format hf --embeddings int9": "unknown values 'int9'",
    "--format scipy --calibrate 8": "--calibrate would change nothing",
    "--format scipy --embeddings int8 --head int8": "--embeddings and --head would change nothing",
    "--format onnx --values int4": "--values would change nothing",
}


@pytest.mark.parametrize("flags", MISTAKES)
def test_mistakes_are_one_line(flags, run, tmp_path, capsys):
    code, _, err = outcome(["export", run, "--output", tmp_path / "out", *flags.split()], capsys)
    assert code == 2
    assert MISTAKES[flags] in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_places_that_are_not_ours_to_replace(run, tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    for form in ("pinscher", "hf", "scipy", "onnx"):
        code, _, err = outcome(["export", run, "--output", tmp_path / "mine", "--format", form], capsys)
        assert code == 2, form
        assert "mine" in err
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"
    code, _, err = outcome(["export", run.parent / "model"], capsys)
    assert code == 2
    assert "--output" in err
    code, _, err = outcome(["export", tmp_path / "nowhere", "--output", tmp_path / "x"], capsys)
    assert code == 2
    code, _, err = outcome(["export", run.parent / "model", "--output", tmp_path / "x", "--score"], capsys)
    assert code == 2
    assert "needs a run" in err
    code, _, err = outcome(
        ["export", run.parent / "model", "--output", tmp_path / "x", "--format", "hf", "--calibrate", 8], capsys
    )
    assert code == 2
    assert "needs a run" in err
    assert not (tmp_path / "x").exists()


def test_a_plain_folder_is_rounded_as_the_calibrated_file_is(run, tmp_path, capsys):
    flags = ["--values", "int4", "--calibrate", 8]
    assert outcome(["export", run, "--output", tmp_path / "hf", "--format", "hf", *flags])[0] == 0
    assert outcome(["export", run, "--output", tmp_path / "small", *flags])[0] == 0
    capsys.readouterr()
    first, second = weights(tmp_path / "hf"), weights(tmp_path / "small")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_stored_model_gets_a_new_head(run, tmp_path, capsys):
    small, plain = tmp_path / "small", tmp_path / "plain"
    assert outcome(["export", run, "--output", small, "--head", "int8"])[0] == 0
    assert outcome(["export", run, "--output", plain, "--format", "hf"])[0] == 0
    rows = tmp_path / "rows.csv"
    rows.write_text("text,label\n" + "".join(f"word {i},{'abc'[i % 3]}\n" for i in range(60)))
    flags = ["--task", "classification", "--train-file", rows, "--test-file", rows, "--text-column", "text"]
    flags += ["--label-column", "label", "--max-steps", 6, "--sparsity", 0.9, "--new-head", "--no-export"]
    scores = []
    for model in (small, plain):
        output = tmp_path / f"{model.name}-run"
        code, _, err = outcome(["prune", "--model", model, *flags, "--output", output], capsys)
        assert code == 0, err
        scores.append(weights(output / "model"))
        assert scores[-1]["classifier.weight"].shape[0] == 3
    code, _, err = outcome(["prune", "--model", small, *flags, "--sparsity", 0.5, "--output", tmp_path / "no"], capsys)
    assert code == 2
    assert "is already 8" in err
    assert not (tmp_path / "no").exists()
    with pytest.raises(InputError, match="replace its head"):
        transformers.AutoModelForSequenceClassification.from_pretrained(small, num_labels=3)


class Hub:
    """Stands for the hub, which no test may need: remembers what was sent."""

    def __init__(self, fails=False):
        self.fails, self.sent = fails, {}

    def __call__(self):
        return self

    def create_repo(self, name, exist_ok):
        if self.fails:
            raise ConnectionError("Name or service not known")
        return type("Repository", (), {"repo_id": name})

    def upload_folder(self, repo_id, folder_path, commit_message):
        self.sent[repo_id] = sorted(path.name for path in folder_path.iterdir())
        return f"https://hub/{repo_id}"


@pytest.mark.parametrize("fails", [False, True])
def test_pushing_sends_the_whole_folder_or_says_why_not(fails, run, tmp_path, capsys, monkeypatch):
    hub = Hub(fails)
    monkeypatch.setattr("huggingface_hub.HfApi", hub)
    words = ["export", run, "--output", tmp_path / "small", "--push-to-hub", "me/mine"]
    code, _, err = outcome(words, capsys)
    files = sorted(path.name for path in (tmp_path / "small").iterdir())
    assert {"README.md", "config.json", "density.png", "model.safetensors"} <= set(files)
    assert (code, hub.sent) == ((2, {}) if fails else (0, {"me/mine": files}))
    assert not fails or "could not push to me/mine: Name or service not known" in err
