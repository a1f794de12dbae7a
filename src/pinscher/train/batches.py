"""The examples of each batch, their order, and how many of their labels count."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Sampler
from transformers import TrainerCallback
from transformers.models.auto import modeling_auto

IGNORED = -100
POOL = 50  # groups that are sorted by length together: enough to save padding, few enough to stay random


class EpochSampler(Sampler[int]):
    """A random order for each epoch that depends on seed and epoch alone, so that a resumed run sees the same data.

    Args:
        rows: how many examples there are.
        seed: another seed, another order.
        lengths: tokens of each example; if given, examples of similar length share a group, which saves padding.
        group: how many examples are trained on together (batch * accumulation * processes).
    """

    def __init__(self, rows: int, seed: int, lengths: Sequence[int] | None = None, group: int = 1) -> None:
        self.rows, self.seed, self.lengths, self.group = rows, seed, lengths, group
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.rows

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed((self.seed << 20) + self.epoch)
        order: list[int] = torch.randperm(self.rows, generator=generator).tolist()
        if self.lengths is None:
            return iter(order)
        lengths, size = self.lengths, self.group
        groups: list[list[int]] = []
        for start in range(0, len(order), POOL * size):
            pool = sorted(order[start : start + POOL * size], key=lambda i: lengths[i], reverse=True)
            groups += [pool[i : i + size] for i in range(0, len(pool), size)]
        whole = [g for g in groups if len(g) == size]
        ragged = [g for g in groups if len(g) < size]  # stays last, where the loader expects a smaller batch
        shuffled = [whole[i] for i in torch.randperm(len(whole), generator=generator).tolist()]
        return iter([i for g in [*shuffled, *ragged] for i in g])


class EpochTeller(TrainerCallback):
    """Tells a Trainer's sampler which epoch it is: wrapped loaders do not always pass it on."""

    def __init__(self, sampler: Callable[[], EpochSampler | None]) -> None:
        self.sampler = sampler

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (sampler := self.sampler()) is not None:
            sampler.set_epoch(int(state.epoch or 0))


def counted(batch: Mapping[str, Any], kind: str) -> int:
    """How many labels a loss of this kind averages over.

    A sum of micro-batch means weighted by this is the mean over the whole batch, for every head.
    """
    labels = batch.get("labels")
    if kind == "causal-lm" and labels is not None:
        labels = labels[:, 1:]  # the first token is never predicted
    if labels is not None and not labels.is_floating_point() and kind not in ("regression", "spans"):
        return int((labels != IGNORED).sum())
    return len(next(value for value in batch.values() if isinstance(value, torch.Tensor) and value.dim() > 0))


def calibration_batches(rows: Any, collate: Any, number: int, size: int, seed: int, device: Any) -> list[Any]:
    """Batches of `number` rows, drawn by `seed` alone, so that a resumed run sees the same ones."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()[:number]
    found = []
    for start in range(0, len(order), size):
        batch = collate([rows[i] for i in order[start : start + size]])
        found.append({name: v.to(device) if isinstance(v, torch.Tensor) else v for name, v in batch.items()})
    return found


def kind_of(model: Any) -> str | None:
    """The kind of a transformers model's outputs, from its class; None for an unknown class."""
    name = type(model).__name__
    families = {
        "tokens": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
        "spans": modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
        "causal-lm": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "seq2seq-lm": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    }
    if name in modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values():
        alone = model.config.problem_type == "regression" or model.config.num_labels == 1
        return "regression" if alone else "classes"
    return next((kind for kind, names in families.items() if name in names.values()), None)
