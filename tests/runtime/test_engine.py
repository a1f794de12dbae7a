"""An Engine gives what `pinscher.load` gives, to the last bit, and never imports torch or transformers."""

from __future__ import annotations

import copy
import io
import itertools
import json
import pickle
import shutil
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.numpy import save_file
from transformers import MODEL_MAPPING

import pinscher
from pinscher.errors import InputError
from pinscher.models.families import FAMILIES, NO_LIMIT, max_positions
from pinscher.models.plain import PlainConfig, parameters
from pinscher.runtime import core
from pinscher.runtime.tokens import PLAIN, TooLongError
from pinscher.store import file, payload
from tiny_accelerated import CONFIGS, batch, model_of
from tiny_engine import NER, TASKS, TEXTS, store, write_sentences, write_tokenizer
from tiny_store import resealed, vector

NO_TORCH = "import sys\nfor name in ('torch', 'transformers', 'accelerate', 'datasets'): sys.modules[name] = None\n"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Stored models, each made once."""
    made: dict[Any, Path] = {}

    def folder(name: str = "bert", task: str = "classification", **settings: Any) -> Path:
        key = (name, task, str(settings))
        if key not in made:
            made[key] = store(tmp_path_factory.mktemp("models") / "small", name, task, **settings)
        return made[key]

    return folder


@pytest.fixture
def own(folders: Any, tmp_path: Path) -> Any:
    """A copy of one that a test may change."""

    def copied(*given: Any, **settings: Any) -> Path:
        return Path(shutil.copytree(folders(*given, **settings), tmp_path / "own"))

    return copied


def outputs(fast: Any, given: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    found = fast(**given)
    return {name: value.detach().numpy() for name, value in found.items() if torch.is_tensor(value)}


# ------------------------------------------------------------ the same numbers


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_and_task_gives_the_bits_of_load(folders, name, task):
    folder = folders(name, task)
    engine, fast = pinscher.Engine(folder), pinscher.load(folder)
    for given in (batch(1, 9, padded=False), batch(3, 37)):
        wanted = outputs(fast, given)
        found = engine.run(**{key: value.numpy() for key, value in given.items()})
        assert found.keys() == wanted.keys()
        for key, value in found.items():
            assert value.dtype == np.float32
            assert np.array_equal(value, wanted[key]), key


@pytest.mark.parametrize("mode", ["fp32", "int8", "w8a8"])
def test_every_mode_gives_the_bits_of_load(folders, mode):
    folder, given = folders(), batch(2, 20)
    found = pinscher.Engine(folder, mode=mode).run(**{key: value.numpy() for key, value in given.items()})
    assert np.array_equal(found["logits"], pinscher.load(folder, mode=mode)(**given).logits.numpy())


@pytest.mark.parametrize("values", ["fp32", "fp16", "bf16", "int4", "keep"])
def test_weights_of_every_type_give_the_bits_of_load(tmp_path, values):
    pinscher.save_pretrained(model_of("roberta"), tmp_path / "small", values=values, embeddings=values, head=values)
    given = batch(2, 20)
    found = pinscher.Engine(tmp_path / "small").run(**{key: value.numpy() for key, value in given.items()})
    assert np.array_equal(found["logits"], pinscher.load(tmp_path / "small")(**given).logits.numpy())


@pytest.mark.parametrize("name", ["bert", "mpnet", "roberta"])
def test_left_padding_hidden_rows_and_types(folders, name):
    engine, fast = pinscher.Engine(folders(name)), pinscher.load(folders(name))
    given = batch(3, 12, padded=False)
    given["attention_mask"][1, :4] = 0
    given["input_ids"][1, :4] = CONFIGS[name].pad_token_id
    for hidden in (False, True):
        if hidden:
            given["attention_mask"][2] = 0
        found = engine.run(**{key: value.numpy() for key, value in given.items()})
        assert np.array_equal(found["logits"], fast(**given).logits.numpy())
    if name == "bert":
        types = (torch.arange(12) > 5).long().expand(3, 12)
        found = engine.run(given["input_ids"].numpy(), None, types.numpy())
        wanted = fast(input_ids=given["input_ids"], token_type_ids=types).logits.numpy()
        assert np.array_equal(found["logits"], wanted)
    empty = np.zeros((0, 5), np.int64)
    assert engine.run(empty)["logits"].shape == (0, 2)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_text_gets_the_same_numbers_beside_any_others(folders, threads):
    engine = pinscher.Engine(folders(), threads=1)
    engine._model.core.threads = engine._model.head.threads = threads  # on one CPU, too
    together = engine.logits(TEXTS * 3)
    for number, text in enumerate(TEXTS):
        assert np.array_equal(engine.logits([text])[0], together[number])
        assert np.array_equal(together[number], together[number + len(TEXTS)])


def test_many_threads_at_once(folders):
    engine = pinscher.Engine(folders())
    wanted = {text: engine.logits([text]) for text in TEXTS}
    with ThreadPoolExecutor(8) as pool:
        for text, found in zip(TEXTS * 20, pool.map(lambda text: engine.logits([text]), TEXTS * 20), strict=True):
            assert np.array_equal(found, wanted[text])


def test_more_tokens_than_are_computed_at_once(folders, monkeypatch):
    from pinscher.runtime import engine as module

    engine = pinscher.Engine(folders())
    wanted = engine.logits(TEXTS * 4)
    monkeypatch.setattr(module, "TOGETHER", 9)
    assert np.array_equal(engine.logits(TEXTS * 4), wanted)
    assert engine.logits([]).shape == (0, 2)


# ------------------------------------------------------------ what it knows without transformers


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_transformers(name, task):
    model = model_of(name, TASKS[task])
    settings = json.loads(model.config.to_json_string()) | {"architectures": [type(model).__name__]}
    found = parameters(PlainConfig(settings, "config.json"))
    assert {key: one.shape for key, one in found.items()} == {
        key: tuple(value.shape) for key, value in model.named_parameters()
    }


@pytest.mark.parametrize("name", [name for name, row in FAMILIES.items() if row.prefix])
def test_defaults_are_those_of_transformers(name):
    config = hf.AutoConfig.for_model(name)
    for key, value in FAMILIES[name].defaults.items():
        assert getattr(config, key) == value, key
    settings = json.loads(config.to_json_string()) | {"architectures": [MODEL_MAPPING[type(config)].__name__]}
    plain = PlainConfig(settings, "config.json")
    assert 0 < max_positions(plain) == max_positions(config) < NO_LIMIT
    assert plain.width == config.hidden_size


@pytest.mark.parametrize("reach", [3, 70, 512])
def test_relative_biases_are_those_of_mpnet(reach):
    from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

    biases = torch.randn(32, 4)
    wanted = MPNetEncoder.relative_position_bucket(-torch.arange(1 - reach, reach), num_buckets=32)
    assert np.array_equal(core.relative_table(biases.numpy(), reach), biases[wanted].T.numpy())


# ------------------------------------------------------------ texts


def test_texts_and_pairs_are_read_as_transformers_reads_them(folders):
    folder = folders(id2label={0: "no", 1: "yes"}, label2id={"no": 0, "yes": 1})
    engine, fast = pinscher.Engine(folder), pinscher.load(folder)
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    for texts in (TEXTS, [(text, "the dog sat") for text in TEXTS]):
        found = engine.classify(texts)
        for text, label in zip(texts, found, strict=True):
            pair = text if isinstance(text, tuple) else (text,)
            given = tokenizer(*pair, return_tensors="pt")
            wanted = fast(**given).logits.double().softmax(-1)[0]
            assert list(label.scores.values()) == pytest.approx(wanted.tolist(), abs=1e-12)
            assert label.label == ["no", "yes"][int(wanted.argmax())]
            assert label.score == max(label.scores.values())
    assert engine.classify("a good film") == engine.classify(["a good film"])[0]
    assert engine.classify(("a good film", "bad")) == engine.classify([("a good film", "bad")])[0]


def test_types_of_tokens_are_given_where_transformers_gives_them(own):
    folder = own()
    path, pair = folder / "tokenizer_config.json", ("a good film", "bad")
    told = json.loads(path.read_text())
    found = []
    for names in (told["model_input_names"], ["input_ids", "attention_mask"], None):
        path.write_text(json.dumps({**told, "model_input_names": names} if names else {"tokenizer_class": PLAIN[0]}))
        given = hf.AutoTokenizer.from_pretrained(folder)(*pair, return_tensors="pt")
        found.append(pinscher.Engine(folder).logits([pair]))
        assert np.array_equal(found[-1], pinscher.load(folder)(**given).logits.numpy())
    assert not np.array_equal(found[0], found[1])
    assert np.array_equal(found[1], found[2])


def test_numbers_and_several_labels(folders):
    engine = pinscher.Engine(folders(num_labels=1, problem_type="regression"))
    assert engine.classify("bad").score == float(engine.logits(["bad"])[0, 0])
    several = pinscher.Engine(folders(problem_type="multi_label_classification"))
    logits = torch.from_numpy(several.logits(["bad"])).double()
    assert list(several.classify("bad").scores.values()) == pytest.approx(logits.sigmoid()[0].tolist())


def test_what_is_too_long_is_cut_with_a_warning_or_refused(folders):
    engine = pinscher.Engine(folders())
    long = " ".join(["film"] * 100)
    with pytest.warns(UserWarning, match="1 of 2 texts have more than 70 tokens"):
        found = engine.classify([long, "bad"])
    assert found[0].scores == engine.classify(" ".join(["film"] * 68)).scores
    with pytest.raises(TooLongError, match="text 1 has more than the 70 tokens"):
        engine.classify(["bad", long], truncate=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.classify(["bad", "film"])


@pytest.mark.parametrize("pooling", ["mean_tokens", "cls_token", "max_tokens"])
@pytest.mark.parametrize("modules", [(), ("Normalize",), ("Dense", "Normalize")])
def test_embeddings_are_those_of_the_modules(own, pooling, modules):
    folder = own("bert", "embeddings")
    write_sentences(folder, *modules, pooling=pooling)
    weight = np.random.default_rng(0).normal(size=(20, 48)).astype(np.float32)
    if "Dense" in modules:
        (folder / "0_Dense").mkdir()
        (folder / "0_Dense" / "config.json").write_text('{"activation_function": "torch.nn.modules.activation.Tanh"}')
        save_file({"linear.weight": weight, "linear.bias": weight[:, 0].copy()}, folder / "0_Dense/model.safetensors")
    engine, fast = pinscher.Engine(folder), pinscher.load(folder)
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    found = engine.encode(TEXTS)
    for text, row in zip(TEXTS, found, strict=True):
        hidden = fast(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        wanted = {"mean_tokens": hidden.mean(0), "cls_token": hidden[0], "max_tokens": hidden.amax(0)}[pooling]
        if "Dense" in modules:
            wanted = torch.tanh(torch.from_numpy(weight) @ wanted + torch.from_numpy(weight[:, 0]))
        if "Normalize" in modules:
            wanted = torch.nn.functional.normalize(wanted, dim=0)
        assert np.allclose(row, wanted.numpy(), atol=2e-6)
    assert engine.dimensions == found.shape[1] == (20 if "Dense" in modules else 48)
    assert np.array_equal(engine.encode(TEXTS[0]), found[0])


def test_prompts_lengths_and_dimensions(own):
    folder = own("bert", "embeddings")
    write_sentences(folder, "Normalize", prompts={"query": "who is "}, default_prompt_name="query")
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 6}')
    engine = pinscher.Engine(folder)
    plain = engine.encode("who is a dog", prompt="")
    assert np.array_equal(engine.encode("a dog"), plain)
    assert np.array_equal(engine.encode("a dog", prompt_name="query"), plain)
    with pytest.warns(UserWarning, match="more than 6 tokens"):
        engine.encode("a dog sat on the mat in rome")
    short = engine.encode("a dog", dimensions=7)
    assert short.shape == (7,)
    assert np.linalg.norm(short) == pytest.approx(1)
    raw = engine.encode("a dog", normalize=False)
    assert np.allclose(raw / np.linalg.norm(raw), plain, atol=1e-6)
    assert np.array_equal(engine.encode("a dog", normalize=False, dimensions=7), raw[:7])
    for wrong, message in (
        ({"prompt_name": "passage"}, "the model's prompts: query"),
        ({"dimensions": 49}, "the model has 48"),
        ({"dimensions": 0}, "not possible"),
    ):
        with pytest.raises(InputError, match=message):
            engine.encode("a dog", **wrong)


def test_ranks(folders):
    engine = pinscher.Engine(folders(num_labels=1))
    found = engine.rerank("who sat", TEXTS)
    scores = engine.logits([("who sat", text) for text in TEXTS])[:, 0]
    assert [rank.index for rank in found] == np.argsort(-scores).tolist()
    assert all(rank.score == pytest.approx(1 / (1 + np.exp(-float(scores[rank.index])))) for rank in found)
    assert [rank.score for rank in engine.rerank("who sat", TEXTS, raw=True)] == sorted(map(float, scores))[::-1]
    assert engine.rerank("who sat", []) == []
    with pytest.raises(InputError, match="needs a model that gives one score"):
        pinscher.Engine(folders()).rerank("who", TEXTS)


def test_spans_are_those_of_a_pipeline(folders):
    folder = folders("bert", "tokens", id2label=NER, label2id={name: number for number, name in NER.items()})
    engine = pinscher.Engine(folder)
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    pipe = hf.pipeline("ner", model=pinscher.load(folder), tokenizer=tokenizer, aggregation_strategy="first")
    some = 0
    for text in (*TEXTS, "the dog sat by zz in paris", "who is xyx qq?", ""):
        found = engine.tokens(text)
        wanted = pipe(text) if text else []
        some += len(wanted)
        assert [(one.label, one.start, one.end) for one in found] == [
            (one["entity_group"], one["start"], one["end"]) for one in wanted
        ]
        assert [one.score for one in found] == pytest.approx([float(one["score"]) for one in wanted], abs=1e-5)
        assert all(text[one.start : one.end] == one.text for one in found)
    assert some > 3
    assert engine.tokens(TEXTS) == [engine.tokens(text) for text in TEXTS]


def test_spans_of_a_long_text_reach_its_end(folders):
    folder = folders("bert", "tokens", id2label=NER, label2id={name: number for number, name in NER.items()})
    engine = pinscher.Engine(folder)
    text = " ".join(TEXTS * 20)
    found = engine.tokens(text)
    ends = [one.end for one in found]
    assert ends == sorted(set(ends))
    assert max(ends) > len(text) - 60
    assert all(before.end <= after.start for before, after in itertools.pairwise(found))


def test_the_best_answer_of_all_windows(folders):
    engine = pinscher.Engine(folders("bert", "answers"))
    fast = pinscher.load(folders("bert", "answers"))
    tokenizer = hf.AutoTokenizer.from_pretrained(folders("bert", "answers"))
    for context in ("the dog sat on the mat in rome", " ".join(TEXTS * 12)):
        best = (-np.inf, 0, 0)
        given = tokenizer(
            "who sat",
            context,
            truncation="only_second",
            max_length=70,
            stride=min(128, (70 - 4 - 3) // 2),
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        for row, places in enumerate(given["offset_mapping"]):
            some = {name: torch.tensor([given[name][row]]) for name in ("input_ids", "token_type_ids")}
            made = fast(**some)
            inside = [at for at, part in enumerate(given.sequence_ids(row)) if part == 1]
            for start in inside:
                for end in range(start, min(start + 30, inside[-1] + 1)):
                    sum_ = float(made.start_logits[0, start].double() + made.end_logits[0, end].double())
                    best = max(best, (sum_, -places[start][0], places[end][1]))
        found = engine.answer("who sat", context)
        assert (found.start, found.end) == (-best[1], best[2])
        assert found.text == context[found.start : found.end]
        assert 0 < found.score <= 1
    assert engine.answer("who sat", "") == type(found)("", 0.0, 0, 0)
    with pytest.raises(TooLongError, match="leaves no room"):
        engine.answer("who " * 90, "the dog")


# ------------------------------------------------------------ without torch


def test_nothing_of_it_needs_torch(folders, own):
    embeddings = own("mpnet", "embeddings")
    write_sentences(embeddings, "Normalize")
    places = [folders(num_labels=1), embeddings, folders("bert", "tokens"), folders("bert", "answers")]
    code = f"""{NO_TORCH}
