"""The page as text: nothing in it is fetched, and nothing in a run can leave its place."""

import json
import re
import time

import numpy as np

import tiny_reports
from pinscher.report import analysis, facts, page
from tiny_reports import data_of


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
