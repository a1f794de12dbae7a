"""Runs side by side, parts on several machines, and locks between them."""

import shutil

import pytest

from pinscher.compare import grid
from pinscher.compare import session as sessions
from tiny_command import outcome
from tiny_comparison import ONE, TWO, complaint, table_of


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
        shards = [sessions.share(cells, (part, parts)) for part in range(1, parts + 1)]
        assert sorted(cell.name for shard in shards for cell in shard) == sorted(cell.name for cell in cells)
        for shard in shards:
            names = [cell.name for cell in shard]
            assert all(cell.teacher is None or cell.teacher in names for cell in shard)


def test_only_one_at_a_time(finished, monkeypatch, words, capsys):
    monkeypatch.setattr(sessions, "PATIENCE", 0.3)
    with sessions.claimed(finished / ".running-1-of-1", "held"):
        assert "is running" in complaint([*words, *TWO, "--output", finished], capsys)


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_no_run_is_made_by_two_at_once(jobs, finished, words, tmp_path, monkeypatch, capsys):
    """Whatever parts or methods another comparison in the folder has."""
    monkeypatch.setattr(sessions, "PATIENCE", 0.3)
    told = [*words, *ONE, "--output", tmp_path, "--shard", "1/2", "--jobs", jobs]
    with sessions.claimed(tmp_path / sessions.CLAIMS / "sst2-pins-80-seed42", "held"):
        code, said, _ = outcome(told, capsys)
    assert code == 1
    assert f"failed: sst2-pins-80-seed42: another comparison in {tmp_path} is making it" in said
    assert not (tmp_path / "cells").exists()
    assert outcome(told, capsys)[0] == 0


def test_a_comparison_that_has_to_wait_leaves_the_others_record_alone(finished, words, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sessions, "PATIENCE", 0.3)
    shutil.copytree(finished, tmp_path / "out")
    before = (tmp_path / "out" / sessions.RECORD).read_text()
    with sessions.claimed(tmp_path / "out" / ".running-1-of-1", "held"):
        complaint([*words, "--methods", "platon", "--tasks", "sst2", "--output", tmp_path / "out"], capsys)
    assert (tmp_path / "out" / sessions.RECORD).read_text() == before
