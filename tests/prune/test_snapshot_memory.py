"""A copy takes little memory: zeros are packed, frozen parameters shared, tied ones kept once."""

from __future__ import annotations

import gc
import operator
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
)

from pinscher.prune import Pruner, PruningConfig, sparsity
from pinscher.prune.snapshot import Snapshot
from tiny_snapshots import (
    MODELS,
    agrees,
    at_test_time,
    batch_for,
    bert,
    gpt2,
    kept_by,
    lasts,
    learn,
    own_bytes,
    shake,
    sparsify,
    untouched,
)


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5"])
def test_a_sparse_copy_is_small(name):
    model = sparsify(MODELS[name]())
    snapshot = Snapshot(model)
    snapshot.take()
    matrices = sum(p.numel() * p.element_size() for p in model.parameters() if p.dim() == 2)
    rest = own_bytes(model) - matrices
    assert snapshot.nbytes - rest < 0.3 * matrices
    assert sorted(kept_by(snapshot)) == sorted(n for n, _ in [*model.named_parameters(), *model.named_buffers()])
    assert set(snapshot.packed) == {n for n, p in model.named_parameters() if p.dim() == 2}


def test_a_sparse_copy_of_a_wide_model_is_below_three_tenths_in_all():
    config = BertConfig(
        vocab_size=200, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=256
    )
    model = sparsify(BertForSequenceClassification(config))
    snapshot = Snapshot(model)
    snapshot.take()
    assert snapshot.nbytes < 0.3 * own_bytes(model)


def test_a_dense_copy_takes_what_the_student_takes():
    model = bert()
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight[0] = 1.0  # the row of the padding token is born zero
    snapshot = Snapshot(model)
    snapshot.take()
    assert snapshot.packed == {}
    assert snapshot.nbytes == own_bytes(model)


def test_the_copy_has_no_memory_before_the_first_take():
    snapshot = Snapshot(bert())
    assert snapshot.nbytes == 0
    assert kept_by(snapshot) == []


def test_the_student_is_whole_after_a_run_without_a_copy():
    model = bert().train()
    batch = batch_for(model)
    with untouched(model), pytest.raises(RuntimeError, match="no snapshot has been taken"):
        Snapshot(model)(batch)


def test_expanded_matrices_are_let_go():
    """A matrix is expanded when its layer runs, and gone before the next layer's is."""
    model = sparsify(bert())
    snapshot = Snapshot(model)
    snapshot.take()
    seen: list[weakref.ref] = []
    most = []

    def look(module, args):
        seen.append(weakref.ref(module.weight))
        gc.collect()
        most.append(sum(ref() is not None for ref in seen))

    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    hooks = [layer.register_forward_pre_hook(look) for layer in layers]
    before, kinds = snapshot.nbytes, [type(layer) for layer in layers]
    snapshot(batch_for(model))
    for hook in hooks:
        hook.remove()
    assert len(snapshot.packed) >= 12
    assert {f"{name}.weight" for name, m in model.named_modules() if m in layers} <= {*snapshot.packed}
    assert max(most) <= 1
    assert snapshot.nbytes == before
    assert [type(layer) for layer in layers] == kinds
    assert not any("_lent" in vars(layer) for layer in layers)


def test_frozen_parameters_are_shared():
    """Embeddings and norms, that is: a matrix may still be pruned while it does not train."""
    model = bert()
    model.bert.embeddings.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.requires_grad_(False)
    batch = batch_for(model)
    snapshot = Snapshot(model)
    snapshot.take()
    kept = snapshot.state_dict()
    frozen = {n: p for n, p in model.named_parameters() if not p.requires_grad}
    assert set(snapshot.shared) == set(frozen) == set(kept["shared"])
    assert not {*snapshot.shared} & {*snapshot.plain, *snapshot.packed, *kept["plain"], *kept["packed"]}
    for name, parameter in frozen.items():
        assert snapshot.shared[name] is parameter
    for name, parameter in model.named_parameters():
        if name not in frozen:
            assert snapshot.plain[name].data_ptr() != parameter.data_ptr()
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    assert snapshot.nbytes == trained + sum(b.numel() * b.element_size() for b in model.buffers())
    lent: dict[str, Tensor] = {}
    handle = model.register_forward_pre_hook(lambda module, args: lent.update(module.named_parameters()))
    with untouched(model):
        snapshot(batch)
    handle.remove()
    assert all((lent[name] is parameter) == (name in frozen) for name, parameter in model.named_parameters())
    expected = at_test_time(model, batch)
    shake(model)
    agrees(snapshot, expected, batch)


