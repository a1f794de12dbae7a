"""A copy leaves the student alone.

It runs in the student's own modules, which are lent the copy's tensors for one forward pass.
"""

from __future__ import annotations

import functools
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from pinscher.prune.gates import Gate
from pinscher.prune.snapshot import Packed, Snapshot
from tiny_snapshots import (
    GATED,
    MODELS,
    agrees,
    at_test_time,
    batch_for,
    bert,
    gated,
    lasts,
    learn,
    shake,
    sparsify,
    untouched,
)


@pytest.mark.parametrize("method", [None, "l0", "pst"])
def test_every_module_keeps_its_own_mode(method):
    model = bert() if method is None else gated(method)[0]
    for i, module in enumerate(model.modules()):
        module.training = i % 3 == 0
    modes = [module.training for module in model.modules()]
    during: list[bool] = []
    model.classifier.register_forward_pre_hook(lambda *args: during.extend(m.training for m in model.modules()))
    snapshot = Snapshot(model)
    assert [module.training for module in model.modules()] == modes
    snapshot.take()
    assert [module.training for module in model.modules()] == modes
    for _ in range(2):
        during.clear()
        snapshot(batch_for(model))
        assert [module.training for module in model.modules()] == modes
        assert during == [False] * len(modes)
        model.train()
        modes = [True] * len(modes)


