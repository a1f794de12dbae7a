"""Answers a task's rows with a model and scores the answers; used by `pinscher eval` and by runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import Dataset

from pinscher.models.inputs import evaluating
from pinscher.prune.distillation import logits_of
from pinscher.prune.sharding import is_managed
from pinscher.train.batches import counted
from pinscher.train.tasks import Outputs, Task
from pinscher.train.tasks.task import REFERENCE


@dataclass(frozen=True)
class Evaluation:
    """Answers and scores for each split, and the scores of all splits as one."""

    answers: dict[str, list[Any]]
    splits: dict[str, dict[str, float]]
    scores: dict[str, float]


def evaluate(
    model: Any, task: Task, tokenizer: Any, tests: Mapping[str, Dataset], labels: Sequence[str], batch_size: int = 64
) -> Evaluation:
    """Answers every row of every split. Splits without labels are answered but not scored."""
    answers = {name: answer(model, task, tokenizer, rows, labels, batch_size) for name, rows in tests.items()}
    splits = {n: task.scores(answers[n], rows) for n, rows in tests.items() if not task.lacks_labels(rows)}
    return Evaluation(answers, splits, task.combined(splits) if splits else {})


def answer(
    model: Any,
    task: Task,
    tokenizer: Any,
    rows: Dataset,
    labels: Sequence[str],
    batch_size: int = 64,
    features: Dataset | None = None,
) -> list[Any]:
    """The model's answer to each row; features that exist already can be passed."""
    features = task.features(rows, tokenizer, labels, training=False) if features is None else features
    if task.generates:
        return task.generate(model, tokenizer, features, batch_size)
    outputs = outputs_of(model, features, task.collator(tokenizer), batch_size, task.kind)
    return task.answers(outputs, features, rows, labels)


def with_reference(
    model: Any, task: Task, tokenizer: Any, rows: Dataset, labels: Sequence[str], batch_size: int
) -> Dataset:
    """The rows with the answers of a model before it is pruned, if the task's scores compare with those."""
    if not task.needs_reference or REFERENCE in rows.column_names:
        return rows
    answers = answer(model, task, tokenizer, rows, labels, batch_size)
    return rows.add_column(REFERENCE, [np.asarray(one).tolist() for one in answers])


def without_gradients(model: Any) -> Any:
    """Inference mode; no_grad for FSDP2, which keeps tensors that training has to write to later."""
    return torch.no_grad() if is_managed(model) else torch.inference_mode()


def outputs_of(model: Any, features: Dataset, collate: Any, batch_size: int, kind: str) -> Outputs:
    """The logits for each feature, computed in batches of similar length."""
    table = features.to_list()
    order = sorted(range(len(table)), key=lambda i: len(table[i]["input_ids"]))
    found: list[Any] = [None] * len(table)
    device = next(model.parameters()).device
    with evaluating(model), without_gradients(model):
        for start in range(0, len(order), batch_size):
            some = order[start : start + batch_size]
            batch = {name: t.to(device) for name, t in collate([table[i] for i in some]).items()}
            batch = {n: t for n, t in batch.items() if n not in ("labels", "start_positions", "end_positions")}
            logits = [side.float().cpu().numpy() for side in logits_of(model(**batch), kind)]
            for place, i in enumerate(some):
                found[i] = tuple(side[place] for side in logits)
    return found


def mean_loss(model: Any, features: Dataset, task: Task, tokenizer: Any, batch_size: int) -> float:
    """The mean loss over all labels that count."""
    collate, table = task.collator(tokenizer), features.to_list()
    table.sort(key=lambda feature: len(feature["input_ids"]))
    device = next(model.parameters()).device
    total, number = 0.0, 0
    with evaluating(model), without_gradients(model):
        for start in range(0, len(table), batch_size):
            batch = {name: t.to(device) for name, t in collate(table[start : start + batch_size]).items()}
            labels = counted(batch, task.kind)
            total += float(model(**batch).loss) * labels
            number += labels
    return total / number
