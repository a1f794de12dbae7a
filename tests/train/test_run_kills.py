"""Real signals at real moments: whatever kills a run, resumed it ends with the files of an unbroken one.

`tests/attack` does the same for longer.
"""

from __future__ import annotations

import json
import shutil
import signal

import pytest

from attack import damage, kills


@pytest.fixture(scope="module")
def ground(tmp_path_factory):
    return kills.prepare(tmp_path_factory.mktemp("ground"))


# A few of all the stages; signals take turns.
MOMENTS = (
    "dense/checkpoints/checkpoint-6",
    "dense/model",
    "checkpoints/.checkpoint-12.new",
    ".model.new",
    "export",
    "eval-export",
)
KILLS = list(zip(MOMENTS, kills.SIGNALS * 2, strict=True))


@pytest.mark.parametrize(("moment", "number"), KILLS, ids=[f"{s.name}-{m}" for m, s in KILLS])
def test_killed_at_a_stage_and_resumed_it_is_the_same(moment, number, ground, tmp_path):
    assert moment in kills.MOMENTS
    assert kills.at_moment(ground, moment, number, tmp_path / "killed") == []


def test_killed_at_random_moments_and_resumed_it_is_the_same(ground):
    ends = list(kills.at_random(ground, 4, seed=11))
    assert [wrong for _, _, wrong in ends if wrong] == []
    assert ends[-1][0] == 4  # signals that came in time


def test_no_damage_to_a_file_gives_a_traceback_or_another_model(ground):
    found = dict(damage.sampled(ground, 8, seed=5))
    assert {what: wrong for what, wrong in found.items() if wrong} == {}
    assert len(found) == 8


def test_the_comparison_sees_every_difference(ground, tmp_path):
    run = shutil.copytree(ground.whole, tmp_path / "run")
    assert kills.differences(run, ground.whole) == []
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps(result | {"seconds": 999.0}, indent=1) + "\n")
    assert kills.differences(run, ground.whole) == []
    (run / "result.json").write_text(json.dumps(result | {"steps": 999}, indent=1) + "\n")
    (run / "model" / "config.json").unlink()
    (run / ".junk").touch()
    wrong = kills.differences(run, ground.whole)
    assert wrong == ["model/config.json is missing", ".junk is too much", "result.json differs"]
    for name in ("result.json", "log.jsonl"):  # no JSON any more
        (run / name).write_bytes(b"\x87{" + bytes(9))
        assert f"{name} differs" in kills.differences(run, ground.whole)


def test_an_end_by_a_traceback_is_noticed(ground, tmp_path, monkeypatch):
    monkeypatch.setattr(kills, "_perform", broken)
    with pytest.raises(AssertionError, match="SIGKILL at never: 1"):
        kills.at_moment(ground, "never", signal.SIGKILL, tmp_path / "killed")


def broken(words: list[str], folder: str) -> None:
    raise ValueError("on purpose")
