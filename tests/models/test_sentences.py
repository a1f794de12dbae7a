"""What the files of sentence-transformers say, of both forms, and what is refused."""

import json

import pytest

from pinscher.errors import InputError
from pinscher.models import sentences
from tiny_sentences import put, sentence_encoder


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("pooling", sentences.POOLINGS)
def test_pooling_is_read_in_both_forms(tmp_path, pooling, old):
    assert sentences.read(str(sentence_encoder(tmp_path, pooling, old=old))).pooling == (pooling,)


def test_all_else_is_read(tmp_path):
    prompts = {"query": "ask : ", "passage": "say : "}
    told = sentences.read(str(sentence_encoder(tmp_path, prompts=prompts, default="query", dense=8, length=20)))
    assert (told.normalizes, told.max_length, told.lowers, told.compares_by_dot) == (True, 20, False, False)
    assert [told.prompt_for(role) for role in ("query", "document", "")] == ["ask : ", "say : ", "ask : "]
    assert told.every_prompt() == ["ask : ", "say : "]
    assert [step.folder for step in told.projections] == ["2_Dense"]
    kept = {path: (tmp_path / path).read_bytes() for path in told.files}
    assert kept == dict(told.files)
    assert {"modules.json", "1_Pooling/config.json", "2_Dense/model.safetensors"} <= set(kept)
    assert not {"config.json", "model.safetensors", "tokenizer.json"} & set(kept)


def test_a_model_without_files_is_pooled_by_the_mean(tmp_path):
    sentence_encoder(tmp_path)
    (tmp_path / "modules.json").unlink()
    told = sentences.read(str(tmp_path), width=48)
    assert (told.pooling, told.normalizes, told.max_length) == (("mean",), False, None)
    assert set(told.files) == {"modules.json", "1_Pooling/config.json"}
    assert json.loads(told.files["1_Pooling/config.json"])["word_embedding_dimension"] == 48


def modules(*kinds):
    paths = ["", *(f"{i}_{kind}" for i, kind in enumerate(kinds[1:], 1))]
    return [{"path": path, "type": f"a.b.{kind}"} for path, kind in zip(paths, kinds, strict=True)]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("modules.json", modules("Transformer", "Pooling", "LSTM"), "has a step LSTM: models of a Transformer"),
        ("modules.json", modules("Transformer", "Pooling", "Normalize", "Dense"), "a step after the normalisation"),
        ("modules.json", [], r"modules\.json is damaged"),
        ("modules.json", [{"type": "a.Transformer", "path": "0_BERT"}], "keeps its transformer in '0_BERT'"),
        ("1_Pooling/config.json", {"pooling_mode": "best"}, "pools by 'best': there are cls"),
        ("1_Pooling/config.json", {"include_prompt": False}, "does not pool the tokens of its prompts"),
        ("sentence_bert_config.json", {"max_seq_length": "long"}, "max_seq_length 'long': give a positive"),
        ("config_sentence_transformers.json", {"prompts": ["a"]}, "its prompts are not texts by name"),
    ],
)
def test_what_cannot_be_repeated_is_refused(tmp_path, name, content, message):
    put(sentence_encoder(tmp_path) / name, content)
    with pytest.raises(InputError, match=message):
        sentences.read(str(tmp_path))


def test_a_file_that_is_not_json_is_named(tmp_path):
    (sentence_encoder(tmp_path) / "modules.json").write_text("{")
    with pytest.raises(InputError, match=r"modules\.json is damaged"):
        sentences.read(str(tmp_path))
