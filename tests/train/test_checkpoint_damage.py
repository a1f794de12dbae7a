"""A damaged checkpoint is noticed before it is loaded: the one before takes over, or one sentence says why not."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny_tasks
from pinscher.errors import InputError
from pinscher.runfolder import RunFolder, checkpoints
from pinscher.train import checksums, storage
from pinscher.train.stopping import Stopping
from tiny_command import SHORT, complaint, outcome

# Besides the model's, what a checkpoint is made of.
FILES = ("model.safetensors", "state.safetensors", "state.json", "trainer_state.json", "config.json", "checksums.json")


def flip(path: Path) -> None:
    """Turns over one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def edit(path: Path, change) -> None:
    found = json.loads(path.read_text())
    path.write_text(json.dumps(change(found)))


def without(*names):
    def change(found):
        inside = found
        for name in names[:-1]:
            inside = inside[name]
        del inside[names[-1]]
        return found

    return change


def lose_state(name):
    """Takes one of the states out of state.json."""

    def damage(folder: Path) -> None:
        def change(found):
            pairs = found["states"]["$dict"]
            found["states"]["$dict"] = [[key, value] for key, value in pairs if key != name]
            return found

        edit(folder / "state.json", change)

    return damage


def change_state(name, value):
    def damage(folder: Path) -> None:
        def change(found):
            found["states"]["$dict"] = [[k, value if k == name else v] for k, v in found["states"]["$dict"]]
            return found

        edit(folder / "state.json", change)

    return damage


def resized(folder: Path) -> None:
    """Another model's tensors under the same names."""
    path = folder / "model.safetensors"
    save_file({name: tensor.repeat(*[2] * tensor.dim()) for name, tensor in load_file(path).items()}, path)


