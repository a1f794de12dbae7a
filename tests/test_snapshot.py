"""The copy of a student: it says what the student said, takes little memory, and leaves the student alone."""

from __future__ import annotations

import functools
import threading

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import (
    AlbertConfig,
    AlbertForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
    Wav2Vec2Config,
    Wav2Vec2ForSequenceClassification,
)

from pinscher.prune import Pruner, PruningConfig, sparsity
from pinscher.prune.gates import Gate
from pinscher.prune.snapshot import Packed, Snapshot

GATED = ["movement", "smvp", "l0", "pst"]
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def bert(**options) -> BertForSequenceClassification:
    return BertForSequenceClassification(BertConfig(vocab_size=40, max_position_embeddings=16, **SMALL, **options))


def albert() -> AlbertForSequenceClassification:
    config = AlbertConfig(vocab_size=40, max_position_embeddings=16, embedding_size=8, **SMALL)
    return AlbertForSequenceClassification(config)


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=16, bos_token_id=1, eos_token_id=2)
    )


def t5() -> T5ForConditionalGeneration:
    return T5ForConditionalGeneration(
        T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0)
    )


class Encoder(nn.Module):
    """A transformer of torch's own parts."""

    def __init__(self, layer: type[nn.Module] = nn.TransformerEncoderLayer) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.encoder = nn.TransformerEncoder(layer(16, 2, 32, batch_first=True), 2)
        self.head = nn.Linear(16, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor]:
        return {"logits": self.head(self.encoder(self.embedding(input_ids))[:, 0])}


class Layer(nn.TransformerEncoderLayer):
    """Of the same make, but not torch's own."""


class Attention(nn.Module):
    """A bare nn.MultiheadAttention, with one matrix for all projections or three."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True, **options)
        self.head = nn.Linear(16, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        return {"logits": self.head(self.attention(x, x, x)[0][:, 0])}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.lstm = nn.LSTM(16, 8, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor]:
        return {"logits": self.head(self.lstm(self.embedding(input_ids))[0][:, -1])}


MODELS = {
    "bert": bert,
    "albert": albert,
    "gpt2": gpt2,
    "t5": t5,
    "encoder": Encoder,
    "encoder-subclass": lambda: Encoder(Layer),
    "attention": Attention,
    "attention-three": lambda: Attention(kdim=16, vdim=16),
    "recurrent": Recurrent,
}


def batch_for(model: nn.Module, rows: int = 4, length: int = 7) -> dict[str, Tensor]:
    batch = {
        "input_ids": torch.randint(3, 40, (rows, length)),
        "attention_mask": torch.ones(rows, length, dtype=torch.long),
    }
    if isinstance(model, T5ForConditionalGeneration):
        batch["labels"] = torch.randint(3, 40, (rows, 5))
    return batch


def sparsify(model: nn.Module, fraction: float = 0.8) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter[torch.rand_like(parameter) < fraction] = 0
    return model


def at_test_time(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The student's logits in evaluation mode; every module is left in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    with torch.no_grad():
        logits = model(**batch)["logits"]
    for module, mode in modes:
        module.training = mode
    return logits


def agrees(snapshot: Snapshot, expected: Tensor, batch: dict[str, Tensor]) -> None:
    torch.testing.assert_close(snapshot(batch)["logits"], expected, rtol=1e-5, atol=1e-6)


def own_bytes(model: nn.Module) -> int:
    return sum(t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()])


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    """Trains on random labels."""
    model.train()
    for _ in range(steps):
        batch = batch_for(model)
        F.cross_entropy(model(**batch)["logits"], torch.randint(0, 2, (4,))).backward()
        optimizer.step()
        optimizer.zero_grad()


def shake(model: nn.Module) -> None:
    """Changes every parameter in place, as an optimiser does."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))


# ---------------------------------------------------------------- says what the student said


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
    snapshot = Snapshot(model)
    snapshot.take()
    assert not snapshot(batch_for(model))["logits"].requires_grad
    assert not any(p.requires_grad for p in snapshot.module.parameters())


