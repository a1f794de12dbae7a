"""Plain `from_pretrained` and `pipeline` read the small file after `import pinscher`, exactly, or say why not."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModel, AutoModelForSequenceClassification, PreTrainedTokenizerFast, pipeline

import pinscher
from pinscher.errors import InputError
from pinscher.store import card, file, loading, payload
from pinscher.store.saving import matrices
from pinscher.store.streams import DamagedError
from tiny_models import BERT, HEADS, VOCABULARY, Head
from tiny_store import dequantised, identical, vector, write_tensors

ELECTRA = {**BERT, "embedding_size": 8}
MODELS = HEADS | {
    "electra": Head("classes", "ElectraForSequenceClassification", "ElectraConfig", {**ELECTRA, "num_labels": 3}),
    "roberta-tokens": Head("tokens", "RobertaForTokenClassification", "RobertaConfig", {**BERT, "num_labels": 4}),
    "electra-spans": Head("spans", "ElectraForQuestionAnswering", "ElectraConfig", ELECTRA),
    "bert-lm": Head("masked-lm", "BertForMaskedLM", "BertConfig", BERT),
    "gpt2-untied": Head("causal-lm", "GPT2LMHeadModel", "GPT2Config", HEADS["gpt2-lm"].settings),
    "llama-tied": Head("causal-lm", "LlamaForCausalLM", "LlamaConfig", HEADS["llama-lm"].settings),
}
SPECIAL = {"gpt2-untied": {"tie_word_embeddings": False}, "llama-tied": {"tie_word_embeddings": True}}
AUTO = {
    "classes": "AutoModelForSequenceClassification",
    "regression": "AutoModelForSequenceClassification",
    "tokens": "AutoModelForTokenClassification",
    "spans": "AutoModelForQuestionAnswering",
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
}
HOWS = ("int8", "int6", "int4", "fp16", "bf16", "fp32", "keep")
QUERY = "bert.encoder.layer.0.attention.self.query"


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    monkeypatch.setattr(card, "draw", lambda *_: None)  # test_saving looks at them


def make(name: str, seed: int = 0) -> Any:
    """A pruned model, whose biases and norms are not all zeros and ones."""
    model = MODELS[name].make(seed, **SPECIAL.get(name, {})).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.normal_(generator=generator)
        for found in (matrix for matrix in matrices(model)):
            weight = model.get_parameter(found)
            weight *= torch.rand(weight.shape, generator=generator) < 0.4
    return model


def wanted(model: Any, values: str = "int8", embeddings: str = "keep", head: str = "keep") -> dict[str, torch.Tensor]:
    """The state dict that must come out: every matrix through its own round trip, tied ones alike."""
    hows = {"matrix": values, "embedding": embeddings, "head": head}
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    known = matrices(model)
    for name, tensor in model.state_dict(keep_vars=True).items():
        source = next((n for n in known if model.get_parameter(n) is tensor), None)
        if source is not None:
            state[name] = dequantised(tensor.detach(), hows[known[source].role], known[source].transposed)
    return state


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not identical(found[name], expected[name])] == []


def load(kind: str, folder: Path, **settings: Any) -> Any:
    """A model, all of whose weights were in the folder, and none besides."""
    model, told = getattr(transformers, kind).from_pretrained(folder, output_loading_info=True, **settings)
    assert not any(told[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


@pytest.mark.parametrize("name", MODELS)
def test_every_architecture_loads_exactly(tmp_path, name):
    model = make(name)
    pinscher.save_pretrained(model, tmp_path / "small")
    found = load(AUTO[MODELS[name].kind], tmp_path / "small")
    assert type(found) is type(model)
    same(found.state_dict(), wanted(model))
    packed = [n for n in matrices(model) if matrices(model)[n].role == "matrix"]
    assert packed
    assert not identical(found.state_dict()[packed[0]], model.state_dict()[packed[0]])  # something was quantised
    model.load_state_dict(wanted(model))
    ids = torch.randint(3, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids} | ({"decoder_input_ids": ids} if name == "t5" else {})
    with torch.no_grad():
        assert identical(found.eval()(**batch)[0], model(**batch)[0])


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", ["bert", "gpt2-lm", "llama-lm"])
def test_values_of_every_kind_load_exactly(tmp_path, name, how):
    model = make(name)
    settings = {"values": how, "embeddings": how, "head": how}
    pinscher.save_pretrained(model, tmp_path / "small", **settings)
    found = load(AUTO[MODELS[name].kind], tmp_path / "small")
    same(found.state_dict(), wanted(model, **settings))
    if name == "gpt2-lm":
        assert found.lm_head.weight is found.transformer.wte.weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_type_that_is_asked_for_is_given(tmp_path, dtype):
    model = make("bert")
    pinscher.save_pretrained(model, tmp_path / "small", embeddings="int8", head="bf16")
    found = load("AutoModelForSequenceClassification", tmp_path / "small", dtype=dtype)
    expected = wanted(model, embeddings="int8", head="bf16")
    same(found.state_dict(), {name: tensor.to(dtype) for name, tensor in expected.items()})


def test_a_model_of_half_precision_comes_back_in_it(tmp_path):
    model = make("bert").bfloat16()
    pinscher.save_pretrained(model, tmp_path / "small", embeddings="fp32")
    found = load("AutoModelForSequenceClassification", tmp_path / "small")
    assert {tensor.dtype for tensor in found.parameters()} == {torch.bfloat16}
    assert json.loads((tmp_path / "small" / "config.json").read_text())["dtype"] == "bfloat16"
    same(found.state_dict(), wanted(model, embeddings="fp32"))


def test_shards_load_exactly(tmp_path):
    model = make("roberta")
    pinscher.save_pretrained(model, tmp_path / "small", max_shard_size="2KB", embeddings="int8")
    assert len(file.files_of(tmp_path / "small")) > 2
    found = load("AutoModelForSequenceClassification", tmp_path / "small")
    same(found.state_dict(), wanted(model, embeddings="int8"))


@pytest.mark.parametrize("name", ["bert", "roberta", "electra", "distilbert", "gpt2", "llama", "gpt2-lm"])
def test_the_bare_model_loads_from_the_folder_of_one_with_a_head(tmp_path, name):
    model = make(name)
    pinscher.save_pretrained(model, tmp_path / "small", embeddings="int8", head="int8")
    found = AutoModel.from_pretrained(tmp_path / "small").state_dict()
    prefix = f"{model.base_model_prefix}."
    expected = wanted(model, embeddings="int8", head="int8")
    inside = {n.removeprefix(prefix): tensor for n, tensor in expected.items() if n.startswith(prefix)}
    same({n: tensor for n, tensor in found.items() if n in inside}, inside)
    assert found.keys() - inside.keys() <= {"pooler.dense.weight", "pooler.dense.bias"}  # which the head's model lacks


def test_a_model_with_a_head_loads_from_the_folder_of_a_bare_one(tmp_path):
    model = make("bert")
    pinscher.save_pretrained(model.bert, tmp_path / "small")
    found, told = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "small", num_labels=3, output_loading_info=True
    )
    assert told["missing_keys"] == {"classifier.weight", "classifier.bias"}
    same({f"bert.{n}": t for n, t in found.bert.state_dict().items()}, {
        n: t for n, t in wanted(model).items() if n.startswith("bert.")
    })  # fmt: skip


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[UNK]": 3} | {f"w{number}": number for number in range(4, VOCABULARY)}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    return PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=32, eos_token="[SEP]", **special)


@pytest.mark.parametrize(
    ("name", "task", "asked"),
    [
        ("bert", "text-classification", "w4 w9 w12"),
        ("tokens", "token-classification", "w4 w9 w12"),
        ("distilbert-spans", "feature-extraction", "w4 w9 w12"),
        ("gpt2-lm", "text-generation", "w4 w9 w12"),
    ],
)
def test_pipelines_answer_as_the_model_itself(tmp_path, name, task, asked):
    model = make(name)
    pinscher.save_pretrained(model, tmp_path / "small", tokenizer=tokenizer(), embeddings="int8")
    model.load_state_dict(wanted(model, embeddings="int8"))
    settings = {"max_new_tokens": 4, "do_sample": False} if name == "gpt2-lm" else {}
    found = pipeline(task, model=str(tmp_path / "small"), device="cpu")(asked, **settings)
    asked_of = model.base_model if task == "feature-extraction" else model
    assert found == pipeline(task, model=asked_of, tokenizer=tokenizer(), device="cpu")(asked, **settings)
    assert found


def test_what_was_loaded_is_an_ordinary_model(tmp_path):
    """It is saved as any other, can be trained, copied and stored small again."""
    model = make("gpt2-lm")
    pinscher.save_pretrained(model, tmp_path / "small", embeddings="int8")
    found = load("AutoModelForCausalLM", tmp_path / "small")
    found.save_pretrained(tmp_path / "plain")
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert "quantization_config" not in config
    plain = load("AutoModelForCausalLM", tmp_path / "plain")
    same(plain.state_dict(), wanted(model, embeddings="int8"))
    ids = torch.randint(3, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(0))
    for trained in (found, plain):
        trained.train()
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        trained(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    assert not identical(found.lm_head.weight, wanted(model, embeddings="int8")["lm_head.weight"])
    same(found.state_dict(), plain.state_dict())
    pinscher.save_pretrained(found, tmp_path / "again", values="keep")
    same(load("AutoModelForCausalLM", tmp_path / "again").state_dict(), found.state_dict())
    same(load("AutoModelForCausalLM", tmp_path / "small").state_dict(), wanted(model, embeddings="int8"))


def test_the_trainer_takes_what_was_loaded(tmp_path):
    from tiny_models import arguments, collate, rows

    pinscher.save_pretrained(make("bert"), tmp_path / "small")
    found = load("AutoModelForSequenceClassification", tmp_path / "small")
    before = found.bert.encoder.layer[0].output.dense.weight.detach().clone()
    settings = arguments(tmp_path / "run", max_steps=2)
    transformers.Trainer(found, settings, train_dataset=rows("classes"), data_collator=collate).train()
    assert not identical(found.bert.encoder.layer[0].output.dense.weight, before)


# Files that do not fit or are not whole.
def changed(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replaces stored tensors, checksums made right."""
    with file.Stored(file.files_of(folder)) as stored:
        state = {name: stored.raw(name).clone() for name in stored.names()}
    state |= {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    write_tensors(folder / file.SINGLE, {name: tensor for name, tensor in state.items() if tensor is not None})


@pytest.mark.parametrize("shape", [(16, 8), (1, 16), (16, 1), (16, 17)], ids=str)
def test_a_matrix_of_another_shape_is_refused_by_name(tmp_path, shape):
    pinscher.save_pretrained(make("bert"), tmp_path / "small")
    changed(tmp_path / "small", **{f"{QUERY}.weight": vector(payload.pack(torch.ones(shape), "int8"))})
    with pytest.raises((InputError, RuntimeError), match=rf"{QUERY}.weight"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "small")


@pytest.mark.parametrize("shape", [(1,), (16, 1), (), (3,)], ids=str)
def test_a_bias_of_another_shape_is_refused_by_name(tmp_path, shape):
    """One number would be a bias for all outputs."""
    pinscher.save_pretrained(make("bert"), tmp_path / "small")
    changed(tmp_path / "small", **{f"{QUERY}.bias": torch.ones(shape)})
    with pytest.raises((InputError, RuntimeError), match=rf"{QUERY}.bias"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "small")


@pytest.mark.parametrize("kind", ["packed", "plain", "bias"])
def test_integers_where_the_model_has_real_numbers_are_refused(tmp_path, kind):
    pinscher.save_pretrained(make("bert"), tmp_path / "small")
    whole = torch.ones(16, 16, dtype=torch.int64)
    made = {"packed": vector(payload.pack(whole)), "plain": whole, "bias": whole[0]}[kind]
    changed(tmp_path / "small", **{f"{QUERY}.{'bias' if kind == 'bias' else 'weight'}": made})
    with pytest.raises((InputError, RuntimeError), match=QUERY):
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "small")


