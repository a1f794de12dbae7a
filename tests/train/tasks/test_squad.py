"""Questions on a text: windows, gold positions and the n-best search against brute force; what is refused; files."""

from __future__ import annotations

import json
import re
from itertools import product

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import ByteLevelBPETokenizer
from transformers import BertConfig, BertForQuestionAnswering, BertTokenizerFast, RobertaTokenizerFast

from pinscher.errors import InputError
from pinscher.train.evaluation import answer, outputs_of
from pinscher.train.tasks import TASKS
from pinscher.train.tasks.squad import best_span, nearest

# Umlauts (which BERT strips), punctuation at both ends, an emoji, a doubled space, CJK, and a text of several windows.
ROWS = [
    ("Where was Ada born?", "Ada was born in Zürich, in 1815 (or so) it seems.", "Zürich"),
    ("When was she born?", "Ada was born in Zürich, in 1815 (or so) it seems.", "1815 (or so)"),
    ("What did it cost?", "It cost «£12.50» — a naïve price!", "£12.50"),
    ("Who said it?", 'The poet,  Jean-Luc  O\'Neil, said: "so 😀 be it".', "Jean-Luc  O'Neil"),
    ("What did he say?", 'The poet,  Jean-Luc  O\'Neil, said: "so 😀 be it".', "so 😀 be it"),
    ("Which city?", "東京 is the city.", "東京"),
    ("Who came last?", "red green blue one two three four five six seven eight nine ten eleven Ada.", "Ada"),
    ("Who came first?", "Ada, red green blue one two three four five six seven eight nine ten eleven.", "Ada"),
]
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
WORDS = [word for row in ROWS for text in row for word in re.findall("[a-z]+", text.lower())]
SQUAD = TASKS["squad"]
SMALL = SQUAD.replace(max_length=20, stride=6)


def bert() -> BertTokenizerFast:
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *"?.,()«»£—!-'\":", *LETTERS]
    pieces += [f"##{letter}" for letter in LETTERS]
    return BertTokenizerFast(vocab={piece: i for i, piece in enumerate(dict.fromkeys(pieces))})


def roberta() -> RobertaTokenizerFast:
    trained = ByteLevelBPETokenizer()
    texts = [text for row in ROWS for text in row]
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trained.train_from_iterator(texts, vocab_size=330, special_tokens=special, show_progress=False)
    model = json.loads(trained.to_str())["model"]
    return RobertaTokenizerFast(vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]])


BERT, ROBERTA = bert(), roberta()
both = pytest.mark.parametrize("tokenizer", [BERT, ROBERTA], ids=["bert", "roberta"])


def rows_of(*rows: tuple[str, str, str], **more: list[object]) -> Dataset:
    """Rows as the hub has them; `more` replaces or adds columns."""
    columns = {
        "id": [f"q{i}" for i in range(len(rows))],
        "question": [question for question, _, _ in rows],
        "context": [context for _, context, _ in rows],
        "answers": [{"text": [a], "answer_start": [max(c.find(a), 0)]} for _, c, a in rows],
    }
    return Dataset.from_dict({**columns, **more})


def gold_logits(features: Dataset, extra: int = 3) -> list[tuple[np.ndarray, ...]]:
    """What a model that knows everything would say, in a batch that is longer by `extra`."""
    outputs = []
    for feature in features:
        sides = []
        for name in ("start_positions", "end_positions"):
            logits = np.zeros(len(feature["input_ids"]) + extra, dtype=np.float32)
            logits[feature[name]] = 10.0
            logits[len(feature["input_ids"]) :] = 99.0  # padding, which must not be listened to
            sides.append(logits)
        outputs.append(tuple(sides))
    return outputs


def text_of(feature: dict, offsets: list, context: str) -> str:
    first, last = offsets[feature["start_positions"]], offsets[feature["end_positions"]]
    return context[first[0] : last[1]]


# ---------------------------------------------------------------- windows and gold positions


