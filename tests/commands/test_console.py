"""Errors of the disk are one line; units are those that people use."""

import errno

import pytest

from pinscher import files
from pinscher.commands import console
from pinscher.errors import InputError
from tiny_command import SHORT, complaint


def test_a_folder_that_cannot_be_written(command, sst2, tmp_path):
    (tmp_path / "file").write_text("in the way")
    for place in ("file/run", "file", "/proc/run"):
        said = complaint(command("prune", *sst2, *SHORT, "--output", place))
        assert f"cannot write {place}" in said
    assert command("prune", *sst2, *SHORT, "--output", "run")[0] == 0
    assert "cannot write file" in complaint(command("eval", "run", "--output", "file"))


@pytest.mark.parametrize("failure", ["OSError", "safetensors"])
def test_a_full_disk(command, sst2, tmp_path, monkeypatch, failure):
    from pinscher.train import checkpoint

    def full(*args, **kwargs):
        if failure == "OSError":
            raise OSError(errno.ENOSPC, "No space left on device", "checkpoint")
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(checkpoint, "save_file", full)
    said = complaint(command("prune", *sst2, *SHORT, "--output", "out"))
    assert "the disk is full" in said
    assert not list((tmp_path / "out").rglob("*.new"))
    assert not (tmp_path / "out" / "model").exists()


@pytest.mark.parametrize(
    ("seconds", "says"),
    [(0.3, "2 seconds"), (89, "89 seconds"), (90, "2 minutes"), (5399, "90 minutes"), (5400, "1.5 hours")],
)
def test_durations(seconds, says):
    assert console.duration(seconds) == says


def test_sizes_and_percents():
    assert [files.readable(count) for count in (999, 123_456, 1_000_000)] == ["1.0 kB", "123.5 kB", "1.00 MB"]
    assert console.megabytes(1_250_000) == "1.2 MB"
    assert console.percent(0.8) == "80.0 %"


def test_only_the_first_process_speaks(monkeypatch, capsys):
    for rank, said in (("0", "error: wrong\n"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as end, console.plainly():
            raise InputError("wrong")
        assert end.value.code == 2
        assert capsys.readouterr().err == said
        assert console.screen().quiet == (rank == "1")


def test_other_errors_keep_their_traceback():
    with pytest.raises(KeyError), console.plainly():
        raise KeyError("ours")
    with pytest.raises(OSError, match="ours"), console.plainly():
        raise OSError(errno.EIO, "ours")
