"""Copies of students with learned masks, which stand aside while the copy runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from pinscher.prune import Pruner, PruningConfig, sparsity
from pinscher.prune.gates import Gate
from pinscher.prune.snapshot import Snapshot
from tiny_snapshots import GATED, MODELS, agrees, at_test_time, batch_for, bert, gated, kept_by, learn, untouched


@pytest.mark.parametrize("method", GATED)
def test_gates_are_seen_through(method):
    model, _, optimizer = gated(method)
    batch = batch_for(model)
    snapshot = Snapshot(model)
    snapshot.take()
    expected = at_test_time(model, batch)
    with untouched(model):
        agrees(snapshot, expected, batch)
    assert sorted(kept_by(snapshot)) == sorted(n for n, _ in [*bert().named_parameters(), *bert().named_buffers()])
    learn(model, optimizer, 2)
    with untouched(model):
        agrees(snapshot, expected, batch)
    assert not torch.allclose(at_test_time(model, batch), expected, atol=1e-4)


@pytest.mark.parametrize("method", GATED)
def test_gates_stand_aside_while_the_copy_runs(method, monkeypatch):
    model, pruner, _ = gated(method)
    gates = [module for module in model.modules() if isinstance(module, Gate)]
    assert len(gates) == len(pruner.sites)
    snapshot = Snapshot(model)
    snapshot.take()
    asked: list[Gate] = []
    for kind in {type(gate) for gate in gates}:
        plain = kind.gated
        monkeypatch.setattr(kind, "gated", lambda self, w, plain=plain: asked.append(self) or plain(self, w))
    during: list[tuple[bool, bool]] = []

    def look(module: nn.Module, args: tuple) -> None:
        for site in pruner.sites:
            name = f"{site.name}.{site.parameter}"
            stored = snapshot.packed[name].expand() if name in snapshot.packed else snapshot.plain[name]
            during.append((torch.equal(site.effective, stored), site.effective.requires_grad))

    handle = model.register_forward_pre_hook(look)
    batch = batch_for(model)
    with untouched(model):
        snapshot(batch)
    handle.remove()
    assert asked == []
    assert during == [(True, False)] * len(pruner.sites)
    model(**batch)
    assert set(asked) == set(gates)
    assert all(parametrize.is_parametrized(site.module, site.parameter) for site in pruner.sites)


@pytest.mark.parametrize("method", GATED)
def test_the_student_keeps_its_gates_and_trains_on(method):
    model, pruner, optimizer = gated(method)
    kinds = {name: type(module) for name, module in model.named_modules()}
    names = [name for name, _ in model.named_parameters()]
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    same = {name: id(parameter) for name, parameter in model.named_parameters()}
    snapshot = Snapshot(model)
    snapshot.take()
    snapshot(batch_for(model))
    assert {name: type(module) for name, module in model.named_modules()} == kinds
    assert [name for name, _ in model.named_parameters()] == names
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == same
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, values[name]), name
    for site in pruner.sites:
        assert parametrize.is_parametrized(site.module, site.parameter)
    learn(model, optimizer, 6)
    moved = [name for name, parameter in model.named_parameters() if not torch.equal(parameter, values[name])]
    assert any("parametrizations" in name for name in moved)
    pruner.finish()
    assert sparsity(model) == pytest.approx(0.8, abs=1 / pruner.total)


@pytest.mark.parametrize("method", ["pins", "magnitude", *GATED])
def test_training_is_the_same_with_a_copy_as_without(method):
    results = []
    for with_copy in (False, True):
        torch.manual_seed(1)
        model, pruner, optimizer = gated(method, steps=3)
        snapshot, batch = Snapshot(model), batch_for(model)
        if with_copy:
            snapshot.take()
            assert snapshot.nbytes > 0
            snapshot.state_dict()
        for _ in range(9):
            learn(model, optimizer)
            if with_copy:
                snapshot(batch)
        results.append(pruner.finish().state_dict())
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(results[0][name], tensor) for name, tensor in results[1].items())


@pytest.mark.parametrize("method", GATED)
def test_gates_may_come_after_the_copy_and_go_before_it(method):
    model = bert()
    snapshot = Snapshot(model)
    pruner = Pruner(model, PruningConfig(method=method, sparsity=0.8, total_steps=6, interval=1, cooldown=2))
    optimizer = torch.optim.AdamW(pruner.param_groups(), lr=1e-2)
    pruner.attach(optimizer)
    batch = batch_for(model)
    for _ in range(2):
        learn(model, optimizer, 3)
        snapshot.take()
        agrees(snapshot, at_test_time(model, batch), batch)
    expected = at_test_time(model, batch)
    pruner.finish()
    agrees(snapshot, expected, batch)
    snapshot.take()
    agrees(snapshot, at_test_time(model, batch), batch)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert {f"{site.name}.weight" for site in pruner.sites} <= {*snapshot.packed, *frozen}


def test_random_gates_show_what_they_are_at_test_time():
    model, _, _ = gated("l0")
    model.train()
    snapshots = [Snapshot(model) for _ in range(2)]
    for snapshot in snapshots:
        snapshot.take()
    batch = batch_for(model)
    assert torch.equal(*(snapshot(batch)["logits"] for snapshot in snapshots))


@pytest.mark.parametrize("act", ["make", "take", "nbytes", "state_dict", "load_state_dict", "run"])
@pytest.mark.parametrize("name", ["l0", "encoder", "recurrent"])
def test_the_students_random_numbers_are_left_alone(name, act):
    """A run that is saved must go on exactly like one that is not."""
    model = gated("l0")[0] if name == "l0" else MODELS[name]()
    if name == "recurrent":
        model.lstm.dropout = 0.5
    batch = batch_for(model)
    model.train()
    assert not torch.equal(model(**batch)["logits"], model(**batch)["logits"])
    snapshot = Snapshot(model)
    snapshot.take()
    state = snapshot.state_dict()
    acts = {
        "make": lambda: Snapshot(model),
        "take": snapshot.take,
        "nbytes": lambda: snapshot.nbytes,
        "state_dict": snapshot.state_dict,
        "load_state_dict": lambda: snapshot.load_state_dict(state),
        "run": lambda: snapshot(batch),
    }
    before = torch.get_rng_state()
    acts[act]()
    assert torch.equal(torch.get_rng_state(), before)


def test_gated_weights_that_are_computed_once():
    """Inside parametrize.cached() the student's gated weights would be those of the copy too."""
    model, _, _ = gated("movement")
    batch = batch_for(model)
    snapshot = Snapshot(model)
    snapshot.take()
    with parametrize.cached(), pytest.raises(RuntimeError, match=r"parametrize\.cached"):
        snapshot(batch)
