"""A maximum length leaves room for text beside the special tokens: a tokenizer that has none does not cut at all."""

from __future__ import annotations

import pytest

import tiny_tasks
from pinscher.errors import InputError
from pinscher.train import plan, pretrained
from pinscher.train.config import RunConfig


@pytest.mark.parametrize(("task", "least"), [("sst2", 3), ("rte", 5), ("conll2003", 3), ("stsb", 5)])
def test_the_least_length_cuts_and_a_smaller_one_is_refused(task, least, tmp_path):
    """[CLS] text [SEP], and [CLS] text [SEP] text [SEP]."""
    tiny_tasks.write_files(task, tmp_path / "data")
    tiny_tasks.tiny_model(task, tmp_path / "model")
    told = {"model": str(tmp_path / "model"), "task": task, "data": str(tmp_path / "data"), "max_steps": 4}
    made = plan.make(RunConfig(**told, max_length=least))
    assert {len(row) for row in made.train["input_ids"]} == {least}
    for length in (least - 1, 1):
        with pytest.raises(InputError, match=f"--max-length {length} leaves no room for text.* Give at least {least}"):
            plan.make(RunConfig(**told, max_length=length))


def test_a_model_that_takes_too_few_tokens_is_refused(tmp_path):
    tiny_tasks.tiny_model("sst2", tmp_path / "model")
    tokenizer = pretrained.load_tokenizer(str(tmp_path / "model"))
    tokenizer.model_max_length = 2
    config = RunConfig(model=str(tmp_path / "model"), task="sst2")
    with pytest.raises(InputError, match="leaves no room"):
        plan.fitted(plan.task_of(config), config, tokenizer)
