"""Every finished run is a row, in CSV and Parquet; runs are only compared with the same settings and data."""

import csv
import json
import shutil
import subprocess

import pyarrow.parquet as pq
import yaml

import tiny_tasks
from pinscher.train import folder as runfolder
from tiny_command import outcome
from tiny_comparison import FEW, METHODS, TWO, complaint, stamps, table_of


def test_every_run_is_a_row(finished):
    rows = table_of(finished)
    assert [(row["variant"], row["seed"]) for row in rows] == [
        ("pins", "42"),
        ("magnitude", "42"),
        ("pins", "1"),
        ("magnitude", "1"),
    ]
    for row in rows:
        said = json.loads((finished / row["folder"] / "result.json").read_text())
        assert float(row["score"]) == said["metrics"]["pruned"]["accuracy"]
        assert float(row["validation"]) == said["metrics"]["validation"]["accuracy"]
        assert (row["sparsity_asked"], row["steps"], row["picked"], row["candidates"]) == ("0.8", "12", "True", "1")
        assert abs(float(row["sparsity"]) - 0.8) < 1e-4
        assert row["interval"] == "1"  # decided by the length of the run
        assert (finished / row["folder"] / "model" / "model.safetensors").exists()
    assert {row["objective"] for row in rows if row["variant"] == "pins"} == {"self-regularization"}
    assert {row["objective"] for row in rows if row["variant"] == "magnitude"} == {"empirical-risk"}
    assert len({row["data"] for row in rows}) == 1
    ended = [(finished / row["folder"] / "result.json").stat().st_mtime_ns for row in rows]
    assert ended == sorted(ended)  # the first seed of everything comes first


def test_parquet_holds_what_the_csv_holds(finished):
    rows = pq.read_table(finished / "results.parquet").to_pylist()
    with open(finished / "results.csv", newline="") as file:
        for ours, theirs in zip(rows, csv.DictReader(file), strict=True):
            assert {n: "" if value is None else str(value) for n, value in ours.items()} == theirs


def test_the_final_model_has_a_validation_score(finished):
    """It is that of the model that was saved, not of the last evaluation's."""
    from pinscher.train import plan, pretrained
    from pinscher.train.evaluation import answer

    folder = finished / "cells" / "sst2-pins-80-seed1"
    made = plan.make(runfolder.config_of(folder))
    model = pretrained.load_model(str(folder / "model"), made.task, made.labels, made.tokenizer)
    said = answer(model.eval(), made.task, made.tokenizer, made.splits.validation, made.labels, 64)
    assert runfolder.read_result(folder).validation == made.task.scores(said, made.splits.validation)


def test_a_narrower_comparison_in_the_same_folder_loses_no_row(finished, words, tmp_path):
    subprocess.run(["cp", "-r", finished, tmp_path / "out"], check=True)
    rows = table_of(tmp_path / "out")
    narrow = [*words, "--methods", "magnitude", "--tasks", "sst2", "--seeds", "1,", "--output", tmp_path / "out"]
    assert outcome(narrow)[0] == 0
    assert table_of(tmp_path / "out") == [rows[3], *rows[:3]]
    assert "pins" not in (tmp_path / "out" / "table.md").read_text()  # the table is that of what was asked for
    shutil.rmtree(tmp_path / "out" / rows[0]["folder"])
    assert outcome(narrow)[0] == 0
    assert table_of(tmp_path / "out") == [rows[3], *rows[1:3]]


def test_a_changed_setting_is_an_error_that_names_the_remedy(finished, words, capsys):
    before = stamps(finished)
    said = complaint([*words, *TWO, "--output", finished, "--learning-rate", "1e-3"], capsys)
    for word in ("sst2-pins-80-seed42", "learning_rate", "the default", "0.001", "remove that folder", "--output"):
        assert word in said
    assert stamps(finished) == before


def test_a_setting_that_an_older_run_did_not_know_had_its_default(finished, words, tmp_path, capsys):
    subprocess.run(["cp", "-r", finished, tmp_path / "out"], check=True)
    for path in (tmp_path / "out").glob("cells/*/config.yaml"):
        told = yaml.safe_load(path.read_text())
        for part in ("run", "asked"):
            del told[part]["teacher_lag"]
        path.write_text(yaml.safe_dump(told))
    told = [*words, *TWO, "--output", tmp_path / "out"]
    assert "was run with teacher_lag the default, now it is 1.5" in complaint([*told, "--teacher-lag", "1.5"], capsys)
    assert outcome(told)[0] == 0


def test_other_data_under_the_same_name_is_an_error(root, words, finished, tmp_path, capsys):
    """Places may differ between machines; rows may not."""
    tiny_tasks.write_files("sst2", tmp_path / "data" / "sst2", rows=40)
    place = ["compare", "--model", root / "model", "--data", tmp_path / "data", *FEW]
    subprocess.run(["cp", "-r", finished, tmp_path / "out"], check=True)
    more = [*METHODS, "--tasks", "sst2", "--seeds", "42,1,5", "--output", tmp_path / "out"]
    assert "different data" in complaint([*place, *more], capsys)


def test_a_damaged_result_is_named_with_its_remedy(finished, words, tmp_path, capsys):
    shutil.copytree(finished, tmp_path / "out")
    for text in ("{", "[]", '{"status": "finished"}'):
        (tmp_path / "out" / "cells" / "sst2-pins-80-seed42" / "result.json").write_text(text)
        assert "result.json is damaged: remove" in complaint([*words, *TWO, "--output", tmp_path / "out"], capsys)


def test_tuning_picks_by_validation_and_never_by_the_test(words, tmp_path, capsys):
    out = tmp_path / "out"
    told = [*words, "--methods", "magnitude", "--tasks", "sst2", "--tune", "batch_size=4,8", "--output", out]
    capsys.readouterr()
    code, said, _ = outcome(told, capsys)
    assert code == 0
    assert said.count(", validation accuracy ") == said.count("finished: ") == 2
    names = [f"sst2-magnitude-80-seed42-batch_size={size}" for size in (4, 8)]
    for better in names:  # whichever has the better validation score, though its test score is the worse one
        for name in names:
            path = out / "cells" / name / "result.json"
            said = json.loads(path.read_text())
            said["metrics"]["validation"]["accuracy"] = 90.0 if name == better else 10.0
            said["metrics"]["pruned"]["accuracy"] = 20.0 if name == better else 80.0
            path.write_text(json.dumps(said))
        assert outcome(told)[0] == 0
        rows = table_of(out)
        assert [row["folder"] for row in rows] == [f"cells/{name}" for name in names]
        assert [row["tuned"] for row in rows] == ["batch_size=4", "batch_size=8"]
        assert {row["candidates"] for row in rows} == {"2"}
        assert [row["picked"] for row in rows] == [str(name == better) for name in names]
        assert [row["score"] for row in rows] == ["20.0" if name == better else "" for name in names]
        assert "20.00" in (out / "table.md").read_text()
        assert "batch\\_size in 4, 8" in (out / "table.md").read_text()
