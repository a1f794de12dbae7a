"""Facts put into words: how rows become prompts and examples, and what comes back out of a model."""

import pickle
import re
import warnings

import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pinscher.errors import InputError
from pinscher.train.tasks.data_to_text import NoRepeat, Text, of_fields, of_triples
from pinscher.train.tasks.task import TASKS

E2E = [
    ("name[The Eagle], eatType[pub]", "The Eagle is a pub."),
    ("name[Blue Spice], area[riverside]", "Blue Spice is by the river."),
    ("name[The Eagle], eatType[pub]", "A pub named The Eagle."),
    ("name[Zizzi], food[Chinese]", "Zizzi serves Chinese food."),
    ("name[Cotto], priceRange[cheap]", "Cotto is a cheap place."),
    ("name[Aromi], near[Crowne Plaza Hotel]", "You find Aromi near Crowne Plaza Hotel."),
    ("name[Wildwood], familyFriendly[yes]", "Take the children to Wildwood."),
    ("name[Loch Fyne], food[French], area[city centre]", "Loch Fyne, in the city centre, cooks French dishes."),
    ("name[Fitzbillies], customer rating[5 out of 5]", "Guests give Fitzbillies 5 out of 5."),
]
DART = [
    {
        "tripleset": [["Mars Hill", "JOINED", "1973"], ["Mars Hill", "STATE", "Ohio | USA"]],
        "annotations": {"source": ["a", "b"], "text": ["Mars Hill of Ohio joined in 1973.", "It joined in 1973."]},
    },
    {"tripleset": [["Newberry", "NICKNAME", "Wolves"]], "annotations": {"source": ["a"], "text": ["The Wolves."]}},
]


def e2e_rows(pairs=E2E, names=("meaning_representation", "human_reference")):
    return Dataset.from_dict(dict(zip(names, map(list, zip(*pairs, strict=True)), strict=True)))


def text_rows(*pairs):
    return e2e_rows(pairs, ("source", "target"))


@pytest.fixture(scope="module")
def gpt2_tokenizer():
    """Byte-level BPE with one special token that begins and ends texts, as GPT-2's."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    bpe.train_from_iterator([text for pair in E2E for text in pair], trainer)
    end = "<|endoftext|>"
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=end, eos_token=end, unk_token=end)


@pytest.fixture(scope="module")
def llama_tokenizer():
    """Metaspace BPE that puts <s> in front of every text by itself, as Llama's."""
    bpe = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    bpe.pre_tokenizer = pre_tokenizers.Metaspace()
    bpe.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], initial_alphabet=[":", "|"])
    bpe.train_from_iterator([text for pair in E2E for text in pair], trainer)
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.fixture(autouse=True)
def without_meteor(monkeypatch):
    """It takes ten seconds to start."""
    monkeypatch.setattr("pinscher.train.metrics.meteor", lambda said, references: None)


@pytest.fixture(params=["gpt2", "llama"])
def tokenizer(request):
    return request.getfixturevalue(f"{request.param}_tokenizer")


def tiny_model(tokenizer, places=256):
    torch.manual_seed(0)
    if tokenizer.bos_token == tokenizer.eos_token:
        return GPT2LMHeadModel(
            GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=2, n_positions=places)
        )
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=places, **shape))


# Rows


def test_the_tasks_are_there():
    assert {"e2e", "dart", "webnlg", "text"} <= set(TASKS)
    for name in ("e2e", "dart", "webnlg", "text"):
        task = TASKS[name]
        assert isinstance(task, Text)
        assert (task.main, task.kind, task.test_splits, task.judged_by_loss) == ("bleu", "causal-lm", ("test",), True)


def test_rows_are_grouped_by_source_in_the_order_they_appear():
    rows = TASKS["e2e"].normalized(e2e_rows())
    assert rows["source"][:2] == ["name : The Eagle | eatType : pub", "name : Blue Spice | area : riverside"]
    assert rows["references"][0] == ["The Eagle is a pub.", "A pub named The Eagle."]
    assert len(rows) == 8
    assert [t for texts in rows["references"] for t in texts if t != E2E[2][1]] == [t for _, t in E2E if t != E2E[2][1]]
    TASKS["e2e"].check(rows, "test")


def test_normalizing_twice_changes_nothing():
    for task, rows in (
        (TASKS["e2e"], e2e_rows()),
        (TASKS["dart"], Dataset.from_list(DART)),
        (TASKS["text"], text_rows(("a", "b"))),
    ):
        once = task.normalized(rows)
        assert task.normalized(once).to_dict() == once.to_dict()


