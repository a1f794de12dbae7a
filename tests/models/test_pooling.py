"""Vectors equal those of sentence-transformers, for every way of pooling and what may follow it."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer

from pinscher.errors import InputError
from pinscher.models import sentences
from pinscher.models.pooling import Embedder, pooled
from tiny_sentences import TEXTS, put, sentence_encoder


def vectors(folder):
    """Ours and theirs, for texts of several lengths."""
    model = SentenceTransformer(str(folder), device="cpu")
    model[0].auto_model.double()
    batch = model.tokenizer(TEXTS, padding=True, truncation=True, return_tensors="pt")
    states = model[0].auto_model(**batch).last_hidden_state.float()
    features = {"token_embeddings": states, "attention_mask": batch["attention_mask"]}
    for step in list(model)[1:]:
        features = step(features)
    return Embedder(sentences.read(str(folder)))(states, batch["attention_mask"]), features["sentence_embedding"]


@pytest.mark.parametrize("pooling", sentences.POOLINGS)
def test_every_way_of_pooling(tmp_path, pooling):
    mine, theirs = vectors(sentence_encoder(tmp_path, pooling, normalize=False))
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("normalize", [True, False])
def test_a_projection_and_normalisation(tmp_path, normalize):
    mine, theirs = vectors(sentence_encoder(tmp_path, dense=8, normalize=normalize))
    assert mine.shape == (len(TEXTS), 8)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_two_ways_are_joined(tmp_path):
    put(sentence_encoder(tmp_path, normalize=False) / "1_Pooling" / "config.json", {"pooling_mode": ["cls", "mean"]})
    told, states = sentences.read(str(tmp_path)), torch.randn(2, 3, 4)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    both = torch.cat([pooled(states, mask, "cls"), pooled(states, mask, "mean")], 1)
    assert torch.equal(Embedder(told)(states, mask), both)


def test_without_a_mask_all_tokens_count():
    states = torch.randn(2, 3, 4)
    torch.testing.assert_close(Embedder(sentences.Sentences())(states, None), states.mean(1))


def test_damaged_or_missing_weights_of_a_projection_are_named(tmp_path):
    weights = sentence_encoder(tmp_path, dense=8) / "2_Dense" / "model.safetensors"
    weights.write_bytes(b"\0" * 64)
    with pytest.raises(InputError, match="the weights in 2_Dense are damaged"):
        Embedder(sentences.read(str(tmp_path)))
    weights.unlink()
    with pytest.raises(InputError, match=r"2_Dense/model\.safetensors has no linear\.weight, or is missing"):
        Embedder(sentences.read(str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("linear.weight", torch.full((8, 48), float("nan")), "values that are not finite"),
        ("linear.bias", torch.full((8,), float("inf")), "values that are not finite"),
        ("linear.weight", torch.ones(8, 47), "does not hold a dense layer for 48 features"),
        ("linear.weight", torch.ones(8), "does not hold a dense layer"),
        ("linear.weight", torch.ones(8, 48, dtype=torch.int64), "does not hold a dense layer"),
        ("linear.bias", torch.ones(7), "a bias that does not fit"),
    ],
)
def test_a_projection_that_does_not_fit_is_refused_before_training(tmp_path, name, value, message):
    path = sentence_encoder(tmp_path, dense=8) / "2_Dense" / "model.safetensors"
    save_file(load_file(path) | {name: value}, path)
    with pytest.raises(InputError, match=message):
        Embedder(sentences.read(str(tmp_path)), 48)
