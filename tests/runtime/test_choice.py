"""Which matrices run as int8, as floats or dense, and what it costs in precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf

import pinscher
from pinscher.runtime import choice, kernels
from pinscher.runtime.sparse import SparseLinear
from pinscher.store import integers
from tiny_accelerated import CONFIGS, DECODERS, batch, model_of, pruned_


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


COSTS = {"f32": 2.0, "dense": 1.0, "i8": 1.5, "groups": 2.5, "dense8": 2.0}  # those of a set with products of bytes


@pytest.fixture
def with_bytes(monkeypatch):
    """Whatever this machine has, products of bytes cost little."""

    class Core:
        def __getattr__(self, name: str) -> Any:
            return (lambda _: COSTS) if name == "costs" else getattr(kernels.core(), name)

    monkeypatch.setattr(choice, "core", Core)


def test_auto_gives_up_bits_where_it_hurts(with_bytes, monkeypatch):
    """Activations of 16 bits first, then fp32; in between some matrices of each."""
    model = model_of("bert", hf.AutoModel)
    blocky_(model)
    monkeypatch.setattr(choice, "LIMIT", 1.0)
    assert kinds_of(pinscher.accelerate(model, mode="auto")) == ["groups"] * 8
    monkeypatch.setattr(choice, "LIMIT", 0.0)
    assert kinds_of(pinscher.accelerate(model, mode="auto")) == ["f32"] * 8
    found = []
    for limit in (1e-2, 8e-3, 6e-3, 4e-3, 3e-3, 2e-3, 1e-3, 5e-4):
        monkeypatch.setattr(choice, "LIMIT", limit)
        found.append(set(kinds_of(pinscher.accelerate(model, mode="auto"))))
    assert {"groups", "i8"} in found
    assert {"i8", "f32"} in found
    assert not any({"groups", "f32"} <= kinds for kinds in found)


def test_what_is_given_up_hurts_most_for_its_time(with_bytes, monkeypatch):
    """The one matrix that is far off goes first, though there are others with activations as narrow."""
    model = model_of("bert", hf.AutoModel)
    blocky_(model)
    layer = model.encoder.layer[1]
    layer.intermediate.dense.bias.data[5] = 30  # an input of the next matrix that leaves others no precision
    layer.output.dense.weight.data[:, 5] *= 1e-3
    monkeypatch.setattr(choice, "LIMIT", 0.03)
    assert kinds_of(pinscher.accelerate(model, mode="auto")) == ["groups"] * 7 + ["i8"]


def blocky_(model: Any) -> None:
    """Random zeros in groups of four inputs."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and "layer" in name:
            kept = torch.rand(parameter.shape[0], parameter.shape[1] // 4, generator=generator) < 0.3
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.data *= kept.repeat_interleave(4, 1)


def test_groups_and_bytes_are_close(with_bytes):
    """A model in blocks of four inputs, and one without zeros."""
    given = batch()
    seen = given["attention_mask"].bool()
    blocks, whole = model_of("bert", hf.AutoModel), hf.AutoModel.from_config(CONFIGS["bert"]).eval()
    blocky_(blocks)
    for model, kind in ((blocks, "groups"), (whole, "dense8")):
        wanted = model(**given).last_hidden_state[seen]
        fast = pinscher.accelerate(model, mode="w8a8")
        assert set(kinds_of(fast)) == {kind}
        found = fast(**given).last_hidden_state[seen]
        assert 0 < (found - wanted).norm() / wanted.norm() < 0.03


def test_w8a8_is_as_it_was_asked_for(with_bytes, monkeypatch):
    monkeypatch.setattr(choice, "LIMIT", 0.0)
    model = model_of("bert", hf.AutoModel)
    blocky_(model)
    assert kinds_of(pinscher.accelerate(model, mode="w8a8")) == ["groups"] * 8
    assert kinds_of(pinscher.accelerate(model, mode="int8")) == ["i8"] * 8


def test_without_zeros_int8_is_only_for_those_who_ask(with_bytes):
    """Where there is nothing to gain but by rounding, the model stays as exact as it is."""
    model = hf.AutoModel.from_config(CONFIGS["bert"]).eval()
    for mode in ("auto", "int8"):
        with pytest.warns(UserWarning, match="stays in PyTorch"):
            same = pinscher.accelerate(model, mode=mode)
        assert torch.equal(same(**batch()).last_hidden_state, model(**batch()).last_hidden_state)


def test_a_group_may_be_cut_off_by_the_edge():
    weight = torch.zeros(3, 10)
    weight[0, 9] = weight[1, 0] = weight[1, 3] = weight[2, 4] = 1
    assert kernels.Weights(dense=weight.numpy()).counts == (4, 3, 30, 9)
    codes = integers.coded(weight.numpy())
    assert kernels.Weights(codes=codes).counts == (4, 3, 30, 9)
    assert kernels.Weights(codes=codes).pack("groups").units == 3
    assert kernels.Weights(codes=codes).pack("dense8").units == 9


def test_what_generates_has_activations_of_16_bits(with_bytes):
    """One token at a time, groups have nothing to gain."""
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(DECODERS["llama"]).eval()
    for layer in model.model.layers:
        blocky_(layer)
    fast = pinscher.accelerate(pruned_(model), mode="w8a8")
    assert {module.matrix.kind for module in fast.modules() if isinstance(module, SparseLinear)} == {"i8"}


def test_too_many_inputs_for_bytes(with_bytes):
    weight = torch.zeros(1, core_limit() + 4)
    weight[0, :4] = 1
    assert choice.kind_of(kernels.Weights(dense=weight[:, :-4].numpy()), 8) == "groups"
    assert choice.kind_of(kernels.Weights(dense=weight.numpy()), 8) == "i8"


def core_limit() -> int:
    return int(kernels.core().MOST_INPUTS)


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
    weights = kernels.Weights(dense=model.encoder.layer[0].output.dense.weight.detach().numpy())
    assert weights.counts.nonzeros == weights.counts.weights
    assert choice.kind_of(weights, 32) == "dense"
    with pytest.warns(UserWarning, match="stays in PyTorch"):
        same = pinscher.accelerate(model, mode="fp32")
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
