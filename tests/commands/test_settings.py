"""Nonsense is refused before anything is read or written, a split is the one that was asked for, and a run that is
resumed keeps the settings that it was started with."""

import dataclasses
import json
import os
import re
import signal
from pathlib import Path

import pytest
import yaml

from pinscher.errors import InputError
from pinscher.runfolder import RunFolder
from pinscher.train import folder as record
from pinscher.train import plan as planning
from pinscher.train import run as experiment
from pinscher.train.stopping import Stopping
from tiny_command import SHORT, complaint, finished_run


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("prune --max-grad-norm nan", "--max-grad-norm must be at least 0, not nan."),
        ("prune --max-grad-norm -1", "--max-grad-norm must be at least 0, not -1."),
        ("prune --weight-decay inf", "--weight-decay must be at most 1000, not inf."),
        ("prune --label-smoothing 1", "--label-smoothing must lie in [0, 1), not 1."),
        ("prune --lr-warmup nan", "--lr-warmup must be a number of steps, or a fraction below 1; not nan."),
        ("prune --temperature 0", "--temperature must be positive, not 0."),
        ("prune --learning-rate 1e300", "--learning-rate must be at most 10, not 1e300."),
        ("prune --seed -1", "--seed must lie in [0, 4294967295], not -1."),
        ("prune --seed 1e20", "--seed must lie in [0, 4294967295], not 1e20."),
        ("prune --epochs inf", "--epochs must be at most 1000000, not inf."),
        ("prune --batch-size many", "--batch-size must be a whole number, not 'many'."),
        ("prune --sparsity 80%", "80 % is 0.8"),
        ("prune --option alpha=[", "--option alpha=[: '[' is not a value that YAML can read."),
        ("prune --option beta1=.nan", "beta1 must lie in [0, 1), not nan."),
        ("prune --method l0 --option margin=inf", "margin must lie in (0, 30], not inf."),
        ("prune --warmup 0.6 --cooldown 0.6", "the schedule does not fit"),
        ("compare --jobs 0", "--jobs must be at least 1, not 0."),
        ("compare --seeds 1,-1", "--seeds must lie in [0, 4294967295], not -1."),
        ("compare --seeds nan", "--seeds must be at least 0, not nan."),
        ("compare --sparsity nan", "--sparsity must lie in [0, 1), not nan."),
        ("compare --tune learning_rate=1e-4,inf", "--learning-rate must be at most 10, not inf."),
        ("bench x --seconds -1", "--seconds must lie in (0, 86400], not -1."),
        ("bench x --seconds nan", "--seconds must lie in (0, 86400], not nan."),
        ("bench x --seconds inf", "--seconds must lie in (0, 86400], not inf."),
        ("bench x --seconds 0", "--seconds must lie in (0, 86400], not 0."),
        ("bench x --threads -2", "--threads must lie in [0, 4096], not -2."),
        ("bench x --batch 1,0", "--batch must be at least 1, not 0."),
        ("bench x --length 8,few", "--length takes whole numbers with commas between them, not 'few'."),
        ("export x --calibrate -1", "--calibrate must be at least 0, not -1."),
        ("inspect x --mask-threshold nan", "--mask-threshold must be a finite number, not nan."),
        ("inspect x --sensitivity --levels 0.5,nan", "--levels must lie between 0 and 1, not nan."),
        ("report x --every nan", "--every must lie in (0, 86400], not nan."),
    ],
)
def test_nonsense_is_refused_before_anything_is_done(command, tmp_path, flags, says):
    words = flags.split()
    more = ["--methods", "pins", "--tasks", "sst2"] if words[0] == "compare" else []
    assert says in complaint(command(*words, *more))
    assert list(tmp_path.iterdir()) == []


def test_an_empty_file_of_settings_is_not_the_demo(command, tmp_path):
    for content, says in ((b"", "is empty"), (b"\xff\xfe\x00", "not a text file")):
        (tmp_path / "run.yaml").write_bytes(content)
        assert says in complaint(command("prune", "--config", "run.yaml"))
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / "config.yaml").write_bytes(content)
        assert says in complaint(command("prune", "--resume", "run"))
    assert not (tmp_path / "runs").exists()


def test_settings_in_sections(command, sst2, tmp_path):
    told = {"pruning": {"sparsity": 0.5}, "training": {"max-steps": 12}, "data": {"data": sst2[5]}, "task": "sst2"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(told))
    code, out, err = command("prune", *sst2[:2], "--config", "run.yaml", "--dry-run")
    assert code == 0, err
    assert "pruning    pins to 50%" in out
    assert re.search(r"^steps +12 of", out, re.MULTILINE)


