"""Students of many makes, and what the tests of their copies ask of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AlbertConfig,
    AlbertForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

from pinscher.prune import Pruner, PruningConfig
from pinscher.prune.gates import Gate
from pinscher.prune.snapshot import Snapshot

GATED = ["movement", "smvp", "l0", "pst"]
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


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


def gated(method: str, steps: int = 6) -> tuple[nn.Module, Pruner, torch.optim.Optimizer]:
    """A student in the middle of training with learned masks."""
    model = bert()
    pruner = Pruner(model, PruningConfig(method=method, sparsity=0.8, total_steps=12, interval=1, cooldown=2))
    optimizer = torch.optim.AdamW(pruner.param_groups(), lr=1e-2)
    pruner.attach(optimizer)
    learn(model, optimizer, steps)
    return model, pruner, optimizer