def renamed(folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file({f"other.{name}": tensor for name, tensor in load_file(path).items()}, path)


def fewer_tensors(folder: Path) -> None:
    path = folder / "state.safetensors"
    save_file(dict(list(load_file(path).items())[5:]), path)


DAMAGES = {
    "flipped weights": lambda folder: flip(folder / "model.safetensors"),
    "flipped states": lambda folder: flip(folder / "state.safetensors"),
    "flipped values": lambda folder: flip(folder / "state.json"),
    "truncated weights": lambda folder: os.truncate(folder / "model.safetensors", 5000),
    "truncated states": lambda folder: os.truncate(folder / "state.safetensors", 5000),
    "truncated values": lambda folder: os.truncate(folder / "state.json", 500),
    "truncated trainer state": lambda folder: os.truncate(folder / "trainer_state.json", 50),
    "empty weights": lambda folder: os.truncate(folder / "model.safetensors", 0),
    "empty states": lambda folder: os.truncate(folder / "state.safetensors", 0),
    "empty values": lambda folder: os.truncate(folder / "state.json", 0),
    "empty trainer state": lambda folder: os.truncate(folder / "trainer_state.json", 0),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "no states": lambda folder: (folder / "state.safetensors").unlink(),
    "no values": lambda folder: (folder / "state.json").unlink(),
    "no trainer state": lambda folder: (folder / "trainer_state.json").unlink(),
    "garbage weights": lambda folder: (folder / "model.safetensors").write_bytes(b"\x93 garbage" * 99),
    "garbage values": lambda folder: (folder / "state.json").write_bytes(b"\xff\xfe garbage" * 99),
    "garbage trainer state": lambda folder: (folder / "trainer_state.json").write_bytes(b"\0\xff" * 99),
    "a list of values": lambda folder: (folder / "state.json").write_text("[1, 2]"),
    "deep values": lambda folder: (folder / "state.json").write_text("[" * 100_000),
    "a number as trainer state": lambda folder: (folder / "trainer_state.json").write_text("3"),
    "steps in words": lambda folder: edit(
        folder / "trainer_state.json", lambda found: found | {"global_step": "eight"}
    ),
    "a history in words": lambda folder: edit(
        folder / "trainer_state.json", lambda found: found | {"log_history": "no"}
    ),
    "unknown trainer state": lambda folder: edit(folder / "trainer_state.json", lambda found: found | {"moon": 1}),
    "no steps": lambda folder: edit(folder / "trainer_state.json", without("global_step")),
    "another format": lambda folder: edit(folder / "state.json", lambda found: found | {"format": 99}),
    "no format": lambda folder: edit(folder / "state.json", without("format")),
    "no states inside": lambda folder: edit(folder / "state.json", without("states")),
    "states as a list": lambda folder: edit(folder / "state.json", lambda found: found | {"states": [1]}),
    "no pruner": lose_state("pruner"),
    "no optimizer": lose_state("optimizer"),
    "no random state": lose_state("rng"),
    "an optimizer in words": change_state("optimizer", "fast"),
    "a pruner in words": change_state("pruner", "sharp"),
    "a teacher in words": change_state("teacher", "wise"),
    "a random state in words": change_state("rng", "random"),
    "an empty random state": change_state("rng", {"$dict": []}),
    "another model's shapes": resized,
    "another model's names": renamed,
    "tensors lost": fewer_tensors,
    "no checksums": lambda folder: (folder / "checksums.json").unlink(),
    "an empty folder": lambda folder: [path.unlink() for path in folder.iterdir()],
}


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A run that was stopped after step 10 of 12, with its data; its checkpoints are those of steps 8 and 10."""
    root = tmp_path_factory.mktemp("interrupted")
    tiny_tasks.write_files("sst2", root / "data")
    tiny_tasks.tiny_model("sst2", root / "model")
    words = ["prune", "--model", root / "model", "--task", "sst2", "--data", root / "data", "--no-export", *SHORT]
    whole = Stopping.on_step_end

    def interrupt(self, args, state, control, **kwargs):
        if state.global_step == 10:
            os.kill(os.getpid(), signal.SIGTERM)
        return whole(self, args, state, control, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stopping, "on_step_end", interrupt)
        assert outcome([*words, "--output", root / "cut"])[0] == 130
        assert outcome([*words, "--output", root / "best", "--select", "best"])[0] == 130
    assert outcome([*words, "--output", root / "whole"])[0] == 0
    return root


@pytest.fixture
def cut(interrupted, tmp_path):
    return Path(shutil.copytree(interrupted / "cut", tmp_path / "run"))


def newest(run: Path) -> Path:
    found = checkpoints(RunFolder(run).checkpoints)
    return found[max(found)]


def forget_checksums(run: Path) -> None:
    """As earlier versions wrote it: one checkpoint, without checksums."""
    found = checkpoints(RunFolder(run).checkpoints)
    for step in sorted(found)[:-1]:
        shutil.rmtree(found[step])
    (newest(run) / checksums.NAME).unlink()
    edit(newest(run) / "state.json", without("checked"))


def events(run: Path) -> list[dict]:
    return [{k: v for k, v in event.items() if k != "seconds"} for event in RunFolder(run).events()]


def check_same(run: Path, whole: Path) -> None:
    for name in ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (run / "model" / name).read_bytes() == (whole / "model" / name).read_bytes(), name
    assert events(run) == events(whole)
    assert not (run / "checkpoints").exists()


def test_two_checkpoints_are_kept_and_every_file_is_listed(cut):
    found = checkpoints(RunFolder(cut).checkpoints)
    assert sorted(found) == [8, 10]
    for folder in found.values():
        listed = json.loads((folder / "checksums.json").read_text())["files"]
        assert set(listed) == {path.name for path in folder.iterdir()} - {"checksums.json"}
        assert set(FILES) - {"checksums.json"} <= set(listed)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_anywhere_is_noticed_and_the_checkpoint_before_takes_over(name, cut, interrupted, capsys):
    flip(newest(cut) / name)
    capsys.readouterr()
    code, said, err = outcome(["prune", "--resume", cut], capsys)
    assert code == 0, err
    assert f"checkpoint-10/{name} is damaged" in said
    assert "continuing from checkpoint-8" in said
    check_same(cut, interrupted / "whole")


@pytest.mark.parametrize("damage", DAMAGES)
def test_no_damage_costs_the_run(damage, cut):
    DAMAGES[damage](newest(cut))
    folder = newest(cut)
    with pytest.raises(ValueError, match=folder.name):
        storage.check(folder)
    found, damages = storage.newest_whole(RunFolder(cut).checkpoints)
    assert found == folder.with_name("checkpoint-8")
    assert len(damages) == 1


@pytest.mark.parametrize("damage", [name for name in DAMAGES if not name.startswith(("flipped", "no checksums"))])
def test_without_checksums_every_damage_is_one_sentence(damage, cut, capsys):
    forget_checksums(cut)
    DAMAGES[damage](newest(cut))
    capsys.readouterr()
    line = complaint(outcome(["prune", "--resume", cut], capsys))
    assert "checkpoint" in line
    assert not (cut / "model").exists()


def test_a_checkpoint_without_checksums_still_resumes(cut, interrupted, capsys):
    forget_checksums(cut)
    assert outcome(["prune", "--resume", cut], capsys)[0] == 0
    check_same(cut, interrupted / "whole")


def test_if_none_is_whole_one_sentence_says_so(cut, capsys):
    for folder in checkpoints(RunFolder(cut).checkpoints).values():
        flip(folder / "state.safetensors")
    capsys.readouterr()
    line = complaint(outcome(["prune", "--resume", cut], capsys))
    assert "checkpoint-10/state.safetensors is damaged" in line
    assert "--overwrite" in line


def test_a_second_interruption_after_a_fallback(cut, interrupted, capsys, monkeypatch):
    """The damaged one is neither taken for the newest when old ones are removed, nor loaded the next time."""
    flip(newest(cut) / "model.safetensors")
    whole = Stopping.on_step_end

    def interrupt(self, args, state, control, **kwargs):
        if state.global_step == 9:
            os.kill(os.getpid(), signal.SIGTERM)
        return whole(self, args, state, control, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Stopping, "on_step_end", interrupt)
        assert outcome(["prune", "--resume", cut])[0] == 130
    assert sorted(checkpoints(RunFolder(cut).checkpoints)) == [8, 9, 10]
    capsys.readouterr()
    code, said, err = outcome(["prune", "--resume", cut], capsys)
    assert code == 0, err
    assert "continuing from checkpoint-9" in said
    check_same(cut, interrupted / "whole")


def test_other_folders_beside_the_checkpoints_are_left_alone(cut, interrupted, capsys):
    backup = cut / "checkpoints" / "checkpoint-backup"
    shutil.copytree(newest(cut), backup)
    (cut / "checkpoints" / "checkpoint-99").write_text("a file")
    assert outcome(["prune", "--resume", cut], capsys)[0] == 0
    assert backup.exists()
    assert (cut / "model" / "model.safetensors").read_bytes() == (
        interrupted / "whole" / "model" / "model.safetensors"
    ).read_bytes()


# ------------------------------------------------------------ the best model


@pytest.mark.parametrize("how", ["flip", "truncate", "remove", "no checksums"])
def test_a_damaged_best_model_is_noticed_before_training_goes_on(how, interrupted, tmp_path, capsys):
    run = Path(shutil.copytree(interrupted / "best", tmp_path / "run"))
    path = run / "checkpoints" / "best" / "model.safetensors"
    if how == "flip":
        flip(path)
    elif how == "truncate":
        os.truncate(path, 999)
    elif how == "no checksums":
        (path.parent / checksums.NAME).unlink()
    else:
        shutil.rmtree(path.parent)
    before = (run / "log.jsonl").read_text()
    capsys.readouterr()
    assert "best" in complaint(outcome(["prune", "--resume", run], capsys))
    assert (run / "log.jsonl").read_text() == before


def test_the_best_model_has_checksums(interrupted):
    run = interrupted / "best"
    storage.check_weights(run / "checkpoints" / "best", newest(run))
    assert (interrupted / "best" / "checkpoints" / "best" / checksums.NAME).exists()


# ------------------------------------------------------------ other files of a run


def test_an_empty_config_is_one_sentence(cut, capsys):
    for content in (b"", b"run: {}\n", b"run: 3\n", b"\xff\xfe", b"run:\n  model: [", b"[" * 5000):
        (cut / "config.yaml").write_bytes(content)
        complaint(outcome(["prune", "--resume", cut], capsys))


def test_a_config_that_lost_what_it_said_of_the_data(cut, capsys):
    text = (cut / "config.yaml").read_text()
    for lost in ("data", "versions"):
        start = text.index(f"\n{lost}:") + 1
        (cut / "config.yaml").write_text(text[:start] + "lost" + text[start + len(lost) :])
        assert "damaged" in complaint(outcome(["prune", "--resume", cut], capsys))


@pytest.mark.parametrize(
    "content",
    [b"\0\xff\x80" * 999, b"[" * 100_000, b'{"step": 4, "seconds": "many"}\n', b'{"step": "x"}\n[]\n3\n', b""],
)
def test_a_binary_log_is_cut(content, cut, interrupted, capsys):
    (cut / "log.jsonl").write_bytes(content)
    code, _, err = outcome(["prune", "--resume", cut], capsys)
    assert code == 0, err
    assert [event["step"] for event in RunFolder(cut).events() if event["step"] > 10]
    assert (cut / "model" / "model.safetensors").read_bytes() == (
        interrupted / "whole" / "model" / "model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]", b"3", b"[" * 100_000])
def test_a_damaged_result_is_one_sentence(content, cut, capsys):
    (cut / "result.json").write_bytes(content)
    assert "result.json is damaged" in complaint(outcome(["prune", "--resume", cut], capsys))


def test_a_result_of_wrong_types_is_one_sentence(interrupted, tmp_path, capsys):
    run = Path(shutil.copytree(interrupted / "whole", tmp_path / "run"))
    good = json.loads((run / "result.json").read_text())
    wrong = [good | {"metrics": 3}, good | {"seconds": "long"}, good | {"metrics": good["metrics"] | {"pruned": [1]}}]
    for content in wrong:
        (run / "result.json").write_text(json.dumps(content))
        assert "result.json is damaged" in complaint(outcome(["export", run, "--output", tmp_path / "x"], capsys))


# ------------------------------------------------------------ checksums


def test_checksums_name_the_file(tmp_path):
    folder = tmp_path / "c"
    (folder / "in").mkdir(parents=True)
    (folder / "a").write_bytes(bytes(3 << 20))  # more than one chunk
    (folder / "in" / "b").write_text("b")
    checksums.verify(folder)  # nothing was promised
    checksums.write(folder)
    checksums.verify(folder)
    flip(folder / "a")
    with pytest.raises(InputError, match=r"a is damaged: its checksum"):
        checksums.verify(folder)
    flip(folder / "a")
    checksums.verify(folder)
    (folder / "in" / "b").unlink()
    with pytest.raises(InputError, match=r"in/b is missing"):
        checksums.verify(folder)
    (folder / "in" / "b").write_text("b")
    save_file({"x": torch.zeros(2)}, folder / "stray.safetensors")
    with pytest.raises(InputError, match=r"stray.safetensors is not part"):
        checksums.verify(folder)


@pytest.mark.parametrize(
    "content", ["", "3", "{}", '{"format": 1, "files": {"../x": {"size": 1, "blake2b": ""}}}', "["]
)
def test_damaged_checksums_say_so(content, tmp_path):
    (tmp_path / "a").write_text("a")
    (tmp_path / checksums.NAME).write_text(content)
    with pytest.raises(InputError, match="damaged"):
        checksums.verify(tmp_path)


# ------------------------------------------------------------ the finished model


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    "content", [b"", b"\xff garbage" * 99, b"[1]", b'{"a": 1}'], ids=["empty", "bytes", "[]", "{}"]
)
def test_a_damaged_model_is_one_sentence(name, content, interrupted, tmp_path, capsys):
    run = Path(shutil.copytree(interrupted / "whole", tmp_path / "run"))
    (run / "model" / name).write_bytes(content)
    for use in (["eval", run, "--output", tmp_path / "scores"], ["export", run, "--output", tmp_path / "small"]):
        code, said, err = outcome(use, capsys)
        if code == 0:  # a model can be stored without its tokenizer, and tokenizer_config.json may say anything
            assert name.startswith("tokenizer"), said
        else:
            complaint((code, said, err))
