"""The copy of a student: it says what the student said, takes little memory, and leaves the student alone.

It runs in the student's own modules, which are lent the copy's tensors for one forward pass.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import operator
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
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

from pinscher import checkpoint
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


def kept_by(snapshot: Snapshot) -> list[str]:
    """The names of all tensors of a copy."""
    return [*snapshot.plain, *snapshot.packed, *snapshot.shared, *snapshot.buffers]


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor under every name it has."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Checks that a student is left as it was: the very same tensors, never written to, in modules of the same kind."""
    tensors = tensors_of(model)
    values = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    before = {name: (t.requires_grad, t.is_leaf, t._version, t.data_ptr()) for name, t in tensors.items()}
    grads = {name: t.grad for name, t in tensors.items()}
    modules = [(name, module, type(module), module.training) for name, module in model.named_modules()]
    random = torch.get_rng_state()
    yield
    now = tensors_of(model)
    assert list(now) == list(tensors)
    for name, tensor in now.items():
        assert tensor is tensors[name], name
        assert type(tensor) is type(tensors[name]), name
        assert (tensor.requires_grad, tensor.is_leaf, tensor._version, tensor.data_ptr()) == before[name], name
        assert tensor.grad is grads[name], name
        assert torch.equal(tensor, values[name]), name
    assert [(name, module, type(module), module.training) for name, module in model.named_modules()] == modules
    assert not any(module.bypass for module in model.modules() if isinstance(module, Gate))
    assert torch.equal(torch.get_rng_state(), random)


def lasts(model: nn.Module, batch: dict[str, Tensor]) -> Snapshot:
    """Takes a copy, and checks that it says what the student said then, also after the student has moved on."""
    snapshot = Snapshot(model)
    with untouched(model):
        snapshot.take()
    expected = at_test_time(model, batch)
    for moved in (False, True):
        if moved:
            shake(model)
            assert not torch.allclose(at_test_time(model, batch), expected, rtol=1e-3, atol=1e-3)
        with untouched(model):
            agrees(snapshot, expected, batch)
    return snapshot


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
    """Changes every parameter that trains in place, as an optimiser does."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
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


# ---------------------------------------------------------------- memory


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


# ---------------------------------------------------------------- leaves the student alone


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


# ---------------------------------------------------------------- state


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
        assert alive > 0.75 * tensor.numel()
        return
    expanded = packed.expand()
    assert (expanded.shape, expanded.dtype) == (tensor.shape, dtype)
    assert torch.equal(expanded.view(BITS[dtype]), tensor.contiguous().view(BITS[dtype]))
    assert packed.nbytes == alive * (packed.gaps.element_size() + tensor.element_size())
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
    assert Packed.of(tensor) is None
    tensor[0, : int(0.3 * numel)] = 0
    assert Packed.of(tensor) is not None


def test_packing_does_not_share_memory():
    tensor = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    packed = Packed.of(tensor)
    tensor.fill_(7.0)
    assert packed.expand().tolist() == [[1.0, 0.0], [0.0, 2.0]]
    packed.expand().fill_(9.0)
    assert packed.expand().tolist() == [[1.0, 0.0], [0.0, 2.0]]
