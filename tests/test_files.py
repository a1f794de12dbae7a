"""Files and folders are whole or not there, wherever their names lead."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from pinscher import files
from pinscher.errors import InputError
from pinscher.runfolder import check_writable
from tiny_command import complaint, finished_run, outcome


@pytest.fixture(params=["pipe", "device", "link to a device", "folder"])
def special(request, tmp_path) -> Path:
    """What is there and no file."""
    path = tmp_path / "out"
    if request.param == "pipe":
        os.mkfifo(path)
    elif request.param == "device":
        if os.geteuid():
            path.symlink_to("/dev/null")
        else:
            os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    elif request.param == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/null")
    return path


def test_what_is_no_file_is_not_replaced_by_one(special):
    before = special.lstat().st_mode
    with pytest.raises(InputError, match="is a folder, a pipe or a device, not a file"):
        files.write_bytes(special, b"x")
    with pytest.raises(InputError, match=r"out is .*: give --json the name of a file\."):
        files.check_file(special, "--json")
    assert special.lstat().st_mode == before
    assert list(special.parent.iterdir()) == [special]
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_a_link_to_a_file_is_written_through(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "new").symlink_to("below/there")
    files.write_text(tmp_path / "link", "x")
    files.write_text(tmp_path / "new", "y")
    assert (tmp_path / "real").read_text() == "x"
    assert (tmp_path / "below" / "there").read_text() == "y"
    assert all((tmp_path / name).is_symlink() for name in ("link", "new"))


def test_a_link_to_a_folder_is_written_through(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "old").touch()
    (tmp_path / "link").symlink_to("real")
    with files.whole(tmp_path / "link") as fresh:
        assert fresh == files.fresh_name(tmp_path / "link")
        (fresh / "new").touch()
    assert (tmp_path / "link").is_symlink()
    assert [path.name for path in (tmp_path / "real").iterdir()] == ["new"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]


@pytest.mark.parametrize("name", [".", ""])
def test_the_folder_that_one_is_in_has_a_name(name, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with files.whole(name) as fresh:
        (fresh / "new").touch()
    assert (tmp_path / "here" / "new").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


@pytest.mark.parametrize("name", ["a/" * 1500, "a" * 3000, "a\udcffb"])
def test_names_that_cannot_be_written_are_refused(name, tmp_path):
    for check in (files.check_file, check_writable):
        with pytest.raises(InputError, match=r"cannot write .*: the name .*\. Give --figures "):
            check(tmp_path / name, "--figures")
    files.check_file(tmp_path / ("é/" * 400), "--figures")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return finished_run(tmp_path_factory.mktemp("files"))


@pytest.mark.parametrize("words", [["inspect", "--no-rank", "--json"], ["report", "--output"]], ids=lambda w: w[0])
def test_the_commands_refuse_a_device(words, run, special, capsys):
    assert str(special) in complaint(outcome([words[0], run, *words[1:], special], capsys))


def test_an_export_through_a_link(run, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for _ in range(2):
        assert outcome(["export", run, "--output", tmp_path / "link"])[0] == 0
    assert (tmp_path / "real" / "model.safetensors").exists()
    assert (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]


@pytest.mark.parametrize("form", ["pinscher", "hf", "scipy"])
@pytest.mark.parametrize("place", ["", ".", "..", "../here"])
def test_nobody_is_left_in_a_folder_that_is_gone(place, form, run, tmp_path, monkeypatch, capsys):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    said = complaint(outcome(["export", run, "--output", place, "--format", form], capsys))
    assert "is the folder that you are in" in said
    assert not list((tmp_path / "here").iterdir())
