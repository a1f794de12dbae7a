"""The plan says how long it will take, and what cannot start."""

import csv
import re

from tiny_command import outcome
from tiny_comparison import FEW, METHODS


def test_a_plan_names_what_cannot_start(root, tmp_path, capsys):
    tasks = f"{{sst2: {{data: {root / 'data' / 'sst2'}}}, cola: {{data: {tmp_path}}}}}"
    (tmp_path / "c.yaml").write_text(f"model: {root / 'model'}\nmethods: [magnitude]\ntasks: {tasks}")
    told = ["compare", *FEW, "--config", tmp_path / "c.yaml", "--output", tmp_path / "out", "--dry-run"]
    code, said, _ = outcome(told, capsys)
    assert code == 0
    assert "2 to do, about" in said
    assert "cannot start: cola, magnitude (IMP): " in said


def test_the_estimate_is_what_finished_cells_took(finished, words, capsys):
    capsys.readouterr()
    told = [*words, *METHODS, "--tasks", "sst2", "--seeds", "42,1,7,8", "--output", finished, "--dry-run"]
    out = outcome(told, capsys)[1]
    assert "8 cells, 4 done, 4 to do" in out
    with open(finished / "results.csv", newline="") as file:
        took = [float(row["seconds"]) for row in csv.DictReader(file)]
    assert abs(float(re.search(r"about ([\d.]+) seconds", out)[1]) - max(2, sum(took))) <= 1
