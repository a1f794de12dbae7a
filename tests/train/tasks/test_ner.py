"""Tags of words: alignment with tokens, cut-off words, byte-level tokenizers, what is refused, and conlleval's file."""

from __future__ import annotations

import json
from itertools import groupby

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Sequence, Value
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import ByteLevelBPETokenizer, pre_tokenizers
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForTokenClassification,
    BertTokenizerFast,
    PreTrainedTokenizerFast,
    RobertaTokenizerFast,
)

from pinscher.errors import InputError
from pinscher.train.evaluation import answer
from pinscher.train.tasks import TASKS
from pinscher.train.tasks.ner import CONLL, _firsts

CONLL2003, OWN = TASKS["conll2003"], TASKS["tokens"]
# Words of one and of many pieces, umlauts, punctuation, an emoji, a word without any token, adjacent entities.
SENTENCES = [
    ("Ada Lovelace lives in Zürich .", "B-PER I-PER O O B-LOC O"),
    ("The U.N. met Eve-Marie O'Neil , 😀 !", "O B-ORG O B-PER I-PER O O O"),
    ("東京 Bern Paris", "B-LOC B-LOC B-LOC"),
    ("in", "O"),
    ("Germans of FC Bern played in Bern in 1815", "B-MISC O B-ORG I-ORG O O B-LOC O O"),
]
WORDS = [text.split() for text, _ in SENTENCES]
TAGS = [tags.split() for _, tags in SENTENCES]
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"


def bert() -> BertTokenizerFast:
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "ada", "in", "the", "of", "bern", *".,!-'", *LETTERS]
    pieces += [f"##{letter}" for letter in LETTERS]
    return BertTokenizerFast(vocab={piece: i for i, piece in enumerate(pieces)})


def roberta(**settings: object) -> RobertaTokenizerFast:
    trained = ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trained.train_from_iterator([s for s, _ in SENTENCES], 330, special_tokens=special, show_progress=False)
    model = json.loads(trained.to_str())["model"]
    return RobertaTokenizerFast(vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]], **settings)


BERT = bert()
both = pytest.mark.parametrize("tokenizer", [BERT, roberta()], ids=["bert", "roberta"])


def rows_of(words: object = WORDS, tags: object = TAGS) -> Dataset:
    return Dataset.from_dict({"tokens": words, "ner_tags": tags})


def ids_of(tags: list[list[str]], names: tuple[str, ...] = CONLL) -> list[list[int]]:
    return [[names.index(tag) for tag in row] for row in tags]


def classed(names: tuple[str, ...]) -> Dataset:
    """Rows whose column knows the names of its ids."""
    kinds = Features({"tokens": Sequence(Value("string")), "ner_tags": Sequence(ClassLabel(names=list(names)))})
    return Dataset.from_dict({"tokens": WORDS, "ner_tags": ids_of(TAGS, names)}, features=kinds)


def gold_logits(features: Dataset, classes: int, extra: int = 2) -> list[tuple[np.ndarray]]:
    """What a model that knows everything would say; nonsense at tokens that have no label, and in the padding."""
    outputs = []
    for feature in features:
        logits = np.zeros((len(feature["labels"]) + extra, classes), dtype=np.float32)
        logits[:, -1] = 1.0
        for place, label in enumerate(feature["labels"]):
            if label != -100:
                logits[place, label] = 9.0
        outputs.append((logits,))
    return outputs


# ---------------------------------------------------------------- words and tokens


@both
def test_gold_labels_say_the_gold_tags(tokenizer):
    rows = rows_of()
    CONLL2003.check(rows, "rows")
    labels = CONLL2003.labels(rows)
    features = CONLL2003.features(rows, tokenizer, labels, training=False)
    answers = CONLL2003.answers(gold_logits(features, len(labels)), features, rows, labels)
    assert answers == TAGS
    assert CONLL2003.scores(answers, rows) == {"precision": 100.0, "recall": 100.0, "f1": 100.0, "accuracy": 100.0}


def test_the_first_token_of_a_word_carries_its_label():
    rows = rows_of([["Ada", "xyz", "Bern"]], [["B-PER", "I-PER", "B-LOC"]])
    (feature,) = CONLL2003.features(rows, BERT, CONLL, training=True)
    assert BERT.convert_ids_to_tokens(feature["input_ids"]) == ["[CLS]", "ada", "x", "##y", "##z", "bern", "[SEP]"]
    assert feature["labels"] == [-100, 1, 2, -100, -100, 5, -100]
    assert feature["words"] == [None, 0, 1, None, None, 2, None]
    assert feature["row"] == 0