@both
@pytest.mark.parametrize("size", [(20, 6), (28, 0), (384, 128)])
def test_gold_positions_say_the_gold_answers(tokenizer, size):
    task = SQUAD.replace(max_length=size[0], stride=size[1])
    rows = rows_of(*ROWS)
    task.check(rows, "rows")
    training = task.features(rows, tokenizer, (), training=True)
    features = task.features(rows, tokenizer, (), training=False)
    assert training["input_ids"][:] == features["input_ids"][:]
    assert training["row"][:] == features["row"][:]
    assert max(map(len, features["input_ids"])) <= size[0]
    found = {
        (f["row"], text_of(f, g["offsets"], ROWS[f["row"]][1]))
        for f, g in zip(training, features, strict=True)
        if f["start_positions"]
    }
    assert found == {(i, gold) for i, (_, _, gold) in enumerate(ROWS)}
    answers = task.answers(gold_logits(training), features, rows, ())
    assert answers == [gold for _, _, gold in ROWS]
    assert task.scores(answers, rows) == {"exact_match": 100.0, "f1": 100.0}


@both
def test_windows_cover_the_context_and_share_the_stride(tokenizer):
    rows = rows_of(*ROWS)
    features = SMALL.features(rows, tokenizer, (), training=False)
    assert len(features) > len(rows)
    for i, (_, context, _) in enumerate(ROWS):
        windows = [[tuple(p) for p in f["offsets"] if p] for f in features if f["row"] == i]
        covered = {at for window in windows for start, end in window for at in range(start, end)}
        assert covered == {at for at, letter in enumerate(context) if not letter.isspace()}
    last = [f["input_ids"] for f in features if f["row"] == 6]
    ending = len(last[0]) - 1  # the closing special token
    question = last[0].index(tokenizer.sep_token_id)
    start = question + (2 if tokenizer is ROBERTA else 1)
    assert last[0][ending - 6 : ending] == last[1][start : start + 6]


def test_an_answer_in_the_overlap_is_in_both_windows_and_else_in_one():
    words = [f"{a}{b}" for a in "abcdef" for b in "0123456789"][:40]  # two pieces each
    context = " ".join(words)
    task = SQUAD.replace(max_length=4 + 20, stride=8)
    # [CLS] q [SEP] + 20 pieces + [SEP]: the first window ends with words[9], the second begins with words[6].
    for gold, windows in ((words[7], {0, 1}), (words[5], {0}), (words[11], {1})):
        rows = rows_of(("a", context, gold))
        training = task.features(rows, BERT, (), training=True)
        offsets = task.features(rows, BERT, (), training=False)["offsets"]
        hits = {i for i, feature in enumerate(training) if feature["start_positions"]}
        assert hits == windows
        assert {text_of(training[i], offsets[i], context) for i in hits} == {gold}
        outside = [f for i, f in enumerate(training) if i not in hits]
        assert all((f["start_positions"], f["end_positions"]) == (0, 0) for f in outside)


def test_an_answer_cut_by_a_window_does_not_count_there():
    words = [f"{a}{b}" for a in "abcdef" for b in "0123456789"][:40]
    context, gold = " ".join(words), " ".join(words[8:12])
    rows = rows_of(("a", context, gold))
    training = SQUAD.replace(max_length=24, stride=8).features(rows, BERT, (), training=True)
    assert [bool(feature["start_positions"]) for feature in training][:3] == [False, True, False]


def test_an_answer_that_is_part_of_a_token_is_that_token():
    rows = rows_of(("Where?", "She was born in the city.", "bor"))
    features = SQUAD.features(rows, BERT, (), training=True)
    assert SQUAD.answers(gold_logits(features), SQUAD.features(rows, BERT, (), training=False), rows, ()) == ["born"]


