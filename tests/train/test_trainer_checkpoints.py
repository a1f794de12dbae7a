"""Checkpoints of PinsTrainer: whole or not there, and resumed to the bit."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from pinscher import files
from pinscher.errors import InputError
from pinscher.train import checkpoint
from tiny_models import DROPOUT, HEADS
from tiny_trainer import contents, logged, pruning, resumable, same, trainer_for

RESUMED = ("pins", "smvp", "l0", "pst", "movement", "magnitude")


@pytest.mark.parametrize("grouped", [False, True], ids=["random", "grouped"])
@pytest.mark.parametrize("method", RESUMED)
def test_a_resumed_run_is_bit_identical(method, grouped, tmp_path):
    whole = resumable(tmp_path / "whole", method, grouped)
    whole.train()
    assert whole.teacher.changes > 1
    for step in (6, 9):  # the end of an epoch, and the middle of one
        folder = tmp_path / f"from-{step}"
        resumed = resumable(folder, method, grouped, seed=5)  # nothing of a new model may remain
        resumed.train(str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert same(resumed.model.state_dict(), whole.model.state_dict())
        assert contents(folder / "checkpoint-15") == contents(tmp_path / "whole" / "checkpoint-15")
        assert logged(resumed, "eval_loss") == logged(whole, "eval_loss")


def test_a_resumed_distillation_is_bit_identical(tmp_path):
    states = []
    for folder, resume in (("whole", None), ("resumed", str(tmp_path / "whole" / "checkpoint-9"))):
        more = {"objective": "knowledge-distillation", "teacher": HEADS["bert"].make(seed=7, **DROPOUT)}
        trainer = resumable(tmp_path / folder, **more)
        trainer.train(resume)
        states.append(contents(tmp_path / folder / "checkpoint-15"))
    assert states[0] == states[1]


def tiny_tokenizer():
    words = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1, "word": 2}, unk_token="[UNK]"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")


@pytest.mark.parametrize("method", ["pins", "l0"])
def test_a_checkpoint_holds_no_pickle(method, tmp_path):
    trainer = resumable(tmp_path, method, args={"max_steps": 6}, processing_class=tiny_tokenizer(), select="best")
    trainer.train()
    found = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.parent.name for path in found} == {"checkpoint-3", "checkpoint-6", "best"}
    assert {path.suffix for path in found} == {".json", ".safetensors"}
    for path in found:
        if path.suffix == ".json":
            json.loads(path.read_text())
        else:
            load_file(path)
    assert PreTrainedTokenizerFast.from_pretrained(tmp_path / "checkpoint-3").pad_token == "[PAD]"


class Crash(BaseException):
    """What no handler of ours may swallow."""


@pytest.mark.parametrize(("module", "place"), [(checkpoint, "save_file"), (files, "_sync"), (checkpoint, "write")])
def test_a_checkpoint_is_whole_or_not_there(module, place, unbroken, tmp_path, monkeypatch):
    trainer = resumable(tmp_path / "run")
    real = getattr(module, place)

    def crash(*args, **kwargs):
        if trainer.state.global_step == 9:
            raise Crash
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(module, place, crash)
        with pytest.raises(Crash):
            trainer.train()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoint-3", "checkpoint-6"]
    assert contents(tmp_path / "run" / "checkpoint-6") == contents(unbroken[0] / "checkpoint-6")
    leftover = tmp_path / "run" / ".checkpoint-9.new"  # what a kill would leave
    leftover.mkdir()
    (leftover / "junk").write_text("half")

    resumed = resumable(tmp_path / "run", seed=5)
    resumed.train(resume_from_checkpoint=True)
    assert contents(tmp_path / "run" / "checkpoint-15") == contents(unbroken[0] / "checkpoint-15")
    assert not list((tmp_path / "run").glob(".*"))


def test_only_so_many_checkpoints_are_kept(tmp_path):
    trainer = resumable(tmp_path, args={"save_total_limit": 2})
    trainer.train()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-12", "checkpoint-15"]


def test_another_models_checkpoint_is_refused(tmp_path):
    resumable(tmp_path / "one", args={"max_steps": 3}, pruning=pruning(interval=1)).train()
    other = trainer_for(tmp_path / "two", "tokens", args={"max_steps": 6}, pruning=pruning())
    with pytest.raises((InputError, ValueError, RuntimeError)):
        other.train(str(tmp_path / "one" / "checkpoint-3"))