import pinscher
ranks, embeds, tags, answers = (pinscher.Engine(place) for place in {list(map(str, places))!r})
print(ranks.classify("a good film").score, ranks.rerank("who", ["a dog", "bad"])[0].score)
print(embeds.encode("a good film")[:3].tolist(), len(tags.tokens("the dog sat")))
print(answers.answer("who", "the dog").start)
assert not [name for name in sys.modules if name.split(".")[0] in ("torch", "transformers") and sys.modules[name]]
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split()[0] == str(pinscher.Engine(places[0]).classify("a good film").score)


# ------------------------------------------------------------ what is refused


def test_the_wrong_question(folders):
    with pytest.raises(InputError, match=r"needs a base model; .* is for classification: use classify or rerank"):
        pinscher.Engine(folders()).encode("a film")
    with pytest.raises(InputError, match="tokens needs a classifier of tokens"):
        pinscher.Engine(folders("bert", "embeddings")).tokens("a film")
    with pytest.raises(InputError, match="unknown mode"):
        pinscher.Engine(folders(), mode="steam")
    with pytest.raises(InputError, match="is not a folder"):
        pinscher.Engine(folders() / "none")


def test_it_is_copied_and_not_pickled(folders):
    engine = pinscher.Engine(folders())
    assert copy.copy(engine) is copy.deepcopy({"engine": engine})["engine"] is engine
    for dump in (pickle.dumps, lambda made: torch.save(made, io.BytesIO())):
        with pytest.raises(InputError, match="an Engine cannot be pickled: make one of the same folder"):
            dump(engine)