def test_offsets_are_the_contexts_alone():
    features = SQUAD.features(rows_of(ROWS[0]), BERT, (), training=False)
    tokens = BERT.convert_ids_to_tokens(features[0]["input_ids"])
    closed = tokens.index("[SEP]")
    assert features[0]["offsets"][: closed + 1] == [None] * (closed + 1)
    assert features[0]["offsets"][-1] is None
    assert all(features[0]["offsets"][closed + 1 : -1])
    assert set(features.column_names) == {"input_ids", "token_type_ids", "attention_mask", "row", "offsets"}


def test_a_token_that_stands_for_a_space_alone_is_no_part_of_the_context():
    features = SQUAD.features(rows_of(ROWS[3]), ROBERTA, (), training=False)
    tokens = ROBERTA.convert_ids_to_tokens(features[0]["input_ids"])
    spaces = [pair for token, pair in zip(tokens, features[0]["offsets"], strict=True) if token == "Ġ"]
    assert len(spaces) >= 2
    assert spaces == [None] * len(spaces)
    assert all(end > start for start, end in filter(None, features[0]["offsets"]))


def test_wrong_and_missing_starts_are_corrected():
    context = "Ada met Ada. Later Ada left."
    rows = rows_of(
        *[("Who?", context, "Ada")] * 4,
        answers=[{"text": ["Ada"], "answer_start": [start]} for start in (9, 27, -1, None)],
    )
    features = SQUAD.features(rows, BERT, (), training=True)
    offsets = SQUAD.features(rows, BERT, (), training=False)["offsets"]
    assert [o[f["start_positions"]][0] for f, o in zip(features, offsets, strict=True)] == [8, 19, 0, 0]


@given(st.text("ab ", max_size=12), st.text("ab", min_size=1, max_size=3), st.integers(-2, 15))
def test_nearest_equals_brute_force(context, text, start):
    places = [i for i in range(len(context)) if context[i : i + len(text)] == text]
    found = nearest(text, context, start)
    if not places:
        assert found is None
    else:
        assert found[0] in places
        assert found[1] == found[0] + len(text)
        target = max(start, 0)
        assert abs(found[0] - target) == min(abs(place - target) for place in places)


@both
def test_a_row_without_its_answer_is_left_out_and_the_others_keep_their_numbers(tokenizer):
    rows = rows_of(ROWS[0], ("Who?", "Nobody is here.", "Ada"), ROWS[2])
    assert set(SQUAD.features(rows, tokenizer, (), training=True)["row"]) == {0, 2}
    assert set(SQUAD.features(rows, tokenizer, (), training=False)["row"]) == {0, 1, 2}
    with pytest.raises(InputError, match=r"train\.json: in 1 of 3 rows no answer occurs .* row 2 \('Ada'\)"):
        SQUAD.check(rows, "train.json")


def test_the_first_answer_that_occurs_is_trained_on():
    rows = rows_of(("Who?", "Ada left.", ""), answers=[{"text": ["Eve", " Ada "], "answer_start": [0, 0]}])
    SQUAD.check(rows, "rows")
    features = SQUAD.features(rows, BERT, (), training=True)
    assert BERT.decode(features[0]["input_ids"][features[0]["start_positions"]]) == "ada"


def test_answers_may_be_a_list_of_objects():
    plain = rows_of(ROWS[0])
    listed = rows_of(ROWS[0], answers=[[{"text": "Zürich", "answer_start": 16}]])
    bare = rows_of(ROWS[0], answers=[{"text": ["Zürich"]}])
    SQUAD.check(listed, "rows")
    expected = SQUAD.features(plain, BERT, (), training=True).to_list()
    for rows in (listed, bare):
        assert SQUAD.features(rows, BERT, (), training=True).to_list() == expected
        assert SQUAD.scores(["Zürich"], rows)["exact_match"] == 100.0