# ------------------------------------------------------------ eval --split


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return finished_run(tmp_path_factory.mktemp("run"))


def test_a_split_is_the_one_that_was_asked_for(command, run):
    sizes = yaml.safe_load((run / "config.yaml").read_text())["data"]["rows"]
    asked = {"train": sizes["train"], "validation": sizes["validation"], None: sizes["test: validation"]}
    assert len(set(asked.values())) == 3, "rows that can be told apart by their number"
    result = json.loads((run / "result.json").read_text())["metrics"]
    for split, rows in asked.items():
        code, out, err = command("eval", run, *(["--split", split] if split else []), "--output", f"said-{split}")
        assert code == 0, err
        assert f"on {rows:,} rows of sst2" in out
    scores = {split: json.loads(Path(f"said-{split}/scores.json").read_text()) for split in asked}
    assert scores["validation"]["metrics"] == result["validation"]
    assert scores[None]["metrics"] == result["pruned"]
    assert "on 3 rows of sst2" in command("eval", run, "--split", "train", "--rows", "3")[1]


def test_an_unknown_split_names_the_known_ones(command, run, tmp_path):
    said = complaint(command("eval", run, "--split", "zzz", "--output", "said"))
    assert "has no split 'zzz'. Known: train, validation" in said
    assert "Did you mean 'train'?" in complaint(command("eval", run, "--split", "trian"))
    assert not (tmp_path / "said").exists()


def test_an_unknown_split_of_files(command, sst2, tmp_path):
    rows = "".join(f"good film {i},yes\nbad film {i},no\n" for i in range(40))
    (tmp_path / "train.csv").write_text("text,label\n" + rows)
    flags = ["--task", "classification", "--train-file", "train.csv", *SHORT, "--no-export"]
    assert command("prune", *sst2[:2], *flags, "--output", "out")[0] == 0
    assert "Known: train, validation, test." in complaint(command("eval", "out", "--split", "zzz"))
    assert "on 8 rows" in command("eval", "out", "--split", "test")[1]
    assert "on 65 rows" in command("eval", "out", "--split", "train")[1]


# ------------------------------------------------------------ resumed as it was started


@pytest.fixture
def interrupted(command, sst2, tmp_path, monkeypatch):
    """A run that a signal stopped at its fifth step."""
    with monkeypatch.context() as patch:
        steps = iter(range(1, 100))

        def stop(self, *args, **kwargs):
            if next(steps) == 5:
                os.kill(os.getpid(), signal.SIGTERM)

        patch.setattr(Stopping, "on_step_begin", stop)
        assert command("prune", *sst2, *SHORT, "--no-export", "--output", "out")[0] == 130
    return tmp_path / "out"


def _edit(run, **changes):
    config = RunFolder(run).read_config()
    config["run"] |= changes
    (run / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))


@pytest.mark.parametrize(
    "changes", [{"learning_rate": 0.01}, {"sparsity": 0.5}, {"max_grad_norm": 0.5}, {"option": {"beta1": 0.5}}], ids=str
)
def test_an_edited_setting_is_refused_by_its_name(command, interrupted, changes):
    before = {path: path.read_bytes() for path in interrupted.rglob("*") if path.is_file() and path.suffix != ".yaml"}
    (name, value) = next(iter(changes.items()))
    _edit(interrupted, **changes)
    said = complaint(command("prune", "--resume", "out"))
    assert f"cannot be resumed with another {name}: it is {value} now" in said
    assert "Undo that change in out/config.yaml" in said
    assert {path: path.read_bytes() for path in before} == before


def test_what_may_change_and_runs_of_earlier_versions_are_resumed(command, interrupted):
    config = RunFolder(interrupted).read_config()
    _edit(interrupted, report_to=["none"])
    record.check_same(planning.make(record.config_of(interrupted)), RunFolder(interrupted), experiment.QUIET)
    assert "learning_rate" in config.pop("started")
    (interrupted / "config.yaml").write_text(yaml.safe_dump(config))
    assert command("prune", "--resume", "out")[0] == 0


def test_python_says_what_the_run_was_started_with(command, interrupted):
    config = record.config_of(interrupted)
    with pytest.raises(InputError, match=r"another seed: it is 7 now; the run was started with 42\."):
        experiment.run(dataclasses.replace(config, seed=7), resume=True)
    assert experiment.run(config, resume=True).status == "finished"
