"""The report: analyses against values worked out by hand or by numpy, run folders in every state, and the command."""

import json
import os
import re
import shutil
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from transformers import GPT2Config, GPT2LMHeadModel

import tiny_reports
from pinscher.errors import InputError
from pinscher.report import analysis, bitmaps, command, facts, page, plots, runs
from pinscher.train import runfolder
from pinscher.train.config import RunConfig
from tiny_command import outcome


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return tiny_reports.real_runs(tmp_path_factory.mktemp("runs"))


def data_of(text: str) -> dict:
    """What a page's script reads."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


# ------------------------------------------------------------ analyses


@pytest.mark.parametrize("shape", [(40, 40), (96, 24), (24, 96), (1, 7)])
@pytest.mark.parametrize("density", [1.0, 0.3, 0.05, 0.0])
def test_the_rank_is_numpys(shape, density):
    random = np.random.default_rng(0)
    weight = random.normal(size=shape).astype(np.float32) * (random.random(shape) < density)
    weight[:, ::5] = 0
    assert analysis.rank(weight) == analysis.rank_reference(weight)


def test_the_rank_of_products_and_repeated_rows():
    random = np.random.default_rng(1)
    low = (random.normal(size=(64, 3)) @ random.normal(size=(3, 80))).astype(np.float32)
    assert analysis.rank(low) == analysis.rank_reference(low) == 3
    assert analysis.rank(np.eye(5, dtype=np.float32)[[0, 1, 1, 0, 4]]) == 3
    # Singular values on both sides of numpy's limit, 64 · 1.2e-7 · σ_max.
    close = np.diag(np.logspace(0, -9, 64)).astype(np.float32)
    assert analysis.rank(close) == analysis.rank_reference(close) == int((np.logspace(0, -9, 64) > 64 * 2**-23).sum())


def test_gini_by_hand():
    assert analysis.gini(np.array([0.2, 0.2, 0.2])) == pytest.approx(0)
    assert analysis.gini(np.array([0, 0, 0, 1.0])) == pytest.approx(0.75)
    assert analysis.gini(np.array([3.0, 1.0])) == pytest.approx(0.25)
    assert analysis.gini(np.zeros(3)) == 0


def test_measures_by_hand():
    found = analysis.measures(np.array([[1, 0, 2, 0], [0, 0, 0, 0], [3, 0, 6, 0], [0, 0, 5, 0]], np.float32))
    assert found["density"] == 5 / 16
    assert found["rank"] == 2 / 4
    assert (found["dead_rows"], found["dead_columns"]) == (0.25, 0.5)
    assert found["gini_rows"] == pytest.approx(analysis.gini(np.array([0.5, 0, 0.5, 0.25])))
    assert found["gini_columns"] == pytest.approx(analysis.gini(np.array([0.5, 0, 0.75, 0])))


def test_the_histogram_counts_survivors_only():
    weights = [np.array([[0.0, 0.5, -0.5], [0.0, 0.25, 9.0]]), np.array([[0.5, 0.0]])]
    found = analysis.histogram(weights, 1.0)
    edges = np.linspace(-1, 1, analysis.BINS + 1)
    assert found["outside"] == pytest.approx(1 / 5)
    assert found["shares"][int(np.searchsorted(edges, 0.5, "right")) - 1] == pytest.approx(2 / 5)
    assert sum(found["shares"]) == pytest.approx(4 / 5)
    assert found["shares"][analysis.BINS // 2] == 0  # no zeros


def test_a_thinned_curve_keeps_ends_and_spikes():
    x = np.arange(100_000.0)
    y = np.sin(x / 9000)
    y[43_210] = 50
    thin_x, thin_y = analysis.thin(x, y)
    assert len(thin_x) == analysis.POINTS
    assert (thin_x[0], thin_x[-1], thin_y.max()) == (0, 99_999, 50)
    assert (np.diff(thin_x) > 0).all()
    assert (
        np.abs(np.interp(x[::97], thin_x, thin_y) - np.sin(x[::97] / 9000))[np.abs(x[::97] - 43_210) > 200].max() < 0.01
    )
    few = analysis.thin(np.array([1, 2, 3.0]), np.array([1, np.nan, 3]))
    assert [list(part) for part in few] == [[1, 3], [1, 3]]
    assert len(analysis.thin(x[:1001], y[:1001])[0]) == analysis.POINTS


def test_churn_is_by_masking():
    steps, back = analysis.churn(np.array([5, 10, 15, 20.0]), np.array([0, 6, 6, 36.0]), np.array([0, 2, 2, 5.0]))
    assert list(steps) == [10, 20]
    assert list(back) == [3, 10]


def test_names_are_as_short_as_they_can_be():
    names = ["attention.self.query", "attention.output.dense", "intermediate.dense", "output.dense"]
    assert analysis.short_names(names) == ["query", "attention.output.dense", "intermediate.dense", "output.dense"]
    assert analysis.short_blocks(["bert.layer.0", "bert.layer.11"]) == ["0", "11"]
    assert analysis.short_blocks(["encoder.block.0", "decoder.block.0"]) == ["encoder.block.0", "decoder.block.0"]
    assert analysis.short_blocks(["h.3"]) == ["3"]


# ------------------------------------------------------------ patterns


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**32 - 1), st.sampled_from(bitmaps.FACTORS))
def test_patterns_come_back(rows, columns, seed, factor):
    mask = np.random.default_rng(seed).random((rows, columns)) < 0.3
    packed = bitmaps.pack(mask)
    assert (bitmaps.unpack(packed, rows, columns) == mask).all()
    squares = bitmaps.coarse(mask, factor)
    for y, x in np.ndindex(squares.shape):
        square = mask[y * factor : (y + 1) * factor, x * factor : (x + 1) * factor]
        assert squares[y, x] == round(255 * square.mean())
    [exact] = bitmaps.embed([(packed, rows, columns)])
    assert exact.factor == 1
    assert (bitmaps.cells(exact) == 255 * mask).all()


def test_patterns_beyond_the_budget_are_coarser():
    mask = np.random.default_rng(0).random((512, 768)) < 0.2
    packed = [(bitmaps.pack(mask), *mask.shape)] * 3
    exact = sum(len(pattern.data) for pattern in bitmaps.embed(packed))
    assert exact < 3 * 4 / 3 * mask.size / 8  # less than a bit a weight, as text
    for part in (3, 30):
        found = bitmaps.embed(packed, exact // part)
        assert len(found) == 3
        assert found[0].factor > 1
        assert sum(len(pattern.data) for pattern in found) <= exact // part
        assert (bitmaps.cells(found[0]) == bitmaps.coarse(mask, found[0].factor)).all()


# ------------------------------------------------------------ run folders


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
    plan = SimpleNamespace(config=RunConfig(task="e2e", model="x", exclude_modules=["mlp.c_fc"]))
    sites = runfolder._sites(plan, model)
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


def test_a_run_that_is_resumed_is_running(tmp_path):
    run = tiny_reports.written(tmp_path / "run", log=[], result={"status": "interrupted"})
    later = time.time() + 5
    assert runs.read(run).status == "interrupted"
    os.utime(run / "log.jsonl", (later, later))
    assert runs.read(run).status == "running"


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda run: (run / "config.yaml").unlink(), "is not a run: it has no config.yaml"),
        (lambda run: (run / "config.yaml").write_text("a: [1"), "config.yaml is damaged"),
        (lambda run: (run / "config.yaml").write_text("a: 1"), "has no settings under `run`"),
        (lambda run: (run / "config.yaml").write_text("{run: {}, sites: [{tensor: a}]}"), "its sites lack 'block'"),
        (lambda run: (run / "result.json").write_text("{"), "result.json is damaged"),
        (lambda run: (run / "bench.json").write_text("[]"), "bench.json is damaged"),
        (lambda run: (run / "model" / "model.safetensors").write_bytes(b"x" * 40), "model.safetensors is damaged"),
        (lambda run: (run / "comparison.yaml").write_text(""), "is a comparison: give some of its runs"),
        (shutil.rmtree, "does not exist"),
    ],
)
def test_what_cannot_be_read_is_one_line(tmp_path, capsys, spoil, says):
    run = tiny_reports.written(tmp_path / "run", {"key": np.eye(3)}, [], {})
    spoil(run)
    code, _, err = outcome(["report", run, "--output", tmp_path / "page.html"], capsys)
    assert code == 2
    assert says in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "page.html").exists()


# ------------------------------------------------------------ the page as text


def test_nothing_in_a_run_can_leave_its_place(tmp_path):
    nasty = "</script><script>alert(1)</script><!-- & \u2028"
    run = tiny_reports.written(tmp_path / "a<b>&amp;'\"", model=nasty, log=[{"event": "train", "step": 1, nasty: 1.0}])
    text = page.build(facts.gather([run]))
    assert "alert(1)" not in text.replace("\\u003c", "<").split('id="data"')[0]
    assert text.count("<script") == text.count("</script>") == 2
    assert data_of(text)["runs"][0]["model"] == nasty
    assert "<title>a&lt;b&gt;&amp;amp;" in text


def test_the_page_needs_no_network(finished):
    text = page.build(facts.gather(finished))
    assert "default-src 'none'" in text
    assert not re.findall(r"(?:src|href)=[\"'](?!#)", text)
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert 'http-equiv="refresh"' not in text


def test_fifty_megabytes_of_log(tmp_path):
    run = tiny_reports.written(tmp_path / "run", {"key": np.eye(8)}, [])
    steady = {
        "epoch": 0.05263157894736842,
        "grad_norm": 1.5095456838607788,
        "lr": 2.2222222222222223e-05,
        "seconds": 1.41,
    }
    steady |= {"loss_er": 0.696876049041748, "density": 0.5, "density_target": 0.5, "threshold": 1e-9, "revived": 3}
    with open(run / "log.jsonl", "w") as file:
        for step in range(1, 190_001):
            figures = {"loss": 1 / step + step % 7 / 100, "loss_sr": step % 11, "returned": 3 * step, "maskings": step}
            file.write(json.dumps({"event": "train", "step": step, **figures, **steady}) + "\n")
            if step % 10 == 0:
                file.write(f'{{"event": "eval", "step": {step}, "eval_accuracy": {step % 90}}}\n')
                file.write(f'{{"event": "teacher", "step": {step}, "teacher_score": {step % 90}}}\n')
    assert (run / "log.jsonl").stat().st_size > 50e6
    started = time.process_time()
    text = page.build(facts.gather([run]))
    assert time.process_time() - started < 20
    assert len(text) < 400_000
    [table] = data_of(text)["runs"]
    assert len(table["curves"]["loss"]["x"]) == analysis.POINTS
    assert table["teacher_changes"] == 19_000
    assert len(table["teachers"]["x"]) <= facts.TEACHERS
    assert table["churn"]["returned"] == 570_000


# ------------------------------------------------------------ the command


def test_one_run_and_several(finished, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, out, _ = outcome(["report", finished[1]], capsys)
    assert code == 0
    assert out.strip() == str(finished[1] / "report.html")
    (finished[1] / "report.html").unlink()
    code, out, _ = outcome(["report", *finished, "--figures", "figures"], capsys)
    assert (code, (tmp_path / "report.html").exists()) == (0, True)
    drawn = {path.name for path in (tmp_path / "figures").iterdir()}
    names = (
        "loss loss-er loss-sr score sparsity churn density rank dead-rows dead-columns gini-rows gini-columns values"
    )
    wanted = [*names.split(), "pattern", "size"]
    assert drawn == {f"{name}.{ending}" for name in wanted for ending in ("png", "svg")}
    assert f"{len(drawn)} figures in figures" in out
    for path in (tmp_path / "figures").iterdir():
        start = path.read_bytes()[:5]
        assert start == (b"\x89PNG\r" if path.suffix == ".png" else b"<?xml")


def test_a_matrix_is_named_by_its_end(finished, tmp_path):
    found = facts.gather(finished)
    assert plots._place_of(found, "layer.0.output.dense.weight") == ("0", "output.dense")
    assert plots._place_of(found, None)[0] == "1"
    with pytest.raises(InputError, match=r"no matrix is named 'layer.9.query'"):
        next(command.run(list(map(str, finished)), str(tmp_path / "page.html"), str(tmp_path / "f"), "layer.9.query"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--matrix", "query"], "--figures DIR"),
        (["--watch", "--every", "0"], "--every takes seconds, not 0"),
        (["--output", "."], "is a folder"),
        (["--output", f"{__file__}/page.html"], "cannot write"),
        (["--output", "x" * 300], "cannot write"),
    ],
)
def test_mistakes_are_one_line(finished, capsys, flags, says):
    code, _, err = outcome(["report", finished[1], *flags], capsys)
    assert code == 2
    assert says in err
    assert len(err.strip().splitlines()) == 1


def test_watching_follows_a_run_to_its_end(finished, tmp_path):
    """A run that grows under the watch: the page loads itself anew until the run has finished."""
    run, target = tmp_path / "run", tmp_path / "page.html"
    shutil.copytree(finished[1], run)
    lines = (run / "log.jsonl").read_text().splitlines(keepends=True)
    (run / "log.jsonl").write_text("".join(lines[:4]))
    (run / "result.json").rename(tmp_path / "result.json")
    said: list[str] = []
    watcher = threading.Thread(target=lambda: said.extend(command.run([str(run)], str(target), every=0.1)))
    watcher.start()
    for upto in (8, len(lines)):
        seen = len(said)
        while len(said) == seen and watcher.is_alive():
            time.sleep(0.02)
        assert 'http-equiv="refresh"' in target.read_text()
        (run / "log.jsonl").write_text("".join(lines[:upto]))
    (tmp_path / "result.json").rename(run / "result.json")
    watcher.join(60)
    assert not watcher.is_alive()
    assert said[-1] == str(target)
    assert len(said) >= 3
    assert 'http-equiv="refresh"' not in target.read_text()
    assert data_of(target.read_text())["runs"][0]["status"] == "finished"