def test_a_damaged_matrix_stops_the_loading_and_is_named(tmp_path):
    pinscher.save_pretrained(make("bert"), tmp_path / "small")
    path = tmp_path / "small" / file.SINGLE
    data = path.read_bytes()
    for place in range(8, len(data), 401):
        path.write_bytes(data[:place] + bytes([data[place] ^ 64]) + data[place + 1 :])
        with pytest.raises(DamagedError, match=str(path)):
            AutoModelForSequenceClassification.from_pretrained(tmp_path / "small")


@pytest.mark.parametrize("trick", ["above", "absolute", "left out", "twice"])
def test_an_index_with_tricks_never_gives_a_model(tmp_path, trick):
    """Weights from elsewhere, or random ones where a file was left out, would look like a model."""
    pinscher.save_pretrained(make("bert"), tmp_path / "small", max_shard_size="4KB")
    shutil.copytree(tmp_path / "small", tmp_path / "other")
    path = tmp_path / "small" / file.INDEX
    index = json.loads(path.read_text())
    places = index["weight_map"]
    lost, other = sorted(set(places.values()))[-2:]
    if trick == "twice":
        shutil.copy(tmp_path / "small" / lost, tmp_path / "small" / other)
    start = {"above": "../other/", "absolute": f"{tmp_path}/other/"}.get(trick, "")
    places = {name: start + (other if trick == "left out" and p == lost else p) for name, p in places.items()}
    path.write_text(json.dumps(index | {"weight_map": places}))
    with pytest.raises((InputError, OSError, RuntimeError)):
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "small")


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_a_newer_format_is_refused_with_advice(tmp_path, version):
    pinscher.save_pretrained(make("bert"), tmp_path / "small")
    path = tmp_path / "small" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["version"] = version
    path.write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"format version .*, this pinscher reads 1: update pinscher"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "small")


