"""A tokenizer that is missing, another model's, or blind to the texts is refused before anything is trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import tiny_tasks
from pinscher.errors import InputError
from pinscher.train import plan, pretrained
from pinscher.train.config import RunConfig
from tiny_command import SHORT, complaint, outcome


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("fit")
    for task in ("sst2", "e2e"):
        tiny_tasks.write_files(task, root / task)
        tiny_tasks.tiny_model(task, root / f"{task}-model")
    return root


@pytest.fixture
def model(place, tmp_path):
    return Path(shutil.copytree(place / "sst2-model", tmp_path / "model"))


def without_tokenizer(model: Path) -> None:
    for path in model.glob("*token*"):
        path.unlink()


def csv_of(texts: list[str], path: Path) -> Path:
    rows = [f"{text},{'yes' if i % 2 else 'no'}" for i, text in enumerate(texts)]
    path.write_text("\n".join(["text,label", *rows]) + "\n")
    return path


def planned(model: Path, train: Path) -> plan.Plan:
    return plan.make(RunConfig(model=str(model), task="classification", train_file=str(train), max_steps=4))


def test_a_model_without_a_tokenizer_is_refused(model, place, tmp_path, capsys):
    without_tokenizer(model)
    assert len(AutoTokenizer.from_pretrained(model)) == 5  # what is silently made up
    words = ["prune", "--model", model, "--task", "sst2", "--data", place / "sst2", *SHORT]
    line = complaint(outcome([*words, "--output", tmp_path / "run"], capsys))
    assert "has no tokenizer" in line
    assert not (tmp_path / "run").exists()
    complaint(outcome(["eval", model, "--task", "sst2", "--data", place / "sst2"], capsys))


@pytest.mark.parametrize("kind", ["gpt2", "roberta", "t5", "xlm-roberta", "deberta-v2"])
def test_no_family_gets_an_empty_tokenizer(kind, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(InputError, match="tokenizer"):
        pretrained.load_tokenizer(str(tmp_path))


def test_a_model_without_a_tokenizer_can_still_be_exported(place, tmp_path, model, capsys):
    without_tokenizer(model)
    assert outcome(["export", model, "--output", tmp_path / "small"], capsys)[0] == 0
    assert not list((tmp_path / "small").glob("tokenizer*"))


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = json.loads((model / "config.json").read_text())["vocab_size"]
    assert len(tokenizer) == rows
    pretrained.load_tokenizer(str(model))
    tokenizer.add_tokens("onemore")
    tokenizer.save_pretrained(model)
    with pytest.raises(InputError, match=f"'onemore' is token {rows}, but the model has {rows}"):
        pretrained.load_tokenizer(str(model))


def with_rows(model: Path, rows: int) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": rows}))


@pytest.mark.parametrize("multiple", [8, 64, 128])
def test_padding_of_the_embedding_is_fine(model, multiple):
    """To a multiple of what the hardware likes; and as far as twice the tokens."""
    tokens = len(AutoTokenizer.from_pretrained(model))
    for rows in (-(-tokens // multiple) * multiple, 2 * tokens):
        with_rows(model, min(rows, 2 * tokens))
        pretrained.load_tokenizer(str(model))


def test_a_tokenizer_with_far_fewer_tokens_than_the_model_is_refused(model):
    tokens = len(AutoTokenizer.from_pretrained(model))
    with_rows(model, 2 * tokens + 1)
    with pytest.raises(InputError, match=f"it knows {tokens} tokens, but the model has {2 * tokens + 1}. Give the tok"):
        pretrained.load_tokenizer(str(model))


@pytest.mark.parametrize(("unknown", "is_refused"), [(3, False), (4, False), (5, True), (8, True)])
def test_more_than_half_unknown_is_refused(unknown, is_refused, model, tmp_path):
    """Eight words a row: known ones, and ones in a script that the tokenizer has never seen."""
    train = csv_of([" ".join(["the"] * (8 - unknown) + ["日"] * unknown)] * 40, tmp_path / "train.csv")
    if is_refused:
        with pytest.raises(InputError, match=f"does not know {unknown / 8:.0%} of the tokens"):
            planned(model, train)
    else:
        planned(model, train)


def test_all_of_the_rows_are_looked_at_evenly(model, tmp_path):
    """The first rows are known, most of the others are not."""
    train = csv_of(["the cat"] * 300 + ["日 本"] * 700, tmp_path / "train.csv")
    with pytest.raises(InputError, match="does not know"):
        planned(model, train)


def test_texts_of_digits_are_known_to_a_real_tokenizer(model, tmp_path):
    signs = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, **{str(i): 4 + i for i in range(10)}}
    signs |= {f"##{i}": 14 + i for i in range(10)}
    made = Tokenizer(models.WordPiece(signs, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=128, **names).save_pretrained(model)
    with_rows(model, len(signs))
    planned(model, csv_of([f"{31 * i} {i}" for i in range(60)], tmp_path / "train.csv"))


def test_a_tokenizer_of_bytes_knows_everything(place, tmp_path):
    """Its unknown token is the end of the text, of which every row has one."""
    model = Path(shutil.copytree(place / "e2e-model", tmp_path / "model"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.unk_token = tokenizer.eos_token
    ids = tokenizer("日")["input_ids"]
    assert len(ids) == 3
    pretrained.check_known("it", tokenizer, [[tokenizer.eos_token_id]] * 9)
    tokenizer.unk_token = None
    pretrained.check_known("it", tokenizer, [ids, []])


@pytest.mark.parametrize("told", [0, -5, "many", None, [3], float("nan")])
def test_a_length_that_is_none_is_told_as_the_tokenizers(told, model, place, tmp_path, capsys):
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": told}))
    words = ["prune", "--model", model, "--task", "sst2", "--data", place / "sst2", *SHORT]
    found = outcome([*words, "--output", tmp_path / "run", "--dry-run"], capsys)
    if told is None:  # which transformers takes for no limit
        assert found[0] == 0
        return
    assert "model_max_length in tokenizer_config.json" in complaint(found)