@both
def test_a_question_that_leaves_no_room_is_cut(tokenizer):
    # Without this the tokenizer panics, which no `except Exception` catches.
    for question in ("where " * 50, "😀" * 50, "é東" * 40):
        rows = rows_of((question, *ROWS[6][1:]))
        features = SMALL.features(rows, tokenizer, (), training=False)
        assert max(map(len, features["input_ids"])) <= 20
        assert SMALL.answers(gold_logits(SMALL.features(rows, tokenizer, (), training=True)), features, rows, ()) == [
            "Ada"
        ]


# ---------------------------------------------------------------- from logits to answers


def best_by_hand(start, end, inside, n_best, max_answer):
    """Every pair of tokens, one by one. Ranks by sorting (logit, place): ties go to the earlier token."""
    places = range(len(start))
    firsts = sorted(places, key=lambda i: (-start[i], i))[:n_best]
    lasts = sorted(places, key=lambda i: (-end[i], i))[:n_best]
    best = None
    for i, j in product(firsts, lasts):
        if inside[i] and inside[j] and i <= j < i + max_answer and (best is None or start[i] + end[j] > best[0]):
            best = (start[i] + end[j], i, j)
    return best


logit = st.one_of(st.integers(-4, 4).map(float), st.floats(-1e4, 1e4, width=32))


@given(st.data(), st.integers(1, 30), st.integers(1, 25), st.integers(1, 12))
@settings(max_examples=200, deadline=None)
def test_the_best_span_equals_brute_force(data, length, n_best, max_answer):
    start, end = (data.draw(st.lists(logit, min_size=length, max_size=length)) for _ in range(2))
    inside = data.draw(st.lists(st.booleans(), min_size=length, max_size=length))
    found = best_span(
        np.array(start, dtype=np.float32), np.array(end, dtype=np.float32), np.array(inside), n_best, max_answer
    )
    assert found == best_by_hand(start, end, inside, n_best, max_answer)


def test_forbidden_tokens_do_not_win_when_all_logits_are_lowest():
    lowest = np.full(4, -np.inf)
    assert best_span(lowest, lowest, np.array([False, False, True, False]), 4, 4) == (-np.inf, 2, 2)


def test_half_precision_logits_do_not_overflow():
    start = np.array([0, 60000, 0], dtype=np.float16)
    assert best_span(start, start, np.array([True] * 3), 3, 3) == (120000.0, 1, 1)


def test_the_best_window_wins():
    rows, task = rows_of(ROWS[6], ROWS[7]), SQUAD.replace(max_length=14, stride=2)
    features = task.features(rows, BERT, (), training=False)
    quiet = [tuple(np.zeros(len(f["input_ids"])) for _ in range(2)) for f in features]
    mine = [i for i, f in enumerate(features) if f["row"] == 0]
    assert len(mine) >= 3
    said = []
    for window, value in ((mine[1], 3.0), (mine[0], 4.0), (mine[2], 3.9)):
        place = next(i for i, pair in enumerate(features[window]["offsets"]) if pair)
        for side in quiet[window]:
            side[place] = value
        start, end = features[window]["offsets"][place]
        said.append(ROWS[6][1][start:end])
        answers = task.answers(quiet, features, rows, ())
        assert answers[0] == said[min(len(said) - 1, 1)]  # the second is never beaten
    assert len(set(said)) == 3


def test_limits_of_an_answer():
    rows = rows_of(("a", "one two three four five", "one"))
    features = SQUAD.features(rows, BERT, (), training=False)
    start, end = np.zeros((2, 9))  # [CLS] a [SEP] one two three four five [SEP]
    start[3] = end[7] = 5.0
    outputs = [(start, end)]
    assert SQUAD.answers(outputs, features, rows, ()) == ["one two three four five"]
    assert SQUAD.replace(max_answer=5).answers(outputs, features, rows, ()) == ["one two three four five"]
    assert SQUAD.replace(max_answer=4).answers(outputs, features, rows, ()) != ["one two three four five"]
    # The only candidate of each side lies in the question, or the end before the start: nothing can be said.
    assert SQUAD.replace(n_best=1).answers([(np.eye(9)[1], np.eye(9)[1])], features, rows, ()) == [""]
    assert SQUAD.replace(n_best=1).answers([(np.eye(9)[5], np.eye(9)[4])], features, rows, ()) == [""]
    assert SQUAD.replace(n_best=1).answers([(np.eye(9)[5], np.eye(9)[5])], features, rows, ()) == ["three"]


