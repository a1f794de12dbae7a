"""An interrupted run goes on with the models that it had, its dense run's among them, or not at all."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from attack.kills import differences
from pinscher.train.stopping import Stopping
from tiny_command import SHORT, complaint, outcome

TAUGHT = ["--dense-start", "--objective", "knowledge-distillation", "--no-export", *SHORT]
WHOLE = Stopping.on_step_end


def flip(path: Path) -> None:
    """Turns over one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def interrupt(patch: pytest.MonkeyPatch, step: int, run: str = "run") -> None:
    """Ends the run with this name at a step; not the dense run inside of it."""

    def stop(self, args, state, control, **kwargs):
        if state.global_step == step and Path(args.output_dir).parent.name == run:
            os.kill(os.getpid(), signal.SIGTERM)
        return WHOLE(self, args, state, control, **kwargs)

    patch.setattr(Stopping, "on_step_end", stop)


@pytest.fixture(scope="module")
def root(sst2, tmp_path_factory) -> Path:
    """A run that learns from its dense one: interrupted, and whole."""
    root = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        (root / "whole").mkdir()
        with pytest.MonkeyPatch.context() as stopped:
            interrupt(stopped, 6)
            assert outcome(["prune", *sst2, *TAUGHT, "--output", "run"])[0] == 130
        patch.chdir(root / "whole")
        assert outcome(["prune", *sst2, *TAUGHT, "--output", "run"])[0] == 0
    return root


@pytest.fixture
def run(root, tmp_path) -> Path:
    return Path(shutil.copytree(root / "run", tmp_path / "run"))


# ------------------------------------------------------------ the dense run's model


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_damaged_dense_model_is_made_again(name, command, root, run):
    flip(run / "dense" / "model" / name)
    code, said, err = command("prune", "--resume", "run")
    assert code == 0, err
    assert f"dense/model/{name} is damaged" in said
    assert "making the dense run again" in said
    same = [line for line in differences(run, root / "whole" / "run") if "config.yaml" not in line]  # it has the output
    assert same == []


def test_a_whole_dense_model_is_taken_as_it_is(command, root, run):
    before = (run / "dense" / "model" / "model.safetensors").stat().st_mtime_ns
    code, said, err = command("prune", "--resume", "run")
    assert code == 0, err
    assert "again" not in said
    assert (run / "dense" / "model" / "model.safetensors").stat().st_mtime_ns == before
    assert differences(run / "model", root / "whole" / "run" / "model") == []


def test_a_dense_run_without_checksums_is_taken_as_it_is(command, root, run):
    """Earlier versions wrote none."""
    result = json.loads((run / "dense" / "result.json").read_text())
    assert result.pop("checksums")["files"].keys() == {path.name for path in (run / "dense" / "model").iterdir()}
    (run / "dense" / "result.json").write_text(json.dumps(result))
    code, said, err = command("prune", "--resume", "run")
    assert code == 0, err
    assert "again" not in said
    assert differences(run / "model", root / "whole" / "run" / "model") == []


# ------------------------------------------------------------ the dense run's settings


@pytest.mark.parametrize("status", ["finished", "interrupted"])
def test_edited_settings_of_the_dense_run_are_refused(status, command, run):
    if status == "interrupted":
        (run / "dense" / "result.json").unlink()
    settings = run / "dense" / "config.yaml"
    before = settings.read_text()
    settings.write_text(before.replace("learning_rate: 0.0001", "learning_rate: 0.5", 1))
    assert settings.read_text() != before
    said = complaint(command("prune", "--resume", "run"))
    assert "run/dense cannot be resumed with another learning_rate: it is 0.5 now" in said
    assert f"Undo that change in {Path('run/dense/config.yaml')}" in said


def test_lost_settings_of_the_dense_run_have_a_remedy_that_works(command, root, run):
    (run / "dense" / "result.json").unlink()
    (run / "dense" / "config.yaml").unlink()
    said = complaint(command("prune", "--resume", "run"))
    assert "dense/config.yaml is missing: put it back from a copy, or remove run/dense" in said
    shutil.rmtree(run / "dense")
    code, _, err = command("prune", "--resume", "run")
    assert code == 0, err
    assert differences(run / "model", root / "whole" / "run" / "model") == []


# ------------------------------------------------------------ the teacher and the model


@pytest.fixture(scope="module")
def taught(root, sst2, tmp_path_factory) -> Path:
    """A run with a teacher of its own, interrupted, beside its model and its teacher."""
    place = tmp_path_factory.mktemp("taught")
    shutil.copytree(sst2[1], place / "model")
    shutil.copytree(root / "run" / "dense" / "model", place / "t1")
    words = ["--objective", "knowledge-distillation", "--teacher", "t1", "--model", "model", "--no-export", *SHORT]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        interrupt(patch, 6)
        assert outcome(["prune", *sst2[2:], *words, "--output", "run"])[0] == 130
    return place


@pytest.fixture
def scene(taught, tmp_path) -> Path:
    """A copy of it, with its places set right."""
    shutil.copytree(taught, tmp_path, dirs_exist_ok=True)
    settings = tmp_path / "run" / "config.yaml"
    settings.write_text(settings.read_text().replace(str(taught), str(tmp_path)))
    return tmp_path


@pytest.mark.parametrize("name", ["t1", "model"])
def test_exchanged_weights_are_refused(name, command, scene):
    flip(scene / name / "model.safetensors")
    said = complaint(command("prune", "--resume", "run"))
    which = {"t1": "teacher", "model": "model"}[name]
    assert f"cannot be resumed with another {which}: {scene / name}" in said
    assert "Put that one back" in said


@pytest.mark.parametrize("other", ["t2", "model", None])
def test_another_teacher_in_the_settings_is_refused(other, command, scene):
    shutil.copytree(scene / "t1", scene / "t2")
    flip(scene / "t2" / "model.safetensors")
    settings = scene / "run" / "config.yaml"
    text = settings.read_text()
    start = text.index("teacher: ", text.index("run:"))
    end = text.index("t1", start) + 2
    settings.write_text(f"{text[:start]}teacher: {scene / other if other else 'null'}{text[end:]}")
    assert "cannot be resumed with another teacher" in complaint(command("prune", "--resume", "run"))


def test_a_model_and_a_teacher_may_have_moved(command, scene):
    for name in ("model", "t1"):
        (scene / name).rename(scene / f"moved-{name}")
        settings = scene / "run" / "config.yaml"
        settings.write_text(settings.read_text().replace(f"{scene / name}\n", f"{scene / f'moved-{name}'}\n"))
    code, _, err = command("prune", "--resume", "run")
    assert code == 0, err


def test_a_run_that_did_not_note_its_models_is_resumed(command, scene):
    """Earlier versions did not."""
    settings = scene / "run" / "config.yaml"
    settings.write_text("".join(line for line in settings.open() if not line.startswith("weights:")))
    flip(scene / "t1" / "model.safetensors")
    assert command("prune", "--resume", "run")[0] == 0


def test_a_teacher_beside_a_baseline(command, scene, sst2):
    words = ["--objective", "knowledge-distillation", "--teacher", "t1", "--baseline", "--no-export", *SHORT]
    code, _, err = command("prune", *sst2, *words, "--output", "both")
    assert code == 0, err
