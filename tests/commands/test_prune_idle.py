"""A flag that would change nothing is refused by its name; a default that is spelled out, or a file's, is not."""

from __future__ import annotations

import pytest
import yaml

from pinscher.train import idle
from pinscher.train.config import RunConfig
from tiny_command import SHORT, complaint

DISTILLED = "--objective knowledge-distillation"
IDLE = [
    "--dense-steps 5",
    "--dense-learning-rate 1e-3",
    "--dense-start --dense-steps 5 --method dense",
    "--temperature 2 --objective empirical-risk",
    "--mix entropy --objective empirical-risk",
    "--hardness 0.5 --method dense",
    "--hidden-weight 1 --objective empirical-risk",
    "--embeddings-weight 1 --method magnitude --max-steps 0",
    f"--teacher-start 3 {DISTILLED}",
    f"--teacher-lag 2 {DISTILLED}",
    "--lr-rewinds 1 --method dense",
    "--lr-rewinds 1 --method magnitude-oneshot --max-steps 0",
    "--average --method dense",
    "--jump 0.5 --method dense",
    "--pattern 2:4 --method dense",
    "--budget quick",
    "--budget quick --method dense",
    "--budget quick --dense-start --dense-steps 5",
]
WORKING = [
    "--dense-steps 5 --baseline",
    f"--dense-steps 5 --dense-learning-rate 1e-3 {DISTILLED}",
    "--temperature 2",
    f"--hidden-weight 1 --hardness 0.5 {DISTILLED}",
    "--teacher-start 3 --teacher-lag 2",
    "--lr-rewinds 1 --average --jump 0.5",
    "--hidden-weight 0 --objective empirical-risk",
    "--no-average --method dense",
    "--budget quick --dense-start",
]


@pytest.mark.parametrize("flags", IDLE)
def test_a_flag_without_effect_is_refused(flags, command, sst2, tmp_path):
    words = flags.split()
    said = complaint(command("prune", *sst2, *SHORT, *words, "--output", "out"))
    assert any(f"{word} would change nothing: it goes with" in said for word in words), said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flags", WORKING)
def test_a_flag_with_an_effect_is_taken(flags, command, sst2):
    code, _, err = command("prune", *sst2, *SHORT, *flags.split(), "--dry-run")
    assert code == 0, err


def test_a_file_may_hold_what_only_some_runs_need(command, sst2, tmp_path):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"temperature": 2.0, "objective": "empirical-risk"}))
    code, _, err = command("prune", *sst2, *SHORT, "--config", "run.yaml", "--dry-run")
    assert code == 0, err


def test_two_lengths_and_two_budgets_are_one_too_many(command, sst2):
    assert "either --epochs or --max-steps" in complaint(command("prune", *sst2, *SHORT, "--epochs", "2"))
    words = ["--recipe", "best/quick", "--budget", "thorough"]
    said = complaint(command("prune", *sst2, "--max-steps", "4", *words))
    assert "best/quick has a budget of its own: leave out --budget thorough, or take best/thorough" in said


def test_every_rule_is_about_settings_and_tried_here():
    fields = set(RunConfig.__dataclass_fields__)
    for rule in idle.RULES:
        assert set(rule.names) <= fields
        assert any(f"--{name.replace('_', '-')} " in f"{flags} " for name in rule.names for flags in IDLE), rule.names


def test_more_rewinds_than_steps_are_refused(command, sst2, tmp_path):
    said = complaint(command("prune", *sst2, *SHORT, "--lr-rewinds", "1000", "--output", "out"))
    assert "--lr-rewinds 1000 does not fit: the model is pruned within 7 steps" in said
    assert list(tmp_path.iterdir()) == []