def test_a_users_own_list_of_references():
    task = TASKS["text"].replace(target_column="references")
    rows = Dataset.from_dict({"source": ["a", "b", "a"], "references": [["x", "y"], ["z"], ["w"]]})
    rows = task.normalized(rows)
    assert rows.to_dict() == {"source": ["a", "b"], "references": [["x", "y", "w"], ["z"]]}
    assert task.normalized(rows).to_dict() == rows.to_dict()


def test_e2e_reads_the_columns_of_the_original_files():
    original = TASKS["e2e"].normalized(e2e_rows(names=("mr", "ref")))
    assert original.to_dict() == TASKS["e2e"].normalized(e2e_rows()).to_dict()


def test_dart_rows():
    rows = TASKS["dart"].normalized(Dataset.from_list(DART))
    assert rows["source"][0] == "Mars Hill : JOINED : 1973 | Mars Hill : STATE : Ohio | USA"
    assert rows["references"] == [["Mars Hill of Ohio joined in 1973.", "It joined in 1973."], ["The Wolves."]]
    listed = [{**row, "annotations": [{"text": t} for t in row["annotations"]["text"]]} for row in DART]
    assert TASKS["dart"].normalized(Dataset.from_list(listed)).to_dict() == rows.to_dict()


def test_a_missing_text_among_others_is_left_out():
    """The official test set of DART has one."""
    row = {"tripleset": [["s", "p", "o"]], "annotations": {"source": ["a", "a"], "text": ["S p o.", None]}}
    assert TASKS["dart"].normalized(Dataset.from_list([row]))["references"] == [["S p o."]]


TRIPLES = ["Aarhus | leaderName | Jacob_Bundsgaard", "Aarhus | area | 91 | km²", "Aarhus | country | Denmark"]


@pytest.mark.parametrize(
    "sets",
    [
        TRIPLES,
        [TRIPLES],
        {"mtriple_set": [TRIPLES]},
        [{"mtriple_set": TRIPLES}],
        [dict(zip(("subject", "property", "object"), t.split(" | ", 2), strict=True)) for t in TRIPLES],
    ],
    ids=["texts", "sets", "hub", "json", "challenge"],
)
def test_webnlg_rows_in_every_shape(sets):
    row = {"modified_triple_sets": sets, "lex": {"comment": ["good"], "lid": ["Id1"], "text": ["Aarhus is Danish."]}}
    rows = TASKS["webnlg"].normalized(Dataset.from_list([row]))
    assert (
        rows["source"][0]
        == "Aarhus : leaderName : Jacob_Bundsgaard | Aarhus : area : 91 | km² | Aarhus : country : Denmark"
    )
    assert rows["references"][0] == ["Aarhus is Danish."]


def test_a_row_without_texts_is_fine_if_another_has_them():
    """WebNLG 2017 has its test inputs in two files, with and without the texts: a reader may hand over both."""
    rows = [{"modified_triple_sets": TRIPLES, "lex": {"text": texts}} for texts in ([], ["Aarhus is Danish."])]
    assert TASKS["webnlg"].normalized(Dataset.from_list(rows))["references"] == [["Aarhus is Danish."]]


@pytest.mark.parametrize(
    ("name", "rows", "says"),
    [
        ("e2e", e2e_rows([E2E[0], (E2E[1][0], "  ")]), "row 2 has nothing in column 'human_reference'"),
        ("e2e", e2e_rows([E2E[0], (E2E[1][0], None)]), "row 2 has nothing in column 'human_reference'"),
        ("e2e", e2e_rows([E2E[0], ("The Eagle", "A pub.")]), "row 2: 'The Eagle' is not of the form 'name"),
        ("e2e", e2e_rows([(None, "A pub.")]), "row 1: None is not text"),
        ("text", text_rows(("a", "b"), (" ", "c")), "row 2 has nothing in column 'source'"),
        ("text", text_rows((1, "b")), "row 1: 1 is not text"),
        ("text", text_rows(("a", 2)), "row 1: 2 is not text"),
        ("dart", Dataset.from_list([DART[0], {**DART[1], "tripleset": []}]), "row 2 has nothing in column 'tripleset'"),
        ("dart", Dataset.from_list([{**DART[0], "tripleset": [["s", "p"]]}]), "row 1: 's' is not a triple"),
        ("dart", Dataset.from_list([{**DART[0], "tripleset": [["s", None, "o"]]}]), "row 1: 's' is not a triple"),
        ("dart", Dataset.from_list([DART[1], {**DART[0], "annotations": {"text": []}}]), "row 2 has no text in column"),
        ("dart", Dataset.from_list([{**DART[0], "annotations": {"text": [None]}}]), "row 1 has no text in column"),
        ("dart", Dataset.from_list([{**DART[0], "annotations": {"text": ["a", ""]}}]), "row 1 has nothing in column"),
        (
            "webnlg",
            Dataset.from_list([{"modified_triple_sets": ["a | b"], "lex": {"text": ["x"]}}]),
            "'a | b' is not a",
        ),
    ],
)
def test_bad_rows_are_named(name, rows, says):
    with pytest.raises(InputError, match=re.escape(says)):
        TASKS[name].normalized(rows)