def test_workers_of_a_data_loader_use_it(folders):
    """Fork copies only the thread that forks: a pool of threads must be made anew."""
    engine = pinscher.Engine(folders(), threads=2)
    want = engine.run([[5, 6, 7]])["logits"][0]

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, _):
            return engine.run([[5, 6, 7]])["logits"][0]

    found = list(torch.utils.data.DataLoader(Rows(), batch_size=2, num_workers=2, timeout=60))
    assert len(found) == 2
    assert all(np.array_equal(row, want) for batch in found for row in batch.numpy())


ODD: list[tuple[Any, str]] = [
    (5, "int is no list of texts"),
    ([5], "text 0 is no text"),
    (["a", ("a", "b", "c")], "text 1 is no text"),
    ({"text": "a", "text_pair": "b"}, "dict is no list of texts"),
    ({"a", "b"}, "set is no list of texts"),
    (["a\ud800"], "text 0 is not valid Unicode"),
]


@pytest.mark.parametrize(("texts", "message"), ODD, ids=[message for _, message in ODD])
def test_odd_texts(folders, texts, message):
    with pytest.raises(InputError, match=message):
        pinscher.Engine(folders()).classify(texts)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"input_ids": [[1, 200]]}, "input_ids contain 200: the model has 0 to 98"),
        ({"input_ids": [[1, -1]]}, "input_ids contain -1"),
        ({"input_ids": [1, 2]}, r"must be integers, \[rows, tokens\]"),
        ({"input_ids": [[1.5]]}, "type float64"),
        ({"input_ids": [[1], [1, 2]]}, "no array of numbers"),
        ({"input_ids": np.zeros((1, 71), int)}, "the model takes 1 to 70"),
        ({"input_ids": np.zeros((1, 0), int)}, "0 tokens in a row"),
        ({"input_ids": [[1, 2]], "attention_mask": [[1]]}, r"attention_mask has shape \[1, 1\]"),
        ({"input_ids": [[1, 2]], "token_type_ids": [[1, 2]]}, "token_type_ids contain 2"),
        ({"input_ids": [[1, 2]], "position_ids": [[1, 2]]}, "leave position_ids out"),
    ],
)
def test_odd_arrays(folders, given, message):
    with pytest.raises(InputError, match=message):
        pinscher.Engine(folders()).run(**given)


