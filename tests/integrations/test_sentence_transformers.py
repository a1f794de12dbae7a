"""Models of sentence-transformers in the sparse runtime: loaded, accelerated, sent to processes, stored."""

from __future__ import annotations

import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import CrossEncoder, SentenceTransformer
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
)

import pinscher
from pinscher.errors import InputError
from pinscher.integrations import sentence_transformers as ours
from pinscher.prune.sites import find_sites
from pinscher.runtime.encoder import FastEncoder, Layers
from tiny_sentences import TEXTS, sentence_encoder

PROMPTS = {"query": "near ", "document": "of the "}
PAIRS = [(TEXTS[0], TEXTS[2]), (TEXTS[1], TEXTS[3]), (TEXTS[2], TEXTS[2])]


def prune_(model) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        for site in find_sites(model):
            site.effective.mul_(torch.rand(site.shape) < 0.1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A pruned encoder as an ordinary folder, and small."""
    root = tmp_path_factory.mktemp("encoder")
    sentence_encoder(root / "plain", prompts=PROMPTS, length=20)
    model = SentenceTransformer(str(root / "plain"), device="cpu")
    prune_(model[0].auto_model)
    model.save_pretrained(str(root / "model"))
    pinscher.save_pretrained(model, root / "small", values="fp32")
    return root / "model", root / "small"


@pytest.fixture(scope="module")
def rerankers(tmp_path_factory):
    """The same of a cross-encoder."""
    root = tmp_path_factory.mktemp("reranker")
    sentence_encoder(root / "plain")
    config = BertConfig.from_pretrained(root / "plain", num_labels=1)
    torch.manual_seed(0)
    BertForSequenceClassification(config).save_pretrained(root / "plain")
    for name in ("modules.json", "config_sentence_transformers.json"):
        (root / "plain" / name).unlink()
    model = CrossEncoder(str(root / "plain"), device="cpu")
    prune_(model.model)
    model.save_pretrained(str(root / "model"))
    pinscher.save_pretrained(model, root / "small", values="fp32")
    return root / "model", root / "small"


def is_fast(model) -> bool:
    return any(isinstance(module, Layers) for module in model.modules())


def near(mine, theirs) -> None:
    np.testing.assert_allclose(np.asarray(mine), np.asarray(theirs), atol=2e-3)


# ------------------------------------------------------------ loaded


def test_a_plain_sentence_transformer_is_fast(folders):
    dense, fast = (SentenceTransformer(str(folder), device="cpu") for folder in folders)
    assert (is_fast(dense), is_fast(fast)) == (False, True)
    assert isinstance(fast[0].auto_model, FastEncoder)
    assert type(fast[0].auto_model).__name__ == "BertModel"
    assert (fast.max_seq_length, fast.prompts, fast.device.type) == (20, PROMPTS, "cpu")
    near(fast.encode(TEXTS), dense.encode(TEXTS))
    assert torch.equal(fast.encode(TEXTS, convert_to_tensor=True), fast.encode(TEXTS, convert_to_tensor=True))


@pytest.mark.parametrize(
    "how",
    [
        {"prompt_name": "query"},
        {"prompt": "a garden "},
        {"truncate_dim": 8},
        {"truncate_dim": 8, "normalize_embeddings": True},
        {"batch_size": 1},
        {"output_value": "token_embeddings"},
    ],
    ids=str,
)
def test_encode_behaves_as_there(folders, how):
    dense, fast = (SentenceTransformer(str(folder), device="cpu") for folder in folders)
    for mine, theirs in zip(fast.encode(TEXTS, **how), dense.encode(TEXTS, **how), strict=True):
        near(mine, theirs)


@pytest.mark.parametrize("precision", ["int8", "uint8", "binary", "ubinary"])
def test_quantised_outputs_behave_as_there(folders, precision):
    dense, fast = (SentenceTransformer(str(folder), device="cpu") for folder in folders)
    mine, theirs = (model.encode(TEXTS * 3, precision=precision) for model in (fast, dense))
    assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
    if precision.endswith("int8"):
        assert np.abs(mine.astype(int) - theirs.astype(int)).max() <= 3
    else:
        assert (mine == theirs).mean() > 0.9


def test_queries_and_documents_have_their_prompts(folders):
    dense, fast = (SentenceTransformer(str(folder), device="cpu") for folder in folders)
    near(fast.encode_query(TEXTS), dense.encode_query(TEXTS))
    near(fast.encode_document(TEXTS), dense.encode_document(TEXTS))


def test_a_plain_cross_encoder_is_fast(rerankers):
    dense, fast = (CrossEncoder(str(folder), device="cpu") for folder in rerankers)
    assert (is_fast(dense), is_fast(fast)) == (False, True)
    near(fast.predict(PAIRS), dense.predict(PAIRS))
    ranks = [[hit["corpus_id"] for hit in model.rank(TEXTS[0], TEXTS)] for model in (fast, dense)]
    assert ranks[0] == ranks[1]


def test_numbers_are_those_of_load(folders, rerankers):
    """Not only near: both run the same layers."""
    fast, loaded = SentenceTransformer(str(folders[1]), device="cpu"), pinscher.load(folders[1])
    batch = fast.tokenizer(TEXTS, padding=True, truncation=True, return_tensors="pt")
    assert torch.equal(fast[0].auto_model(**batch)[0], loaded(**batch)[0])


def test_transformers_itself_still_gives_a_plain_model(folders, rerankers):
    plain = AutoModel.from_pretrained(folders[1])
    assert not is_fast(plain)
    assert pinscher.sparsity(plain) > 0.85
    assert not is_fast(AutoModelForSequenceClassification.from_pretrained(rerankers[1]))


@pytest.mark.parametrize("why", ["type", "accelerator", "native"])
def test_where_it_cannot_run_the_model_stays_plain(folders, monkeypatch, why):
    told = {}
    if why == "type":
        told = {"model_kwargs": {"dtype": torch.bfloat16}}
    elif why == "accelerator":
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    else:
        monkeypatch.setattr(ours.native, "core", lambda: None)
    model = SentenceTransformer(str(folders[1]), device="cpu", **told)
    assert not is_fast(model)
    near(model.encode(TEXTS, convert_to_tensor=True).float(), model.encode(TEXTS, convert_to_tensor=True).float())


def test_pinscher_may_be_imported_last(folders):
    code = (
        "import sentence_transformers, pinscher\n"
        f"model = sentence_transformers.SentenceTransformer({str(folders[1])!r}, device='cpu')\n"
        "print(hasattr(model[0].auto_model, 'fast_layers'))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "True"


SIZES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96}
DISTIL = {"dim": 48, "n_layers": 2, "n_heads": 2, "hidden_dim": 96}


@pytest.mark.parametrize("name", ["DistilBert", "MPNet", "XLMRoberta", "Electra"])
def test_other_families_of_encoders_are_fast_too(tmp_path, name):
    folder = sentence_encoder(tmp_path / "model")
    words = AutoTokenizer.from_pretrained(folder).vocab_size
    sizes = DISTIL if name == "DistilBert" else SIZES | ({"embedding_size": 48} if name == "Electra" else {})
    config = getattr(transformers, f"{name}Config")(vocab_size=words, max_position_embeddings=64, **sizes)
    config.pad_token_id, config.initializer_range = 0, 0.1
    torch.manual_seed(0)
    getattr(transformers, f"{name}Model")(config).save_pretrained(folder)
    dense = SentenceTransformer(str(folder), device="cpu")
    prune_(dense[0].auto_model)
    pinscher.save_pretrained(dense, tmp_path / "small", values="fp32")
    fast = SentenceTransformer(str(tmp_path / "small"), device="cpu")
    assert isinstance(fast[0].auto_model, FastEncoder)
    near(fast.encode(TEXTS), dense.encode(TEXTS))


# ------------------------------------------------------------ several processes


def test_other_processes_load_it_anew(folders):
    fast = SentenceTransformer(str(folders[1]), device="cpu")
    before = fast.encode(TEXTS)
    pool = fast.start_multi_process_pool(["cpu"])
    try:
        said = fast.encode(TEXTS, pool=pool, chunk_size=2)
    finally:
        fast.stop_multi_process_pool(pool)
    near(said, before)
    assert np.array_equal(fast.encode(TEXTS), before)


def test_memory_that_is_shared_is_still_read(folders):
    """`share_memory` frees what a tensor held before."""
    for fast in (
        SentenceTransformer(str(folders[1]), device="cpu"),
        pinscher.accelerate(SentenceTransformer(str(folders[0]), device="cpu")),
    ):
        before = fast.encode(TEXTS)
        fast.share_memory()
        torch.full((1 << 20,), 7.0)  # takes the place of what was freed
        assert np.array_equal(fast.encode(TEXTS), before)


def test_pickled_it_is_the_name_of_its_folder(folders):
    fast = SentenceTransformer(str(folders[1]), device="cpu")
    content = pickle.dumps(fast[0].auto_model)
    assert len(content) < 1000
    assert is_fast(pickle.loads(content))


def test_one_made_from_memory_cannot_be_pickled(folders):
    fast = pinscher.accelerate(SentenceTransformer(str(folders[0]), device="cpu"))
    with pytest.raises(InputError, match=r"load that in every process that needs it"):
        pickle.dumps(fast[0].auto_model)


# ------------------------------------------------------------ accelerated


def test_accelerate_makes_a_copy_with_a_fast_transformer(folders):
    dense = SentenceTransformer(str(folders[0]), device="cpu")
    fast = pinscher.accelerate(dense)
    assert (is_fast(dense), is_fast(fast)) == (False, True)
    assert type(fast) is SentenceTransformer
    near(fast.encode(TEXTS), dense.encode(TEXTS))
    near(fast.encode_query(TEXTS, truncate_dim=8), dense.encode_query(TEXTS, truncate_dim=8))
    assert dense[1] is fast[1]


def test_accelerate_takes_a_cross_encoder(rerankers):
    dense = CrossEncoder(str(rerankers[0]), device="cpu")
    fast = pinscher.accelerate(dense)
    assert (is_fast(dense), is_fast(fast)) == (False, True)
    near(fast.predict(PAIRS), dense.predict(PAIRS))


def test_accelerate_of_one_that_is_fast_or_has_no_transformer_is_refused(folders):
    with pytest.raises(InputError, match="accelerated already"):
        pinscher.accelerate(SentenceTransformer(str(folders[1]), device="cpu"))
    with pytest.raises(InputError, match="has no transformer inside"):
        pinscher.accelerate(SentenceTransformer(modules=[SentenceTransformer(str(folders[0]), device="cpu")[1]]))


# ------------------------------------------------------------ stored


def test_the_small_folder_is_whole(folders):
    names = {path.relative_to(folders[1]).as_posix() for path in folders[1].rglob("*") if path.is_file()}
    assert {"modules.json", "1_Pooling/config.json", "config_sentence_transformers.json", "tokenizer.json"} <= names
    assert 'model = SentenceTransformer("' in (folders[1] / "README.md").read_text()


def test_a_cross_encoders_card_says_how_to_load_it(rerankers):
    card = (rerankers[1] / "README.md").read_text()
    assert 'model = CrossEncoder("' in card
    assert "pipeline_tag: text-ranking" in card


def test_a_fast_one_cannot_be_saved(folders, tmp_path):
    fast = SentenceTransformer(str(folders[1]), device="cpu")
    with pytest.raises(InputError, match="an accelerated model cannot be saved"):
        fast.save_pretrained(str(tmp_path / "again"))
