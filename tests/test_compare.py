"""A comparison as a person runs it: planned, run, killed, resumed, spread, tuned, and written down four ways."""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import yaml

import tiny_tasks
from pinscher import comparing
from pinscher.train import compare, experiment, grid, runfolder, worker
from pinscher.train.ablations import ABLATIONS
from pinscher.train.config import RunConfig
from pinscher.train.stopping import Stopping
from tiny_command import SHORT, outcome

FEW = [*SHORT, "--warmup", "0", "--cooldown", "4"]
METHODS = ["--methods", "pins,magnitude", "--sparsity", "0.8"]
TWO = [*METHODS, "--tasks", "sst2", "--seeds", "2"]
ONE = [*METHODS, "--tasks", "sst2", "--seeds", "1"]
UNEQUAL = ("seconds",)  # what may differ between two comparisons that say the same


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """As the processes that are started here: the last bits depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A tiny model and the files of two tasks."""
    root = tmp_path_factory.mktemp("compare")
    for task in ("sst2", "cola"):
        tiny_tasks.write_files(task, root / "data" / task)
    tiny_tasks.tiny_model("sst2", root / "model")
    return root


@pytest.fixture(scope="module")
def words(root):
    return ["compare", "--model", root / "model", "--data", root / "data", *FEW]


@pytest.fixture(scope="module")
def finished(root, words):
    """Two methods, one task, two seeds."""
    assert outcome([*words, *TWO, "--output", root / "out"])[0] == 0
    return root / "out"


def table_of(folder: Path) -> list[dict[str, str]]:
    with open(folder / "results.csv", newline="") as file:
        return [{n: v for n, v in row.items() if n not in UNEQUAL} for row in csv.DictReader(file)]


def stamps(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in (folder / "cells").rglob("*")}


def complaint(words, capsys) -> str:
    capsys.readouterr()
    code, _, err = outcome(words, capsys)
    assert code == 2, err
    assert len(err.strip().splitlines()) == 1, err
    assert err.startswith("error: ")
    return err


# ------------------------------------------------------------ running


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
    from pinscher.train import models, plan
    from pinscher.train.evaluation import answer

    folder = finished / "cells" / "sst2-pins-80-seed1"
    made = plan.make(runfolder.config_of(folder))
    model = models.load_model(str(folder / "model"), made.task, made.labels, made.tokenizer)
    said = answer(model.eval(), made.task, made.tokenizer, made.splits.validation, made.labels, 64)
    assert runfolder.read_result(folder).validation == made.task.scores(said, made.splits.validation)


def test_a_finished_comparison_is_only_printed(finished, words, capsys):
    before, rows = stamps(finished), table_of(finished)
    capsys.readouterr()
    code, out, _ = outcome([*words, *TWO, "--output", finished], capsys)
    assert code == 0
    assert stamps(finished) == before
    assert "pins" in out
    assert "1 of " not in out
    assert table_of(finished) == rows
    code, again, _ = outcome(["compare", "--output", finished], capsys)  # it knows what it compares
    assert (code, again) == (0, out)
    assert stamps(finished) == before


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


def test_a_value_to_tune_by_counts_once():
    assert grid._distinct("16,8,16,8.0") == ["16", "8"]
    assert grid._distinct([1e-4, "0.0001", "cubic", "cubic"]) == [1e-4, "cubic"]


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


def test_one_failure_does_not_stop_the_others(root, words, tmp_path, capsys):
    data = tmp_path / "data"
    data.mkdir()
    (data / "sst2").symlink_to(root / "data" / "sst2")
    told = ["compare", "--model", root / "model", "--data", data, *FEW, "--methods", "magnitude"]
    told += ["--tasks", "cola,sst2", "--output", tmp_path / "out"]
    capsys.readouterr()
    code, out, _ = outcome(told, capsys)
    assert code == 1
    last = [line for line in out.splitlines() if line.startswith("failed: cola-magnitude-80-seed42: ")][-1]
    assert str(data / "cola") in last
    assert [row["task"] for row in table_of(tmp_path / "out")] == ["sst2"]
    assert "1 of 2 cells are not finished" in out
    assert (tmp_path / "out" / "errors" / "cola-magnitude-80-seed42.txt").read_text().startswith(last.split(": ", 2)[2])
    before = stamps(tmp_path / "out")
    (data / "cola").symlink_to(root / "data" / "cola")
    assert outcome(told)[0] == 0
    assert [row["task"] for row in table_of(tmp_path / "out")] == ["cola", "sst2"]
    assert not list((tmp_path / "out" / "errors").iterdir())
    after = stamps(tmp_path / "out")
    assert all(after[path] == stamp for path, stamp in before.items() if "/sst2-" in path)


