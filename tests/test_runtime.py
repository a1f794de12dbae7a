"""Accelerated models against the models they were made from: every family, masks, batches, threads, files."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
import transformers as hf
from hypothesis import strategies as st

import pinscher
from pinscher.errors import InputError
from pinscher.runtime import choice, kernels
from pinscher.runtime.families import FAMILIES
from pinscher.runtime.sparse import SparseLinear
from tiny_models import HEADS, VOCABULARY

SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 70,
}
CONFIGS: dict[str, Any] = {
    "bert": hf.BertConfig(**SIZES),
    "bert-tanh": hf.BertConfig(**SIZES, hidden_act="gelu_new"),
    "bert-relu": hf.BertConfig(**SIZES, hidden_act="relu"),
    "camembert": hf.CamembertConfig(**SIZES),
    "distilbert": hf.DistilBertConfig(
        vocab_size=99, dim=48, n_layers=2, n_heads=4, hidden_dim=80, max_position_embeddings=70
    ),
    "electra": hf.ElectraConfig(**SIZES, embedding_size=48),
    "electra-projected": hf.ElectraConfig(**SIZES, embedding_size=32),
    "mpnet": hf.MPNetConfig(**SIZES),
    "roberta": hf.RobertaConfig(**SIZES, type_vocab_size=1),
    "xlm-roberta": hf.XLMRobertaConfig(**SIZES),
}


def pruned_(model: Any, density: float = 0.2) -> Any:
    """Random zeros in the blocks; biases and norms that are not what they start as."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if (parameter.dim() == 2 and "layer" in name) or (".h." in name and parameter.dim() == 2):
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.data *= torch.rand(parameter.shape, generator=generator) < density
        elif parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def model_of(name: str, head: Any = hf.AutoModelForSequenceClassification) -> Any:
    torch.manual_seed(0)
    return pruned_(head.from_config(CONFIGS[name]))


