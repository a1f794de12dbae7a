"""Which matrices run as int8, as floats or dense, and what it costs in precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf

import pinscher
from pinscher.runtime import choice, kernels
from pinscher.runtime.sparse import SparseLinear
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