@both
def test_each_word_starts_one_label_with_its_own_pieces(tokenizer):
    features = CONLL2003.features(rows_of(), tokenizer, CONLL, training=False)
    for feature, words, tags in zip(features, WORDS, TAGS, strict=True):
        assert [word for word in feature["words"] if word is not None] == list(range(len(words)))
        assert [CONLL[label] for label in feature["labels"] if label != -100] == tags
        starts = [i for i, word in enumerate(feature["words"]) if word is not None]
        for start, end, word in zip(starts, [*starts[1:], len(feature["words"]) - 1], words, strict=True):
            alone = tokenizer([word], is_split_into_words=True, add_special_tokens=False)["input_ids"]
            assert feature["input_ids"][start:end] == alone


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), max_size=8))
def test_firsts_by_hand(runs):
    words = [word for word, (_, size) in enumerate(runs) for _ in range(size)]
    expected = [word if i == 0 else None for word, group in groupby(words) for i, _ in enumerate(group)]
    assert _firsts([None, *words, None]) == [None, *expected, None]


def test_words_that_are_cut_off_or_have_no_token_are_outside():
    rows = rows_of([["Ada", "\u200b", "xyz", "Bern", "Ada"]], [["B-PER", "B-MISC", "B-ORG", "B-LOC", "B-PER"]])
    task = CONLL2003.replace(max_length=5)  # [CLS] ada x ##y [SEP]
    features = task.features(rows, BERT, CONLL, training=False)
    assert features[0]["words"] == [None, 0, 2, None, None]
    answers = task.answers(gold_logits(features, 9), features, rows, CONLL)
    assert answers == [["B-PER", "O", "B-ORG", "O", "O"]]
    scores = task.scores(answers, rows)
    assert scores["precision"] == 100.0
    assert scores["recall"] == pytest.approx(40.0)


def test_sentences_without_a_label_are_no_training_examples_but_have_answers():
    rows = rows_of([[], ["Ada"], ["\u200b"]], [[], ["B-PER"], ["B-PER"]])
    CONLL2003.check(rows, "rows")
    assert CONLL2003.features(rows, BERT, CONLL, training=True)["row"][:] == [1]
    features = CONLL2003.features(rows, BERT, CONLL, training=False)
    assert features["row"][:] == [0, 1, 2]
    assert CONLL2003.answers(gold_logits(features, 9), features, rows, CONLL) == [[], ["B-PER"], ["O"]]


# ---------------------------------------------------------------- byte-level tokenizers


def test_a_byte_level_tokenizer_reads_words_as_in_a_text(tmp_path):
    tokenizer = roberta()
    before = tokenizer(["Ada", "lives"], is_split_into_words=True)["input_ids"]
    (feature,) = CONLL2003.features(rows_of([["Ada", "lives"]], [["B-PER", "O"]]), tokenizer, CONLL, training=True)
    assert feature["input_ids"] != before
    assert feature["input_ids"] == roberta(add_prefix_space=True)("Ada lives")["input_ids"]
    assert tokenizer.decode(feature["input_ids"], skip_special_tokens=True) == " Ada lives"
    # The stored tokenizer does the same, however it is loaded, and its offsets are those of the words.
    tokenizer.save_pretrained(tmp_path)
    for kind in (AutoTokenizer, RobertaTokenizerFast, PreTrainedTokenizerFast):
        stored = kind.from_pretrained(tmp_path)
        encoded = stored(["Ada", "lives"], is_split_into_words=True, return_offsets_mapping=True)
        assert encoded["input_ids"] == feature["input_ids"]
        assert encoded["offset_mapping"][1][0] == 0


def test_a_tokenizer_with_the_space_or_without_need_is_left_alone():
    for tokenizer in (bert(), roberta(add_prefix_space=True)):
        before = tokenizer.backend_tokenizer.to_str()
        CONLL2003.features(rows_of(), tokenizer, CONLL, training=True)
        assert json.loads(tokenizer.backend_tokenizer.to_str())["pre_tokenizer"] == json.loads(before)["pre_tokenizer"]


def test_tokenizers_that_cannot_split_words_are_refused():
    glued = roberta()
    split = pre_tokenizers.Split(r"\s", behavior="merged_with_next")
    glued.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    with pytest.raises(InputError, match=r"as if no space stood between them\. .*add_prefix_space=True"):
        CONLL2003.features(rows_of(), glued, CONLL, training=True)

    class Slow:
        is_fast = False

    with pytest.raises(InputError, match="need a fast tokenizer, and Slow is not one"):
        CONLL2003.features(rows_of(), Slow(), CONLL, training=True)


# ---------------------------------------------------------------- tags and their names


