"""`pinscher report`: pages, figures, watching, and mistakes."""

import shutil
import threading
import time

import pytest

from pinscher.errors import InputError
from pinscher.report import facts, plots
from pinscher.report import writing as command
from tiny_command import outcome
from tiny_reports import data_of


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
        (["--watch", "--every", "0"], "--every must lie in (0, 86400], not 0"),
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
