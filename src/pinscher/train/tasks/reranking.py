"""The task of cross-encoders: a query and a text, read together, get one score.

Where rows have scores (0 to 1), the loss is the binary cross-entropy, BinaryCrossEntropyLoss of sentence-transformers.
Without, a fine-tuned cross-encoder learns its own scores from before it was pruned; then each query also meets the text
of another row in training, so that the model does not forget what does not belong together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch.nn.functional as F
from datasets import Dataset
from torch import Tensor

from pinscher.errors import InputError
from pinscher.models import surgery
from pinscher.train import metrics, retrieval
from pinscher.train.tasks.glue import Padded
from pinscher.train.tasks.task import Outputs, Task, add, write_lines
from pinscher.train.tasks.texts import Texts


@dataclass(frozen=True, kw_only=True)
class Reranking(Texts):
    """Scores a text by how well it answers a query."""

    main: str = "spearman"
    max_length: int = 512
    text_columns: tuple[str, ...] = ("query", "text")

    kind: ClassVar[str] = "regression"
    architecture: ClassVar[str] = "AutoModelForSequenceClassification"
    loads_as: ClassVar[str | None] = "CrossEncoder"

    def with_columns(self, text: Sequence[str], label: str | None) -> Task:
        if text and len(text) != 2:
            raise InputError(f"task {self.name!r} needs --text-column twice: the query and the text.")
        return self.replace(text_columns=tuple(text) or None, label_column=label)

    @property
    def needs_reference(self) -> bool:
        return self.label_column is None

    @property
    def teaches(self) -> bool:
        return self.label_column is None

    def adapted(self, model: Any) -> Any:
        """A classifier of one label whose loss is that of a cross-encoder."""
        surgery.become_(model, surgery.subclass(type(model), Scorer))
        return model

    def features(self, rows: Dataset, tokenizer: Any, labels: Sequence[str], training: bool) -> Dataset:
        queries, texts = (list(rows[column][:]) for column in self.text_columns)
        others = training and self.label_column is None
        if others:
            half = len(rows) // 2
            queries, texts = queries * 2, [*texts, *texts[half:], *texts[:half]]
        encoded = tokenizer(queries, texts, truncation=True, max_length=self.max_length)
        columns = {name: encoded[name] for name in encoded if name in tokenizer.model_input_names}
        if training and self.label_column is not None:
            columns["labels"] = self.targets(rows, 0, "the loss takes 0 to 1")
        return Dataset.from_dict({**columns, "row": list(range(len(rows))) * (2 if others else 1)})

    def collator(self, tokenizer: Any) -> Any:
        return Padded(tokenizer)

    def answers(self, outputs: Outputs, features: Dataset, rows: Dataset, labels: Sequence[str]) -> list[Any]:
        return [float(logits.reshape(-1)[0]) for (logits,) in outputs]

    def scores(self, answers: Sequence[Any], rows: Dataset) -> dict[str, float]:
        if self.label_column is None:
            true = self.referred(rows, "rows with scores (--label-column)")
            return {"spearman": metrics.spearman(answers, true), "pearson": metrics.pearson(answers, true)}
        true = np.asarray(self.true(rows))
        found = {"spearman": metrics.spearman(answers, true)}
        return found | retrieval.reranked(rows[self.text_columns[0]][:], answers, true > true.max() / 2)

    def write(self, answers: Sequence[Any], rows: Dataset, folder: Path, split: str) -> Path:
        lines = [f"{i}\t{value:.6f}" for i, value in enumerate(answers)]
        return write_lines(folder / f"predictions_{split}.tsv", ["index\tprediction", *lines])


class Scorer:
    """Mixed into a classifier of one label: the loss of its scores, zero for rows without labels."""

    def forward(self, *given: Any, labels: Tensor | None = None, **named: Any) -> Any:
        """As the model's own, which is not given the labels."""
        outputs = super().forward(*given, **named, return_dict=True)  # type: ignore[misc]
        logits = outputs.logits.float().view(-1)
        known = None if labels is None else labels.view(-1).to(logits.dtype)
        loss = logits.sum() * 0.0 if known is None else F.binary_cross_entropy_with_logits(logits, known)
        outputs["loss"] = loss
        return outputs


add(Reranking(name="reranking"))
