"""The copy of a student says what the student said when it was taken."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pinscher.prune.snapshot import Snapshot
from tiny_snapshots import MODELS, agrees, at_test_time, batch_for, bert, shake, sparsify, untouched


@pytest.mark.parametrize("zeros", [0.0, 0.8, 1.0])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_those_of_the_student_then(name, zeros):
    model = sparsify(MODELS[name](), zeros).train()
    batch = batch_for(model)
    snapshot = Snapshot(model)
    snapshot.take()
    expected = at_test_time(model, batch)
    agrees(snapshot, expected, batch)
    shake(model)
    agrees(snapshot, expected, batch)
    snapshot.take()
    agrees(snapshot, at_test_time(model, batch), batch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_other_precisions(dtype):
    model = sparsify(bert().to(dtype))
    batch = batch_for(model)
    snapshot = Snapshot(model)
    snapshot.take()
    assert snapshot(batch)["logits"].dtype == dtype
    assert torch.equal(snapshot(batch)["logits"], at_test_time(model, batch))


def test_buffers_are_of_that_moment():
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": self.head(self.norm(x))}

    model, batch = Normed().train(), {"x": torch.randn(8, 4)}
    snapshot = Snapshot(model)
    snapshot.take()
    expected = at_test_time(model, batch)
    for _ in range(3):
        model(x=torch.randn(8, 4) + 5)
    agrees(snapshot, expected, batch)
    assert not torch.allclose(at_test_time(model, batch), expected)


def test_taken_inside_inference_mode():
    model = sparsify(bert())
    batch = batch_for(model)
    snapshot = Snapshot(model)
    with torch.inference_mode():
        snapshot.take()
    agrees(snapshot, at_test_time(model, batch), batch)


def test_outputs_carry_no_graph():
    model = sparsify(bert())
    model.bert.embeddings.requires_grad_(False)
    snapshot = Snapshot(model)
    snapshot.take()
    lent: list[Tensor] = []
    layers = [module for module in model.modules() if isinstance(module, nn.Linear | nn.LayerNorm)]
    model.register_forward_pre_hook(lambda module, args: lent.extend(layer.weight for layer in layers))
    with torch.enable_grad():
        logits = snapshot(batch_for(model))["logits"]
    assert not logits.requires_grad
    assert logits.grad_fn is None
    assert len(lent) == len(layers)
    assert not any(p.requires_grad for p in lent)


def test_works_on_after_a_batch_that_fails():
    model = sparsify(bert()).train()
    batch = batch_for(model)
    snapshot = Snapshot(model)
    snapshot.take()
    expected = at_test_time(model, batch)
    shake(model)
    with untouched(model), pytest.raises(IndexError):
        snapshot({"input_ids": torch.full((2, 3), 1000)})
    with untouched(model), pytest.raises(RuntimeError):
        snapshot({"inputs_embeds": torch.randn(2, 3, 17, generator=torch.Generator())})
    agrees(snapshot, expected, batch)
