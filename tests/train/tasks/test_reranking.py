"""Cross-encoders: rows with and without scores, losses against sentence-transformers, and a run without scores."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from datasets import Dataset
from sentence_transformers import CrossEncoder
from sentence_transformers.cross_encoder import losses
from transformers import BertConfig, BertForSequenceClassification

import tiny_tasks
from pinscher.errors import InputError
from pinscher.models.surgery import become_, subclass
from pinscher.prune import sparsity
from pinscher.train import pretrained
from pinscher.train.tasks import TASKS
from pinscher.train.tasks.reranking import Scorer
from tiny_command import complaint, outcome

TASK = TASKS["reranking"]
PAIRS = [("the cat of Ann", "a cat is superb"), ("the dog", "a garden of Bob"), ("a cat", "the piano is dull !")]
WORDS = ["--max-steps", 6, "--batch-size", 4, "--eval-every", 3, "--save-every", 3, "--sparsity", 0.5]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A cross-encoder with a head of its own."""
    place = tiny_tasks.tiny_model("embeddings", tmp_path_factory.mktemp("model"), dropout=0.0)
    torch.manual_seed(0)
    BertForSequenceClassification(BertConfig.from_pretrained(place, num_labels=1)).save_pretrained(place)
    return place


def held(**more):
    return Dataset.from_dict({"query": [q for q, _ in PAIRS], "text": [t for _, t in PAIRS], **more})


def test_without_scores_each_query_also_meets_the_text_of_another_row(folder):
    tokenizer = pretrained.load_tokenizer(str(folder))
    made = TASK.features(held(), tokenizer, (), training=True)
    assert made["row"][:] == [0, 1, 2, 0, 1, 2]
    met = [(PAIRS[q][0], PAIRS[t][1]) for q, t in ((0, 0), (1, 1), (2, 2), (0, 1), (1, 2), (2, 0))]
    assert made["input_ids"][:] == tokenizer([q for q, _ in met], [t for _, t in met])["input_ids"]
    assert len(TASK.features(held(), tokenizer, (), training=False)) == 3


def test_the_loss_is_that_of_sentence_transformers(folder):
    theirs = CrossEncoder(str(folder), device="cpu")
    mine = BertForSequenceClassification.from_pretrained(folder)
    become_(mine, subclass(type(mine), Scorer))
    scores = torch.tensor([1.0, 0.25, 0.0])
    batch = theirs.tokenizer([q for q, _ in PAIRS], [t for _, t in PAIRS], padding=True, return_tensors="pt")
    logits = theirs.model.eval()(**batch).logits.view(-1)
    wanted = losses.BinaryCrossEntropyLoss(theirs).bce_with_logits_loss(logits, scores)
    torch.testing.assert_close(mine.eval()(**batch, labels=scores).loss, wanted)
    assert mine(**batch).loss == 0


@pytest.mark.parametrize(
    ("told", "message"),
    [({"text": ["a"]}, "--text-column twice"), ({"text": ["a", "b", "c"]}, "--text-column twice")],
)
def test_other_columns_are_refused(told, message):
    with pytest.raises(InputError, match=message):
        TASK.with_columns(told["text"], None)


def test_scores_beyond_1_cannot_be_learned(folder):
    tokenizer = pretrained.load_tokenizer(str(folder))
    scored = TASK.with_columns((), "fit")
    with pytest.raises(InputError, match="the score 3: the loss takes 0 to 1"):
        scored.features(held(fit=[0, 3, 1]), tokenizer, (), training=True)


def test_scores_of_ranked_texts():
    scored = TASK.with_columns((), "fit")
    rows = Dataset.from_dict({"query": ["a", "a", "b", "b"], "text": list("wxyz"), "fit": [1, 0, 0, 3]})
    found = scored.scores([0.1, 0.9, 0.2, 0.4], rows)
    assert (found["map"], found["mrr@10"], found["recall@1"]) == (100.0, 100.0, 100.0)  # only z is relevant
    assert scored.scores(rows["fit"][:], rows)["spearman"] == 100.0
    with pytest.raises(InputError, match="rows without labels have no scores but those against the model before"):
        TASK.scores([0.1], held())


def test_a_run_without_scores_keeps_what_the_model_said(folder, tmp_path):
    lines = [{"query": f"{q} {n}", "text": t} for n in "abcdefgh" for q, t in PAIRS]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["prune", "--model", folder, "--task", "reranking", "--train-file", tmp_path / "pairs.jsonl", *WORDS]
    assert outcome([*words, "--output", tmp_path / "run"])[0] == 0
    assert not (tmp_path / "run" / "dense").exists()
    before, dense, fast = (CrossEncoder(str(p), device="cpu") for p in (folder, *made(tmp_path / "run")))
    assert sparsity(dense.model) == 0.5
    assert hasattr(fast.model.base_model, "fast_layers")
    np.testing.assert_allclose(fast.predict(PAIRS), dense.predict(PAIRS), atol=0.02)
    np.testing.assert_allclose(dense.predict(PAIRS), before.predict(PAIRS), atol=0.2)
    assert 'CrossEncoder("' in (tmp_path / "run" / "export" / "README.md").read_text()


def made(run):
    return run / "model", run / "export"


@pytest.mark.parametrize("recipe", ["best/standard", "none"])
def test_a_model_without_a_head_has_nothing_to_say(tmp_path, capsys, recipe):
    bare = tiny_tasks.tiny_model("embeddings", tmp_path / "bare")
    (tmp_path / "pairs.jsonl").write_text((json.dumps({"query": "a cat", "text": "a dog"}) + "\n") * 12)
    words = ["prune", "--model", bare, "--task", "reranking", "--train-file", tmp_path / "pairs.jsonl", *WORDS]
    words += ["--recipe", recipe]
    assert "is not fine-tuned for reranking" in complaint(outcome([*words, "--output", tmp_path / "run"], capsys))
    assert not (tmp_path / "run").exists()