def test_scores_take_the_best_of_several_answers():
    rows = rows_of(
        ROWS[0], ROWS[2], answers=[{"text": ["Zürich", "in Zürich"], "answer_start": [16, 13]},
                                   {"text": ["£12.50"], "answer_start": [9]}]
    )  # fmt: skip
    assert SQUAD.scores(["in Zürich", "a naïve price"], rows) == {"exact_match": 50.0, "f1": 50.0}


# ---------------------------------------------------------------- batches


@both
def test_a_batch_has_what_the_model_takes_and_nothing_else(tokenizer):
    features = SMALL.features(rows_of(*ROWS), tokenizer, (), training=True).to_list()
    features[0]["anything"] = "else"
    batch = SMALL.collator(tokenizer)(features)
    assert set(batch) == {*tokenizer.model_input_names, "start_positions", "end_positions"} & {*batch, "input_ids"}
    longest = max(len(feature["input_ids"]) for feature in features)
    for i, feature in enumerate(features):
        size = len(feature["input_ids"])
        assert batch["input_ids"][i].tolist() == feature["input_ids"] + [tokenizer.pad_token_id] * (longest - size)
        assert batch["attention_mask"][i].tolist() == [1] * size + [0] * (longest - size)
        assert int(batch["start_positions"][i]) == feature["start_positions"]
        assert int(batch["end_positions"][i]) == feature["end_positions"]


def test_padding_stands_on_the_right_whatever_the_tokenizer_prefers():
    tokenizer = bert()
    tokenizer.padding_side = "left"
    features = SMALL.features(rows_of(*ROWS), tokenizer, (), training=False).to_list()
    assert set(SMALL.collator(tokenizer)(features)["input_ids"][:, 0].tolist()) == {tokenizer.cls_token_id}


def model() -> BertForQuestionAnswering:
    torch.manual_seed(0)
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return BertForQuestionAnswering(BertConfig(vocab_size=len(BERT), **size))


def test_a_real_model_trains_and_answers():
    rows, net = rows_of(*ROWS), model()
    features = SMALL.features(rows, BERT, (), training=True).to_list()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        loss = net(**SMALL.collator(BERT)(features)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]
    answers = answer(net, SMALL, BERT, rows, (), batch_size=5)
    assert all(text and text in context for text, (_, context, _) in zip(answers, ROWS, strict=True))
    assert set(SMALL.scores(answers, rows)) == {"exact_match", "f1"}
    # Batches of another size pad otherwise; the answers are the same.
    features = SMALL.features(rows, BERT, (), training=False)
    for size in (1, 64):
        outputs = outputs_of(net, features, SMALL.collator(BERT), size, "spans")
        assert SMALL.answers(outputs, features, rows, ()) == answers


# ---------------------------------------------------------------- files


def test_the_submission_is_read_back(tmp_path):
    rows = rows_of(*ROWS)
    answers = [gold for _, _, gold in ROWS[:-1]] + [""]
    path = SQUAD.write(answers, rows, tmp_path / "new", "validation")
    assert path == tmp_path / "new" / "predictions_validation.json"
    assert json.loads(path.read_bytes()) == dict(zip(rows["id"], answers, strict=True))
    assert SQUAD.write(answers[::-1], rows, tmp_path / "new", "validation") == path
    assert json.loads(path.read_bytes()) == dict(zip(rows["id"], answers[::-1], strict=True))
    assert [file.name for file in path.parent.iterdir()] == [path.name]  # nothing half-written is left