def test_missing_columns_and_rows_are_left_to_check():
    task = TASKS["e2e"]
    for rows, says in (
        (text_rows(("a", "b")), "x has no column 'meaning_representation'"),
        (e2e_rows().select([]), "x has no rows"),
    ):
        with pytest.raises(InputError, match=says):
            task.check(task.normalized(rows), "x")


# Linearisers

anything = st.text(st.sampled_from("ab ,|:£\n"), max_size=8)
balanced = st.recursive(
    anything, lambda inner: st.tuples(anything, inner, anything).map(lambda t: f"{t[0]}[{t[1]}]{t[2]}")
)
keys = st.text(st.sampled_from("ab |:"), min_size=1).filter(str.strip)


@given(st.lists(st.tuples(keys, balanced), min_size=1, max_size=6))
@settings(deadline=None)
def test_no_field_is_lost(fields):
    line = of_fields(", ".join(f"{key}[{value}]" for key, value in fields))
    assert line == " | ".join(f"{key.strip()} : {value.strip()}".rstrip() for key, value in fields)


@given(st.text(st.sampled_from("ab[],| ")))
@settings(deadline=None)
def test_anything_else_is_refused_with_a_sentence(text):
    try:
        line = of_fields(text)
    except ValueError as error:
        line = str(error)
    if "is not of the form" not in line:
        assert text.count("[") == text.count("]") > 0
        assert re.sub(r"[\s:|,\[\]]", "", line) == re.sub(r"[\s:|,\[\]]", "", text)


parts = st.text(st.sampled_from("ab ,|:[]"), max_size=6)


@given(st.lists(st.lists(parts, min_size=3, max_size=3), min_size=1, max_size=5))
@settings(deadline=None)
def test_no_triple_is_lost(triples):
    assert of_triples(triples) == " | ".join(" : ".join(part.strip() for part in triple) for triple in triples)


@given(st.lists(st.tuples(st.text("ab ,:"), st.text("ab"), parts), min_size=1, max_size=5))
@settings(deadline=None)
def test_no_triple_written_as_text_is_lost(triples):
    line = of_triples([" | ".join(triple) for triple in triples])
    assert line == " | ".join(" : ".join(part.strip() for part in triple) for triple in triples)


# Features


def test_examples_hold_source_and_target_exactly(tokenizer):
    task = TASKS["e2e"]
    rows = task.normalized(e2e_rows())
    features = task.features(rows, tokenizer, (), training=True)
    assert features["row"] == [0, 0, *range(1, 8)]
    pairs = [(source, text) for source, texts in zip(rows["source"], rows["references"], strict=True) for text in texts]
    special = {tokenizer.bos_token_id, tokenizer.eos_token_id}
    front = [] if tokenizer.bos_token == tokenizer.eos_token else [tokenizer.bos_token_id]
    for feature, (source, target) in zip(features, pairs, strict=True):
        ids, labels = feature["input_ids"], feature["labels"]
        start = sum(label == -100 for label in labels)
        assert labels == [-100] * start + ids[start:]
        assert feature["attention_mask"] == [1] * len(ids)
        assert ids[: len(front)] == front
        assert ids[start - 1] == tokenizer.bos_token_id
        assert ids[-1] == tokenizer.eos_token_id
        inner = ids[len(front) : start - 1], ids[start:-1]
        assert not special & {*inner[0], *inner[1]}
        assert tuple(map(tokenizer.decode, inner)) == (source, target)


