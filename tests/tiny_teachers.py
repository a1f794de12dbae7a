"""Students of every kind of output, their examples, and what the tests of teachers ask of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
)

from pinscher import Teacher
from tiny_snapshots import SMALL, t5

IGNORED = -100


def bert(kind: type = BertForSequenceClassification, **options) -> nn.Module:
    return kind(BertConfig(**{"vocab_size": 40, "max_position_embeddings": 24, **SMALL, **options})).train()


def gpt2(kind: type = GPT2LMHeadModel, **options) -> nn.Module:
    config = GPT2Config(
        vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=24, bos_token_id=1, eos_token_id=2, **options
    )
    return kind(config).train()


class Encoder(nn.Module):
    """A transformer of torch's own parts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
        self.head = nn.Linear(16, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.encoder(self.embedding(input_ids), src_key_padding_mask=attention_mask == 0)
        return {"logits": self.head(hidden[:, 0])}


STUDENTS = {
    "classes": bert,
    "regression": lambda: bert(num_labels=1),
    "tokens": lambda: bert(BertForTokenClassification, num_labels=3),
    "spans": lambda: bert(BertForQuestionAnswering),
    "causal-lm": gpt2,
    "seq2seq-lm": t5,
    "encoder": Encoder,
}


def kind_of(name: str) -> str:
    return "classes" if name == "encoder" else name


def batch_for(name: str, lengths=(7, 4, 6, 5), width: int = 7, seed: int = 0) -> dict[str, Tensor]:
    """Random examples with their labels, padded on the right; the i-th example of a seed is always the same."""
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    ids = torch.zeros(len(lengths), width, dtype=torch.long)
    for i, length in enumerate(lengths):
        ids[i, :length] = torch.randint(3, 40, (length,), generator=torch.Generator().manual_seed(1000 * seed + i))
    batch = {"input_ids": ids, "attention_mask": mask}
    rows = torch.arange(len(lengths))
    if name == "regression":
        batch["labels"] = rows / 2
    elif name == "tokens":
        batch["labels"] = (ids % 3).masked_fill(mask == 0, IGNORED)
    elif name == "causal-lm":
        batch["labels"] = ids.masked_fill(mask == 0, IGNORED)
    elif name == "seq2seq-lm":
        batch["labels"] = ids[:, :5].masked_fill(mask[:, :5] == 0, IGNORED)
    elif name == "spans":
        batch |= {"start_positions": rows % 2, "end_positions": rows % 4}
    else:
        batch["labels"] = rows % 2
    return batch


def inputs_of(batch: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    away = () if name == "seq2seq-lm" else ("labels", "start_positions", "end_positions")
    return {n: v for n, v in batch.items() if n not in away}


def sides(outputs) -> list[Tensor]:
    return [outputs[n] for n in ("logits", "start_logits", "end_logits") if n in outputs]


def at_test_time(model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    model.eval()
    with torch.no_grad():
        found = [x.clone() for x in sides(model(**inputs))]
    model.train()
    return found


def learn(
    model: nn.Module, teacher: Teacher, batch: dict[str, Tensor], steps: int = 1, lr: float = 0.5
) -> list[Tensor]:
    """Plain training with both terms; the second terms are returned."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    terms = []
    for _ in range(steps):
        outputs = model(**batch)
        own = outputs["loss"] if "loss" in outputs else F.cross_entropy(outputs["logits"], batch["labels"])
        terms.append(teacher.loss(batch, outputs))
        optimizer.zero_grad()
        (own + terms[-1]).backward()
        optimizer.step()
    return [x.detach() for x in terms]


def watch(module: nn.Module) -> list[int]:
    """The number of examples in each call of a module, as they come."""
    calls: list[int] = []

    def note(module: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
        calls.append(len(next(iter(kwargs.values()))))

    module.register_forward_hook(note, with_kwargs=True)
    return calls


def remembered(teacher: Teacher) -> int:
    """Bytes of remembered outputs."""
    return teacher.nbytes - (teacher.snapshot.nbytes if teacher.snapshot is not None else 0)