def test_where_the_names_of_tags_come_from():
    other = ("B-LOC", "I-ORG", "O", "B-ORG", "B-PER", "I-PER", "B-MISC")
    assert CONLL2003.labels(rows_of()) == CONLL  # names in the file
    assert CONLL2003.labels(rows_of(tags=ids_of(TAGS))) == CONLL  # ids alone: the known order
    assert CONLL2003.labels(classed(other)) == CONLL
    assert OWN.labels(classed(other)) == other
    assert OWN.labels(rows_of()) == ("O", "B-LOC", "B-MISC", "B-ORG", "B-PER", "I-ORG", "I-PER")
    assert OWN.labels(rows_of([["Ada"]], [["B-PER"]])) == ("O", "B-PER")  # cut-off words need an O


@pytest.mark.parametrize("names", [CONLL, ("B-LOC", "I-ORG", "O", "B-ORG", "B-PER", "I-PER", "B-MISC")])
def test_ids_are_read_by_their_own_columns_names(names):
    rows = classed(names)
    CONLL2003.check(rows, "rows")
    expected = CONLL2003.features(rows_of(), BERT, CONLL, training=True).to_list()
    assert CONLL2003.features(rows, BERT, CONLL, training=True).to_list() == expected
    assert CONLL2003.scores(TAGS, rows)["f1"] == 100.0
    bare = rows_of(tags=ids_of(TAGS))
    assert CONLL2003.features(bare, BERT, CONLL, training=True).to_list() == expected


def test_scores_count_whole_entities():
    said = [list(tags) for tags in TAGS]
    said[0][1] = "O"  # cuts Ada Lovelace short: one entity missed, one invented
    said[3][0] = "B-LOC"  # invented
    scores = CONLL2003.scores(said, rows_of())
    total = 2 + 2 + 3 + 3  # entities of the rows
    assert scores["recall"] == pytest.approx(100 * (total - 1) / total)
    assert scores["precision"] == pytest.approx(100 * (total - 1) / (total + 1))
    assert scores["f1"] == pytest.approx(100 * 2 * (total - 1) / (2 * total + 1))
    assert scores["accuracy"] == pytest.approx(100 * (sum(map(len, TAGS)) - 2) / sum(map(len, TAGS)))


# ---------------------------------------------------------------- batches


@both
def test_a_batch_has_what_the_model_takes_and_nothing_else(tokenizer):
    features = CONLL2003.features(rows_of(), tokenizer, CONLL, training=True).to_list()
    features[0]["anything"] = "else"
    batch = CONLL2003.collator(tokenizer)(features)
    assert set(batch) == {"input_ids", "attention_mask", "labels", *tokenizer.model_input_names}
    longest = max(len(feature["input_ids"]) for feature in features)
    for i, feature in enumerate(features):
        rest = longest - len(feature["input_ids"])
        assert batch["input_ids"][i].tolist() == feature["input_ids"] + [tokenizer.pad_token_id] * rest
        assert batch["attention_mask"][i].tolist() == [1] * (longest - rest) + [0] * rest
        assert batch["labels"][i].tolist() == feature["labels"] + [-100] * rest


def test_labels_stay_with_their_tokens_if_the_tokenizer_pads_on_the_left():
    tokenizer = bert()
    tokenizer.padding_side = "left"
    features = CONLL2003.features(rows_of(), tokenizer, CONLL, training=True).to_list()
    batch, usual = CONLL2003.collator(tokenizer)(features), CONLL2003.collator(BERT)(features)
    assert all(torch.equal(batch[name], usual[name]) for name in usual)


def test_a_real_model_learns_the_tags():
    torch.manual_seed(0)
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    net = BertForTokenClassification(BertConfig(vocab_size=len(BERT), num_labels=len(CONLL), **size))
    rows = rows_of()
    batch = CONLL2003.collator(BERT)(CONLL2003.features(rows, BERT, CONLL, training=True).to_list())
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-2)
    for _ in range(60):
        loss = net(**batch).loss
        assert torch.isfinite(loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for size in (1, 2, 64):
        assert CONLL2003.scores(answer(net, CONLL2003, BERT, rows, CONLL, size), rows)["f1"] > 90.0


# ---------------------------------------------------------------- the file


def conll_file(text: str) -> list[list[tuple[str, ...]]]:
    """Sentences as conlleval reads them: columns between blanks, sentences between empty lines."""
    blocks = [list(lines) for filled, lines in groupby(text.split("\n"), key=bool) if filled]
    return [[tuple(line.split(" ")) for line in block] for block in blocks]


def test_the_file_is_read_back(tmp_path):
    said = [["O"] * len(tags) for tags in TAGS]
    path = CONLL2003.write(said, rows_of(), tmp_path / "new", "test")
    assert path == tmp_path / "new" / "predictions_test.txt"
    expected = [list(zip(*columns, strict=True)) for columns in zip(WORDS, TAGS, said, strict=True)]
    text = path.read_bytes().decode("utf-8")
    assert conll_file(text) == expected
    assert text.count("\n\n") == len(WORDS) - 1
    assert text.startswith("Ada B-PER O\n")
    CONLL2003.write(TAGS, classed(CONLL), tmp_path / "new", "test")
    back = conll_file(path.read_text("utf-8"))
    assert [[(true, found) for _, true, found in sentence] for sentence in back] == [
        [(tag, tag) for tag in tags] for tags in TAGS
    ]
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_odd_words_do_not_add_columns(tmp_path):
    rows = rows_of([["New York", "", "a\u00a0b\n"]], [["B-LOC", "O", "O"]])
    path = OWN.write([["B-LOC", "O", "O"]], rows, tmp_path, "test")
    assert path.read_text("utf-8") == "New_York B-LOC B-LOC\n_ O O\na_b O O\n"


alphabet = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)