def test_prompts_are_the_beginnings_of_examples(tokenizer):
    task = TASKS["e2e"]
    rows = task.normalized(e2e_rows())
    prompts = task.features(rows, tokenizer, (), training=False)
    assert prompts["row"] == list(range(8))
    assert set(prompts.column_names) == {"input_ids", "row"}
    for feature in task.features(rows, tokenizer, (), training=True):
        prompt = prompts["input_ids"][feature["row"]]
        assert feature["input_ids"][: len(prompt)] == prompt
        assert feature["labels"][: len(prompt) + 1].count(-100) == len(prompt)


def test_a_tokenizer_without_a_beginning_separates_by_its_end(gpt2_tokenizer):
    other = PreTrainedTokenizerFast(tokenizer_object=gpt2_tokenizer.backend_tokenizer, eos_token="<|endoftext|>")
    assert other.bos_token_id is None
    rows = TASKS["text"].normalized(text_rows(("a", "b")))
    assert TASKS["text"].features(rows, other, (), training=False)["input_ids"][0][-1] == other.eos_token_id
    endless = PreTrainedTokenizerFast(tokenizer_object=gpt2_tokenizer.backend_tokenizer)
    with pytest.raises(InputError, match="no end token"):
        TASKS["text"].features(rows, endless, (), training=True)


def test_what_is_too_long_loses_its_end(tokenizer):
    task = TASKS["text"].replace(max_length=20, max_new_tokens=8)
    source, target = "The Eagle " + "is a pub " * 30, "A pub named " + "The Eagle " * 30
    rows = task.normalized(text_rows((source, target), ("a", "b")))
    with pytest.warns(UserWarning, match="1 of 2 targets"), pytest.warns(UserWarning, match="1 of 2 sources"):
        examples = task.features(rows, tokenizer, (), training=True)
    with pytest.warns(UserWarning, match="1 of 2 sources"):
        prompts = task.features(rows, tokenizer, (), training=False)["input_ids"]
    assert len(prompts[0]) == 12
    assert prompts[0][-1] == tokenizer.bos_token_id
    long, short = examples
    assert long["input_ids"][:12] == prompts[0]
    whole = tokenizer([source, target], add_special_tokens=False)["input_ids"]
    room = 12 - 1 - (tokenizer.bos_token != tokenizer.eos_token)  # the separator, and where it is usual a beginning
    assert long["input_ids"][11 - room : 11] == whole[0][:room]
    assert long["input_ids"][12:] == whole[1][:8]
    assert long["labels"].count(-100) == 12
    assert long["input_ids"][-1] != tokenizer.eos_token_id  # it was not taught to stop there
    assert short["input_ids"][-1] == tokenizer.eos_token_id
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        task.features(rows.select([1]), tokenizer, (), training=True)
    with pytest.raises(InputError, match="max_length 9 is too little"):
        task.replace(max_length=9).features(rows, tokenizer, (), training=True)


def test_batches_are_filled_on_the_right_to_train_and_on_the_left_to_write(tokenizer):
    collate = pickle.loads(pickle.dumps(TASKS["text"].collator(tokenizer)))  # loaders may run in other processes
    assert tokenizer.pad_token_id is None
    pad = tokenizer.eos_token_id
    batch = collate([{"input_ids": [7, 8], "labels": [-100, 8], "row": 0}, {"input_ids": [9], "labels": [9], "row": 1}])
    assert {name: values.tolist() for name, values in batch.items()} == {
        "input_ids": [[7, 8], [9, pad]],
        "attention_mask": [[1, 1], [1, 0]],
        "labels": [[-100, 8], [9, -100]],
    }
    batch = collate([{"input_ids": [7, 8]}, {"input_ids": [9]}])
    assert {name: values.tolist() for name, values in batch.items()} == {
        "input_ids": [[7, 8], [pad, 9]],
        "attention_mask": [[1, 1], [0, 1]],
    }
    assert all(values.dtype == torch.int64 for values in batch.values())


def test_the_loss_of_a_batch_is_that_of_its_examples(tokenizer):
    task = TASKS["e2e"]
    features = task.features(task.normalized(e2e_rows()), tokenizer, (), training=True)
    model, collate = tiny_model(tokenizer).eval(), task.collator(tokenizer)
    with torch.no_grad():
        alone = [(model(**collate([f])).loss, sum(label != -100 for label in f["labels"])) for f in features]
        together = model(**collate(list(features))).loss
    torch.testing.assert_close(together, sum(loss * n for loss, n in alone) / sum(n for _, n in alone))


# Texts