def batch(rows: int = 3, tokens: int = 37, padded: bool = True) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * tokens)
    ids = torch.randint(5, 99, (rows, tokens), generator=generator)
    mask = torch.ones_like(ids)
    if padded and tokens > 4:
        mask[0, tokens // 2 :] = 0
        mask[-1, tokens - 3 :] = 0
        ids[mask == 0] = 1
    return {"input_ids": ids, "attention_mask": mask}


def test_every_family_is_tried():
    assert {config.model_type for config in CONFIGS.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", CONFIGS)
def test_outputs_are_those_of_the_model(name):
    model = model_of(name)
    fast = pinscher.accelerate(model, mode="fp32")
    for rows, tokens in ((1, 1), (1, 8), (3, 37), (2, 64), (5, 65)):
        given = batch(rows, tokens)
        wanted, found = model(**given), fast(**given)
        assert type(found) is type(wanted)
        assert torch.allclose(found.logits, wanted.logits, atol=2e-5)
    assert isinstance(fast, type(model))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_bare_model_too(name):
    model = model_of(name, hf.AutoModel)
    fast = pinscher.accelerate(model, mode="fp32")
    given = batch()
    seen = given["attention_mask"].bool()
    wanted = model(**given, output_hidden_states=True)
    found = fast(**given, output_hidden_states=True)
    assert type(found) is type(wanted)
    assert torch.allclose(found.last_hidden_state[seen], wanted.last_hidden_state[seen], atol=2e-5)
    assert (found.last_hidden_state[~seen] == 0).all()
    assert len(found.hidden_states) == len(wanted.hidden_states)
    for some, other in zip(found.hidden_states, wanted.hidden_states, strict=True):
        assert torch.allclose(some[seen], other[seen], atol=2e-5)
    as_tuple = fast(**given, return_dict=False)
    assert torch.equal(as_tuple[0], found.last_hidden_state)
    assert ("pooler_output" in found) == ("pooler_output" in wanted)


@pytest.mark.parametrize("mode", ["fp32", "int8"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_classifier_computes_the_end_of_the_last_layer_for_first_tokens_only(name, mode):
    fast = pinscher.accelerate(model_of(name), mode=mode)
    last = fast.base_model.fast_layers.packed[-1]
    given = batch(3, 20)
    before = [matrix.work for matrix in last]
    alone = fast(**given).logits
    done = [(m.work - b) // m.nonzeros for m, b in zip(last, before, strict=True)]
    assert done == [int(given["attention_mask"].sum()), 3, 3, 3]  # keys and values are of all tokens
    assert torch.equal(fast(**given, output_hidden_states=True).logits, alone)
    assert fast.base_model(**given)[0].shape == (3, 20, 48)


def watch(fast: Any, where: str) -> tuple[list[Any], Any]:
    """The shapes of the last hidden states that somebody sees, and how to stop looking."""
    seen: list[Any] = []
    base = fast.base_model
    if where == "base":
        return seen, base.register_forward_hook(lambda _, __, out: seen.append(out[0].shape)).remove
    if where == "anywhere":
        look = torch.nn.modules.module.register_module_forward_hook(
            lambda module, _, out: seen.append(out[0].shape) if module is base else None
        )
        return seen, look.remove
    if where == "method":
        own = base.forward
        base.forward = lambda *a, **k: [out := own(*a, **k), seen.append(out[0].shape)][0]
        return seen, lambda: vars(base).pop("forward")
    reader = fast.classifier if getattr(base, "pooler", None) is None else base.pooler
    return seen, reader.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape)).remove


@pytest.mark.parametrize("where", ["base", "anywhere", "method", "reader"])
@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_whoever_looks_on_sees_all_tokens(name, where):
    fast, given = pinscher.accelerate(model_of(name), mode="fp32"), batch(3, 20)
    alone = fast(**given).logits
    seen, stop = watch(fast, where)
    assert torch.equal(fast(**given).logits, alone)
    stop()
    assert seen == [(3, 20, 48)]
    assert torch.equal(fast(**given).logits, alone)
    assert len(seen) == 1


class Mean(torch.nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.mean(1)[:, :2]


HEADS_OF_ONES_OWN = {
    "mean": Mean,
    "torch": lambda: torch.nn.Sequential(torch.nn.Flatten(1), torch.nn.Linear(12 * 48, 2)),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("head", HEADS_OF_ONES_OWN)
def test_a_head_that_may_read_all_tokens_gets_them(head, when):
    model, given = model_of("roberta"), batch(2, 12, padded=False)
    own = HEADS_OF_ONES_OWN[head]().eval()
    fast = pinscher.accelerate(model, mode="fp32")
    model.classifier = own
    if when == "before":
        fast = pinscher.accelerate(model, mode="fp32")
    else:
        fast.classifier = own
    assert torch.allclose(fast(**given).logits, model(**given).logits, atol=2e-5)


def test_another_model_that_is_called_meanwhile_computes_all_tokens():
    outer, inner = pinscher.accelerate(model_of("bert")), pinscher.accelerate(model_of("bert", hf.AutoModel))
    given, seen = batch(2, 12), []
    outer.dropout.register_forward_hook(lambda *_: seen.append(inner(**given)[0].shape))
    outer(**given)
    assert seen == [(2, 12, 48)]


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


def test_a_row_whose_first_token_is_hidden():
    fast = pinscher.accelerate(model_of("bert"), mode="fp32")
    given = batch(2, 12, padded=False)
    given["attention_mask"][1, :3] = 0
    assert torch.equal(fast(**given).logits, fast(**given, output_hidden_states=True).logits)


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "electra-projected"])
def test_holes_in_the_mask_are_holes(name):
    model = model_of(name, hf.AutoModel)
    fast = pinscher.accelerate(model, mode="fp32")
    given = batch(3, 20, padded=False)
    given["attention_mask"][:, 4:9] = 0
    given["attention_mask"][1, 0] = 0
    seen = given["attention_mask"].bool()
    wanted, found = model(**given).last_hidden_state, fast(**given).last_hidden_state
    assert torch.allclose(found[seen], wanted[seen], atol=2e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_other_ways_to_say_it(name):
    model = model_of(name, hf.AutoModel)
    fast = pinscher.accelerate(model, mode="fp32")
    ids = batch(2, 9)["input_ids"]
    embeds = model.get_input_embeddings()(ids)
    pairs: list[dict[str, Any]] = [{"input_ids": ids}, {"inputs_embeds": embeds}]
    if name not in ("mpnet", "distilbert"):
        types = (torch.arange(9) > 4).long().expand(2, 9).contiguous()
        pairs.append({"input_ids": ids, "token_type_ids": types % model.config.type_vocab_size})
    pairs.append({"input_ids": ids, "position_ids": torch.arange(9).flip(0).expand(2, 9) + 2})
    for given in pairs:
        wanted, found = model(**given).last_hidden_state, fast(**given).last_hidden_state
        assert torch.allclose(found, wanted, atol=2e-5), list(given)


def test_int8_is_close_and_auto_is_no_worse():
    model = model_of("bert", hf.AutoModel)
    given = batch()
    seen = given["attention_mask"].bool()
    wanted = model(**given).last_hidden_state[seen]
    for mode in ("int8", "auto"):
        found = pinscher.accelerate(model, mode=mode)(**given).last_hidden_state[seen]
        assert 0 < (found - wanted).norm() / wanted.norm() < 0.03


def kinds_of(fast: Any) -> list[str]:
    return [matrix.kind for layer in fast.base_model.fast_layers.packed for matrix in layer]


def test_auto_gives_up_int8_where_it_hurts(monkeypatch):
    model = model_of("bert", hf.AutoModel)
    assert kinds_of(pinscher.accelerate(model)) == ["i8"] * 8
    monkeypatch.setattr(choice, "LIMIT", 0.0)
    assert kinds_of(pinscher.accelerate(model)) == ["f32"] * 8
    found = []
    for limit in (4e-3, 3e-3, 2e-3, 1e-3, 5e-4):
        monkeypatch.setattr(choice, "LIMIT", limit)
        found.append(set(kinds_of(pinscher.accelerate(model))))
    assert {"f32", "i8"} in found


def test_nearly_all_work_is_done_in_sparse_kernels():
    """Of every product with a prunable matrix, counted in the kernels."""
    model = model_of("bert")
    fast = pinscher.accelerate(model, mode="int8")
    matrices = [matrix for layer in fast.bert.fast_layers.packed for matrix in layer]
    before = [matrix.work for matrix in matrices]
    fast(**batch(2, 16, padded=False), output_hidden_states=True)
    weights = [m.weight for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and ".layer." in n]
    wanted = 32 * sum(int(weight.count_nonzero()) for weight in weights)
    done = sum(m.work - b for m, b in zip(matrices, before, strict=True) if m.kind != "dense")
    assert done >= 0.95 * wanted
    assert set(kinds_of(fast)) == {"i8"}


def test_what_is_faster_dense_stays_dense():
    torch.manual_seed(0)
    model = hf.AutoModel.from_config(CONFIGS["bert"]).eval()
    weights = kernels.Weights(dense=model.encoder.layer[0].output.dense.weight)
    assert weights.density == 1
    assert choice.kind_of(weights, "int8") == choice.kind_of(weights, "fp32") == "dense"
    with pytest.warns(UserWarning, match="stays in PyTorch"):
        same = pinscher.accelerate(model)
    assert torch.equal(same(**batch()).last_hidden_state, model(**batch()).last_hidden_state)


def test_a_model_that_is_partly_dense():
    model = model_of("bert", hf.AutoModel)
    generator = torch.Generator().manual_seed(0)
    for layer in model.encoder.layer:
        layer.output.dense.weight.data = torch.randn(48, 80, generator=generator) * 0.2
    fast = pinscher.accelerate(model, mode="fp32")
    assert kinds_of(fast) == ["f32", "f32", "f32", "dense"] * 2
    given = batch()
    seen = given["attention_mask"].bool()
    assert torch.allclose(fast(**given).last_hidden_state[seen], model(**given).last_hidden_state[seen], atol=2e-5)


def test_several_threads_at_once():
    model = model_of("bert")
    fast = pinscher.accelerate(model, mode="fp32", threads=2)
    work = [batch(2, tokens) for tokens in (5, 9, 33, 64, 17, 40)]
    wanted = [model(**given).logits for given in work]
    wrong: list[int] = []

    def go(start: int) -> None:
        for turn in range(30):
            place = (start + turn) % len(work)
            if not torch.allclose(fast(**work[place]).logits, wanted[place], atol=2e-5):
                wrong.append(place)

    threads = [threading.Thread(target=go, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@hypothesis.settings(max_examples=15, deadline=None)
@hypothesis.given(
    lengths=st.lists(st.integers(1, 330), min_size=1, max_size=4),
    name=st.sampled_from(["bert", "mpnet"]),
    mode=st.sampled_from(["fp32", "int8"]),
    threads=st.sampled_from([2, 3]),
)
@hypothesis.example(lengths=[128], name="bert", mode="int8", threads=2)  # cut in the middle of the only sequence
@hypothesis.example(lengths=[70, 1, 200], name="mpnet", mode="fp32", threads=3)
@hypothesis.example(lengths=[186, 200], name="bert", mode="int8", threads=6)  # nothing is left for the last one
def test_threads_only_divide_the_work(lengths, name, mode, threads):
    """However tokens are cut up, what comes out is that of one thread to the last bit."""
    config = type(CONFIGS[name])(**{**SIZES, "max_position_embeddings": 340})
    torch.manual_seed(0)
    model = pruned_(hf.AutoModelForSequenceClassification.from_config(config))
    generator = torch.Generator().manual_seed(sum(lengths))
    ids = torch.randint(3, 99, (len(lengths), max(lengths)), generator=generator)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    given = {"input_ids": ids * mask + (1 - mask), "attention_mask": mask}
    alone, together = (pinscher.accelerate(model, mode=mode, threads=number) for number in (1, threads))
    assert torch.equal(together(**given).logits, alone(**given).logits)  # the last layer is for first tokens only
    wanted = alone(**given, output_hidden_states=True).hidden_states
    found = together(**given, output_hidden_states=True).hidden_states
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    if mode == "fp32":
        assert torch.allclose(together(**given).logits, model(**given).logits, atol=5e-5)


@pytest.mark.parametrize("isa", kernels.core().isas())
def test_every_instruction_set_runs_whole_models(isa, monkeypatch):
    monkeypatch.setenv("PINSCHER_ISA", isa)
    model = model_of("bert")
    fast = pinscher.accelerate(model, mode="fp32")
    assert torch.allclose(fast(**batch()).logits, model(**batch()).logits, atol=2e-5)


def test_an_unknown_instruction_set_is_refused(monkeypatch):
    monkeypatch.setenv("PINSCHER_ISA", "abacus")
    with pytest.raises(InputError, match="this machine has"):
        pinscher.accelerate(model_of("bert"))


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_models_of_other_precision(dtype):
    model = model_of("bert")
    wanted = model(**batch()).logits
    for fast in (pinscher.accelerate(model_of("bert").to(dtype), mode="fp32"), pinscher.accelerate(model).to(dtype)):
        found = fast(**batch(), output_hidden_states=True)
        assert found.logits.dtype == found.hidden_states[0].dtype == dtype
        assert torch.allclose(found.logits.float(), wanted, atol=0.05)


def test_arguments_without_names_are_the_models_own():
    ids, mask = batch(2, 6, padded=False)["input_ids"], torch.ones(2, 6, dtype=torch.long)
    positions = torch.arange(9, 15).expand(2, 6)
    for name, third in (("mpnet", positions), ("bert", torch.ones_like(ids)), ("roberta", torch.zeros_like(ids))):
        model = model_of(name, hf.AutoModel)
        fast = pinscher.accelerate(model, mode="fp32")
        found, wanted = fast(ids, mask, third), model(ids, mask, third)
        assert torch.allclose(found.last_hidden_state, wanted.last_hidden_state, atol=2e-5), name
    model = model_of("distilbert", hf.AutoModel)
    embeds = torch.randn(2, 6, 48)
    found, wanted = pinscher.accelerate(model, mode="fp32")(None, mask, embeds), model(None, mask, embeds)
    assert torch.allclose(found.last_hidden_state, wanted.last_hidden_state, atol=2e-5)


def test_left_padding_where_distances_count():
    model = model_of("mpnet", hf.AutoModel)
    ids = batch(2, 8, padded=False)["input_ids"]
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 0], [1] * 8])
    ids[mask == 0] = model.config.pad_token_id
    found = pinscher.accelerate(model, mode="fp32")(input_ids=ids, attention_mask=mask).last_hidden_state
    wanted = model(input_ids=ids, attention_mask=mask).last_hidden_state
    assert torch.allclose(found[mask.bool()], wanted[mask.bool()], atol=2e-5)
    with pytest.raises(InputError, match="not its inside"):
        pinscher.accelerate(model)(input_ids=ids, attention_mask=torch.tensor([[1, 0, 1, 1, 1, 1, 1, 1]] * 2))


def test_auto_looks_at_decoders_too():
    torch.manual_seed(0)
    model = pruned_(hf.AutoModelForCausalLM.from_config(DECODERS["llama"]))
    usual = {module.matrix.kind for module in pinscher.accelerate(model).modules() if isinstance(module, SparseLinear)}
    assert usual == {"i8"}
    for layer in model.model.layers:  # features that stand out, as trained models have them
        layer.mlp.down_proj.weight.data[3] *= 200
        layer.self_attn.o_proj.weight.data[3] *= 200
    fast = pinscher.accelerate(model)
    kinds = [module.matrix.kind for module in fast.modules() if isinstance(module, SparseLinear)]
    assert "f32" in kinds
    ids = torch.randint(5, 99, (2, 30))
    found, wanted = (some.base_model(ids).last_hidden_state for some in (fast, model))
    assert (found - wanted).norm() / wanted.norm() < 0.03


@pytest.mark.parametrize("name", HEADS)
def test_every_architecture_runs(name):
    model = pruned_(HEADS[name].make())
    fast = pinscher.accelerate(model, mode="fp32")
    inputs = {"input_ids": torch.randint(3, VOCABULARY, (2, 9))}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    found, wanted = fast(**inputs), model(**inputs)
    for key in ("logits", "start_logits"):
        if key in wanted:
            assert torch.allclose(found[key], wanted[key], atol=1e-4)


DECODERS = {
    "gpt2": hf.GPT2Config(
        vocab_size=99, n_embd=48, n_layer=2, n_head=4, n_positions=64, eos_token_id=0, bos_token_id=0
    ),
    "llama": hf.LlamaConfig(**{**SIZES, "num_key_value_heads": 2}, eos_token_id=0, bos_token_id=0),
}


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_generate_the_same(name):
    torch.manual_seed(0)
    model = pruned_(hf.AutoModelForCausalLM.from_config(DECODERS[name]))
    fast = pinscher.accelerate(model, mode="fp32")
    assert sum(isinstance(module, SparseLinear) for module in fast.modules()) == (8 if name == "gpt2" else 14)
    ids = torch.randint(5, 99, (2, 7))
    assert torch.allclose(fast(ids).logits, model(ids).logits, atol=3e-5)
    how = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(fast.generate(ids, **how), model.generate(ids, **how))
    assert torch.equal(fast.generate(ids, **how, num_beams=3), model.generate(ids, **how, num_beams=3))


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
    from pinscher.store import payload

    def refuse(*_: Any) -> None:
        raise AssertionError("a dense matrix was asked for")

    monkeypatch.setattr(payload, "unpack", refuse)
    monkeypatch.setattr(kernels.Weights, "_numbers", refuse)
    fast = pinscher.load(tmp_path / "small", mode="int8")
    assert fast(**batch()).logits.isfinite().all()


@pytest.mark.parametrize("values", ["int8", "fp32"])
def test_matrices_are_read_one_at_a_time(values, tmp_path, monkeypatch):
    pinscher.save_pretrained(model_of("bert"), tmp_path / "small", values=values)
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0

    def watched(read: Any) -> Any:
        def reading(*given: Any) -> Any:
            nonlocal most
            found = read(*given)
            alive.add(found.codes if values == "int8" else found)
            most = max(most, len(alive))
            return found

        return reading

    from pinscher.store import payload

    monkeypatch.setattr(payload, "unpack_rows", watched(payload.unpack_rows))
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


ODD: list[tuple[dict[str, Any], str]] = [
    ({}, "either input_ids or inputs_embeds"),
    ({"input_ids": torch.zeros(2, 71, dtype=torch.long)}, "71 tokens in a row: the model takes 70"),
    ({"input_ids": torch.zeros(7, dtype=torch.long)}, "1 dimensions"),
    ({"input_ids": torch.zeros(2, 7)}, "float32"),
    ({"input_ids": torch.zeros(2, 7, dtype=torch.long), "attention_mask": torch.ones(2, 8)}, "shape"),
    ({"input_ids": torch.zeros(2, 7, dtype=torch.long), "attention_mask": torch.ones(2, 1, 7, 7)}, "shape"),
    ({"input_ids": torch.zeros(2, 7, dtype=torch.long), "token_type_ids": torch.zeros(2, 6).long()}, "token_type_ids"),
    ({"input_ids": torch.zeros(2, 7, dtype=torch.long), "token_type_ids": torch.zeros(2, 7)}, "float32"),
    ({"input_ids": torch.zeros(2, 7, dtype=torch.long), "output_attentions": True}, "output_attentions"),
    ({"input_ids": [[1, 2]]}, "must be tensors, not list"),
]


@pytest.mark.parametrize(("given", "message"), ODD, ids=[message for _, message in ODD])
def test_odd_input_is_refused(given, message):
    fast = pinscher.accelerate(model_of("bert", hf.AutoModel))
    with pytest.raises(InputError, match=message):
        fast(**given)


def test_tokens_out_of_range_are_refused():
    fast = pinscher.accelerate(model_of("bert", hf.AutoModel))
    for token in (-1, 99, 2**40):
        with pytest.raises(IndexError):
            fast(input_ids=torch.tensor([[5, token]]))


def test_empty_and_wholly_masked_rows():
    fast = pinscher.accelerate(model_of("bert", hf.AutoModel))
    assert fast(input_ids=torch.zeros(0, 7, dtype=torch.long)).last_hidden_state.shape == (0, 7, 48)
    ids = batch(2, 6, padded=False)["input_ids"]
    mask = torch.tensor([[1] * 6, [0] * 6])
    found = fast(input_ids=ids, attention_mask=mask).last_hidden_state
    assert (found[1] == 0).all()
    assert torch.equal(found[:1], fast(input_ids=ids[:1]).last_hidden_state)


def test_nan_in_one_row_stays_there():
    model = model_of("bert", hf.AutoModel)
    fast = pinscher.accelerate(model)
    embeds = torch.randn(2, 6, 48)
    clean = fast(inputs_embeds=embeds).last_hidden_state
    embeds[0, 3] = float("nan")
    found = fast(inputs_embeds=embeds).last_hidden_state
    assert found[0].isnan().all()
    assert torch.equal(found[1], clean[1])


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


def test_without_native_code_a_plain_copy_comes_back(monkeypatch):
    from pinscher import native

    monkeypatch.setattr(native, "core", lambda: None)
    model = model_of("bert").train()
    same = pinscher.accelerate(model)
    assert model.training
    assert not same.training
    assert torch.equal(same(**batch()).logits, model.eval()(**batch()).logits)