@given(st.lists(st.lists(st.tuples(alphabet, st.sampled_from(CONLL), st.sampled_from(CONLL)), min_size=1), min_size=1))
@settings(max_examples=40, deadline=None)
def test_any_words_can_be_written(tmp_path_factory, sentences):
    columns = [[[entry[i] for entry in sentence] for sentence in sentences] for i in range(3)]
    path = CONLL2003.write(columns[2], rows_of(*columns[:2]), tmp_path_factory.mktemp("x"), "test")
    back = conll_file(path.read_bytes().decode("utf-8"))
    assert [[entry[1:] for entry in sentence] for sentence in back] == [[e[1:] for e in s] for s in sentences]


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("words", "tags", "message"),
    [
        ([["Ada"], ["in", "Bern"]], [["O"], ["O"]], "x: row 2 has 2 words but 1 tags"),
        ([["Ada"], ["in"]], [["O"], None], "x: row 2 has 1 words but 0 tags"),
        ([["Ada"], ["in"]], [["O"], ["NN"]], "x: row 2 has the tag 'NN': tags must be O, or B- or I- with"),
        ([["Ada"]], [["B-"]], "x: row 1 has the tag 'B-': tags must be"),
        ([["Ada"]], [[None]], "x: row 1 has the tag None"),
        ([["Ada"]], [[2.5]], "x: row 1 has the tag 2.5"),
        ([["Ada"], ["in"]], [[0], [9]], "x: row 2 has the tag 9: the ids of 9 tags are 0 to 8"),
        ([["Ada"]], [[-1]], "x: row 1 has the tag -1: the ids of 9 tags are 0 to 8"),
        (["Ada"], [["O"]], "x: column 'tokens' does not hold lists"),
        ([["Ada"]], ["O"], "x: column 'ner_tags' does not hold lists"),
        ([[3]], [["O"]], "x: row 1 has something other than words in column 'tokens'"),
        ([["Ada", None]], [["O", "O"]], "x: row 1 has something other than words in column 'tokens'"),
        ([None, ["Ada"]], [["O"], ["O"]], "x: row 1 has something other than words in column 'tokens'"),
        ([[], []], [[], []], "x has no words"),
    ],
)
def test_rows_that_cannot_be_used(words, tags, message):
    with pytest.raises(InputError, match=message):
        CONLL2003.check(rows_of(words, tags), "x")


def test_ids_without_names_are_refused_by_the_generic_task():
    rows = rows_of(tags=ids_of(TAGS))
    for ask in (lambda: OWN.check(rows, "x"), lambda: OWN.labels(rows), lambda: OWN.scores(TAGS, rows)):
        with pytest.raises(InputError, match=r"row 1 has the tag 1, an id without a name: .* Store the names"):
            ask()
    named = OWN.replace(names=CONLL)
    named.check(rows, "x")
    assert named.scores(TAGS, rows)["f1"] == 100.0


def test_a_tag_that_training_never_showed_is_refused():
    labels = OWN.labels(rows_of(WORDS[:1], TAGS[:1]))
    assert labels == ("O", "B-LOC", "B-PER", "I-PER")
    for training in (True, False):
        with pytest.raises(InputError, match=r"row 2 has the tag 'B-ORG', which is none of the 4 .*\(O, B-LOC, B-PER"):
            OWN.features(rows_of(), BERT, labels, training=training)


def test_missing_columns_and_the_users_own():
    with pytest.raises(InputError, match="x has no column 'ner_tags', which task 'conll2003' needs"):
        CONLL2003.check(rows_of().remove_columns("ner_tags"), "x")
    task = OWN.with_columns(["words"], "tags")
    assert task.columns == ("words", "tags")
    rows = rows_of().rename_columns({"tokens": "words", "ner_tags": "tags"})
    task.check(rows, "x")
    labels = task.labels(rows)
    features = task.features(rows, BERT, labels, training=False)
    assert task.answers(gold_logits(features, len(labels)), features, rows, labels) == TAGS
    assert (task.kind, task.architecture, task.main) == ("tokens", "AutoModelForTokenClassification", "f1")
