"""Accelerated models as a user has them: from a model, from a file, compiled, in a pipeline; and what is refused."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors import safe_open

import pinscher
from pinscher.errors import InputError
from tiny_accelerated import DECODERS, batch, model_of, pruned_
from tiny_store import write_tensors


def test_the_class_stays_what_it_was():
    model = model_of("bert")
    one, other = pinscher.accelerate(model), pinscher.accelerate(model)
    assert type(one) is type(other)
    assert (type(one).__module__, type(one).__qualname__) == (type(model).__module__, type(model).__qualname__)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_torch_compile_goes_round_it(name):
    torch.manual_seed(0)
    gpt2 = hf.GPT2Config(vocab_size=99, n_embd=48, n_layer=2, n_head=4, pad_token_id=0)
    model = model_of("bert") if name == "bert" else pruned_(hf.GPT2ForSequenceClassification(gpt2))
    given = batch(2, 12, padded=False)
    compiled = torch.compile(pinscher.accelerate(model, mode="fp32"), backend="eager")
    assert torch.allclose(compiled(**given).logits, model(**given).logits, atol=2e-5)


def test_the_model_is_not_changed():
    model = model_of("bert")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    wanted = model(**batch()).logits
    fast = pinscher.accelerate(model)
    assert fast is not model
    shared = model.bert.embeddings.word_embeddings.weight
    assert fast.bert.embeddings.word_embeddings.weight.data_ptr() == shared.data_ptr()
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(model(**batch()).logits, wanted)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(parameter.requires_grad for parameter in fast.parameters())
    fast.half()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    for refused in (fast.save_pretrained, fast.push_to_hub):
        with pytest.raises(InputError, match="cannot be saved"):
            refused("x")
    with pytest.raises(InputError, match="cannot be changed"):
        fast.set_input_embeddings(shared)


@pytest.mark.parametrize("of", ["fast", "dense"])
def test_memory_that_is_shared_is_still_read(of):
    """`share_memory` frees what a tensor held before, under all that read it."""
    model = model_of("bert")
    fast = pinscher.accelerate(model, mode="fp32")
    wanted = fast(**batch()).logits
    {"fast": fast, "dense": model}[of].share_memory()
    table = model.bert.embeddings.word_embeddings.weight
    spoilt = [torch.full_like(table, 7.0) for _ in range(8)]  # takes the place of what was freed
    assert torch.equal(fast(**batch()).logits, wanted)
    assert len(spoilt) == 8


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "electra-projected", "mpnet"])
@pytest.mark.parametrize("values", ["int8", "fp32", "keep"])
def test_from_the_small_file(name, values, tmp_path):
    model = model_of(name)
    pinscher.save_pretrained(model, tmp_path / "small", values=values, embeddings="int8")
    wanted = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "small").eval()
    fast = pinscher.load(tmp_path / "small", mode="fp32")
    assert type(wanted).__name__ == type(fast).__name__
    assert torch.allclose(fast(**batch()).logits, wanted(**batch()).logits, atol=2e-5)
    plain = pinscher.load(tmp_path / "small", runtime="torch")
    assert torch.equal(plain(**batch()).logits, wanted(**batch()).logits)
    close = pinscher.load(tmp_path / "small", mode="int8")
    assert torch.allclose(close(**batch()).logits, wanted(**batch()).logits, atol=0.1)


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_from_the_small_file(name, tmp_path):
    torch.manual_seed(0)
    model = pruned_(hf.AutoModelForCausalLM.from_config(DECODERS[name]))
    pinscher.save_pretrained(model, tmp_path / "small")
    wanted = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "small").eval()
    fast = pinscher.load(tmp_path / "small", mode="fp32")
    ids = torch.randint(5, 99, (2, 7))
    assert torch.allclose(fast(ids).logits, wanted(ids).logits, atol=3e-5)


def test_loading_never_builds_dense_weights(tmp_path, monkeypatch):
    pinscher.save_pretrained(model_of("bert"), tmp_path / "small")
    from pinscher.store import integers, unpacking

    def refuse(*_: Any) -> None:
        raise AssertionError("a dense matrix was asked for")

    monkeypatch.setattr(unpacking, "unpack", refuse)
    monkeypatch.setattr(integers, "numbers", refuse)
    fast = pinscher.load(tmp_path / "small", mode="int8")
    assert fast(**batch()).logits.isfinite().all()


@pytest.mark.parametrize("values", ["int8", "fp32"])
def test_matrices_are_read_one_at_a_time(values, tmp_path, monkeypatch):
    pinscher.save_pretrained(model_of("bert"), tmp_path / "small", values=values)
    alive: dict[int, weakref.ref[np.ndarray]] = {}
    most = 0

    def watched(read: Any) -> Any:
        def reading(*given: Any) -> Any:
            nonlocal most
            found, head = read(*given)
            some = found.codes if values == "int8" else found
            alive[len(alive)] = weakref.ref(some)
            most = max(most, sum(each() is not None for each in alive.values()))
            return found, head

        return reading

    from pinscher.store import unpacking

    monkeypatch.setattr(unpacking, "unpack_rows", watched(unpacking.unpack_rows))
    pinscher.load(tmp_path / "small")
    assert 1 <= most <= 4  # queries, keys and values are one matrix, the last of the one before may linger


def test_a_pipeline_takes_it():
    texts = ["a good film", "bad", "what a long and winding story that is"]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *sorted({word for text in texts for word in text.split()})]
    tokenizer = hf.BertTokenizer(vocab={word: number for number, word in enumerate(words)})
    model = model_of("bert")
    fast = pinscher.accelerate(model, mode="fp32")
    pipe = hf.pipeline("text-classification", model=fast, tokenizer=tokenizer)
    plain = hf.pipeline("text-classification", model=model, tokenizer=tokenizer)
    for some, other in zip(pipe(texts, batch_size=2), plain(texts), strict=True):
        assert some["label"] == other["label"]
        assert some["score"] == pytest.approx(other["score"], abs=1e-4)


def test_bad_wishes_are_refused(tmp_path: Path):
    model = model_of("bert")
    with pytest.raises(InputError, match="unknown mode"):
        pinscher.accelerate(model, mode="int3")
    for threads in (0, "2", 2.5, 60000):
        with pytest.raises(InputError, match=f"threads {threads!r} is not possible"):
            pinscher.accelerate(model, threads=threads)
    for other in (None, "runs/rte"):
        with pytest.raises(InputError, match="is no model"):
            pinscher.accelerate(other)
    broken = model_of("bert")
    broken.bert.encoder.layer[1].output.dense.weight.data[0, 0] = float("nan")
    with pytest.raises(InputError, match=r"layer\.1\.output\.dense: .*not finite"):
        pinscher.accelerate(broken)
    with pytest.raises(InputError, match="nothing to make fast"):
        pinscher.accelerate(torch.nn.Linear(3, 3))
    with pytest.raises(InputError, match="runtimes"):
        pinscher.load(tmp_path, runtime="steam")
    with pytest.raises(InputError, match="is not a folder"):
        pinscher.load(tmp_path / "none")
    model.save_pretrained(tmp_path / "plain")
    with pytest.raises(InputError, match="not stored in pinscher's format"):
        pinscher.load(tmp_path / "plain")
    linear = pinscher.accelerate(pruned_(hf.AutoModelForCausalLM.from_config(DECODERS["gpt2"]))).transformer.h[0].mlp
    with pytest.raises(InputError, match="47 features"):
        linear.c_fc(torch.zeros(2, 47))


@pytest.mark.parametrize("tied", [False, True])
def test_a_config_that_ties_what_the_file_holds_apart(tied, tmp_path):
    model = pruned_(hf.AutoModelForCausalLM.from_config(DECODERS["llama"]))
    assert not model.config.tie_word_embeddings
    if tied:
        model.lm_head.weight.data.copy_(model.model.embed_tokens.weight.data)
    pinscher.save_pretrained(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    plain, fast = hf.LlamaForCausalLM.from_pretrained(tmp_path).eval(), pinscher.load(tmp_path, mode="fp32")
    head, embeddings = fast.lm_head.weight, fast.model.embed_tokens.weight
    assert torch.equal(head, plain.lm_head.weight)
    assert torch.equal(embeddings, plain.model.embed_tokens.weight)
    assert (head is embeddings) == tied


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(wrong, tmp_path):
    """PyTorch's attention makes numbers of keys that are none; the kernels would not."""
    pinscher.save_pretrained(pruned_(model_of("bert")), tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as stored:
        tensors = {name: stored.get_tensor(name).clone() for name in stored.keys()}  # noqa: SIM118
    name = next(name for name in tensors if name.endswith("layer.0.attention.self.key.bias"))
    tensors[name][3] = wrong
    write_tensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(InputError, match=rf"model.safetensors holds values that are not finite .* in {name}"):
        pinscher.load(tmp_path)


def test_a_config_that_cannot_be_initialised_is_refused_by_name(tmp_path):
    model = model_of("bert")
    pinscher.save_pretrained(pruned_(model), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"initializer_range": -0.8}))
    with pytest.raises(InputError, match=r"cannot make a model of the config.json of .*std >= 0.0"):
        pinscher.load(tmp_path)


def test_without_native_code_a_plain_copy_comes_back(monkeypatch):
    from pinscher import native

    monkeypatch.setattr(native, "core", lambda: None)
    model = model_of("bert").train()
    same = pinscher.accelerate(model)
    assert model.training
    assert not same.training
    assert torch.equal(same(**batch()).logits, model.eval()(**batch()).logits)


def test_without_native_code_bad_wishes_are_refused_too(tmp_path, monkeypatch):
    from pinscher import native

    monkeypatch.setattr(native, "core", lambda: None)
    pinscher.save_pretrained(pruned_(model_of("bert")), tmp_path)
    with pytest.raises(InputError, match="threads -3 is not possible"):
        pinscher.load(tmp_path, threads=-3)
    with pytest.raises(InputError, match="nothing to make fast"):
        pinscher.accelerate(torch.nn.Linear(3, 3))
