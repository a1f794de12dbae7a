"""Students of other makes: wrapped, compiled, with weights that are computed or read without a call."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from transformers import (
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    Wav2Vec2Config,
    Wav2Vec2ForSequenceClassification,
)

from pinscher.prune.snapshot import Snapshot
from tiny_snapshots import SMALL, agrees, at_test_time, batch_for, bert, lasts, shake, sparsify, tensors_of, untouched


def test_a_parameter_list_that_is_never_called():
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.ParameterList([nn.Parameter(torch.zeros(4, 4))])
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": self.head(x + x @ self.extra[0])}

    model, batch = Listed(), {"x": torch.randn(3, 4)}
    lasts(model, batch)


def test_a_module_that_reads_the_weights_of_its_child():
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(4, 4)
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": self.head(F.linear(x, self.proj.weight, self.proj.bias))}

    model, batch = sparsify(Reads()), {"x": torch.randn(3, 4)}
    lasts(model, batch)


def test_deberta_reads_its_relative_embeddings_without_calling_them():
    config = DebertaV2Config(
        vocab_size=40,
        max_position_embeddings=16,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        norm_rel_ebd="layer_norm",
        **SMALL,
    )
    model = sparsify(DebertaV2ForSequenceClassification(config))
    batch = batch_for(model)
    lasts(model, batch)


def test_a_parametrization_that_is_no_gate():
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))
            self.head = nn.utils.parametrizations.weight_norm(nn.Linear(4, 2))
            self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": self.head(self.spectral(self.hidden(x)))}

    model, batch = Normed().train(), {"x": torch.randn(3, 4)}
    lasts(model, batch)


def wav2vec2() -> Wav2Vec2ForSequenceClassification:
    config = Wav2Vec2Config(
        conv_dim=(16, 16),
        conv_stride=(4, 2),
        conv_kernel=(8, 4),
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        classifier_proj_size=8,
        **SMALL,
    )
    return Wav2Vec2ForSequenceClassification(config).train()


def test_wav2vec2_normalises_its_position_weights():
    model, batch = wav2vec2(), {"input_values": torch.randn(2, 400)}
    snapshot = Snapshot(model)
    snapshot.take()
    expected = at_test_time(model, batch)
    agrees(snapshot, expected, batch)
    shake(model)
    assert not torch.allclose(at_test_time(model, batch), expected, atol=1e-3)
    before = tensors_of(model)
    agrees(snapshot, expected, batch)
    assert all(tensor is before[name] for name, tensor in tensors_of(model).items())
    assert all(module.training for module in model.modules())


def test_a_student_that_draws_random_numbers_at_test_time():
    """Wav2Vec2 does, for layers that it then does not drop; training goes on with the numbers it had without a copy."""
    model, batch = wav2vec2(), {"input_values": torch.randn(2, 400)}
    snapshot = Snapshot(model)
    snapshot.take()
    with untouched(model):
        snapshot(batch)


class Inner(nn.Module):
    """A model with a part that happens to be called `module`."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(self.module(x))}


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return self.inner(x)


@pytest.mark.parametrize("kind", [Inner, Outer])
def test_a_part_called_module_is_no_wrapper(kind):
    model, batch = kind(), {"x": torch.randn(3, 4)}
    lasts(model, batch)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
def test_a_weight_that_a_hook_makes():
    """The older weight_norm and spectral_norm compute the weight right before the forward pass."""

    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = nn.utils.spectral_norm(nn.Linear(4, 4))
            self.head = nn.utils.weight_norm(nn.Linear(4, 2))

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": self.head(self.hidden(x))}

    model, batch = Hooked().train(), {"x": torch.randn(3, 4)}
    snapshot = Snapshot(model)
    snapshot.take()
    expected = at_test_time(model, batch)
    shake(model)
    logits = model(**batch)["logits"]
    agrees(snapshot, expected, batch)
    logits.sum().backward()
    assert all(torch.count_nonzero(p.grad) for p in model.parameters())
    model.zero_grad()
    model(**batch)["logits"].sum().backward()
    assert all(torch.count_nonzero(p.grad) for p in model.parameters())


def test_a_buffer_that_appears_after_the_copy_was_taken():
    model, batch = Positions(), {"x": torch.randn(3, 4)}
    snapshot = Snapshot(model)
    snapshot.take()
    expected = at_test_time(model, batch)
    agrees(snapshot, expected, batch)


def test_a_buffer_that_grows():
    model = Positions()
    model(torch.randn(2, 4))
    batch = {"x": torch.randn(5, 4)}
    snapshot = Snapshot(model)
    snapshot.take()
    expected = at_test_time(model, batch)
    agrees(snapshot, expected, batch)
    snapshot.take()
    restored = Snapshot(Positions())
    restored.load_state_dict(snapshot.state_dict())
    agrees(restored, expected, batch)


class Positions(nn.Module):
    """A model with a table of positions that is made when it is first needed, and no part of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.register_buffer("table", None, persistent=False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if self.table is None or len(self.table) < len(x):
            self.table = torch.arange(len(x)).float()
        return {"logits": self.head(x) + self.table[: len(x), None]}


@pytest.mark.parametrize("wrapped", ["plain", "parallel", "distributed"])
def test_wrappers_of_parallel_training_are_left_behind(wrapped):
    model = sparsify(bert()).train()
    batch = batch_for(model)
    if wrapped == "distributed":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrap = {"plain": lambda m: m, "parallel": DataParallel, "distributed": DistributedDataParallel}[wrapped]
        snapshot = Snapshot(wrap(wrap(model)) if wrapped == "parallel" else wrap(model))
        assert snapshot.student is model
        snapshot.take()
        assert "classifier.weight" in {*snapshot.plain, *snapshot.packed}
        expected = at_test_time(model, batch)
        shake(model)
        with untouched(model):
            agrees(snapshot, expected, batch)
    finally:
        if wrapped == "distributed":
            dist.destroy_process_group()


def test_a_compiled_student():
    model = sparsify(bert()).train()
    batch = batch_for(model)
    compiled = torch.compile(model, backend="eager")
    snapshot = lasts(compiled, batch)
    assert snapshot.student is compiled
    shake(model)
    torch.testing.assert_close(at_test_time(compiled, batch), at_test_time(model, batch))


def test_blocks_compiled_one_by_one():
    model = sparsify(bert()).train()
    batch = batch_for(model)
    expected = at_test_time(model, batch)
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list) -> object:
        compiled.append(1)
        return graph.forward

    torch._dynamo.reset()
    layers = model.bert.encoder.layer
    for i, layer in enumerate(layers):
        layers[i] = torch.compile(layer, backend=backend)
    snapshot = Snapshot(model)
    snapshot.take()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    labels = torch.tensor([0, 1, 0, 1])
    counts = []
    for _ in range(5):
        loss = F.cross_entropy(model(**batch)["logits"], labels)
        with untouched(model):
            agrees(snapshot, expected, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(len(compiled))
    assert 0 < counts[0] <= 2 * len(layers)
    assert counts[1:] == counts[:1] * 4  # lending the tensors compiles nothing anew
    assert not torch.allclose(at_test_time(model, batch), expected, atol=1e-3)
    lasts(model, batch)


def test_hidden_states_are_there_when_the_student_was_asked_for_them_before():
    model = sparsify(bert()).eval()
    batch = {**batch_for(model), "output_hidden_states": True}
    with torch.no_grad():
        expected = model(**batch).hidden_states
    snapshot = Snapshot(model)
    snapshot.take()
    shake(model)
    found = snapshot(batch).hidden_states
    assert len(found) == len(expected)
    for mine, its in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, its)