def test_works_on_after_a_batch_that_fails():
    model = sparsify(bert())
    batch = batch_for(model)
    snapshot = Snapshot(model)
    snapshot.take()
    before = sum(p.numel() for p in snapshot.module.parameters())
    with pytest.raises(IndexError):
        snapshot({"input_ids": torch.full((2, 3), 1000)})
    with pytest.raises(RuntimeError):
        snapshot({"inputs_embeds": torch.randn(2, 3, 17)})
    assert sum(p.numel() for p in snapshot.module.parameters()) == before
    agrees(snapshot, at_test_time(model, batch), batch)


# ---------------------------------------------------------------- models of other makes


def test_a_parameter_list_that_is_never_called():
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.ParameterList([nn.Parameter(torch.zeros(4, 4))])
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": self.head(x + x @ self.extra[0])}

    model, batch = Listed(), {"x": torch.randn(3, 4)}
    snapshot = Snapshot(model)
    snapshot.take()
    agrees(snapshot, at_test_time(model, batch), batch)


def test_a_module_that_reads_the_weights_of_its_child():
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(4, 4)
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": self.head(F.linear(x, self.proj.weight, self.proj.bias))}

    model, batch = sparsify(Reads()), {"x": torch.randn(3, 4)}
    snapshot = Snapshot(model)
    snapshot.take()
    agrees(snapshot, at_test_time(model, batch), batch)


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
    snapshot = Snapshot(model)
    snapshot.take()
    agrees(snapshot, at_test_time(model, batch), batch)


def test_a_parametrization_that_is_no_gate():
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))
            self.head = nn.utils.parametrizations.weight_norm(nn.Linear(4, 2))

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": self.head(self.hidden(x))}

    model, batch = Normed(), {"x": torch.randn(3, 4)}
    snapshot = Snapshot(model)
    snapshot.take()
    agrees(snapshot, at_test_time(model, batch), batch)


def test_wav2vec2_normalises_its_position_weights():
    config = Wav2Vec2Config(
        conv_dim=(16, 16),
        conv_stride=(4, 2),
        conv_kernel=(8, 4),
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        classifier_proj_size=8,
        **SMALL,
    )
    model, batch = Wav2Vec2ForSequenceClassification(config), {"input_values": torch.randn(2, 400)}
    snapshot = Snapshot(model)
    snapshot.take()
    agrees(snapshot, at_test_time(model, batch), batch)


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
    snapshot = Snapshot(model)
    snapshot.take()
    agrees(snapshot, at_test_time(model, batch), batch)


def test_wrappers_are_left_behind():
    model = sparsify(bert())
    batch = batch_for(model)
    snapshot = Snapshot(torch.compile(model, backend="eager"))
    snapshot.take()
    agrees(snapshot, at_test_time(model, batch), batch)
    assert snapshot.student is model
    assert "classifier.weight" in {*snapshot.plain, *snapshot.packed}


def test_blocks_compiled_one_by_one():
    model = sparsify(bert())
    batch = batch_for(model)
    expected = at_test_time(model, batch)
    layers = model.bert.encoder.layer
    for i, layer in enumerate(layers):
        layers[i] = torch.compile(layer, backend="eager")
    snapshot = Snapshot(model)
    snapshot.take()
    agrees(snapshot, expected, batch)


def test_hidden_states_are_there_when_the_student_was_asked_for_them_before():
    model = sparsify(bert()).eval()
    batch = {**batch_for(model), "output_hidden_states": True}
    with torch.no_grad():
        expected = model(**batch).hidden_states
    snapshot = Snapshot(model)
    snapshot.take()
    found = snapshot(batch).hidden_states
    assert len(found) == len(expected)
    for mine, its in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, its)


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5"])
def test_a_sparse_copy_is_small(name):
    model = sparsify(MODELS[name]())
    snapshot = Snapshot(model)
    snapshot.take()
    matrices = sum(p.numel() * p.element_size() for p in model.parameters() if p.dim() == 2)
    rest = own_bytes(model) - matrices
    assert snapshot.nbytes - rest < 0.3 * matrices
    assert set(snapshot.packed) | set(snapshot.plain) == set(snapshot._places)


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
    assert all(p.is_meta for p in snapshot.module.parameters())


