"""Flags, files and recipes become settings; the plan says what a run would do."""

import dataclasses
import json

import yaml

from pinscher.train import plan as planning
from pinscher.train import recipes
from pinscher.train.config import RunConfig
from pinscher.train.tasks import TASKS
from tiny_command import SHORT, STEPS

# official sizes of the training sets (squad: windows)
ROWS = {"rte": 2490, "mrpc": 3668, "stsb": 5749, "cola": 8551, "sst2": 67349, "qnli": 104743, "mnli": 392702}
ROWS |= {"qqp": 363846, "squad": 88524, "conll2003": 14041, "e2e": 42061, "dart": 62659, "webnlg": 18025}


def test_every_setting_is_a_flag(command):
    code, out, _ = command("prune", "--help")
    assert code == 0
    for setting in dataclasses.fields(RunConfig):
        assert f"--{setting.name.replace('_', '-')}" in out, setting.name
        assert setting.metadata["help"]
    assert all(flag in out for flag in ("--config", "--resume", "--dry-run"))


def test_a_dry_run_prints_the_plan_and_writes_nothing(command, sst2, tmp_path):
    code, out, _ = command("prune", *sst2, *SHORT, "--dry-run")
    assert code == 0
    for word in ("steps", "12 matrices", "memory", "time", "warm-up", "█"):
        assert word in out, out
    assert list(tmp_path.iterdir()) == []


def test_only_so_many_rows(sst2):
    asked = {"model": sst2[1], "task": "sst2", "data": sst2[5], "max_steps": 12}
    made = planning.make(RunConfig(**asked, validation_rows=2, test_rows=3))
    assert len(made.splits.validation) == 2
    assert [len(rows) for rows in made.splits.tests.values()] == [3]
    assert len(planning.make(RunConfig(**asked)).splits.validation) > 2


def test_recipes_cover_every_cell_of_the_paper(command):
    code, out, _ = command("prune", "--recipe", "list")
    assert code == 0
    assert out.count("paper/") == len(recipes.RECIPES) == 8 * 4 + 4 + 2 + 3 + 6 + 6
    shown = {line.split()[0] for line in out.splitlines() if "/" in line}
    assert shown == set(recipes.BEST) | set(recipes.RECIPES)
    for name, settings in recipes.RECIPES.items():
        config = RunConfig.from_dict({**settings, "recipe": name})
        assert config.task in TASKS
        rows = ROWS[config.task]
        steps = int(rows * 0.9 / config.batch_size * config.epochs)
        config.pruning(steps)  # the schedule fits
    rte = recipes.settings("paper/rte-80")
    assert (rte["epochs"], rte["batch_size"], rte["warmup"], rte["cooldown"], rte["lr_warmup"]) == (
        20,
        16,
        200,
        1200,
        200,
    )


def test_flags_win_over_the_file_and_the_file_over_the_recipe(command, sst2, tmp_path):
    (tmp_path / "run.yaml").write_text("learning-rate: 2e-4\nsparsity: 0.5\nepochs: 1\nrecipe: paper/sst2-90\n")
    flags = ["--config", "run.yaml", *sst2, "--sparsity", "0.6", *STEPS, "--warmup", "0.1", "--cooldown", "0.3"]
    code, _, err = command("prune", *flags, "--interval", "2", "--output", "here")
    assert code == 0, err
    said = yaml.safe_load((tmp_path / "here" / "config.yaml").read_text())["run"]
    assert (said["learning_rate"], said["sparsity"], said["batch_size"]) == (2e-4, 0.6, 8)
    assert json.loads((tmp_path / "here" / "result.json").read_text())["status"] == "finished"
