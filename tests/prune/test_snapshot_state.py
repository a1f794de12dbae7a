"""The state of a copy: saved and loaded to the bit, and refused where it does not fit."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
)

from pinscher.prune.snapshot import Snapshot
from pinscher.train import checkpoint
from tiny_snapshots import MODELS, SMALL, agrees, at_test_time, batch_for, bert, gated, kept_by, sparsify, untouched


@pytest.mark.parametrize("name", ["bert", "albert", "gpt2", "t5", "encoder"])
@pytest.mark.parametrize("zeros", [0.0, 0.8])
def test_state_round_trip_is_bitwise(name, zeros, tmp_path):
    model = sparsify(MODELS[name](), zeros)
    batch = batch_for(model)
    snapshot = Snapshot(model)
    snapshot.take()
    assert set(snapshot.state_dict()) == {"plain", "packed", "shared", "buffers"}
    checkpoint.save(tmp_path / "state", teacher=snapshot.state_dict())
    restored = Snapshot(MODELS[name]())
    restored.load_state_dict(checkpoint.load(tmp_path / "state")["teacher"])
    assert torch.equal(restored(batch)["logits"], snapshot(batch)["logits"])
    assert restored.nbytes == snapshot.nbytes


def test_a_loaded_state_is_not_shared_with_who_saved_it():
    model = sparsify(bert())
    batch = batch_for(model)
    snapshot = Snapshot(model)
    snapshot.take()
    state = snapshot.state_dict()
    restored = Snapshot(bert())
    restored.load_state_dict(state)
    expected = restored(batch)["logits"]
    for tensor in [*state["plain"].values(), *(t for p in state["packed"].values() for t in (p["gaps"], p["values"]))]:
        tensor.zero_()
    assert torch.equal(restored(batch)["logits"], expected)


@pytest.mark.parametrize("zeros", [0.0, 0.8])
@pytest.mark.parametrize(
    "options",
    [{"num_hidden_layers": 3}, {"hidden_size": 32}, {"intermediate_size": 48}, {"num_labels": 5}],
    ids=lambda options: next(iter(options)),
)
def test_the_state_of_another_model_is_refused(options, zeros):
    model = sparsify(bert(), zeros)
    snapshot = Snapshot(model)
    snapshot.take()
    other = BertForSequenceClassification(
        BertConfig(**{"vocab_size": 40, "max_position_embeddings": 16, **SMALL, **options})
    )
    restored = Snapshot(other)
    restored.take()
    batch = batch_for(other)
    expected = restored(batch)["logits"]
    before = kept_by(restored)
    with untouched(other), pytest.raises(ValueError, match="another model"):
        restored.load_state_dict(snapshot.state_dict())
    assert kept_by(restored) == before
    assert torch.equal(restored(batch)["logits"], expected)


@pytest.mark.parametrize("way", ["more", "less"])
def test_a_state_that_shares_other_parameters_is_refused(way):
    model = bert()
    model.bert.embeddings.requires_grad_(False)
    batch = batch_for(model)
    snapshot = Snapshot(model)
    snapshot.take()
    expected = snapshot(batch)["logits"]
    state, before = snapshot.state_dict(), dict(snapshot.shared)
    assert state["shared"]
    if way == "more":
        state["shared"].append("bert.embeddings.other.weight")
    else:
        state["shared"].pop()
    with pytest.raises(ValueError, match="another model"):
        snapshot.load_state_dict(state)
    assert snapshot.shared == before
    assert torch.equal(snapshot(batch)["logits"], expected)


def test_a_loaded_copy_lives_where_the_student_does():
    """Checkpoints are read on the CPU."""
    snapshot = Snapshot(sparsify(bert()))
    snapshot.take()
    restored = Snapshot(bert().to("meta"))
    restored.load_state_dict(snapshot.state_dict())
    tensors = [*restored.plain.values(), *(t for p in restored.packed.values() for t in (p.gaps, p.values))]
    assert all(tensor.is_meta for tensor in tensors)


def test_the_state_of_a_gated_student_is_loaded_with_or_without_gates():
    model, _, _ = gated("movement")
    batch = batch_for(model)
    snapshot = Snapshot(model)
    snapshot.take()
    expected = at_test_time(model, batch)
    for student in (bert(), gated("movement")[0], gated("pst")[0]):
        restored = Snapshot(student)
        restored.load_state_dict(snapshot.state_dict())
        with untouched(student):
            agrees(restored, expected, batch)