# ------------------------------------------------------------ killed, stopped, spread


def checkpoints(out: Path) -> list[Path]:
    return list(out.glob("cells/*/checkpoints/checkpoint-*"))


def wait_for(condition, seconds: float = 300.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_killed_with_all_its_processes_it_ends_with_the_same_rows(finished, words, tmp_path):
    out = tmp_path / "out"
    told = [*map(str, words), *TWO, "--output", str(out)]
    going = subprocess.Popen([sys.executable, "-m", "pinscher", *told, "--jobs", "2"], stdout=subprocess.DEVNULL)
    wait_for(lambda: checkpoints(out))
    os.kill(going.pid, signal.SIGKILL)
    going.wait()
    with compare.claimed(out / ".running-1-of-1", "its processes go on"):  # they end with it
        assert checkpoints(out)  # so it was in the middle of a run
    done = [path.parent for path in out.glob("cells/*/result.json")]
    assert len(done) < 4
    assert outcome(told)[0] == 0
    assert table_of(out) == table_of(finished)
    assert not checkpoints(out)


def test_ctrl_c_ends_cleanly_and_says_how_to_go_on(finished, words, tmp_path, capsys):
    out = tmp_path / "out"

    def interrupt() -> None:
        wait_for(lambda: checkpoints(out))
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    capsys.readouterr()
    code, said, _ = outcome([*words, *ONE, "--output", out], capsys)
    assert code == 130
    assert f"Go on with the same command, or with: pinscher compare --output {out}" in said
    assert len(list(out.glob("cells/*/result.json"))) < 2
    assert outcome(["compare", "--output", out])[0] == 0
    assert table_of(out) == table_of(finished)[:2]


@pytest.mark.parametrize("testing", [False, True])
def test_a_signal_at_the_very_end_of_a_run_stops_what_would_follow(testing, finished, words, tmp_path, monkeypatch):
    """In the last step nothing of the run is left to stop, while it is tested nobody listens for its sake."""
    place, name = (experiment, "_test") if testing else (Stopping, "on_step_end")
    whole = getattr(place, name)

    def interrupt(*args, **kwargs):
        if testing or args[2].global_step == args[2].max_steps:
            os.kill(os.getpid(), signal.SIGTERM)
        return whole(*args, **kwargs)

    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(place, name, interrupt)
        assert outcome([*words, *ONE, "--output", out])[0] == 130
    assert len(list((out / "cells").iterdir())) == 1
    assert len(list(out.glob("cells/*/result.json"))) == (not testing)
    assert len(table_of(out)) == (not testing)
    assert outcome(["compare", "--output", out])[0] == 0
    assert table_of(out) == table_of(finished)[:2]


def test_side_by_side_gives_the_same_rows(finished, words, tmp_path, capsys):
    out = tmp_path / "out"
    assert outcome([*words, *ONE, "--jobs", "2", "--output", out])[0] == 0
    assert table_of(out) == table_of(finished)[:2]


def test_two_shards_make_the_whole(finished, words, tmp_path, capsys):
    told = [*words, *ONE, "--output", tmp_path]
    for shard, done in (("1/2", 1), ("2/2", 2)):
        capsys.readouterr()
        code, said, _ = outcome([*told, "--shard", shard], capsys)
        assert code == 0
        assert f"shard {shard[0]} of 2 of 2 cells: 1 cell, 0 done, 1 to do" in said
        assert table_of(tmp_path) == table_of(finished)[:done]


def test_every_cell_is_in_one_shard_and_pupils_follow_their_teacher(tmp_path):
    made = grid.read(None, {"tasks": "sst2,cola", "seeds": 3, "sparsity": "0.5,0.9"}, "objective")
    cells = made.cells(tmp_path)
    for parts in (1, 2, 3, 5):
        shards = [compare.share(cells, (part, parts)) for part in range(1, parts + 1)]
        assert sorted(cell.name for shard in shards for cell in shard) == sorted(cell.name for cell in cells)
        for shard in shards:
            names = [cell.name for cell in shard]
            assert all(cell.teacher is None or cell.teacher in names for cell in shard)


def test_only_one_at_a_time(finished, monkeypatch, words, capsys):
    monkeypatch.setattr(compare, "PATIENCE", 0.3)
    with compare.claimed(finished / ".running-1-of-1", "held"):
        assert "is running" in complaint([*words, *TWO, "--output", finished], capsys)


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_no_run_is_made_by_two_at_once(jobs, finished, words, tmp_path, monkeypatch, capsys):
    """Whatever parts or methods another comparison in the folder has."""
    monkeypatch.setattr(compare, "PATIENCE", 0.3)
    told = [*words, *ONE, "--output", tmp_path, "--shard", "1/2", "--jobs", jobs]
    with compare.claimed(tmp_path / compare.CLAIMS / "sst2-pins-80-seed42", "held"):
        code, said, _ = outcome(told, capsys)
    assert code == 1
    assert f"failed: sst2-pins-80-seed42: another comparison in {tmp_path} is making it" in said
    assert not (tmp_path / "cells").exists()
    assert outcome(told, capsys)[0] == 0


def test_a_comparison_that_has_to_wait_leaves_the_others_record_alone(finished, words, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare, "PATIENCE", 0.3)
    shutil.copytree(finished, tmp_path / "out")
    before = (tmp_path / "out" / compare.RECORD).read_text()
    with compare.claimed(tmp_path / "out" / ".running-1-of-1", "held"):
        complaint([*words, "--methods", "platon", "--tasks", "sst2", "--output", tmp_path / "out"], capsys)
    assert (tmp_path / "out" / compare.RECORD).read_text() == before


def test_a_damaged_result_is_named_with_its_remedy(finished, words, tmp_path, capsys):
    shutil.copytree(finished, tmp_path / "out")
    for text in ("{", "[]", '{"status": "finished"}'):
        (tmp_path / "out" / "cells" / "sst2-pins-80-seed42" / "result.json").write_text(text)
        assert "result.json is damaged: remove" in complaint([*words, *TWO, "--output", tmp_path / "out"], capsys)


def test_how_to_go_on_keeps_jobs_and_shard(words, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(worker, "perform", lambda *_: worker.INTERRUPTED)
    code, said, _ = outcome([*words, *ONE, "--output", tmp_path, "--shard", "2/2"], capsys)
    assert code == 130
    assert f"pinscher compare --output {tmp_path} --shard 2/2\n" in said


def test_runs_that_fail_for_the_same_reason_are_named_together():
    failed = {"a": "no data", "b": "no memory", "c": "no data"}
    assert comparing._by_cause(failed) == {"no data": ["a", "c"], "no memory": ["b"]}


def test_a_process_that_is_killed_is_a_failure_with_a_reason(root, tmp_path):
    config = RunConfig(
        model=str(root / "model"), task="sst2", data=str(root / "data" / "sst2"), output=str(tmp_path / "r")
    )
    process = worker.start(config, tmp_path / "why.txt", 1)
    process.child.kill()
    wait_for(lambda: process.status() is not None, 30)
    assert process.status() == worker.FAILED
    assert "signal 9" in worker.told(tmp_path / "why.txt")
    process.end()


# ------------------------------------------------------------ tuning, ablations


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


def test_what_a_dense_run_cannot_use_is_not_tuned(tmp_path):
    flags = {"methods": "pins,dense", "tasks": "sst2", "tune": {"interval": [1, 5], "batch_size": [16, 32]}}
    cells = {cell.variant: cell for cell in grid.read(None, flags).cells(tmp_path)}
    assert len(cells["pins"].trials) == 4
    assert [trial.tuned for trial in cells["dense"].trials] == [{"batch_size": 16}, {"batch_size": 32}]


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


# ------------------------------------------------------------ the plan


def test_a_file_with_settings_for_all_for_a_task_and_for_a_method(tmp_path, monkeypatch):
    monkeypatch.setenv("DATA", str(tmp_path))
    (tmp_path / "c.yaml").write_text(
        """
model: ./m
learning-rate: 1e-4
epochs: 2
option: {beta1: 0.5}
seeds: [3, 7]
sparsity: [0.9, 0.5]
tasks:
  sst2: {data: $DATA/sst2, rows: 6000, epochs: 3}
  film: {task: classification, train-file: "${DATA}/film.csv"}
methods:
  pins: {}
  slow: {method: pins, interval: 50, option: {smoothing: ema}, epochs: 9}
  dense:
"""
    )
    made = grid.read(tmp_path / "c.yaml", {})
    cells = made.cells(tmp_path / "cells")
    assert [cell.name for cell in cells[:6]] == [
        "sst2-dense-seed3",
        "sst2-pins-90-seed3",
        "sst2-slow-90-seed3",
        "sst2-pins-50-seed3",
        "sst2-slow-50-seed3",
        "film-dense-seed3",
    ]
    assert [cell.seed for cell in cells] == [3] * 10 + [7] * 10
    config = {cell.name: cell.config for cell in cells}
    assert config["sst2-pins-90-seed3"].epochs == 3
    assert config["film-pins-90-seed3"].epochs == 2
    assert config["film-slow-90-seed3"].epochs == 9
    assert config["film-slow-90-seed7"].option == {"beta1": 0.5, "smoothing": "ema"}
    assert config["film-slow-90-seed7"].train_file == f"{tmp_path}/film.csv"
    assert config["film-slow-90-seed7"].task == "classification"
    assert config["sst2-dense-seed3"].option == {}
    assert config["sst2-pins-50-seed7"].learning_rate == 1e-4
    flagged = {cell.name: cell.config for cell in grid.read(tmp_path / "c.yaml", {"epochs": 1.0}).cells(tmp_path)}
    assert {one.epochs for one in flagged.values()} == {1.0}  # a flag wins everywhere
    chosen = grid.read(tmp_path / "c.yaml", {"methods": "slow", "tasks": "film", "seeds": "3,", "sparsity": 0.9})
    assert chosen.cells(tmp_path / "cells") == [cell for cell in cells if cell.name == "film-slow-90-seed3"]
    # What is written down is read again as the same.
    (tmp_path / "again.yaml").write_text(grid.dump(made))
    assert grid.read(tmp_path / "again.yaml", {}).cells(tmp_path / "cells") == cells
    monkeypatch.delenv("DATA")
    with pytest.raises(Exception, match="DATA is not set"):
        grid.read(tmp_path / "c.yaml", {})


@pytest.mark.parametrize(("seeds", "are"), [(1, (42,)), ("3", (42, 1, 2)), ("7,", (7,)), ([5, 6, 5], (5, 6))])
def test_seeds_are_counted_or_named(seeds, are):
    assert grid.read(None, {"methods": "pins", "tasks": "sst2", "seeds": seeds}).seeds == are


def test_the_committed_comparisons(tmp_path, monkeypatch):
    monkeypatch.setenv("DATA", str(tmp_path))
    folder = Path(__file__).parents[1] / "benchmarks"
    cells = grid.read(folder / "comparison.yaml", {}).cells(tmp_path)
    assert len(cells) == 2 * 8 * 3
    assert {cell.seed for cell in cells[:16]} == {42}
    assert {(cell.task, cell.config.rows, cell.config.epochs) for cell in cells} == {
        ("sst2", 6000, 3),
        ("cola", None, 6),
    }
    assert {cell.config.learning_rate for cell in cells} == {1e-4}
    assert {cell.config.objective for cell in cells if cell.variant == "pins"} == {"self-regularization"}
    assert {cell.config.objective for cell in cells if cell.variant != "pins"} == {"empirical-risk"}
    more = grid.read(folder / "comparison_sparsities.yaml", {}).cells(tmp_path)
    assert len(more) == 2 * (3 + 1) * 3
    shared = {cell.name: cell for cell in cells}
    assert [cell == shared[cell.name] for cell in more if cell.variant == "dense"] == [True] * 6


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
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing_behind(flags, says, words, tmp_path, capsys):
    told = [*words, "--methods", "pins,magnitude", "--tasks", "sst2", "--output", tmp_path / "out"]
    assert says in complaint([*told, *flags], capsys)
    assert not (tmp_path / "out").exists()


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