@pytest.mark.parametrize("beams", [1, 4])
def test_padding_changes_no_text(tokenizer, beams):
    task = TASKS["e2e"].replace(beams=beams, max_new_tokens=12, no_repeat_ngram=2)
    prompts = task.features(task.normalized(e2e_rows()), tokenizer, (), training=False)
    model = tiny_model(tokenizer)
    for parameter in model.parameters():  # sharper than at birth: no ties between beams
        parameter.data.mul_(4)
    alone = [task.generate(model, tokenizer, prompts.select([i]), 1)[0] for i in range(len(prompts))]
    assert len({len(ids) for ids in prompts["input_ids"]}) > 3
    assert len(set(alone)) > 3
    for batch_size in (3, 8):
        assert task.generate(model, tokenizer, prompts, batch_size) == alone


def test_no_ngram_comes_twice_but_the_prompts_may_be_said():
    scores = torch.zeros(1, 6)
    processor = NoRepeat(2, width=3)
    assert processor(torch.tensor([[1, 2, 3, 1]]), scores).isfinite().all()  # 1 2 is only in the prompt
    banned = processor(torch.tensor([[1, 2, 3, 4, 5, 4]]), scores)
    assert banned.isinf().nonzero().tolist() == [[0, 5]]


def test_the_model_comes_back_as_it_was(gpt2_tokenizer):
    task = TASKS["e2e"].replace(beams=2, max_new_tokens=6)
    prompts = task.features(task.normalized(e2e_rows()), gpt2_tokenizer, (), training=False)
    model = tiny_model(gpt2_tokenizer).train()
    plain = task.generate(model, gpt2_tokenizer, prompts, 8)
    model.transformer.h[0].eval()
    model.config.use_cache = False
    model.generation_config.repetition_penalty = 50.0  # a checkpoint's own taste is not the task's
    model.generation_config.min_new_tokens = 6
    own, state = model.generation_config, torch.get_rng_state()
    assert task.generate(model, gpt2_tokenizer, prompts, 8) == plain
    assert model.training
    assert not model.transformer.h[0].training
    assert model.transformer.h[1].training
    assert model.config.use_cache is False
    assert model.generation_config is own
    assert torch.equal(torch.get_rng_state(), state)
    small = tiny_model(gpt2_tokenizer, places=16)
    with pytest.raises(InputError, match="the model only 16: lower max_length"):
        task.generate(small, gpt2_tokenizer, prompts, 8)


def test_answers_come_from_generate_alone():
    with pytest.raises(NotImplementedError, match="generate"):
        TASKS["e2e"].answers([], e2e_rows(), e2e_rows(), ())


def test_a_small_gpt2_learns_to_say_eight_things(gpt2_tokenizer):
    task = TASKS["e2e"]
    rows = task.normalized(e2e_rows([pair for pair in E2E if pair != E2E[2]]))
    model, collate = tiny_model(gpt2_tokenizer).eval(), task.collator(gpt2_tokenizer)  # by heart: no dropout
    batch = collate(list(task.features(rows, gpt2_tokenizer, (), training=True)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(300):
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / 300)
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    prompts = task.features(rows, gpt2_tokenizer, (), training=False)
    for beams in (1, 10):
        said = task.replace(beams=beams).generate(model, gpt2_tokenizer, prompts, 8)
        assert said == [texts[0] for texts in rows["references"]]
    assert task.scores(said, rows)["bleu"] == 100.0


# Scores and files


@pytest.mark.parametrize("style", ["plain", "e2e", "triples"])
def test_gold_texts_score_100(style):
    task = TASKS["text"].replace(style=style)
    rows = TASKS["e2e"].normalized(e2e_rows())
    scores = task.scores([texts[-1] for texts in rows["references"]], rows)
    assert task.main in scores
    assert {"plain": "rougeL", "e2e": "rouge_l", "triples": "bleu"}[style] in scores
    assert set(scores.values()) == {100.0}
    assert task.scores(["Nothing of the kind"] * 8, rows)["bleu"] < 5


def test_one_line_for_each_row(tmp_path):
    rows = TASKS["e2e"].normalized(e2e_rows())
    said = ["one", "two\nlines", "", "a\r\nb\u2028c", "Café", "f", "g", "h"]
    path = TASKS["e2e"].write(said, rows, tmp_path / "new", "test")
    assert path == tmp_path / "new" / "predictions_test.txt"
    lines = path.read_text(encoding="utf-8").split("\n")
    assert lines == ["one", "two lines", "", "a b c", "Café", "f", "g", "h", ""]
    assert [file.name for file in path.parent.iterdir()] == ["predictions_test.txt"]
