"""A new family is one row: a made-up one is pruned, stored, run natively, shrunk, exported and timed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import pinscher
import tiny_family
from pinscher.errors import InputError
from pinscher.models.families import FAMILIES, max_positions
from pinscher.prune import prune_once
from pinscher.runtime import bench
from pinscher.store import onnx
from pinscher.store.shrink import shrink_

NAME = tiny_family.TerrierConfig.model_type
ENGINES = ["torch", "pinscher-fp32", "onnxruntime"]


@pytest.fixture
def family() -> Iterator[None]:
    """The row, and what transformers has to know, for one test."""
    tiny_family.register()
    yield
    del FAMILIES[NAME], CONFIG_MAPPING._extra_content[NAME]
    delattr(transformers, tiny_family.TerrierForSequenceClassification.__name__)


def pruned() -> Any:
    return prune_once(tiny_family.make(), "magnitude", sparsity=0.8)


def batch(rows: int = 3, tokens: int = 20) -> dict[str, torch.Tensor]:
    """Rows of uneven length, with two sentences each."""
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(3, 60, (rows, tokens), generator=generator)
    mask = torch.ones_like(ids)
    mask[-1, tokens // 2 :] = 0
    types = (torch.arange(tokens) > tokens // 3).long().expand(rows, -1)
    return {"input_ids": ids.masked_fill(mask == 0, 2), "attention_mask": mask, "token_type_ids": types}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**batch()).logits


def test_it_is_pruned_while_it_trains():
    """By its structure: that needs no row."""
    model = tiny_family.make().train()
    pruner = pinscher.Pruner(model, pinscher.PruningConfig(method="pins", sparsity=0.8, total_steps=12, interval=2))
    optimizer = torch.optim.AdamW(pruner.param_groups(), lr=1e-3)
    pruner.attach(optimizer)
    for _ in range(12):
        optimizer.zero_grad()
        model(**batch(), labels=torch.tensor([0, 1, 2])).loss.backward()
        optimizer.step()
    pruner.finish()
    assert pinscher.sparsity(model) == pytest.approx(0.8, abs=1e-3)
    assert all((dog.nose.seek.weight == 0).any() for dog in model.terrier.pack)
    assert (model.bark.weight != 0).all()


def test_its_whole_layers_run_in_native_code(family):
    model = pruned()
    fast = pinscher.accelerate(model, mode="fp32")
    assert hasattr(fast.base_model, "fast_layers")
    assert not any(isinstance(module, torch.nn.ModuleList) for module in fast.modules())
    assert torch.allclose(logits(fast), logits(model), atol=2e-5)
    with pytest.raises(InputError, match="38 tokens in a row: the model takes 37"):  # of 40, behind padding token 2
        fast(torch.full((1, 38), 5))


def test_without_its_row_only_its_matrices_do():
    model = pruned()
    fast = pinscher.accelerate(model, mode="fp32")
    assert not hasattr(fast.base_model, "fast_layers")
    assert torch.allclose(logits(fast), logits(model), atol=2e-5)


def test_its_small_file_loads_and_runs(family, tmp_path):
    model = pruned()
    pinscher.save_pretrained(model, tmp_path / "small", values="fp32")
    again = tiny_family.TerrierForSequenceClassification.from_pretrained(tmp_path / "small")
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    fast = pinscher.load(tmp_path / "small", mode="fp32")
    assert hasattr(fast.base_model, "fast_layers")
    assert torch.allclose(logits(fast), logits(model), atol=2e-5)


def test_dead_heads_and_features_are_removed(family, tmp_path):
    model = pruned()
    with torch.no_grad():
        for dog in model.terrier.pack:
            dog.bury.weight[:, :10] = 0.0
            dog.nose.bring.weight[:, 8:16] = 0.0
    wanted = logits(model)
    sizes = [(now.heads, now.inner) for _, now in shrink_(model, plain=False).layers]
    assert all(heads == 3 and inner <= 54 for heads, inner in sizes)
    assert torch.allclose(logits(model), wanted, atol=1e-5)
    pinscher.save_pretrained(model, tmp_path / "small", values="fp32")
    again = tiny_family.TerrierForSequenceClassification.from_pretrained(tmp_path / "small")
    assert torch.allclose(logits(again), wanted, atol=1e-5)


def test_it_is_exported_as_onnx(family, tmp_path):
    model, given = pruned(), batch()
    onnx.export(model, tmp_path, length=16)
    session = onnxruntime.InferenceSession(tmp_path / onnx.FP32, providers=["CPUExecutionProvider"])
    assert {value.name for value in session.get_inputs()} == set(given)
    found = session.run(None, {name: value.numpy() for name, value in given.items()})[0]
    assert np.abs(found - logits(model).numpy()).max() < 1e-4


def test_without_its_row_onnx_is_refused(tmp_path):
    with pytest.raises(InputError, match="cannot be written as ONNX: supported are bert, "):
        onnx.export(tiny_family.make(), tmp_path)


def test_it_is_timed_in_the_engines_processes(family, tmp_path, monkeypatch):
    """The processes learn of the family as this one does: Python imports sitecustomize when it starts."""
    (tmp_path / "sitecustomize.py").write_text("import tiny_family\ntiny_family.register()\n")
    (tmp_path / "files").mkdir()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(tiny_family.__file__).parent)]))
    model, said = pruned(), []
    assert max_positions(model.config) == 37
    inputs = bench.inputs_of(model, 2, 8)
    assert set(inputs) == {"input_ids", "attention_mask", "token_type_ids"}
    sizes = bench.prepare(model, None, tmp_path / "files", ENGINES, said.append)
    assert list(sizes) == ENGINES
    with bench.workers(list(sizes), tmp_path / "files", 1, inputs, said.append) as ready:
        assert said == []
        found = bench.agreement(ready, [inputs, {name: value.numpy() for name, value in batch().items()}])
        timed = bench.measure(ready, inputs, seconds=0.1)
    assert list(found) == list(timed) == ENGINES
    assert all(one["same"] == 1 and one["largest_difference"] < 1e-4 for one in found.values())
    assert all(one["p50_ms"] > 0 for one in timed.values())
