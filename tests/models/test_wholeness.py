"""A plain model folder that lacks a weight is refused by name; a new head, and a pooler that never was, are not."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from safetensors.torch import load_file, save_file

from pinscher.errors import InputError
from pinscher.models.hub import load_weights
from tiny_models import BERT, HEADS

BODY = [
    "embeddings.word_embeddings.weight",
    "embeddings.position_embeddings.weight",
    "embeddings.LayerNorm.weight",
    "encoder.layer.1.output.dense.bias",
    "pooler.dense.weight",
]


def without(folder: Path, *names: str) -> None:
    """Removes tensors from a folder."""
    path = folder / "model.safetensors"
    held = load_file(path)
    for name in names:
        del held[name]
    save_file(held, path, metadata={"format": "pt"})


def saved(model: transformers.PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", [*(f"bert.{name}" for name in BODY), "classifier.weight", "classifier.bias"])
def test_every_weight_of_the_class_is_needed(name, tmp_path):
    folder = saved(HEADS["bert"].make(), tmp_path / "model")
    without(folder, name)
    with pytest.raises(InputError, match=f"model lacks {name}: it is not the whole model"):
        load_weights(transformers.BertForSequenceClassification, str(folder))


@pytest.mark.parametrize("name", BODY)
def test_every_weight_of_the_base_is_needed_under_a_new_head(name, tmp_path):
    folder = saved(HEADS["bert"].make().bert, tmp_path / "model")
    without(folder, name)
    with pytest.raises(InputError, match=f"model lacks bert.{name}"):
        load_weights(transformers.BertForSequenceClassification, str(folder))
    with pytest.raises(InputError, match=f"model lacks {name}"):
        load_weights(transformers.BertModel, str(folder))


NO_POOLER = {"bert.pooler.dense.weight", "bert.pooler.dense.bias"}


@pytest.mark.parametrize(
    ("kind", "pooler"), [("BertForMaskedLM", NO_POOLER), ("BertModel", set()), ("BertForPreTraining", set())]
)
def test_a_new_head_and_the_pooler_that_a_class_does_not_have_are_given(kind, pooler, tmp_path):
    folder = saved(getattr(transformers, kind)(transformers.BertConfig(**BERT)), tmp_path / "model")
    loaded, told = load_weights(transformers.AutoModelForSequenceClassification, str(folder), num_labels=2)
    assert set(told["missing_keys"]) == {"classifier.weight", "classifier.bias"} | pooler
    assert type(loaded).__name__ == "BertForSequenceClassification"


def test_a_bare_model_may_be_saved_without_its_pooler(tmp_path):
    folder = saved(transformers.BertModel(transformers.BertConfig(**BERT), add_pooling_layer=False), tmp_path / "model")
    load_weights(transformers.AutoModel, str(folder))


@pytest.mark.parametrize("name", HEADS)
def test_whole_models_of_all_families_load_by_every_class(name, tmp_path):
    """By their own, tied weights and all; and what is inside of them, bare."""
    model = HEADS[name].make()
    folder = saved(model, tmp_path / "model")
    load_weights(type(model), str(folder))
    load_weights(transformers.AutoModel, str(folder))
    load_weights(type(model), str(saved(model.base_model, tmp_path / "bare")))


def test_the_last_norm_is_needed(tmp_path):
    folder = saved(HEADS["gpt2-lm"].make(), tmp_path / "model")
    without(folder, "transformer.ln_f.weight")
    for kind in (transformers.GPT2LMHeadModel, transformers.GPT2ForSequenceClassification, transformers.AutoModel):
        with pytest.raises(InputError, match=r"lacks .*ln_f\.weight"):
            load_weights(kind, str(folder))


def test_a_head_beside_the_parts_of_its_base(tmp_path):
    """T5 has its encoder and decoder beside its head: a bare one needs them too."""
    bare = saved(transformers.T5Model(HEADS["t5"].make().config), tmp_path / "bare")
    load_weights(transformers.T5ForConditionalGeneration, str(bare))
    without(bare, "decoder.final_layer_norm.weight")
    with pytest.raises(InputError, match=r"lacks decoder\.final_layer_norm\.weight"):
        load_weights(transformers.T5ForConditionalGeneration, str(bare))