def test_a_plain_model_is_not_taken_for_a_small_one(tmp_path):
    make("bert").save_pretrained(tmp_path / "plain")
    with pytest.raises(InputError, match=r"pinscher\.save_pretrained stores it so"):
        AutoModelForSequenceClassification.from_pretrained(
            tmp_path / "plain", quantization_config=loading.PinscherConfig()
        )


def test_no_thread_is_left_behind(tmp_path):
    pinscher.save_pretrained(make("bert"), tmp_path / "small", embeddings="int8")
    before = threading.active_count()
    found = load("AutoModelForSequenceClassification", tmp_path / "small")
    deadline = time.monotonic() + 20
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before
    assert found is not None


# Imports, each in a process of its own.
LOAD = """
from transformers import AutoModelForSequenceClassification
model = AutoModelForSequenceClassification.from_pretrained("FOLDER")
print("sum", float(sum(parameter.double().sum() for parameter in model.parameters())))
"""
ORDERS = {
    "pinscher first": "import pinscher, sys; assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)",
    "transformers first": "import transformers.quantizers.auto, transformers.modeling_utils, pinscher",
    "never": "",
}


@pytest.mark.parametrize("order", ORDERS)
def test_the_order_of_imports_does_not_matter_but_the_import_does(tmp_path, order):
    """Without pinscher the loading must fail: transformers makes up weights that it does not find."""
    pinscher.save_pretrained(make("bert"), tmp_path / "small")
    code = ORDERS[order] + LOAD.replace("FOLDER", str(tmp_path / "small"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, timeout=300)
    if order == "never":
        assert done.returncode != 0
        assert "sum" not in done.stdout
        assert "mismatch" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        total = float(sum(tensor.double().sum() for tensor in wanted(make("bert")).values()))
        assert float(done.stdout.split()[-1]) == pytest.approx(total, rel=1e-12)