def test_a_frozen_matrix_is_copied():
    model = bert()
    model.requires_grad_(False)
    snapshot = Snapshot(model)
    snapshot.take()
    matrices = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert not matrices & set(snapshot.shared)
    assert matrices <= {*snapshot.plain, *snapshot.packed}
    assert all(snapshot.plain[n].data_ptr() != model.get_parameter(n).data_ptr() for n in matrices)
    assert set(snapshot.shared) >= {n for n, _ in model.named_parameters() if "LayerNorm" in n or "embeddings" in n}


def test_pruning_a_frozen_matrix_does_not_move_the_copy():
    model = bert()
    model.bert.requires_grad_(False)
    batch = batch_for(model)
    snapshot = Snapshot(model)
    snapshot.take()
    expected = at_test_time(model, batch)
    pruner = Pruner(model, PruningConfig(method="magnitude", sparsity=0.9, total_steps=4, interval=1))
    optimizer = torch.optim.SGD(pruner.param_groups(), lr=0.1)
    pruner.attach(optimizer)
    learn(model, optimizer, 4)
    assert sparsity(pruner.finish()) > 0.85
    agrees(snapshot, expected, batch)


@pytest.mark.parametrize("zeros", [0.0, 0.8])
def test_frozen_parameters_come_from_the_student_again(zeros):
    model = sparsify(bert(), zeros)
    model.bert.encoder.requires_grad_(False)
    batch = batch_for(model)
    snapshot = Snapshot(model)
    snapshot.take()
    twin = bert()
    twin.load_state_dict(model.state_dict())
    twin.bert.encoder.requires_grad_(False)
    restored = Snapshot(twin)
    restored.load_state_dict(snapshot.state_dict())
    expected = snapshot(batch)["logits"]
    assert torch.equal(restored(batch)["logits"], expected)
    with torch.no_grad():
        twin.classifier.weight.add_(1.0)
    assert torch.equal(restored(batch)["logits"], expected)


def test_a_parameter_frozen_later_stays_in_the_saved_copy():
    """Freezing part of the student must not take the weights of the teacher out of a checkpoint."""
    model = bert()
    batch = batch_for(model)
    snapshot = Snapshot(model)
    snapshot.take()
    expected = at_test_time(model, batch)
    shake(model)
    model.bert.requires_grad_(False)
    state = snapshot.state_dict()
    assert state["shared"] == []
    assert {n for n, _ in model.named_parameters()} <= {*state["plain"], *state["packed"]}
    twin = bert()
    twin.load_state_dict(model.state_dict())
    twin.bert.requires_grad_(False)
    restored = Snapshot(twin)
    restored.load_state_dict(state)
    assert restored.shared == {}
    agrees(snapshot, expected, batch)
    agrees(restored, expected, batch)


@pytest.mark.parametrize("act", ["run", "state_dict"])
def test_a_parameter_unfrozen_later_does_not_move_the_copy(act):
    """Gradual unfreezing: what was frozen when the copy was taken trains afterwards."""
    model = bert()
    model.bert.requires_grad_(False)
    batch = batch_for(model)
    snapshot = Snapshot(model)
    snapshot.take()
    expected = snapshot(batch)["logits"].clone()
    shared, before = dict(snapshot.shared), snapshot.nbytes
    assert shared
    model.bert.requires_grad_(True)
    if act == "run":
        agrees(snapshot, expected, batch)
    else:
        assert snapshot.state_dict()["shared"] == []
    assert snapshot.shared == {}
    for name, parameter in shared.items():
        assert torch.equal(snapshot.plain[name], parameter)
        assert snapshot.plain[name].data_ptr() != parameter.data_ptr()
    assert snapshot.nbytes == before + sum(p.numel() * p.element_size() for p in shared.values())
    learn(model, torch.optim.SGD(model.parameters(), lr=0.5), steps=2)
    assert all(p.requires_grad for p in model.parameters())
    agrees(snapshot, expected, batch)


