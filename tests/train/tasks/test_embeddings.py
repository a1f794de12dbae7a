"""Embeddings: rows, batches, losses against sentence-transformers, scores, and runs that keep a model's files."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import losses

import pinscher
from pinscher.errors import InputError
from pinscher.prune import sparsity
from pinscher.train import plan, pretrained, scoring
from pinscher.train.config import RunConfig
from pinscher.train.evaluation import answer
from pinscher.train.tasks import TASKS
from pinscher.train.tasks.embeddings import loss_of
from tiny_command import outcome
from tiny_sentences import TEXTS, sentence_encoder

PROMPTS = {"query": "near ", "document": "of the "}
LEARNS = {"max_steps": 8, "batch_size": 4, "learning_rate": 1e-3, "eval_every": 4, "save_every": 4, "sparsity": 0.5}


def task(columns=(), label=None, **encoder):
    return TASKS["embeddings"].replace(**encoder).with_columns(columns, label)


def rows(**columns):
    return Dataset.from_dict(columns)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return sentence_encoder(tmp_path_factory.mktemp("encoder"), prompts=PROMPTS)


def settings(folder, tmp_path, **more):
    """A run on texts alone, as the command makes it."""
    lines = [f"{text} {n}" for n in "abcdefgh" for text in TEXTS]
    (tmp_path / "texts.txt").write_text("\n".join(lines))
    told = {"model": str(folder), "task": "embeddings", "train_file": str(tmp_path / "texts.txt"), **LEARNS, **more}
    return pinscher.recipe("best/standard", output=str(tmp_path / "run"), **told)


# ------------------------------------------------------------ rows


@pytest.mark.parametrize(
    ("columns", "label", "main"),
    [
        ((), None, "cosine"),
        (("a", "b"), "c", "spearman"),
        (("a", "b"), None, "mrr@10"),
        (("a", "b", "c"), None, "mrr@10"),
    ],
)
def test_the_columns_say_what_is_learned(columns, label, main):
    made = task(tuple(columns), label)
    assert made.main == main
    assert made.columns == (*(columns or ("text",)), *([label] if label else []))


@pytest.mark.parametrize(("columns", "label"), [("abcd", None), ("a", "c"), ("abc", "d")])
def test_other_numbers_of_columns_are_refused(columns, label):
    with pytest.raises(InputError, match="takes one text column, two"):
        task(tuple(columns), label)


@pytest.mark.parametrize(
    ("columns", "label", "held", "message"),
    [
        ((), None, {"text": ["", " "]}, "file: every text in column 'text' is empty"),
        (("a", "b"), None, {"a": ["x"], "b": [""]}, "file: every text in column 'b' is empty"),
        ((), None, {"text": ["a", None]}, "row 2 has no text in column 'text'"),
        (("a", "b"), "c", {"a": ["x"], "b": ["y"], "c": ["high"]}, "row 1 has 'high' in column 'c': not a number"),
        (("a", "b"), None, {"a": ["x"]}, "has no column 'b'"),
    ],
)
def test_rows_that_cannot_be_used_are_named(columns, label, held, message):
    with pytest.raises(InputError, match=message):
        task(columns, label).check(rows(**held), "file")


def test_scores_that_are_no_cosines_cannot_be_learned(folder):
    tokenizer = pretrained.load_tokenizer(str(folder))
    with pytest.raises(InputError, match="has the score 4: a cosine is between -1 and 1"):
        task(("a", "b"), "c").features(rows(a=["x", "y"], b=["y", "z"], c=[1.0, 4.0]), tokenizer, (), training=True)


@pytest.mark.parametrize(
    ("lines", "more", "message"),
    [
        ("a cat", {"objective": "empirical-risk"}, "texts without labels teach only what another model says"),
        ("a\tb", {"text_column": ("a", "b"), "batch_size": 1}, "the other pairs of their batch: give --batch-size 2"),
        ("a\tb", {"text_column": ("a", "a")}, "column 'a' is given twice"),
        ("a\tb", {"text_column": ("a", "b"), "label_column": "b"}, "column 'b' is given twice"),
    ],
)
def test_what_nothing_can_be_learned_from_is_refused(folder, tmp_path, lines, more, message):
    """Each of these ran to the end, with a loss of zero or of nonsense."""
    name = "rows.tsv" if "\t" in lines else "rows.txt"
    (tmp_path / name).write_text("\n".join([lines, *[f"{lines} {n}" for n in range(20)]]))
    told = {"model": str(folder), "task": "embeddings", "train_file": str(tmp_path / name), **LEARNS, **more}
    with pytest.raises(InputError, match=message):
        plan.make(RunConfig(output=str(tmp_path / "run"), **told))


def test_prompts_go_before_texts_by_their_role(folder):
    made = TASKS["retrieval"].of_model(str(folder))
    assert made._texts(rows(query=["cat"], passage=["a cat"])) == [["near cat"], ["of the a cat"]]
    alone = TASKS["embeddings"].of_model(str(folder))
    assert alone._texts(rows(text=["a", "b", "c", "d"])) == [["a", "near b", "of the c", "d"]]


# ------------------------------------------------------------ batches and losses


def test_a_batch_holds_the_first_texts_then_the_second_ones(folder):
    tokenizer = pretrained.load_tokenizer(str(folder))
    made = task(("a", "b"), "c")
    held = rows(a=TEXTS[:2], b=TEXTS[2:], c=[0.5, -1])
    batch = made.collator(tokenizer)(list(made.features(held, tokenizer, (), training=True)))
    wanted = tokenizer([TEXTS[0], TEXTS[1], TEXTS[2], TEXTS[3]], padding=True, return_tensors="pt")
    assert torch.equal(batch["input_ids"], wanted["input_ids"])
    assert torch.equal(batch["attention_mask"], wanted["attention_mask"])
    assert (batch["texts"], batch["labels"].tolist()) == (2, [0.5, -1.0])


@pytest.mark.parametrize("texts", [2, 3])
def test_losses_equal_those_of_sentence_transformers(folder, texts):
    model = SentenceTransformer(str(folder), device="cpu")
    torch.manual_seed(0)
    parts = [torch.randn(4, 48) for _ in range(texts)]
    theirs = losses.MultipleNegativesRankingLoss(model)
    wanted = theirs.compute_loss_from_embeddings(parts, None)
    torch.testing.assert_close(loss_of(torch.cat(parts), texts, None), wanted)
    if texts == 2:
        scores = torch.rand(4)
        wanted = losses.CosineSimilarityLoss(model).compute_loss_from_embeddings(parts, scores)
        torch.testing.assert_close(loss_of(torch.cat(parts), 2, scores), wanted)


def test_texts_alone_have_no_loss_of_their_own():
    vectors = torch.randn(3, 4, requires_grad=True)
    loss_of(vectors, 1, None).backward()
    assert torch.equal(vectors.grad, torch.zeros(3, 4))


# ------------------------------------------------------------ the model


@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken"])
def test_embeddings_equal_those_of_sentence_transformers(tmp_path, pooling):
    folder = sentence_encoder(tmp_path, pooling, prompts=PROMPTS, length=9)
    made = TASKS["retrieval"].of_model(str(folder))
    tokenizer = pretrained.load_tokenizer(str(folder))
    model = pretrained.load_model(str(folder), made, (), tokenizer, trained=True).eval()
    held = rows(query=TEXTS[:2], passage=TEXTS[2:])
    said = answer(model, made, tokenizer, held, (), 3)
    theirs = SentenceTransformer(str(folder), device="cpu")
    np.testing.assert_allclose([v[0] for v in said], theirs.encode_query(TEXTS[:2]), atol=1e-5)
    np.testing.assert_allclose([v[1] for v in said], theirs.encode_document(TEXTS[2:]), atol=1e-5)


# ------------------------------------------------------------ scores


def test_search_ranks_each_text_among_all_others():
    made = task(("a", "b"))
    held = rows(a=["q", "q", "r"], b=["x", "y", "x"])
    vectors = {"q": [1.0, 0], "x": [0.9, 0.1], "y": [0.5, 0.5], "r": [0.0, 1]}
    answers = [np.array([vectors[a], vectors[b]]) for a, b in zip(held["a"], held["b"], strict=True)]
    assert made.scores(answers, held) == {"mrr@10": 75.0, "ndcg@10": pytest.approx(81.546, abs=1e-3)} | {
        "recall@1": 25.0,
        "recall@10": 100.0,
    }


def test_triplets_count_which_text_is_nearer():
    made = task(("a", "b", "c"))
    answers = [np.array([[1.0, 0], [1, 0.1], [0, 1]]), np.array([[1.0, 0], [0, 0.9], [1, 0.2]])]
    assert made.scores(answers, rows(a=["1", "2"], b=["3", "4"], c=["5", "6"]))["triplets"] == 50.0


def test_texts_alone_are_scored_against_the_model_before():
    made, vectors = task(), np.random.default_rng(0).normal(size=(6, 4))
    held = rows(text=list("abcdef"), reference=vectors[:, None].tolist())
    assert made.scores([v[None] for v in 2 * vectors], held) == {"cosine": 100.0, "spearman": 100.0}
    assert made.scores([v[None] for v in -vectors], held)["cosine"] == -100.0
    with pytest.raises(InputError, match="rows without labels have no scores but those against the model before"):
        made.scores([v[None] for v in vectors], rows(text=list("abcdef")))


# ------------------------------------------------------------ runs


def test_the_model_before_is_the_teacher_and_no_dense_run_is_made(folder, tmp_path):
    made = plan.make(settings(folder, tmp_path))
    assert made.config.teacher == str(folder)
    assert not made.config.needs_dense
    assert made.task.max_length == 24


@pytest.mark.parametrize("wrong", [{"method": "dense", "recipe": "none"}, {"baseline": True}])
def test_a_dense_run_on_texts_alone_is_refused(folder, tmp_path, wrong):
    asked = {**settings(folder, tmp_path).to_dict(), **wrong}
    if "method" in wrong:
        asked |= {"objective": "empirical-risk", "dense_start": False}
    with pytest.raises(InputError, match="there is nothing to learn in a dense run"):
        plan.make(pinscher.RunConfig.from_dict(asked))


def test_the_result_is_a_folder_of_sentence_transformers(tmp_path):
    folder = sentence_encoder(tmp_path / "model", "cls", dense=8, prompts=PROMPTS, length=20)
    words = ["prune", "--model", folder, "--task", "embeddings", "--output", tmp_path / "run", "--sparsity", 0.5]
    words += ["--max-steps", 4, "--batch-size", 8, "--eval-every", 4, "--train-file", tmp_path / "texts.txt"]
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS * 5))
    assert outcome(words)[0] == 0
    for made in ("model", "export"):
        model = SentenceTransformer(str(tmp_path / "run" / made), device="cpu")
        assert [type(step).__name__ for step in model] == ["Transformer", "Pooling", "Dense", "Normalize"]
        assert (model.max_seq_length, model.prompts) == (20, PROMPTS)
        assert model.encode(TEXTS).shape == (len(TEXTS), 8)
    assert sparsity(SentenceTransformer(str(tmp_path / "run" / "model"), device="cpu")[0].auto_model) == 0.5
    card = (tmp_path / "run" / "export" / "README.md").read_text()
    assert "library_name: sentence-transformers" in card
    assert 'SentenceTransformer("' in card
    again = scoring.score(str(tmp_path / "run"), {}, output=str(tmp_path / "again"))
    assert again.scores == json.loads((tmp_path / "run" / "result.json").read_text())["metrics"]["pruned"]


def test_a_student_of_texts_alone_stays_near_its_teacher(folder, tmp_path):
    long = pinscher.run(settings(folder, tmp_path, max_steps=60))
    short = pinscher.run(settings(folder, tmp_path, max_steps=1, overwrite=True))
    assert long.sparsity == short.sparsity == pytest.approx(0.5, abs=1e-3)
    assert long.score > max(short.score, 95.0)
    assert long.scores["spearman"] > short.scores["spearman"]


def test_adapters_can_be_trained_instead(folder, tmp_path):
    told = settings(folder, tmp_path).to_dict() | {"recipe": "none", "lora_rank": 2, "learning_rate": 1e-2}
    told |= {"objective": "self-regularization", "dense_start": False, "teacher": None}
    result = pinscher.run(pinscher.RunConfig.from_dict(told))
    assert result.sparsity == pytest.approx(0.5, abs=1e-3)
    before, after = (
        SentenceTransformer(str(p), device="cpu")[0].auto_model for p in (folder, tmp_path / "run" / "model")
    )
    assert torch.equal(before.embeddings.word_embeddings.weight, after.embeddings.word_embeddings.weight)
    assert not torch.equal(before.encoder.layer[0].output.dense.weight, after.encoder.layer[0].output.dense.weight)


def test_an_export_says_how_to_load_it(folder, tmp_path, capsys):
    code, said, err = outcome(["export", folder, "--output", tmp_path / "small"], capsys)
    assert code == 0, err
    assert f'sentence_transformers.SentenceTransformer("{tmp_path / "small"}")' in said
    code, _, err = outcome(["export", folder, "--output", tmp_path / "plain", "--format", "hf"], capsys)
    assert code == 0, err
    assert SentenceTransformer(str(tmp_path / "plain"), device="cpu").prompts == PROMPTS


def test_scales_are_calibrated_on_rows_of_pairs(folder, tmp_path, capsys):
    lines = [{"a": text, "b": f"{text} a"} for text in TEXTS * 4]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = [
        "prune",
        "--model",
        folder,
        "--task",
        "embeddings",
        "--train-file",
        tmp_path / "pairs.jsonl",
        "--no-export",
    ]
    words += ["--text-column", "a", "--text-column", "b", "--output", tmp_path / "run"]
    assert outcome([*words, *(f"--{n.replace('_', '-')}={v}" for n, v in LEARNS.items())], capsys)[0] == 0
    code, _, err = outcome(["export", tmp_path / "run", "--calibrate", "4"], capsys)
    assert code == 0, err
