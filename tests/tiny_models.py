"""Real architectures with every kind of head, tiny and random, with rows of uneven length to train them on."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from transformers import PreTrainedModel, TrainingArguments

from pinscher.prune.sites import find_sites

VOCABULARY, LONGEST = 40, 12
SMALL = {"vocab_size": VOCABULARY, "max_position_embeddings": 32, "pad_token_id": 0, "initializer_range": 0.2}
WIDE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
BERT = {**SMALL, **WIDE, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
DISTIL = {**SMALL, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32, "dropout": 0.0, "attention_dropout": 0.0}
GPT2 = {**SMALL, "n_embd": 16, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
LLAMA = {**SMALL, **WIDE, "num_key_value_heads": 1}
T5_SIZE = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
T5 = {"vocab_size": VOCABULARY, "pad_token_id": 0, "decoder_start_token_id": 0, **T5_SIZE}
MODERN = {**SMALL, **WIDE, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}


@dataclass(frozen=True)
class Head:
    """A model class with its configuration, and the kind of its outputs."""

    kind: str
    model: str
    config: str
    settings: dict[str, Any]

    def make(self, seed: int = 0, **settings: Any) -> PreTrainedModel:
        torch.manual_seed(seed)
        config = getattr(transformers, self.config)(**(self.settings | settings))
        return getattr(transformers, self.model)(config)


HEADS = {
    "bert": Head("classes", "BertForSequenceClassification", "BertConfig", {**BERT, "num_labels": 3}),
    "roberta": Head("classes", "RobertaForSequenceClassification", "RobertaConfig", {**BERT, "num_labels": 3}),
    "distilbert": Head(
        "classes", "DistilBertForSequenceClassification", "DistilBertConfig", {**DISTIL, "num_labels": 3}
    ),
    "deberta-v2": Head("classes", "DebertaV2ForSequenceClassification", "DebertaV2Config", {**BERT, "num_labels": 3}),
    "modernbert": Head(
        "classes", "ModernBertForSequenceClassification", "ModernBertConfig", {**MODERN, "num_labels": 3}
    ),
    "gpt2": Head("classes", "GPT2ForSequenceClassification", "GPT2Config", {**GPT2, "num_labels": 3}),
    "llama": Head("classes", "LlamaForSequenceClassification", "LlamaConfig", {**LLAMA, "num_labels": 3}),
    "regression": Head("regression", "BertForSequenceClassification", "BertConfig", {**BERT, "num_labels": 1}),
    "tokens": Head("tokens", "BertForTokenClassification", "BertConfig", {**BERT, "num_labels": 4}),
    "distilbert-tokens": Head(
        "tokens", "DistilBertForTokenClassification", "DistilBertConfig", {**DISTIL, "num_labels": 4}
    ),
    "spans": Head("spans", "BertForQuestionAnswering", "BertConfig", BERT),
    "distilbert-spans": Head("spans", "DistilBertForQuestionAnswering", "DistilBertConfig", DISTIL),
    "gpt2-lm": Head("causal-lm", "GPT2LMHeadModel", "GPT2Config", GPT2),
    "llama-lm": Head("causal-lm", "LlamaForCausalLM", "LlamaConfig", LLAMA),
    "t5": Head("seq2seq-lm", "T5ForConditionalGeneration", "T5Config", T5),
}
DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}  # for the BERTs


def rows(kind: str, number: int = 24, seed: int = 1) -> Dataset:
    """Rows of 3 to 12 tokens whose label can be read off them; of token labels an uneven number a row counts."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(number):
        ids = torch.randint(
            3, VOCABULARY, (int(torch.randint(3, LONGEST + 1, (), generator=generator)),), generator=generator
        )
        row: dict[str, Any] = {"input_ids": ids.tolist(), "attention_mask": [1] * len(ids)}
        if kind == "classes":
            row["labels"] = int(ids[0]) % 3
        elif kind == "regression":
            row["labels"] = float(ids[0]) / VOCABULARY
        elif kind == "spans":
            start = int(ids[0]) % len(ids)
            row |= {"start_positions": start, "end_positions": min(start + 1, len(ids) - 1)}
        else:
            counts = torch.rand(len(ids), generator=generator) < torch.rand((), generator=generator)
            counts[-1] = True
            labels = ids % 4 if kind == "tokens" else ids
            row["labels"] = labels.masked_fill(~counts, -100).tolist()
        found.append(row)
    return Dataset.from_list(found)


def collate(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pads tokens with zeros and labels with -100 to the longest of the batch.

    Spans are padded to one length: BERT takes padding for a possible answer, so its loss depends on the padding.
    """
    batch = {}
    for name in features[0]:
        values = [feature[name] for feature in features]
        if not isinstance(values[0], list):
            batch[name] = torch.tensor(values)
            continue
        longest = LONGEST if "start_positions" in features[0] else max(map(len, values))
        fill = -100 if name == "labels" else 0
        batch[name] = torch.tensor([value + [fill] * (longest - len(value)) for value in values])
    return batch


def collate_pairs(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The same for an encoder-decoder, with the decoder's inputs: with label smoothing the model sees no labels."""
    batch = collate(features)
    shifted = batch["labels"].roll(1, dims=1)
    shifted[:, 0] = 0
    return batch | {"decoder_input_ids": shifted.masked_fill(shifted == -100, 0)}


def collator(kind: str) -> Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]]:
    return collate_pairs if kind == "seq2seq-lm" else collate


def arguments(folder: Path | str, **settings: Any) -> TrainingArguments:
    """A quiet run on one CPU; nothing is saved, evaluated or reported unless asked for."""
    plain = {"learning_rate": 5e-3, "max_grad_norm": 1.0, "weight_decay": 0.01, "save_strategy": "no"}
    quiet = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 1, "log_level": "error"}
    rest = {"remove_unused_columns": False, "dataloader_pin_memory": False, "lr_scheduler_type": "linear"}
    return TrainingArguments(output_dir=str(folder), **(plain | quiet | rest | settings))


def become_rank(rank: int, port: int, limit: float) -> None:
    """Makes this process one of two, as a launcher would; it computes in float64 and gives up after `limit` seconds."""
    faulthandler.dump_traceback_later(limit, exit=True)
    torch.set_num_threads(1)
    torch.Tensor.float = torch.Tensor.double  # see double_losses
    os.environ.update(RANK=f"{rank}", LOCAL_RANK=f"{rank}", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=f"{port}", LOCAL_WORLD_SIZE="2")


def pruned_bert() -> tuple[PreTrainedModel, dict[str, int]]:
    """A pruned model, and how many zeros each of its matrices has."""
    model = HEADS["bert"].make()
    torch.manual_seed(3)
    zeros = {}
    for site in find_sites(model):
        with torch.no_grad():
            site.effective.mul_(torch.rand(site.shape) < 0.4)
        zeros[site.name] = site.zeros()
    return model, zeros