@pytest.mark.parametrize(
    ("ids", "types", "message"),
    [
        ([[]], None, "row 0 has 0 tokens: the model takes 1 to 70"),
        ([[5], []], None, "row 1 has 0 tokens"),
        ([[5] * 71], None, "row 0 has 71 tokens: the model takes 1 to 70"),
        ([[5.5]], None, "row 0: give a list of token ids, which are whole numbers"),
        ([["a"]], None, "row 0: give a list of token ids"),
        ([[[5]]], None, "row 0: give a list of token ids"),
        ([5], None, "row 0: give a list of token ids"),
        ([[2**70]], None, "row 0: give a list of token ids"),
        (5, None, "lists of lists"),
        ([[99]], None, "input_ids contain 99"),
        ([[5, 6]], [[0]], "row 0 has 2 tokens and 1 types"),
        ([[5, 6]], [], "there are 1 rows, and types for 0"),
        ([[5, 6]], [[0, 2]], "token types contain 2: the model has 0 to 1"),
        ([[5, 6]], [[0, 0.5]], "types of row 0: give a list"),
    ],
)
def test_odd_rows(folders, ids, types, message):
    """An empty row had the bytes of whatever was in memory before as its logits."""
    with pytest.raises(InputError, match=message):
        pinscher.Engine(folders()).vectors(ids, types)


