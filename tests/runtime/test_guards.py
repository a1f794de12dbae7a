"""What a fast model cannot do is refused in one sentence; what it can do is right whatever torch is set to."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import save_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import pinscher
from pinscher.errors import InputError
from pinscher.runtime import kernels
from pinscher.runtime.sparse import SparseLinear, assemble, weights_of
from tiny_accelerated import CONFIGS, DECODERS, batch, model_of, pruned_

T5 = hf.T5Config(
    vocab_size=99, d_model=48, d_ff=80, d_kv=12, num_layers=2, num_heads=4, decoder_start_token_id=0, eos_token_id=0
)


def decoder(name: str = "gpt2") -> Any:
    torch.manual_seed(0)
    if name == "t5":
        return pruned_(hf.T5ForConditionalGeneration(T5))
    return pruned_(hf.AutoModelForCausalLM.from_config(DECODERS[name]))


ORIGINALS = {
    "classifier": lambda: model_of("bert"),
    "base": lambda: model_of("bert", hf.AutoModel),
    "answers": lambda: model_of("bert", hf.AutoModelForQuestionAnswering),
    "decoder": decoder,
}
IDS = batch(2, 8, padded=False)["input_ids"]


def fast_of(kind: str) -> Any:
    return pinscher.accelerate(ORIGINALS[kind](), mode="fp32")


# ------------------------------------------------------------ tracing


@pytest.mark.parametrize("kind", ORIGINALS)
def test_a_fast_model_is_not_traced(kind):
    fast = fast_of(kind)
    with pytest.raises(InputError, match=r"cannot be traced or exported \(take the model it was made from"):
        torch.jit.trace(fast, (IDS,), strict=False)
    with pytest.raises(InputError, match=r"cannot be traced or exported \(take the model it was made from"):
        torch.export.export(fast, (IDS,))
    with pytest.raises(InputError, match=r"cannot be traced or exported \(take the model it was made from"):
        torch.onnx.export(fast, (IDS,), io.BytesIO(), dynamo=False)
    with torch.no_grad():
        assert fast(IDS)[0].isfinite().all()  # it goes on


@pytest.mark.parametrize("made_of", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("kind", [*ORIGINALS, "llama"])
def test_a_fast_model_leaves_no_graph_of_its_operators(kind, made_of):
    fast = pinscher.accelerate(decoder("llama"), mode="fp32") if kind == "llama" else fast_of(kind)
    with pytest.raises(InputError, match=r"cannot be traced or exported \(take the model it was made from"):
        make_fx(lambda ids: fast(ids)[0], tracing_mode=made_of, _allow_non_fake_inputs=True)(IDS)
    with torch.no_grad():
        assert fast(IDS)[0].isfinite().all()


def test_a_layer_alone_leaves_none_either():
    linear = next(module for module in fast_of("decoder").modules() if isinstance(module, SparseLinear))
    with pytest.raises(InputError, match="cannot be traced"):
        make_fx(linear)(torch.zeros(2, linear.in_features))


@pytest.mark.parametrize("kind", ["base", "decoder"])
def test_tensors_without_numbers_are_refused(kind):
    fast = fast_of(kind)
    with pytest.raises(InputError, match="is on meta: an accelerated model runs on the CPU"):
        fast(IDS.to("meta"))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, pytest.raises(InputError, match="is a fake tensor"):
        fast(mode.from_tensor(IDS))


def test_compiling_leaves_native_code_alone():
    model, given = model_of("bert"), batch(3, 12)
    given["attention_mask"][1, :4] = 0
    compiled = torch.compile(pinscher.accelerate(model, mode="fp32"), backend="eager")
    assert torch.allclose(compiled(**given).logits, model(**given).logits, atol=2e-5)
    with pytest.raises(InputError, match="input_ids contain 99"):
        compiled(input_ids=torch.full((1, 4), 99))


def test_compiling_a_decoder_does_too():
    model = decoder("llama")
    compiled = torch.compile(pinscher.accelerate(model, mode="fp32"), backend="eager")
    wanted = model(input_ids=IDS, attention_mask=MASK).logits
    for mask in (MASK, MASK.tolist()):
        assert torch.allclose(compiled(input_ids=IDS, attention_mask=mask).logits, wanted, atol=2e-5)


# ------------------------------------------------------------ pickling, copying


@pytest.mark.parametrize("kind", ORIGINALS)
def test_a_fast_model_is_copied_not_pickled(kind):
    fast = fast_of(kind)
    wanted = fast(IDS)[0]
    for store in (pickle.dumps, lambda it: torch.save(it, io.BytesIO()), ForkingPickler.dumps):
        with pytest.raises(InputError, match=r"cannot be pickled: save the model it was made from .*load that in"):
            store(fast)
    for made in (copy.copy(fast), copy.deepcopy(fast)):
        assert made is not fast
        assert type(made) is type(fast)
        assert torch.equal(made(IDS)[0], wanted)
    own = copy.deepcopy(fast)
    own.config.pad_token_id = 7
    assert fast.config.pad_token_id != 7
    for part, twin in zip(fast.parameters(), own.parameters(), strict=True):
        assert torch.equal(part, twin)
        assert part.data_ptr() != twin.data_ptr()


@pytest.mark.parametrize("kind", [*ORIGINALS, "llama"])
def test_what_is_left_in_torch_is_not_saved_as_if_it_were_the_model(kind, tmp_path):
    fast = pinscher.accelerate(decoder("llama"), mode="fp32") if kind == "llama" else fast_of(kind)
    for part in (fast, fast.base_model, copy.deepcopy(fast)):
        for refused in (part.save_pretrained, part.push_to_hub):
            with pytest.raises(InputError, match="cannot be saved: save the one it was made from"):
                refused(str(tmp_path / "x"))
        for store in (
            lambda model: model.state_dict(),
            lambda model: save_model(model, str(tmp_path / "x")),
            lambda model: pinscher.save_pretrained(model, tmp_path / "x"),
        ):
            with pytest.raises(InputError, match=r"has no state_dict.*\(take the model it was made from"):
                store(part)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", [*ORIGINALS, "llama"])
def test_a_change_is_refused_before_it_is_half_made(kind):
    model = decoder("llama") if kind == "llama" else ORIGINALS[kind]()
    fast = pinscher.accelerate(model, mode="fp32")
    wanted = fast(IDS)[0]
    for change in (
        lambda: fast.resize_token_embeddings(50),
        lambda: fast.base_model.resize_token_embeddings(50),
        lambda: fast.set_input_embeddings(torch.nn.Embedding(50, 48)),
        lambda: fast.load_state_dict(model.state_dict(), strict=False),
    ):
        with pytest.raises(InputError, match="cannot be changed: change the one it was made from"):
            change()
    assert torch.equal(fast(IDS)[0], wanted)
    with pytest.raises(InputError, match="is accelerated already"):
        pinscher.accelerate(fast)


# ------------------------------------------------------------ inputs


@pytest.fixture
def _doubles() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("mode", ["fp32", "auto"])
@pytest.mark.parametrize("name", ["bert", "mpnet", "gpt2"])
@pytest.mark.usefixtures("_doubles")
def test_doubles_by_default(name, mode, tmp_path):
    torch.set_default_dtype(torch.float32)
    model = decoder() if name == "gpt2" else model_of(name)
    given = {"input_ids": IDS} if name == "gpt2" else batch()
    wanted = model(**given).logits
    before = pinscher.accelerate(model, mode=mode)
    pinscher.save_pretrained(model, tmp_path / "small")
    torch.set_default_dtype(torch.float64)
    close = 2e-5 if mode == "fp32" else 0.05
    for fast in (before, pinscher.accelerate(model, mode=mode)):
        assert fast(**given).logits.dtype == torch.float32
        assert torch.allclose(fast(**given).logits, wanted, atol=close)
        hidden = fast(**given, output_hidden_states=True).hidden_states
        assert {state.dtype for state in hidden} == {torch.float32}
    loaded = pinscher.load(tmp_path / "small", mode=mode)
    assert torch.allclose(loaded(**given).logits.float(), wanted, atol=0.1)


@pytest.mark.parametrize("made", [lambda mask: mask.tolist(), lambda mask: mask.numpy(), lambda mask: mask.bool()])
def test_masks_that_are_no_tensors(made):
    fast, given = pinscher.accelerate(model_of("bert")), batch()
    wanted = fast(**given).logits
    given["attention_mask"] = made(given["attention_mask"])
    assert torch.equal(fast(**given).logits, wanted)


LONG = torch.long
ODD: list[tuple[str, dict[str, Any], str]] = [
    ("ragged", {"input_ids": IDS, "attention_mask": [[1, 1], [1]]}, "attention_mask is no array of numbers"),
    ("words", {"input_ids": IDS, "attention_mask": "1111"}, "attention_mask is no array of numbers"),
    ("short", {"input_ids": IDS, "attention_mask": [1] * 8}, r"attention_mask has shape \[8\].*\[2, 8\]"),
    ("3-D", {"input_ids": IDS, "attention_mask": torch.ones(2, 8, 8)}, r"attention_mask has shape \[2, 8, 8\]"),
    ("4-D", {"input_ids": IDS, "attention_mask": torch.ones(2, 1, 8, 8)}, r"attention_mask has shape \[2, 1, 8, 8\]"),
    ("no tokens", {"input_ids": torch.zeros(2, 0, dtype=LONG)}, "the rows have no tokens"),
    ("no vectors", {"inputs_embeds": torch.zeros(2, 0, 48)}, "the rows have no tokens"),
    ("token", {"input_ids": torch.tensor([[5, 99]])}, "input_ids contain 99: the model has 0 to 98"),
    ("huge", {"input_ids": torch.tensor([[5, 2**62]])}, f"input_ids contain {2**62}: the model has 0 to 98"),
    ("negative", {"input_ids": torch.tensor([[5, -100]])}, "input_ids contain -100: the model has 0 to 98"),
    ("type", {"input_ids": IDS, "token_type_ids": IDS}, r"token_type_ids contain \d+: the model has 0 to 1"),
    ("negative type", {"input_ids": IDS, "token_type_ids": -torch.ones_like(IDS)}, "token_type_ids contain -1"),
    ("position", {"input_ids": IDS, "position_ids": torch.full((2, 8), 70)}, "position_ids contain 70: .* 0 to 69"),
    ("negative position", {"input_ids": IDS, "position_ids": -torch.ones_like(IDS)}, "position_ids contain -1"),
    ("vectors' position", {"inputs_embeds": torch.zeros(2, 8, 48), "position_ids": torch.full((2, 8), 70)}, "70"),
    ("floats", {"input_ids": IDS.float()}, "float32"),
    ("booleans", {"input_ids": IDS.bool()}, "bool; they must be integers"),
    ("float types", {"input_ids": IDS, "token_type_ids": IDS.float()}, "token_type_ids have .*float32; they must be"),
    ("float positions", {"input_ids": IDS, "position_ids": IDS.float()}, "position_ids have .*float32; they must be"),
    ("types' shape", {"input_ids": IDS, "token_type_ids": IDS[:, :5]}, r"token_type_ids have shape \[2, 5\]"),
    ("positions' shape", {"input_ids": IDS, "position_ids": IDS[:, :5]}, r"position_ids have shape \[2, 5\]"),
    ("list of types", {"input_ids": IDS, "token_type_ids": IDS.tolist()}, "token_type_ids: .* tensors, not list"),
    ("array", {"input_ids": IDS.numpy()}, "input_ids: the inputs must be tensors, not ndarray"),
    ("long", {"inputs_embeds": torch.zeros(1, 71, 48)}, "71 tokens in a row: the model takes 70"),
    ("one mask", {"input_ids": IDS, "attention_mask": 1}, "attention_mask is 1: give a number for each token"),
    ("sparse", {"input_ids": IDS.to_sparse()}, "input_ids is sparse or quantized"),
    ("sparse mask", {"input_ids": IDS, "attention_mask": torch.ones(2, 8).to_sparse()}, "attention_mask is sparse"),
    ("doubles", {"inputs_embeds": torch.zeros(2, 8, 48).double()}, "float64, the model torch.float32: give them in"),
    ("complex", {"inputs_embeds": torch.zeros(2, 8, 48) * 1j}, "complex64, the model torch.float32: give them in"),
    ("width", {"inputs_embeds": torch.zeros(2, 8, 49)}, "inputs_embeds of 49 features are not .*: give 48"),
    ("meta mask", {"input_ids": IDS, "attention_mask": torch.ones(2, 8, device="meta")}, "attention_mask is on meta"),
]


@pytest.mark.parametrize(("given", "message"), [odd[1:] for odd in ODD], ids=[odd[0] for odd in ODD])
def test_odd_inputs_are_refused(given, message):
    for fast in (fast_of("base"), fast_of("classifier")):
        with pytest.raises(InputError, match=message):
            fast(**given)


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_out_of_range_are_named_in_every_family(name):
    fast = pinscher.accelerate(model_of(name))
    for token in (-1, 99):
        with pytest.raises(IndexError, match=f"input_ids contain {token}: the model has 0 to 98") as seen:
            fast(input_ids=torch.tensor([[5, token, 7]]))
        assert isinstance(seen.value, InputError)


def test_native_code_reads_nothing_outside_of_its_tables():
    layers = fast_of("base").fast_layers.core.encoder
    fine = np.zeros(4, np.int64)
    out = np.empty((4, 48), np.float32)

    def run(indices: list[Any], lengths: list[int], hides: list[int]) -> None:
        layers.run(pinscher.native.pool(1), "", None, indices, lengths, out, None, False, hides)

    for place, wrong in ((0, 99), (0, -1), (1, 70), (2, 2), (2, -(2**62))):
        indices = [fine.copy() for _ in range(3)]
        indices[place][3] = wrong
        with pytest.raises(IndexError, match="out of range"):
            run(indices, [4], [0])
    for lengths, hides in (([5], [0]), ([3], [0]), ([4, 0], [0, 0]), ([4], [0, 0]), ([3, 1], [0, 1])):
        with pytest.raises(ValueError, match=r"lengths do not add up|is empty|for each row's first token"):
            run([fine] * 3, lengths, hides)
    far = pinscher.accelerate(model_of("mpnet", hf.AutoModel)).fast_layers.core.encoder
    with pytest.raises(ValueError, match="too long"):
        far.run(pinscher.native.pool(1), "", None, [fine] * 2, [4], out, None, False, [2**40])


def test_rows_of_one_tensor_or_none():
    fast = fast_of("classifier")
    assert fast(input_ids=torch.zeros(0, 8, dtype=LONG)).logits.shape == (0, 2)
    types = torch.ones(1, 8, dtype=LONG)
    wanted = fast(input_ids=IDS, token_type_ids=types.repeat(2, 1)).logits
    assert torch.equal(fast(input_ids=IDS, token_type_ids=types).logits, wanted)
    assert torch.equal(fast(input_ids=IDS.int()).logits, fast(input_ids=IDS).logits)


# ------------------------------------------------------------ numbers that are none, or very large


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("mode", ["fp32", "int8"])
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_numbers_that_are_not_finite_go_through(odd, mode, threads):
    model = model_of("bert", hf.AutoModel)
    fast = pinscher.accelerate(model, mode=mode, threads=1)
    fast.fast_layers.threads = threads
    embeds = torch.randn(2, 66, 48, generator=torch.Generator().manual_seed(0))
    clean = fast(inputs_embeds=embeds).last_hidden_state
    embeds[0, 3] = odd
    found = fast(inputs_embeds=embeds).last_hidden_state
    assert found[0].isnan().all() == model(inputs_embeds=embeds).last_hidden_state[0].isnan().all()
    assert torch.equal(found[1], clean[1])


@pytest.mark.parametrize("mode", ["fp32", "int8"])
def test_large_numbers_come_out_as_from_pytorch(mode):
    model = model_of("bert", hf.AutoModel)
    fast = pinscher.accelerate(model, mode=mode)
    embeds = torch.randn(2, 9, 48, generator=torch.Generator().manual_seed(0)) * 1e6
    found, wanted = fast(inputs_embeds=embeds).last_hidden_state, model(inputs_embeds=embeds).last_hidden_state
    assert torch.allclose(found, wanted, atol=2e-5 if mode == "fp32" else 0.1)


@pytest.mark.parametrize("mode", ["fp32", "int8"])
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_decoders_too(odd, mode):
    model = decoder()
    fast = pinscher.accelerate(model, mode=mode)
    embeds = torch.randn(2, 6, 48, generator=torch.Generator().manual_seed(0))
    embeds[0, 3] = odd
    found, wanted = fast(inputs_embeds=embeds).logits, model(inputs_embeds=embeds).logits
    assert torch.equal(found.isnan(), wanted.isnan())


# ------------------------------------------------------------ decoders

MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1] * 8])
NONE = torch.zeros(2, 0, dtype=LONG)
ODD_OF_DECODERS: list[tuple[str, dict[str, Any], str]] = [
    ("ragged", {"input_ids": IDS, "attention_mask": [[1, 1], [1]]}, "attention_mask is no array of numbers"),
    ("words", {"input_ids": IDS, "attention_mask": "1111"}, "attention_mask is no array of numbers"),
    ("no tokens", {"input_ids": NONE}, r"input_ids have shape \[2, 0\].*each at least one token"),
    ("no rows", {"input_ids": IDS[:0]}, r"input_ids have shape \[0, 8\].*give at least one row"),
    ("no vectors", {"inputs_embeds": torch.zeros(2, 0, 48)}, r"inputs_embeds have shape \[2, 0, 48\]"),
    ("list", {"input_ids": IDS.tolist()}, "input_ids: the inputs must be tensors, not list"),
    ("floats", {"input_ids": IDS.float()}, "input_ids have .*float32; they must be integers"),
    ("booleans", {"input_ids": IDS.bool()}, "input_ids have .*bool; they must be integers"),
    ("shorts", {"input_ids": IDS.short()}, "input_ids have .*int16; they must be integers, int64 or int32"),
    ("token", {"input_ids": IDS + 99}, r"input_ids contain \d+: the model has 0 to 98"),
    ("negative", {"input_ids": -IDS}, r"input_ids contain -\d+: the model has 0 to 98"),
    ("sparse", {"input_ids": IDS.to_sparse()}, "input_ids is sparse or quantized"),
    ("one mask", {"input_ids": IDS, "attention_mask": 1}, "attention_mask is 1: give a number for each token"),
    ("doubles", {"inputs_embeds": torch.zeros(2, 8, 48).double()}, "float64, the model torch.float32: give them in"),
]


def call(fast: Any, given: dict[str, Any]) -> Any:
    return fast(**given, **({"decoder_input_ids": IDS} if fast.config.is_encoder_decoder else {}))


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_decoders_take_masks_that_are_no_tensors(name):
    model = decoder(name)
    fast = pinscher.accelerate(model, mode="fp32")
    wanted = call(model, {"input_ids": IDS, "attention_mask": MASK}).logits
    for mask in (MASK, MASK.tolist(), MASK.numpy()):
        assert torch.allclose(call(fast, {"input_ids": IDS, "attention_mask": mask}).logits, wanted, atol=2e-5)
    if name == "llama":  # whose mask is its second argument
        assert torch.allclose(fast(IDS, MASK.tolist()).logits, wanted, atol=2e-5)


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
@pytest.mark.parametrize(
    ("given", "message"), [odd[1:] for odd in ODD_OF_DECODERS], ids=[o[0] for o in ODD_OF_DECODERS]
)
def test_odd_inputs_of_decoders_are_refused(name, given, message):
    fast = pinscher.accelerate(decoder(name), mode="fp32")
    with pytest.raises(InputError, match=message):
        call(fast, given)
    if "input_ids" in given and "attention_mask" not in given and name != "t5":
        with pytest.raises(InputError, match=message):
            fast(given["input_ids"])


def test_an_empty_answer_is_refused():
    fast = pinscher.accelerate(decoder("t5"), mode="fp32")
    with pytest.raises(InputError, match=r"decoder_input_ids have shape \[2, 0\]"):
        fast(input_ids=IDS, decoder_input_ids=NONE)


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_generating_goes_on(name):
    model = decoder(name)
    fast = pinscher.accelerate(model, mode="fp32")
    words = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    for given in (
        {"input_ids": IDS, "attention_mask": MASK},
        {"inputs_embeds": model.get_input_embeddings()(IDS), "attention_mask": MASK},
    ):
        assert torch.equal(fast.generate(**given, **words), model.generate(**given, **words))


@pytest.mark.parametrize("kind", ["decoder", "classifier"])
def test_a_matrix_of_another_shape_is_refused_when_it_is_read(kind):
    model = ORIGINALS[kind]()
    names = {"decoder": "transformer.h.1.mlp.c_fc", "classifier": "bert.encoder.layer.1.attention.self.key"}

    def source(name: str) -> kernels.Weights:
        found = weights_of(model, name)
        assert found.dense is not None
        return kernels.Weights(dense=found.dense[:-1]) if name == names[kind] else found

    rows = 192 if kind == "decoder" else 48
    own = names[kind].rpartition(".")[2]
    message = rf"{names[kind]}.*: {own}\.weight has the shape \[{rows - 1}, 48\], the model needs \[{rows}, 48\]"
    with pytest.raises(InputError, match=message):
        assemble(copy.deepcopy(model), source, "fp32", 1)


def test_errors_within_generate_are_ours():
    fast = fast_of("decoder")
    linear = next(module for module in fast.modules() if isinstance(module, SparseLinear))
    linear.register_forward_pre_hook(lambda _, given: (given[0][..., :47],))
    with pytest.raises(InputError, match="47 features were given, the matrix takes 48"):
        fast.generate(IDS, max_new_tokens=3, pad_token_id=0)
