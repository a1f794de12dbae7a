"""`pinscher prune` with patterns and scopes."""

import json

import pytest
import transformers
import yaml

import tiny_tasks
from pinscher.prune import find_sites
from pinscher.train import folder as runfolder
from pinscher.train.config import RunConfig
from tiny_command import SHORT, outcome
from tiny_patterns import oriented


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    root = tmp_path_factory.mktemp("command")
    tiny_tasks.write_files("sst2", root / "data")
    tiny_tasks.tiny_model("sst2", root / "model")
    return ["prune", "--model", root / "model", "--task", "sst2", "--data", root / "data", *SHORT, "--no-export"]


def test_the_command(words, tmp_path, capsys):
    flags = ["--pattern", "2:4", "--scope", "layer", "--sparsity", "0.5", "--output", tmp_path / "run"]
    code, _, err = outcome([*words, *flags], capsys)
    assert code == 0, err
    assert json.loads((tmp_path / "run" / "result.json").read_text())["sparsity"] == 0.5
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model")
    for site in find_sites(model):
        assert bool((oriented(site).reshape(-1, 4).sum(1) == 2).all())
    config = tmp_path / "run" / "config.yaml"
    settings = yaml.safe_load(config.read_text())
    assert settings["run"].pop("pattern") == "2:4"
    assert settings["run"].pop("scope") == "layer"
    config.write_text(yaml.safe_dump(settings))  # as a run of before there were patterns has it
    found = runfolder.config_of(tmp_path / "run")
    assert (found.pattern, found.scope) == ("unstructured", None)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--pattern 2:4", "sparsity must be 0.5, not 0.8"),
        ("--pattern 2by4", "unknown pattern '2by4'"),
        ("--pattern rows --scope here", "unknown scope 'here'"),
        ("--pattern 1x5", "pattern 1x5 does not fit"),
        ("--pattern 1x5 --dry-run", "pattern 1x5 does not fit"),
    ],
)
def test_mistakes_of_the_command_are_one_line(flags, says, words, tmp_path, capsys):
    code, _, err = outcome([*words, *flags.split(), "--output", tmp_path / "run"], capsys)
    assert code == 2
    assert says in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_where_a_run_goes_by_default():
    assert str(RunConfig(task="rte", sparsity=0.5, pattern="2:4").folder) == "runs/rte-pins-50-2of4"