def test_only_what_was_unfrozen_becomes_a_copy():
    model = bert()
    model.bert.requires_grad_(False)
    batch = batch_for(model)
    snapshot = Snapshot(model)
    snapshot.take()
    shared = set(snapshot.shared)
    thawed = {n for n, _ in model.named_parameters() if n in shared and n.startswith("bert.encoder.layer.1.")}
    model.bert.encoder.layer[1].requires_grad_(True)
    snapshot(batch)
    assert set(snapshot.shared) == shared - thawed < shared


def test_frozen_parameters_of_a_checkpoint_are_copied_if_they_train_now():
    model = bert()
    model.bert.embeddings.requires_grad_(False)
    batch = batch_for(model)
    snapshot = Snapshot(model)
    snapshot.take()
    twin = bert()
    twin.load_state_dict(model.state_dict())
    restored = Snapshot(twin)
    restored.load_state_dict(snapshot.state_dict())
    assert restored.shared == {}
    expected = at_test_time(model, batch)
    shake(twin)
    agrees(restored, expected, batch)


@pytest.mark.parametrize(
    ("name", "ties"),
    [
        ("gpt2", {"transformer.wte.weight", "lm_head.weight"}),
        (
            "t5",
            {"shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"},
        ),
    ],
)
@pytest.mark.parametrize("zeros", [0.0, 0.8])
def test_tied_parameters_are_kept_once(name, ties, zeros):
    model = sparsify(MODELS[name](), zeros)
    tied = {n for n, _ in model.named_parameters(remove_duplicate=False)} & ties
    assert len({id(model.get_parameter(n)) for n in tied}) == 1
    snapshot = Snapshot(model)
    snapshot.take()
    state = snapshot.state_dict()
    assert len(tied & {*state["plain"], *state["packed"]}) == 1
    assert state["shared"] == []
    if not zeros:
        assert snapshot.nbytes == own_bytes(model)
    lent: list[Tensor] = []
    handle = model.register_forward_pre_hook(
        lambda module, args: lent.extend(operator.attrgetter(n)(module) for n in tied)
    )
    batch = batch_for(model)
    with untouched(model):
        snapshot(batch)
    handle.remove()
    if not zeros:  # packed ones are expanded whenever they are asked for
        assert len({t.data_ptr() for t in lent}) == 1
    assert lent[0].data_ptr() != model.get_parameter(next(iter(tied))).data_ptr()
    assert len({id(model.get_parameter(n)) for n in tied}) == 1


def test_frozen_tied_parameters_are_shared_once():
    model = gpt2()
    model.transformer.wte.requires_grad_(False)
    snapshot = Snapshot(model)
    snapshot.take()
    assert kept_by(snapshot).count("transformer.wte.weight") == 1
    assert "lm_head.weight" not in kept_by(snapshot)
    assert snapshot.shared["transformer.wte.weight"] is model.lm_head.weight
    model.transformer.wte.requires_grad_(True)
    batch = batch_for(model)
    expected = snapshot(batch)["logits"].clone()
    assert snapshot.shared == {}
    shake(model)
    with untouched(model):
        agrees(snapshot, expected, batch)
    assert model.lm_head.weight is model.transformer.wte.weight


def test_a_tied_and_gated_matrix_is_kept_once():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(self.up(x).relu())

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block()])
            self.blocks[1].up.weight = self.blocks[0].up.weight
            self.head = nn.Linear(6, 2)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            for block in self.blocks:
                x = block(x)
            return {"logits": self.head(x)}

    model, batch = Model(), {"x": torch.randn(5, 6)}
    pruner = Pruner(model, PruningConfig(method="movement", sparsity=0.5, total_steps=4, interval=1))
    optimizer = torch.optim.SGD(pruner.param_groups(), lr=0.1)
    pruner.attach(optimizer)
    for _ in range(3):
        F.cross_entropy(model(**batch)["logits"], torch.randint(0, 2, (5,))).backward()
        optimizer.step()
        optimizer.zero_grad()
    snapshot = Snapshot(model)
    snapshot.take()
    kept = {*snapshot.plain, *snapshot.packed}
    assert "blocks.0.up.weight" in kept
    assert "blocks.1.up.weight" not in kept
    lasts(model, batch)
