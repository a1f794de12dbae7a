"""One clear line for every mistake, and nothing left behind."""

import shutil

import pytest

from tiny_command import SHORT, complaint


def test_an_unknown_task_is_guessed(command, sst2):
    said = complaint(command("prune", "--model", sst2[1], "--task", "sst-2"))
    assert "Did you mean 'sst2'?" in said


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--sparsity", "80"], "Did you mean 0.8?"),
        (["--sparsity", "-0.1"], "must lie in [0, 1)"),
        (["--teacher-start", "-1"], "--teacher-start must be a number of steps"),
        (["--teacher-lag", "0.5"], "--teacher-lag must be at least 1"),
        (["--teacher-start", "9999"], "is after the end of the run"),
        (["--method", "pin"], "Did you mean 'pins'?"),
        (["--objective", "self-regularisation"], "Did you mean 'self-regularization'?"),
        (["--select", "last"], "Known: final, best"),
        (["--batch-size", "0"], "--batch-size must be at least 1"),
        (["--epochs", "-1"], "--epochs must be positive"),
        (["--rows", "0"], "--rows must be at least 1"),
        (["--validation-rows", "0"], "--validation-rows must be at least 1"),
        (["--warmup", "100"], "the schedule does not fit"),
        (["--cooldown", "13"], "the schedule does not fit"),
        (["--option", "beta"], "NAME=VALUE"),
        (["--option", "gamma=1"], "has no option 'gamma'"),
        (["--select", "best", "--method", "smvp"], "learns its masks"),
        (["--teacher", "x"], "knowledge-distillation"),
        (["--text-column", "phrase"], "has no column 'phrase'"),
        (["--label-column", "mark"], "has no column 'mark'"),
        (["--beams", "4"], "no beams"),
        (["--recipe", "paper/rte-81"], "unknown recipe"),
        (["--target-modules", "nothing.like.this"], "nothing"),
        (["--target-size", "twenty"], "such as 20MB"),
        (["--target-size", "1KB"], "out of reach"),
        (["--target-size", "1MB", "--sparsity", "0.5"], "either --sparsity or --target-size"),
        (["--max-length", "100000"], "tokens"),
        (["--data", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--model", "./nothing-here"], "there is no model folder"),
        (["--config", "missing.yaml"], "cannot read missing.yaml"),
        (["--resume", "nothing"], "give no others"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing_behind(command, sst2, tmp_path, flags, says):
    said = complaint(command("prune", *sst2, *SHORT, "--output", "out", *flags))
    assert says in said
    assert not (tmp_path / "out").exists()


def test_an_unknown_setting_in_a_file(command, sst2, tmp_path):
    (tmp_path / "run.yaml").write_text("sparsty: 0.5\n")
    assert "Did you mean 'sparsity'?" in complaint(command("prune", *sst2, "--config", "run.yaml"))
    (tmp_path / "run.yaml").write_text("sparsity: many\n")
    assert "run.yaml: --sparsity must be a number, not 'many'" in complaint(
        command("prune", *sst2, "--config", "run.yaml")
    )
    (tmp_path / "run.yaml").write_text("a: [1\n")
    assert "not YAML" in complaint(command("prune", *sst2, "--config", "run.yaml"))


def test_an_empty_file(command, sst2, tmp_path):
    (tmp_path / "train.csv").write_text("")
    said = complaint(command("prune", *sst2[:2], "--task", "classification", "--train-file", "train.csv"))
    assert "train.csv" in said


def test_a_label_that_training_never_saw(command, sst2, tmp_path):
    (tmp_path / "train.csv").write_text("text,label\n" + "good film,yes\nbad film,no\n" * 20)
    (tmp_path / "test.csv").write_text("text,label\nodd film,maybe\n")
    flags = ["--task", "classification", "--train-file", "train.csv", "--test-file", "test.csv"]
    said = complaint(command("prune", *sst2[:2], *flags, *SHORT, "--output", "out"))
    assert "'maybe'" in said
    assert not (tmp_path / "out").exists()


def test_a_head_for_another_number_of_labels(command, sst2, tmp_path):
    (tmp_path / "train.csv").write_text("text,label\n" + "good film,a\nbad film,b\nfilm,c\n" * 20)
    assert command("prune", *sst2, *SHORT, "--output", "two")[0] == 0
    flags = ["--model", "two/model", "--task", "classification", "--train-file", "train.csv", *SHORT]
    said = complaint(command("prune", *flags, "--output", "out"))
    assert "2 labels, the task has 3" in said
    assert "--new-head" in said
    assert command("prune", *flags, "--output", "out", "--new-head")[0] == 0


def test_a_model_with_nothing_to_prune(command, sst2, tmp_path):
    from transformers import BertConfig, BertModel

    shutil.copytree(sst2[1], tmp_path / "empty")
    config = BertConfig.from_pretrained(sst2[1], num_hidden_layers=0)
    BertModel(config).save_pretrained(tmp_path / "empty")
    said = complaint(command("prune", "--model", "./empty", *sst2[2:], *SHORT, "--output", "out"))
    assert "prun" in said
    assert not (tmp_path / "out").exists()


def test_no_network(command, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    said = complaint(command("prune", "--model", "someone/no-such-model", "--task", "rte"))
    assert "no network" in said


@pytest.mark.parametrize(
    "wrong", ["--train-file nosuch.csv", "--target-modules nosuch", "--report-to steam", "--report-to mlflow"]
)
def test_a_mistake_costs_nobody_an_earlier_run(command, sst2, tmp_path, wrong):
    flags = ["prune", *sst2, *SHORT, "--output", "out"]
    assert command(*flags)[0] == 0
    before = (tmp_path / "out" / "model" / "model.safetensors").read_bytes()
    complaint(command(*flags, *wrong.split(), "--overwrite"))
    assert (tmp_path / "out" / "model" / "model.safetensors").read_bytes() == before
    complaint(command(*flags[:-1], "new", *wrong.split()))
    assert not (tmp_path / "new").exists()
    if "modules" in wrong:
        assert "nothing to prune" in complaint(command(*flags[:-1], "new", *wrong.split(), "--dry-run"))
        assert "nothing to prune" in complaint(command(*flags[:-1], "new", *wrong.split(), "--target-size", "1MB"))


def test_a_run_is_not_overwritten_by_accident(command, sst2, tmp_path):
    flags = ["prune", *sst2, *SHORT, "--output", "out"]
    assert command(*flags)[0] == 0
    assert "--overwrite" in complaint(command(*flags))
    assert "nothing to resume" in complaint(command("prune", "--resume", "out"))
    assert command(*flags, "--overwrite")[0] == 0
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    assert "not a run" in complaint(command("prune", *sst2, *SHORT, "--output", "mine", "--overwrite"))
    assert (tmp_path / "mine" / "thesis.txt").exists()