def test_a_text_without_tokens(own):
    folder = own()
    made = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(made | {"post_processor": None}))
    engine = pinscher.Engine(folder)
    with pytest.raises(InputError, match="row 0 has 0 tokens"):
        engine.classify("")
    assert engine.classify("a").label


@pytest.mark.parametrize("padding", [-5, 98, 10**6, 1.5, True, "x"])
def test_positions_that_are_counted_from_no_token(own, padding):
    folder = own("roberta")
    change(folder, pad_token_id=padding)
    with pytest.raises(InputError, match=f"pad_token_id = {padding}"):
        pinscher.Engine(folder)


def test_what_becomes_of_scores_is_known_or_refused(own):
    folder = own("bert", "classification", num_labels=1)
    change(folder, sentence_transformers={"activation_fn": "torch.nn.modules.activation.Tanh"})
    with pytest.raises(InputError, match=r"puts scores through torch\.nn\.modules\.activation\.Tanh: rerank"):
        pinscher.Engine(folder).rerank("a", ["b"])
    assert len(pinscher.Engine(folder).rerank("a", ["b"], raw=True)) == 1


def test_weights_beside_the_model_are_checked_too(own):
    """A dense layer after pooling has no checksum."""
    folder = own("bert", "embeddings")
    write_sentences(folder, "Dense")
    dense = folder / "0_Dense"
    dense.mkdir()
    (dense / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"lacks 0_Dense/model\.safetensors"):
        pinscher.Engine(folder)
    for value, message in ((np.nan, "not finite"), (np.inf, "not finite")):
        weight = np.full((8, 48), value, np.float32)
        save_file({"linear.weight": weight}, dense / "model.safetensors")
        with pytest.raises(InputError, match=message):
            pinscher.Engine(folder)
    save_file({"linear.weight": np.ones((8, 48), np.float32)}, dense / "model.safetensors")
    assert pinscher.Engine(folder).encode("a").shape == (8,)