@pytest.mark.parametrize("act", ["take", "run"])
def test_the_student_is_whole_after_an_error(act):
    class Broken(Gate if act == "take" else nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            if not self.training:
                raise RuntimeError("no test time for me")
            return weight

    model = bert().train()
    broken = Broken(model.classifier.weight) if act == "take" else Broken()
    parametrize.register_parametrization(model.classifier, "weight", broken)
    batch = batch_for(model)
    snapshot = Snapshot(model)
    if act == "run":
        snapshot.take()
    with untouched(model), pytest.raises(RuntimeError, match="no test time"):
        snapshot.take() if act == "take" else snapshot(batch)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("where", ["", "bert.embeddings", "bert.encoder.layer.1.attention"])
@pytest.mark.parametrize("method", [None, *GATED])
def test_the_student_is_whole_after_an_error_anywhere(method, where):
    model, optimizer = gated(method)[::2] if method else (sparsify(bert()), None)
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = batch_for(model)
    snapshot = Snapshot(model)
    snapshot.take()
    expected = at_test_time(model, batch)
    learn(model, optimizer)

    def fail(*args: object) -> None:
        raise KeyboardInterrupt

    before = model(**batch)["logits"]
    handle = model.get_submodule(where).register_forward_hook(fail)
    with untouched(model), pytest.raises(KeyboardInterrupt):
        snapshot(batch)
    handle.remove()
    before.sum().backward()
    assert sum(p.grad is not None for p in model.parameters()) == sum(p.requires_grad for p in model.parameters())
    optimizer.zero_grad()
    with untouched(model):
        agrees(snapshot, expected, batch)
    values = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    learn(model, optimizer)
    assert sum(not torch.equal(model.get_parameter(n), value) for n, value in values.items()) > len(values) / 2


def test_the_student_is_whole_after_running_out_of_memory(monkeypatch):
    model = sparsify(bert()).train()
    batch = batch_for(model)
    snapshot = Snapshot(model)
    snapshot.take()
    plain, count = Packed.expand, []

    def expand(self: Packed) -> Tensor:
        count.append(1)
        if len(count) == 3:
            raise MemoryError
        return plain(self)

    monkeypatch.setattr(Packed, "expand", expand)
    with untouched(model), pytest.raises(MemoryError):
        snapshot(batch)


@pytest.mark.parametrize("name", MODELS)
def test_the_tensors_of_the_student_are_the_very_same_afterwards(name):
    model = sparsify(MODELS[name]()).train()
    batch = batch_for(model)
    model(**batch)["logits"].sum().backward()
    snapshot = Snapshot(model)
    with untouched(model):
        snapshot.take()
    for _ in range(2):
        with untouched(model):
            snapshot(batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = at_test_time(model, batch)
    optimizer.step()
    assert not torch.equal(at_test_time(model, batch), before)


def gradients(model: nn.Module, batch: dict[str, Tensor], between=lambda: None) -> dict[str, Tensor]:
    """The student's gradients for one batch, with something done between its forward and its backward pass."""
    torch.manual_seed(7)
    model.zero_grad()
    logits = model(**batch)["logits"]
    between()
    logits.float().square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert sum(bool(torch.count_nonzero(grad)) for grad in expected.values()) > len(expected) / 2
    for name, grad in found.items():
        assert torch.equal(grad, expected[name]), name


@pytest.mark.parametrize("act", ["take", "run", "fail"])
@pytest.mark.parametrize("name", [*MODELS, *GATED])
def test_a_graph_made_before_has_the_right_gradients_afterwards(name, act):
    model = gated(name)[0] if name in GATED else sparsify(MODELS[name]())
    model.train()
    batch = batch_for(model)
    snapshot = Snapshot(model)
    snapshot.take()
    shake(model)
    expected = gradients(model, batch)

    def fail() -> None:
        with pytest.raises((IndexError, RuntimeError)):
            snapshot({**batch, "input_ids": torch.full((4, 7), 1000)})

    acts = {"take": snapshot.take, "run": lambda: snapshot(batch), "fail": fail}
    same_gradients(gradients(model, batch, acts[act]), expected)


def test_gradients_with_checkpointing():
    """The forward pass is done again during the backward pass, after the copy has run."""
    model = sparsify(bert()).train()
    batch = batch_for(model)
    snapshot = Snapshot(model)
    snapshot.take()
    said = at_test_time(model, batch)
    shake(model)
    expected = gradients(model, batch)
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()  # its name from 5.23 on
    same_gradients(gradients(model, batch, lambda: agrees(snapshot, said, batch)), expected)


@pytest.mark.parametrize("method", [None, *GATED])
def test_gradients_in_one_autocast_with_the_copy(method):
    """Autocast remembers the weights it has cast; it must not mistake the copy's for the student's."""
    model = gated(method)[0] if method else sparsify(bert())
    model.train()
    batch = batch_for(model)
    snapshot = Snapshot(model)
    snapshot.take()
    with torch.autocast("cpu", torch.bfloat16):
        said = snapshot(batch)["logits"]
        if method != "pst":  # whose student multiplies its update in low precision, too
            assert torch.equal(said, at_test_time(model, batch))
    torch.testing.assert_close(said.float(), at_test_time(model, batch), rtol=0, atol=2e-3)
    shake(model)

    def run() -> None:
        assert torch.equal(snapshot(batch)["logits"], said)

    found = []
    for act in (lambda: None, run):
        with torch.autocast("cpu", torch.bfloat16):
            act()
            found.append(gradients(model, batch, act))
    same_gradients(found[1], found[0])


def test_the_optimiser_of_the_student_works_on():
    results = []
    for with_copy in (False, True):
        torch.manual_seed(0)
        model = sparsify(bert()).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        batch = batch_for(model)
        snapshot = Snapshot(model)
        for step in range(5):
            if with_copy and step % 2 == 0:
                snapshot.take()
            logits = model(**batch)["logits"]
            if with_copy:
                assert not snapshot(batch)["logits"].requires_grad
            F.cross_entropy(logits, torch.tensor([0, 1, 1, 0])).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {
            id(p) for p in model.parameters()
        }
        results.append(model.state_dict())
    assert all(torch.equal(tensor, results[1][name]) for name, tensor in results[0].items())


def test_hooks_of_the_student_run_for_the_copy_too():
    model = sparsify(bert())
    seen: list[str] = []
    model.bert.register_forward_hook(lambda *args: seen.append("after"))
    model.bert.register_forward_pre_hook(lambda *args: seen.append("before"))
    model.register_forward_hook(lambda *args, **kwargs: seen.append("kwargs"), with_kwargs=True)
    model.classifier.register_forward_hook(lambda *args: seen.append("always"), always_call=True)
    model.classifier.register_full_backward_hook(lambda *args: seen.append("backward"))
    batch = batch_for(model)
    snapshot = lasts(model, batch)
    seen.clear()
    snapshot.take()
    assert seen == []
    snapshot(batch)
    assert seen == ["before", "after", "always", "kwargs"]
    seen.clear()
    model(**batch)["logits"].sum().backward()
    assert sorted(seen) == ["after", "always", "backward", "before", "kwargs"]


def test_a_hook_that_changes_outputs_changes_those_of_the_copy():
    model = bert()
    batch = batch_for(model)
    plain = at_test_time(model, batch)
    model.classifier.register_forward_hook(lambda module, args, output: output + 1)
    snapshot = lasts(model, batch)
    agrees(snapshot, plain + 1, batch)


def test_a_student_that_cannot_be_copied():
    class Recorder:
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def look(self, *args: object) -> None:
            with self.lock:
                pass

    model = bert()
    model.lock = threading.Lock()
    model.bert.register_forward_hook(Recorder().look)
    lasts(model, batch_for(model))


def test_a_patched_forward_runs_for_the_copy_too():
    model = sparsify(bert())
    batch = batch_for(model)
    plain = at_test_time(model, batch)
    calls: list[nn.Module] = []

    def spying(module: nn.Module, forward, *args, **kwargs):
        calls.append(module)
        found = forward(*args, **kwargs)
        return found * 2 if module is model.classifier else found

    patched = [model, model.bert.encoder.layer[0], model.classifier]
    for module in patched:
        module.forward = functools.partial(spying, module, module.forward)
    snapshot = lasts(model, batch)
    calls.clear()
    agrees(snapshot, plain * 2, batch)
    assert calls == patched


def test_the_copy_is_in_no_tree_of_the_student():
    model = bert()
    before, state = [name for name, _ in model.named_modules()], list(model.state_dict())
    snapshot = Snapshot(model)
    snapshot.take()
    snapshot(batch_for(model))
    assert not isinstance(snapshot, nn.Module)
    assert snapshot.student is model
    assert not any(isinstance(value, nn.Module) for name, value in vars(snapshot).items() if name != "student")
    assert [name for name, _ in model.named_modules()] == before
    assert list(model.state_dict()) == state
    own = {t.data_ptr() for t in [*model.parameters(), *model.buffers()]}
    assert not own & {t.data_ptr() for t in snapshot.plain.values()}


def test_the_student_may_grow_hooks_afterwards():
    model = bert()
    batch = batch_for(model)
    snapshot = Snapshot(model)
    snapshot.take()
    seen: list[bool] = []
    model.bert.register_forward_hook(lambda *args: seen.append(torch.is_grad_enabled()))
    snapshot(batch)
    model(**batch)
    assert seen == [False, True]