def test_expanded_matrices_are_let_go():
    model = sparsify(bert())
    snapshot = Snapshot(model)
    snapshot.take()
    held = sum(p.numel() for p in snapshot.module.parameters())
    assert held == sum(t.numel() for n, t in snapshot.plain.items() if n in dict(model.named_parameters()))
    snapshot(batch_for(model))
    assert sum(p.numel() for p in snapshot.module.parameters()) == held


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
    copies = dict(snapshot.module.named_parameters())
    for name, parameter in frozen.items():
        assert snapshot.plain[name].data_ptr() == parameter.data_ptr() == copies[name].data_ptr()
        assert name not in kept["plain"]
        assert name not in kept["packed"]
    for name, parameter in model.named_parameters():
        if name not in frozen:
            assert snapshot.plain[name].data_ptr() != parameter.data_ptr()
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    assert snapshot.nbytes == trained + sum(b.numel() * b.element_size() for b in model.buffers())
    agrees(snapshot, at_test_time(model, batch), batch)


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
    twin = bert()
    twin.load_state_dict(model.state_dict())
    twin.bert.requires_grad_(False)
    restored = Snapshot(twin)
    restored.load_state_dict(snapshot.state_dict())
    agrees(snapshot, expected, batch)
    agrees(restored, expected, batch)


def test_a_parameter_unfrozen_later_does_not_move_the_copy():
    """Gradual unfreezing: what was frozen when the copy was taken trains afterwards."""
    model = bert()
    model.bert.requires_grad_(False)
    batch = batch_for(model)
    snapshot = Snapshot(model)
    snapshot.take()
    expected = snapshot(batch)["logits"].clone()
    model.bert.requires_grad_(True)
    agrees(snapshot, expected, batch)
    learn(model, torch.optim.SGD(model.parameters(), lr=0.5), steps=2)
    agrees(snapshot, expected, batch)


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
    if not zeros:
        assert snapshot.nbytes == own_bytes(model)


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
    agrees(snapshot, at_test_time(model, batch), batch)


# ---------------------------------------------------------------- gates


def gated(method: str, steps: int = 6) -> tuple[nn.Module, Pruner, torch.optim.Optimizer]:
    """A student in the middle of training with learned masks."""
    model = bert()
    pruner = Pruner(model, PruningConfig(method=method, sparsity=0.8, total_steps=12, interval=1, cooldown=2))
    optimizer = torch.optim.AdamW(pruner.param_groups(), lr=1e-2)
    pruner.attach(optimizer)
    learn(model, optimizer, steps)
    return model, pruner, optimizer


@pytest.mark.parametrize("method", GATED)
def test_gates_are_seen_through(method):
    model, _, optimizer = gated(method)
    batch = batch_for(model)
    snapshot = Snapshot(model)
    snapshot.take()
    expected = at_test_time(model, batch)
    agrees(snapshot, expected, batch)
    assert not any(parametrize.is_parametrized(m) for m in snapshot.module.modules())
    assert not any(isinstance(m, Gate) for m in snapshot.module.modules())
    assert set(snapshot._places) <= {n for n, _ in [*bert().named_parameters(), *bert().named_buffers()]}
    learn(model, optimizer, 2)
    agrees(snapshot, expected, batch)
    assert not torch.allclose(at_test_time(model, batch), expected, atol=1e-4)


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


@pytest.mark.parametrize("method", GATED)
def test_training_is_the_same_with_a_copy_as_without(method):
    results = []
    for with_copy in (False, True):
        torch.manual_seed(1)
        model, pruner, optimizer = gated(method, steps=3)
        if with_copy:
            snapshot = Snapshot(model)
            snapshot.take()
            assert snapshot.nbytes > 0
            snapshot.state_dict()
        learn(model, optimizer, 9)
        results.append(pruner.finish().state_dict())
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
def test_the_students_random_numbers_are_left_alone(act):
    """A run that is saved must go on exactly like one that is not."""
    model, _, _ = gated("l0")
    batch = batch_for(model)
    model.train()
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


# ---------------------------------------------------------------- leaves the student alone