def test_a_mask_with_holes_where_distances_count(folders):
    with pytest.raises(InputError, match="not its inside"):
        pinscher.Engine(folders("mpnet")).run([[5, 6, 7]], [[1, 0, 1]])


def change(folder: Path, **settings: Any) -> None:
    path = folder / "config.json"
    told = json.loads(path.read_text()) | settings
    path.write_text(json.dumps({name: value for name, value in told.items() if value is not ...}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "gpt2"}, "models of type 'gpt2' need PyTorch: use pinscher.load"),
        ({"model_type": ["bert"]}, "need PyTorch"),
        ({"architectures": ["BertForMaskedLM"]}, "says that it is 'BertForMaskedLM'"),
        ({"architectures": None}, "says that it is ''"),
        ({"architectures": ["RobertaForSequenceClassification"]}, "says that it is 'Roberta' and of type 'bert'"),
        ({"hidden_size": "48"}, "hidden_size = 48: it must be a whole number"),
        ({"hidden_size": ...}, "hidden_size = None"),
        ({"num_attention_heads": 5}, "no multiple of 5"),
        ({"hidden_act": "tanh"}, "does not run this bert model, because of its activation"),
        ({"is_decoder": True}, "because it is a decoder"),
        ({"position_embedding_type": "relative_key"}, "its positions"),
        ({"layer_norm_eps": "x"}, "layer_norm_eps = x"),
        ({"id2label": {"0": "a", "2": "b"}}, "must name the classes from 0 on"),
        ({"id2label": {"0": "a"}}, r"classifier.weight is stored as \[2, 48\], the model to load has \[1, 48\]"),
        ({"num_hidden_layers": 3}, r"lacks bert.encoder.layer.2"),
        ({"vocab_size": 98}, r"word_embeddings.weight is stored as \[99, 48\]"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers = 1000000, but the model has only"),
        ({"quantization_config": ...}, "not stored in pinscher's format"),
        ({"quantization_config": {"quant_method": "pinscher", "version": 2}}, "format version '2'"),
        (
            {"quantization_config": {"quant_method": "pinscher", "version": 1, "shrunk": [[4, 80]]}},
            "sizes of the layers in config.json do not fit",
        ),
        (
            {"quantization_config": {"quant_method": "pinscher", "version": 1, "shrunk": [[3, 80], [4, 80]]}},
            "fewer attention heads than others need PyTorch",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_odd_configs(own, settings, message):
    folder = own()
    change(folder, **settings)
    with pytest.raises(InputError, match=message):
        pinscher.Engine(folder)


def test_a_base_model_may_be_stored_under_its_name(own):
    """As load takes it: a classifier's file as a base model."""
    folder = own("roberta", "classification")
    change(folder, architectures=["RobertaModel"])
    with pytest.raises(InputError, match="lacks pooler"):
        pinscher.Engine(folder)


@pytest.mark.parametrize("mode", ["auto", "fp32", "int8"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("embeddings.LayerNorm.weight", torch.full((48,), float("nan"))),
        ("encoder.layer.0.output.dense.weight", torch.full((48, 80), float("nan"))),
        ("encoder.layer.0.output.dense.weight", torch.full((48, 80), float("inf"), dtype=torch.float16)),
    ],
    ids=["norm", "block", "fp16 block"],
)
@pytest.mark.parametrize("packed", [False, True])
def test_numbers_that_are_none(own, mode, name, value, packed):
    """The checksums are right."""
    folder = own("bert", "embeddings")
    with file.Stored(file.files_of(folder)) as stored:
        tensors = {name: stored.raw(name).clone() for name in stored.names()}
    if packed and value.dim() == 2:
        finite = torch.full_like(value, 1.5)
        bytes_of = [one.flatten()[:1].numpy().tobytes() for one in (finite, value)]
        value = vector(resealed(payload.pack(finite, codecs=("dense",)).replace(*bytes_of)))
    file.write(folder, tensors | {name: value})
    for read in (pinscher.Engine, pinscher.load):
        with pytest.raises(InputError, match=rf"{folder}.*not finite \(NaN or infinity\) in {name}"):
            read(folder, mode=mode)


def test_tokenizers_that_do_not_fit(own):
    folder = own()
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match=r"cannot read .*tokenizer.json"):
        pinscher.Engine(folder).classify("a")
    told = json.loads((folder / "tokenizer_config.json").read_text())
    write_tokenizer(folder, longest=3)
    with pytest.raises(InputError, match="no room for any of the text's"):
        pinscher.Engine(folder).classify("a")
    write_tokenizer(folder)
    made = json.loads((folder / "tokenizer.json").read_text())
    made["model"]["vocab"] |= {f"more{number}": 90 + number for number in range(30)}
    (folder / "tokenizer.json").write_text(json.dumps(made))
    with pytest.raises(InputError, match="it is another model's tokenizer"):
        pinscher.Engine(folder).classify("a")
    assert "pad_token" in told
    write_tokenizer(folder)
    few = json.loads((folder / "tokenizer.json").read_text())
    few["model"]["vocab"] = dict(list(few["model"]["vocab"].items())[:40])
    (folder / "tokenizer.json").write_text(json.dumps(few))
    with pytest.raises(InputError, match="knows 40 tokens, the model 99: it is another model's tokenizer, or damaged"):
        pinscher.Engine(folder).classify("a")
    (folder / "tokenizer.json").unlink()
    engine = pinscher.Engine(folder)
    assert engine.run([[5, 6]])["logits"].shape == (1, 2)
    with pytest.raises(InputError, match=r"has no tokenizer.json"):
        engine.classify("a")