@pytest.mark.parametrize("ids", [None, ["same", "same"], [7, 8]])
def test_rows_without_ids_of_their_own_are_numbered(tmp_path, ids):
    rows = rows_of(ROWS[0], ROWS[2]).remove_columns("id")
    if ids is not None:
        rows = rows.add_column("id", ids)
    task = TASKS["qa"]
    task.check(rows, "rows")
    assert task.scores(["Zürich", "nothing"], rows) == {"exact_match": 50.0, "f1": 50.0}
    said = json.loads(task.write(["Zürich", "£12"], rows, tmp_path, "test").read_text("utf-8"))
    assert said == dict(zip(["7", "8"] if ids == [7, 8] else ["0", "1"], ["Zürich", "£12"], strict=True))


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"answers": [{"text": [], "answer_start": []}]},
            r"x: row 1 is unanswerable \(SQuAD v2\): not supported",
        ),
        ({"answers": [{"text": [" "], "answer_start": [0]}]}, "x: row 1 is unanswerable"),
        ({"answers": ["Zürich"]}, "x: row 1 has 'Zürich' in column 'answers', not answers of the form"),
        ({"answers": [None]}, "x: row 1 has None in column 'answers'"),
        ({"answers": [{"start": [1]}]}, "not answers of the form"),
        ({"answers": [{"text": [None], "answer_start": [1]}]}, "not answers of the form"),
        ({"answers": [{"text": ["Ada"], "answer_start": [0, 5]}]}, "not answers of the form"),
        ({"answers": [[{"answer_start": 1}]]}, "not answers of the form"),
        ({"question": [None]}, "x: row 1 has no text in column 'question'"),
        ({"context": ["  "]}, "x: row 1 has no text in column 'context'"),
        ({"context": [3]}, "x: row 1 has no text in column 'context'"),
    ],
)
def test_rows_that_cannot_be_used(changes, message):
    with pytest.raises(InputError, match=message):
        SQUAD.check(rows_of(ROWS[0], **changes), "x")


def test_missing_columns_and_rows():
    with pytest.raises(InputError, match="x has no column 'answers', which task 'squad' needs"):
        SQUAD.check(rows_of(ROWS[0]).remove_columns("answers"), "x")
    with pytest.raises(InputError, match="x has no rows"):
        SQUAD.check(rows_of(ROWS[0]).select([]), "x")


def test_settings_that_cannot_work():
    for settings_, message in (
        ({"stride": -1}, "stride must be at least 0, not -1"),
        ({"n_best": 0}, "n_best must be at least 1"),
        ({"max_answer": 0}, "max_answer must be at least 1"),
    ):
        with pytest.raises(InputError, match=message):
            SQUAD.replace(**settings_)
    with pytest.raises(InputError, match="windows of 132 tokens that share 128 leave no room for a question"):
        SQUAD.replace(max_length=132).features(rows_of(ROWS[0]), BERT, (), training=True)
    SQUAD.replace(max_length=133).features(rows_of(ROWS[0]), BERT, (), training=True)


def test_a_slow_tokenizer_is_refused():
    class Slow:
        is_fast = False

    with pytest.raises(InputError, match="task 'squad' needs a fast tokenizer, and Slow is not one"):
        SQUAD.features(rows_of(ROWS[0]), Slow(), (), training=True)


def test_the_users_own_columns():
    task = TASKS["qa"].with_columns(["q", "text"], "gold")
    assert task.columns == ("q", "text", "gold")
    rows = rows_of(ROWS[0]).rename_columns({"question": "q", "context": "text", "answers": "gold"})
    task.check(rows, "rows")
    features = task.features(rows, BERT, (), training=True)
    answers = task.answers(gold_logits(features), task.features(rows, BERT, (), training=False), rows, ())
    assert task.scores(answers, rows) == {"exact_match": 100.0, "f1": 100.0}
    assert (task.kind, task.architecture, task.main) == ("spans", "AutoModelForQuestionAnswering", "f1")
    assert SQUAD.labels(rows) == ()