@pytest.mark.parametrize("method", [None, "l0", "pst"])
def test_every_module_keeps_its_own_mode(method):
    model = bert() if method is None else gated(method)[0]
    for i, module in enumerate(model.modules()):
        module.training = i % 3 == 0
    modes = [module.training for module in model.modules()]
    snapshot = Snapshot(model)
    assert [module.training for module in model.modules()] == modes
    snapshot.take()
    assert [module.training for module in model.modules()] == modes
    snapshot(batch_for(model))
    assert [module.training for module in model.modules()] == modes
    assert not any(module.training for module in snapshot.module.modules())
    model.train()
    assert not any(module.training for module in snapshot.module.modules())


def test_modes_come_back_after_an_error():
    class Broken(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            if not self.training:
                raise RuntimeError("no test time for me")
            return weight

    model = bert().train()
    parametrize.register_parametrization(model.classifier, "weight", Broken())
    snapshot = Snapshot(model)
    with pytest.raises(RuntimeError, match="no test time"):
        snapshot.take()
    assert all(module.training for module in model.modules())


def test_hooks_do_not_run_in_the_copy():
    model = sparsify(bert())
    seen: list[str] = []
    handles = [
        model.bert.register_forward_hook(lambda *args: seen.append("after")),
        model.bert.register_forward_pre_hook(lambda *args: seen.append("before")),
        model.register_forward_hook(lambda *args, **kwargs: seen.append("kwargs"), with_kwargs=True),
        model.classifier.register_forward_hook(lambda *args: seen.append("always"), always_call=True),
        model.classifier.register_full_backward_hook(lambda *args: seen.append("backward")),
    ]
    batch = batch_for(model)
    expected = at_test_time(model, batch)
    seen.clear()
    snapshot = Snapshot(model)
    snapshot.take()
    agrees(snapshot, expected, batch)
    assert seen == []
    model(**batch)["logits"].sum().backward()
    assert sorted(seen) == ["after", "always", "backward", "before", "kwargs"]
    for handle in handles:
        handle.remove()


def test_a_hook_that_changes_outputs_is_the_students_own():
    model = bert()
    batch = batch_for(model)
    expected = at_test_time(model, batch)
    model.classifier.register_forward_hook(lambda module, args, output: output + 1)
    snapshot = Snapshot(model)
    snapshot.take()
    agrees(snapshot, expected, batch)


def test_a_hook_that_cannot_be_copied():
    class Recorder:
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def look(self, *args: object) -> None:
            with self.lock:
                pass

    model = bert()
    model.bert.register_forward_hook(Recorder().look)
    batch = batch_for(model)
    snapshot = Snapshot(model)
    snapshot.take()
    agrees(snapshot, at_test_time(model, batch), batch)


def test_a_patched_forward_does_not_run_in_the_copy():
    model = sparsify(bert())
    batch = batch_for(model)
    expected = at_test_time(model, batch)
    calls: list[nn.Module] = []

    def spying(module: nn.Module, plain, *args, **kwargs):
        calls.append(module)
        return plain(*args, **kwargs)

    for module in (model, model.bert.encoder.layer[0], model.classifier):
        module.forward = functools.partial(spying, module, module.forward)
    snapshot = Snapshot(model)
    snapshot.take()
    shake(model)
    agrees(snapshot, expected, batch)
    assert calls == []
    model(**batch)
    assert calls == [model, model.bert.encoder.layer[0], model.classifier]


def test_the_copy_is_in_no_tree_of_the_student():
    model = bert()
    before = [name for name, _ in model.named_modules()]
    snapshot = Snapshot(model)
    snapshot.take()
    assert not isinstance(snapshot, nn.Module)
    assert [name for name, _ in model.named_modules()] == before
    assert not {id(m) for m in model.modules()} & {id(m) for m in snapshot.module.modules()}


def test_the_student_may_grow_hooks_afterwards():
    model = bert()
    batch = batch_for(model)
    snapshot = Snapshot(model)
    snapshot.take()
    seen: list[int] = []
    model.bert.register_forward_hook(lambda *args: seen.append(1))
    snapshot(batch)
    assert seen == []


# ---------------------------------------------------------------- state


@pytest.mark.parametrize("name", ["bert", "albert", "gpt2", "t5", "encoder"])
@pytest.mark.parametrize("zeros", [0.0, 0.8])
def test_state_round_trip_is_bitwise(name, zeros, tmp_path):
    model = sparsify(MODELS[name](), zeros)
    batch = batch_for(model)
    snapshot = Snapshot(model)
    snapshot.take()
    torch.save(snapshot.state_dict(), tmp_path / "state.pt")
    restored = Snapshot(MODELS[name]())
    restored.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
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
    for tensor in [*state["plain"].values(), *(t for p in state["packed"].values() for t in (p["bits"], p["values"]))]:
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
    with pytest.raises(ValueError, match="another model"):
        restored.load_state_dict(snapshot.state_dict())
    assert torch.equal(restored(batch)["logits"], expected)


# ---------------------------------------------------------------- Packed

BITS = {torch.float32: torch.int32, torch.float64: torch.int64, torch.float16: torch.int16, torch.bfloat16: torch.int16}


@settings(deadline=None, max_examples=150)
@given(
    rows=st.integers(0, 9),
    columns=st.integers(0, 21),
    density=st.sampled_from([0.0, 0.05, 0.3, 0.6, 0.85]),
    dtype=st.sampled_from(list(BITS)),
    transposed=st.booleans(),
    seed=st.integers(0, 10_000),
)
@example(rows=0, columns=5, density=0.3, dtype=torch.float32, transposed=False, seed=0)
@example(rows=5, columns=0, density=0.3, dtype=torch.bfloat16, transposed=True, seed=0)
@example(rows=1, columns=1, density=0.0, dtype=torch.float16, transposed=False, seed=0)
@example(rows=3, columns=3, density=0.0, dtype=torch.float64, transposed=False, seed=0)
def test_packing_is_bitwise(rows, columns, density, dtype, transposed, seed):
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(rows, columns, generator=generator).to(dtype)
    tensor[torch.rand(rows, columns, generator=generator) >= density] = 0
    tensor = tensor.T if transposed else tensor
    alive = int(torch.count_nonzero(tensor))
    packed = Packed.of(tensor)
    if packed is None:
        assert alive > 0.9 * tensor.numel()
        return
    expanded = packed.expand()
    assert (expanded.shape, expanded.dtype) == (tensor.shape, dtype)
    assert torch.equal(expanded.view(BITS[dtype]), tensor.contiguous().view(BITS[dtype]))
    assert packed.nbytes == -(-tensor.numel() // 8) + alive * tensor.element_size()
    assert torch.equal(packed.expand(), expanded)


@pytest.mark.parametrize("dtype", BITS, ids=str)
def test_packing_keeps_odd_values(dtype):
    info = torch.finfo(dtype)
    odd = [float("nan"), float("inf"), float("-inf"), info.max, info.min, info.tiny, -info.smallest_normal, info.eps]
    tensor = torch.zeros(5, 7, dtype=dtype)
    tensor.view(-1)[torch.arange(8) * 4] = torch.tensor(odd, dtype=dtype)
    tensor[1, 1] = torch.nextafter(torch.zeros((), dtype=dtype), torch.ones((), dtype=dtype))
    assert tensor[1, 1] != 0
    expanded = Packed.of(tensor).expand()
    assert torch.equal(expanded.view(BITS[dtype]), tensor.view(BITS[dtype]))


def test_a_negative_zero_counts_as_zero():
    """Masking a negative weight by multiplication leaves one; it must not cost memory."""
    tensor = torch.tensor([[-0.0, 1.0, -0.0], [0.0, -2.0, -0.0]])
    packed = Packed.of(tensor)
    assert packed.values.tolist() == [1.0, -2.0]
    assert torch.equal(packed.expand(), tensor)


@pytest.mark.parametrize("numel", [10, 80, 83])
def test_a_hardly_sparse_matrix_is_not_packed(numel):
    tensor = torch.ones(1, numel)
    assert Packed.of(tensor) is None
    tensor[0, : int(0.2 * numel)] = 0
    assert Packed.of(tensor) is not None


def test_packing_does_not_share_memory():
    tensor = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    packed = Packed.of(tensor)
    tensor.fill_(7.0)
    assert packed.expand().tolist() == [[1.0, 0.0], [0.0, 2.0]]
    packed.expand().fill_(9.0)
    assert packed.expand().tolist() == [[1.0, 0.0], [0.0, 2.0]]
