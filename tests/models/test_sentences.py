"""What the files of sentence-transformers say, of both forms, and what is refused."""

import json
import os

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
        ("modules.json", [5], r"modules\.json is damaged: it does not list the steps"),
        ("modules.json", {}, r"modules\.json is damaged: it does not list the steps"),
        ("modules.json", [{"type": "a.Transformer", "path": 5}], r"modules\.json is damaged"),
        ("1_Pooling/config.json", [], r"1_Pooling/config\.json is damaged: it does not hold an object"),
        ("1_Pooling/config.json", {"pooling_mode": []}, "switches every way of pooling off"),
        ("1_Pooling/config.json", {"pooling_mode": 5}, "pools by 5: there are cls"),
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": False}, "switches every way of pooling off"),
        (
            "1_Pooling/config.json",
            {"pooling_mode_cls_token": "false"},
            "cls_token 'false': give true",
        ),
        ("sentence_bert_config.json", 5, r"sentence_bert_config\.json is damaged: it does not hold an object"),
        ("sentence_bert_config.json", {"max_seq_length": True}, "max_seq_length True: give a positive"),
        ("sentence_bert_config.json", {"do_lower_case": "no"}, "do_lower_case 'no': give true or false"),
        (
            "config_sentence_transformers.json",
            {"default_prompt_name": "q"},
            "the default prompt 'q'; its prompts: none",
        ),
        ("config_sentence_transformers.json", {"default_prompt_name": []}, r"has the default prompt \[\]"),
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


@pytest.mark.parametrize("path", ["..", ".", "../1_Pooling", "/etc", "1_Pooling/../../x", "x\\..", "a\0b", "a" * 300])
def test_nothing_outside_the_folder_is_read_or_written(tmp_path, path):
    """Its files would be read, and written with the result at the same place beside that."""
    folder = sentence_encoder(tmp_path / "model")
    put(tmp_path / "1_Pooling" / "config.json", {"pooling_mode": "cls"})
    put(folder / "modules.json", [{"path": "", "type": "a.Transformer"}, {"path": path, "type": "a.Pooling"}])
    for read in (sentences.read, sentences.files_of):
        with pytest.raises(InputError, match=r"modules\.json names .*, which is not a folder beside it"):
            read(str(folder))


@pytest.mark.parametrize("kind", ["Pooling", "Dense"])
def test_a_step_without_its_settings_is_refused_not_guessed(tmp_path, kind):
    folder = sentence_encoder(tmp_path, "cls", dense=8)
    path = next(folder.glob(f"*_{kind}/config.json"))
    path.unlink()
    with pytest.raises(InputError, match=f"lacks the config.json of its {kind}, in ._{kind}"):
        sentences.read(str(folder))
    os.mkfifo(path)
    with pytest.raises(InputError, match=r"config\.json is not a file"):
        sentences.read(str(folder))
