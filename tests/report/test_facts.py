"""What is shown of runs is what their folders say."""

import json
import shutil

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file
from transformers import GPT2Config, GPT2LMHeadModel

import tiny_reports
from pinscher.report import bitmaps, facts, page
from pinscher.train import folder as runfolder
from pinscher.train.config import RunConfig
from pinscher.train.plan import sites_of


def test_what_is_shown_is_what_the_folder_says(finished):
    found = facts.gather(finished)
    pins, magnitude = found.data["runs"]
    result = json.loads((finished[0] / "result.json").read_text())
    assert (pins["name"], magnitude["name"]) == ("pins", "magnitude")
    assert pins["pruned"] == result["metrics"]["pruned"]
    assert pins["dense_scores"] == result["metrics"]["dense"]
    assert magnitude["dense"] is None
    log = [json.loads(line) for line in (finished[0] / "log.jsonl").read_text().splitlines()]
    train = [line for line in log if line["event"] == "train"]
    assert pins["curves"]["loss"]["x"] == [line["step"] for line in train]
    assert pins["curves"]["loss_er"]["y"] == pytest.approx([line["loss_er"] for line in train], rel=1e-5)
    assert pins["curves"]["reached"]["y"] == pytest.approx([1 - line["density"] for line in train], abs=1e-6)
    assert pins["curves"]["asked"]["y"] == pytest.approx([1 - line["density_target"] for line in train], abs=1e-6)
    accuracies = [line["eval_accuracy"] for line in log if line["event"] == "eval"]
    assert pins["scores"]["accuracy"]["y"] == pytest.approx(accuracies, rel=1e-5)
    assert pins["teachers"]["x"] == [line["step"] for line in log if line["event"] == "teacher"]
    assert pins["churn"]["returned"] == train[-1]["returned"] > 0
    assert sum(pins["churn"]["y"]) * pins["weights"] == pytest.approx(train[-1]["returned"], rel=1e-4)  # interval 1


def test_a_line_of_a_damaged_log_may_lack_a_value(finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished[0], run)
    lines = (run / "log.jsonl").read_text().splitlines()
    number = [n for n, line in enumerate(lines) if '"maskings"' in line][4]
    lines[number] = lines[number].replace('"maskings"', '"maskingz"')
    (run / "log.jsonl").write_text("\n".join(lines) + "\n")
    whole, damaged = (facts.gather([folder]).data["runs"][0]["churn"] for folder in (finished[0], run))
    assert len(damaged["x"]) == len(whole["x"]) - 1
    assert {**damaged, "x": [], "y": []} == {**whole, "x": [], "y": []}


def test_matrices_are_the_models(finished):
    found = facts.gather(finished[:1])
    [run] = found.data["runs"]
    model = load_file(finished[0] / "model" / "model.safetensors")
    dense = load_file(finished[0] / "dense" / "model" / "model.safetensors")
    assert len(run["matrices"]) == 12
    assert run["weights"] == sum(model[matrix["tensor"]].size for matrix in run["matrices"])
    zeros = sum(int((model[matrix["tensor"]] == 0).sum()) for matrix in run["matrices"])
    assert zeros / run["weights"] == pytest.approx(run["sparsity"], abs=1e-9)
    for matrix, pattern, twin in zip(run["matrices"], found.patterns[0], run["dense"]["matrices"], strict=True):
        weight = model[matrix["tensor"]]
        assert (bitmaps.cells(pattern) == 255 * (weight != 0)).all()
        assert matrix["density"] == (weight != 0).mean()
        assert matrix["rank"] == np.linalg.matrix_rank(weight) / min(weight.shape)
        assert twin["rank"] == np.linalg.matrix_rank(dense[matrix["tensor"]]) / min(weight.shape)
    assert {matrix["layer"] for matrix in run["matrices"]} == {"0", "1"}
    assert run["values"]["outside"] + sum(run["values"]["shares"]) == pytest.approx(1)
    assert run["files"]["export"] == (finished[0] / "export" / "model.safetensors").stat().st_size


def test_transposed_matrices_are_turned(tmp_path):
    weight = np.arange(12.0).reshape(3, 4) * (np.arange(4) != 2)
    tables = [
        facts.gather([tiny_reports.written(tmp_path / str(turned), {"c_attn": weight}, transposed=turned)]).data[
            "runs"
        ][0]
        for turned in (False, True)
    ]
    assert tables[0]["matrices"] == tables[1]["matrices"]
    assert (tables[1]["matrices"][0]["rows"], tables[1]["matrices"][0]["dead_columns"]) == (3, 0.25)


def test_a_run_records_what_is_prunable():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=8, n_layer=1, n_head=2, n_positions=16))
    found = sites_of(RunConfig(task="e2e", model="x", exclude_modules=["mlp.c_fc"]), model)
    sites = [runfolder._described(site) for site in found]
    names = ["transformer.h.0.attn.c_attn", "transformer.h.0.attn.c_proj", "transformer.h.0.mlp.c_proj"]
    assert [site["tensor"] for site in sites] == [f"{name}.weight" for name in names]
    assert (sites[0]["outputs"], sites[0]["inputs"], sites[0]["transposed"]) == (24, 8, True)
    assert set(model.state_dict()) >= {site["tensor"] for site in sites}


def test_names_tell_runs_apart(tmp_path):
    folders = [tiny_reports.written(tmp_path / name / "rte") for name in ("a", "b")]
    assert [table["name"] for table in facts.gather(folders).data["runs"]] == ["a/rte", "b/rte"]


def test_an_unfinished_run_shows_what_is_there(tmp_path, finished):
    young = tmp_path / "young"
    young.mkdir()
    shutil.copy(finished[0] / "config.yaml", young)
    [table] = facts.gather([young]).data["runs"]
    assert (table["status"], table["matrices"], table["curves"], table["sparsity"]) == ("running", [], {}, None)
    assert table["main"] == "accuracy"
    lines = (finished[0] / "log.jsonl").read_text().splitlines()
    (young / "log.jsonl").write_text("\n".join(lines[:9]) + "\n" + lines[9][:20])
    [table] = facts.gather([young]).data["runs"]
    assert table["steps"] == json.loads(lines[8])["step"]
    assert table["remarks"] == ["There is no model yet: patterns, ranks and values come when the run has finished."]
    page.build(facts.gather([young]))
    (young / "log.jsonl").write_text("\n".join(lines) + "\n[]\nnull\n{}\n")
    assert "3 lines of log.jsonl could not be read." in facts.gather([young]).data["runs"][0]["remarks"]


def test_an_unfinished_run_opens_on_the_score_of_its_task(tmp_path):
    scores = {"event": "eval", "step": 0, "eval_accuracy": 71.0, "eval_matthews": 5.0}
    run = tiny_reports.written(tmp_path / "run", log=[scores])
    assert facts.gather([run]).data["runs"][0]["main"] == "accuracy"  # an older folder does not say
    known = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump(known | {"data": {"score": "matthews"}}))
    assert facts.gather([run]).data["runs"][0]["main"] == "matthews"
