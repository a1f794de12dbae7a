"""The command compare: one line for every mistake, and how to go on."""

import pytest

from pinscher.commands import compare
from pinscher.compare import worker
from tiny_command import outcome
from tiny_comparison import ONE, complaint, words_for, write_world


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    return words_for(write_world(tmp_path_factory.mktemp("compare")))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--methods", "pin"], "Did you mean 'pins'?"),
        (["--tasks", "sst-2"], "Did you mean 'sst2'?"),
        (["--sparsity", "80"], "Did you mean 0.8?"),
        (["--sparsity", "0,0.5"], "is the method dense"),
        (["--sparsity", "much"], "numbers with commas"),
        (["--sparsity", "80%"], "80 % is 0.8"),
        (["--model", "nowhere/there"], "nowhere/there"),
        (["--data", "nowhere"], "nowhere"),
        (["--seeds", "few"], "--seeds takes"),
        (["--seeds", "0"], "no seeds"),
        (["--shard", "3/2"], "--shard takes I/N"),
        (["--jobs", "0"], "--jobs must be at least 1"),
        (["--tune", "batch_size"], "NAME=VALUE"),
        (["--tune", "batch_sise=8"], "Did you mean 'batch_size'?"),
        (["--tune", "seed=1,2"], "which the comparison decides"),
        (["--ablation", "smothing"], "either --methods or --ablation"),
        (["--paper", "bert"], "Did you mean 'bert-base'?"),
        (["--option", "beta1=0.5"], "has no option 'beta1'"),
        (["--objective", "self-regularisation"], "Did you mean 'self-regularization'?"),
        (["--config", "missing.yaml"], "cannot read missing.yaml"),
        (["--budget", "quick", "--max-steps", "6"], "--budget would change nothing: it goes with pruning without --ep"),
        (["--epochs", "1", "--max-steps", "6"], "give either --epochs or --max-steps"),
        (["--teacher-lag", "2", "--objective", "empirical-risk"], "--teacher-lag would change nothing"),
        (["--objective", "knowledge-distillation", "--dense-steps", "5"], "--dense-steps would change nothing"),
        (["--ray", ""], "--ray takes HOST:PORT, auto or local, not ''."),
        (["--ray", "here"], "--ray takes HOST:PORT, auto or local, not 'here'."),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing_behind(flags, says, words, tmp_path, capsys):
    told = [*words, "--methods", "pins,magnitude", "--tasks", "sst2", "--output", tmp_path / "out"]
    assert says in complaint([*told, *flags], capsys)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("flags", [["--teacher-lag", "2"], ["--hardness", "0.5"], ["--jump", "0.5"]])
def test_a_flag_need_not_change_every_run(flags, words, tmp_path):
    """The dense run has no teacher and no sparsity to jump to, and magnitude none of the first."""
    told = [*words, "--methods", "pins,magnitude,dense", "--tasks", "sst2", "--output", tmp_path / "out", *flags]
    assert outcome([*told, "--dry-run"])[0] == 0


def test_mistakes_of_ablations_and_files(words, tmp_path, capsys):
    told = [*words, "--tasks", "sst2", "--output", tmp_path / "out"]
    assert "Did you mean 'smoothing'?" in complaint([*told, "--ablation", "smothing"], capsys)
    assert "is what the ablation varies" in complaint([*told, "--ablation", "hold", "--hold", "never"], capsys)
    assert "would undo" in complaint([*told, "--ablation", "interval", "--tune", "interval=2,3"], capsys)
    assert "no methods to compare" in complaint(told, capsys)
    for text, says in (
        ("methods: {pins: {epoch: 3}}", "Did you mean 'epochs'?"),
        ("methods: {pins: 3}", "must be settings as NAME: VALUE"),
        ("methods: [pins]\nmethod: pins", "which the comparison decides"),
        ("methods: [a/b]", "names folders"),
        ("metods: [pins]", "Did you mean 'methods'?"),
    ):
        (tmp_path / "c.yaml").write_text(text + ("" if "methods" in text else "\nmethods: [pins]"))
        assert says in complaint([*told, "--config", tmp_path / "c.yaml"], capsys), text
    assert not (tmp_path / "out").exists()


def test_how_to_go_on_keeps_jobs_and_shard(words, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(worker, "perform", lambda *_: worker.INTERRUPTED)
    code, said, _ = outcome([*words, *ONE, "--output", tmp_path, "--shard", "2/2"], capsys)
    assert code == 130
    assert f"pinscher compare --output {tmp_path} --shard 2/2\n" in said


def test_runs_that_fail_for_the_same_reason_are_named_together():
    failed = {"a": "no data", "b": "no memory", "c": "no data"}
    assert compare._by_cause(failed) == {"no data": ["a", "c"], "no memory": ["b"]}
