"""Every ablation can be planned, and its variants share what they can."""

import json
import shutil

import pytest
import yaml

from pinscher.compare.ablations import ABLATIONS
from tiny_command import outcome
from tiny_comparison import stamps


@pytest.mark.parametrize("axis", ABLATIONS)
def test_every_ablation_plans(axis, words, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")  # names are whole there, too
    capsys.readouterr()
    code, out, err = outcome(
        [*words, "--ablation", axis, "--tasks", "cola", "--seeds", "5", "--dry-run", "--output", tmp_path / "out"],
        capsys,
    )
    assert code == 0, err
    shown = [line.split()[3] for line in out.splitlines() if line.startswith("cola  ")]
    prefix = "pins-" if axis == "objective" else f"pins-{axis}-"
    assert [name for name in shown if name != "dense"] == [f"{prefix}{name}" for name in ABLATIONS[axis]]
    assert ("dense" in shown) == (axis == "objective")  # somebody has to teach
    assert out.count("0 of 5") == len(shown)
    cells = len(shown) * 5
    assert f"{cells} cells, 0 done, {cells} to do, about" in out
    assert not (tmp_path / "out").exists()
    settings = {json.dumps(variant, sort_keys=True) for variant in ABLATIONS[axis].values()}
    assert len(settings) == len(ABLATIONS[axis])


def test_the_objective_ablation_shares_its_teacher(words, tmp_path, capsys):
    out = tmp_path / "out"
    assert outcome([*words, "--ablation", "objective", "--tasks", "cola", "--output", out])[0] == 0
    assert sorted(path.name for path in (out / "cells").iterdir()) == [
        "cola-dense-seed42",
        "cola-pins-empirical-risk-80-seed42",
        "cola-pins-knowledge-distillation-80-seed42",
        "cola-pins-self-regularization-80-seed42",
    ]
    taught = out / "cells" / "cola-pins-knowledge-distillation-80-seed42"
    settings = yaml.safe_load((taught / "config.yaml").read_text())["run"]
    assert settings["teacher"] == str((out / "cells" / "cola-dense-seed42" / "model").resolve())
    assert not (taught / "dense").exists()
    before = stamps(out)
    assert outcome([*words, "--ablation", "objective", "--tasks", "cola", "--output", out])[0] == 0
    assert stamps(out) == before
    text = (out / "table.md").read_text()
    assert all(figure in text for figure in ("55.4", "56.0", "57.1"))  # the paper's ablation, BERT-base at 80 %
    shutil.rmtree(taught)
    shutil.rmtree(out / "cells" / "cola-dense-seed42" / "model")  # as where a run was kept without its model
    code, said, _ = outcome([*words, "--ablation", "objective", "--tasks", "cola", "--output", out], capsys)
    assert code == 1
    assert "its teacher cola-dense-seed42 has no model any more; remove" in said
