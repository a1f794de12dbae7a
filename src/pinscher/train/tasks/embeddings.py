"""Tasks of sentence encoders: texts become vectors, by which they are compared, searched and clustered.

A row holds

    one text                    nothing is labelled: the model learns its own embeddings from before it was pruned
    two texts and a score       cosine loss: mean((cos(a, b) − score)²)
    two texts                   contrastive loss: each second text among those of the batch belongs to its first
    three texts                 the same, and the third of each row is one more that does not belong

and where there is a teacher, which is the model before pruning unless another is named, its embeddings are learned
too (prune/distillation.py). Pooling, normalisation, prompts and length are those of the model's sentence-transformers
files, which the result has as well. The losses are those of sentence-transformers: CosineSimilarityLoss and
MultipleNegativesRankingLoss.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from datasets import Dataset
from torch import Tensor
from transformers.utils.generic import ModelOutput

from pinscher import files
from pinscher.errors import InputError
from pinscher.models import sentences, surgery
from pinscher.models.pooling import Embedder
from pinscher.models.sentences import Sentences
from pinscher.train import formats, metrics, retrieval
from pinscher.train.tasks.task import Outputs, Reader, Task, add, write_lines
from pinscher.train.tasks.texts import Texts

SHARPNESS = 20.0  # cosines are multiplied by it before the softmax, as in sentence-transformers
SCORED = ("sentence1", "sentence2")
LONGEST = 512  # tokens of a text where the model's files do not say
MOST_PAIRED = 1000  # texts whose likenesses are compared, each with each


@dataclass(frozen=True, kw_only=True)
class Embeddings(Texts):
    """Makes a vector of each text: of one, two or three columns. The score of two is how alike they are, -1 to 1.

    Args:
        sentences: how the model makes embeddings.
    """

    main: str = "cosine"
    text_columns: tuple[str, ...] = ("text",)
    sentences: Sentences = field(default_factory=Sentences)

    kind: ClassVar[str] = "embeddings"
    architecture: ClassVar[str] = "AutoModel"
    loads_as: ClassVar[str | None] = "SentenceTransformer"
    joins_texts: ClassVar[bool] = False

    @property
    def teaches(self) -> bool:
        return True

    @property
    def needs_reference(self) -> bool:
        return len(self.text_columns) == 1

    # ------------------------------------------------------------ rows

    def with_columns(self, text: Sequence[str], label: str | None) -> Task:
        columns = tuple(text) or self.text_columns
        scored = label or (self.label_column if len(columns) == 2 else None)
        if not 1 <= len(columns) <= 3 or (scored and len(columns) != 2):
            raise InputError(
                f"task {self.name!r} takes one text column, two (with --label-column if there are scores), or three: "
                "a text, one that belongs to it and one that does not."
            )
        main = "spearman" if scored else "cosine" if len(columns) == 1 else "mrr@10"
        made = self.replace(text_columns=columns, main=main)
        return made if scored is None else made.replace(label_column=scored)

    def reader(self, suffix: str) -> Reader | None:
        return partial(_lines, column=self.text_columns[0]) if suffix == ".txt" else None

    def normalized(self, rows: Dataset) -> Dataset:
        """The scores of STS-B are called label in `datasets`."""
        if self.label_column == "score" and "score" not in rows.column_names and "label" in rows.column_names:
            return rows.rename_column("label", "score")
        return rows

    def check_batch(self, size: int) -> None:
        if size == 1 and len(self.text_columns) == 2 and self.label_column is None:
            raise InputError("pairs of texts learn from the other pairs of their batch: give --batch-size 2 or more.")

    # ------------------------------------------------------------ the model

    def of_model(self, model: str) -> Task:
        from pinscher.train import pretrained

        told = sentences.read(model, pretrained.width(model))
        return self.replace(sentences=told, max_length=told.max_length or LONGEST)

    def adapted(self, model: Any) -> Any:
        """A base model whose outputs hold embeddings and their loss. It keeps its class's name and its weights."""
        surgery.become_(model, surgery.subclass(type(model), SentenceModel))
        model.embedder = Embedder(self.sentences, int(getattr(model.config, "hidden_size", 0) or 0))
        return model

    # ------------------------------------------------------------ features

    def features(self, rows: Dataset, tokenizer: Any, labels: Sequence[str], training: bool) -> Dataset:
        """Examples of all texts of a row, one after another; if training is False, one of each distinct text."""
        texts = self._texts(rows)
        if not training:
            every = _distinct(texts)
            ids = self._tokens(every, tokenizer)
            return Dataset.from_dict({"input_ids": ids, "parts": [[len(i)] for i in ids], "row": range(len(ids))})
        tokens = [self._tokens(column, tokenizer) for column in texts]
        columns: dict[str, Any] = {
            "input_ids": [[i for ids in row for i in ids] for row in zip(*tokens, strict=True)],
            "parts": [[len(ids) for ids in row] for row in zip(*tokens, strict=True)],
        }
        if self.label_column is not None:
            columns["labels"] = self.targets(rows, -1, "a cosine is between -1 and 1")
        return Dataset.from_dict({**columns, "row": range(len(rows))})

    def _texts(self, rows: Dataset) -> list[list[str]]:
        """The texts of each column, with their prompts.

        Texts alone begin with each of the model's prompts in turn, so that it learns all of them.
        """
        told = self.sentences
        columns = [[text.strip() for text in rows[column][:]] for column in self.text_columns]
        if len(columns) == 1:
            prompts = told.every_prompt()
            columns = [[prompts[i % len(prompts)] + text for i, text in enumerate(columns[0])]]
        else:
            alike = self.label_column is not None
            roles = ["" if alike else "query" if n == 0 else "document" for n in range(len(columns))]
            columns = [[told.prompt_for(role) + text for text in c] for role, c in zip(roles, columns, strict=True)]
        return [[text.lower() for text in column] for column in columns] if told.lowers else columns

    def _tokens(self, texts: list[str], tokenizer: Any) -> list[list[int]]:
        found: list[list[int]] = tokenizer(texts, truncation=True, max_length=self.max_length)["input_ids"]
        return found

    def collator(self, tokenizer: Any) -> Any:
        return Batches(tokenizer)

    # ------------------------------------------------------------ answers

    def answers(self, outputs: Outputs, features: Dataset, rows: Dataset, labels: Sequence[str]) -> list[Any]:
        """For each row the embeddings of its texts, [texts, features]."""
        texts = self._texts(rows)
        known = {text: vector for text, (vector,) in zip(_distinct(texts), outputs, strict=True)}
        return [np.stack([known[text] for text in row]) for row in zip(*texts, strict=True)]

    def scores(self, answers: Sequence[Any], rows: Dataset) -> dict[str, float]:
        if len(self.text_columns) == 1:
            return self._likeness(np.stack(answers)[:, 0], rows)
        if self.label_column is not None:
            said, true = self._compared(answers), self.true(rows)
            return {"spearman": metrics.spearman(said, true), "pearson": metrics.pearson(said, true)}
        found = self._found(answers, rows)
        if len(self.text_columns) == 3:
            apart = [self._alike(v[0], v[1]) > self._alike(v[0], v[2]) for v in answers]
            found["triplets"] = metrics.accuracy(apart, [True] * len(apart))
        return found

    def _likeness(self, vectors: Any, rows: Dataset) -> dict[str, float]:
        """How like those of the model before pruning the embeddings are, and what they say of pairs of texts."""
        true = self.referred(rows, "--task sts or --task retrieval")[:, 0]
        mine, theirs = retrieval.unit(vectors[:MOST_PAIRED]), retrieval.unit(true[:MOST_PAIRED])
        found = {"cosine": retrieval.mean_cosine(vectors, true)}
        pairs = np.triu_indices(len(mine), 1)
        if len(pairs[0]) > 1:
            found["spearman"] = metrics.spearman((mine @ mine.T)[pairs], (theirs @ theirs.T)[pairs])
        return found

    def _found(self, answers: Sequence[Any], rows: Dataset) -> dict[str, float]:
        """Every distinct first text searches for its second ones among all others."""
        texts = [rows[column][:] for column in self.text_columns]
        queries = {text: i for i, text in enumerate(_distinct(texts[:1]))}
        corpus = {text: i for i, text in enumerate(_distinct(texts[1:]))}
        asked: list[Any] = [None] * len(queries)
        held: list[Any] = [None] * len(corpus)
        relevant: list[set[int]] = [set() for _ in queries]
        for vectors, (query, *others) in zip(answers, zip(*texts, strict=True), strict=True):
            asked[queries[query]] = vectors[0]
            for vector, other in zip(vectors[1:], others, strict=True):
                held[corpus[other]] = vector
            relevant[queries[query]].add(corpus[others[0]])
        made = np.stack if self.sentences.compares_by_dot else retrieval.unit
        return retrieval.scores(made(asked), made(held), relevant)

    def _compared(self, answers: Sequence[Any]) -> list[float]:
        return [self._alike(vectors[0], vectors[1]) for vectors in answers]

    def _alike(self, one: Any, other: Any) -> float:
        if self.sentences.compares_by_dot:
            return float(np.dot(one.astype(np.float64), other.astype(np.float64)))
        return float(np.sum(retrieval.unit([one])[0] * retrieval.unit([other])[0]))

    def write(self, answers: Sequence[Any], rows: Dataset, folder: Path, split: str) -> Path:
        """The embeddings of texts alone as a numpy array; else how alike the first two texts of each row are."""
        if len(self.text_columns) == 1:
            content = io.BytesIO()
            np.save(content, np.stack(answers)[:, 0].astype(np.float32))
            return files.write_bytes(folder / f"embeddings_{split}.npy", content.getvalue())
        lines = [f"{i}\t{value:.6f}" for i, value in enumerate(self._compared(answers))]
        return write_lines(folder / f"predictions_{split}.tsv", ["index\tprediction", *lines])


# ------------------------------------------------------------ the model in training


@dataclass
class Embedded(ModelOutput):
    """The embeddings of all texts of a batch, [texts, features], as `logits`."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None


class SentenceModel:
    """Mixed into a base model (BertModel, …): its outputs are embeddings, and it saves its files with it."""

    embedder: Embedder

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        texts: int = 1,
        labels: Tensor | None = None,
        **others: Any,
    ) -> Embedded:
        """Embeddings, and their loss: zero for texts alone.

        Args:
            input_ids: [texts × rows, tokens]: the first texts of all rows, then the second ones, …
            attention_mask: of that shape.
            texts: how many each row has.
            labels: the scores of pairs.
            others: further inputs of the base model.
        """
        given = {"input_ids": input_ids, "attention_mask": attention_mask, **others, "return_dict": True}
        outputs = super().forward(**given)  # type: ignore[misc]
        vectors = self.embedder(outputs.last_hidden_state, attention_mask)
        return Embedded(loss_of(vectors, int(texts), labels), vectors, outputs.get("hidden_states"))

    def save_pretrained(self, save_directory: str | Path, **settings: Any) -> None:
        """The model's own files, with those of sentence-transformers beside them."""
        super().save_pretrained(save_directory, **settings)  # type: ignore[misc]
        self.write_beside(save_directory)

    def write_beside(self, folder: str | Path) -> None:
        files.fill(folder, self.embedder.sentences.files)


def loss_of(vectors: Tensor, texts: int, scores: Tensor | None) -> Tensor:
    """The loss of a batch of embeddings, [texts × rows, features]."""
    if texts == 1:
        return vectors.float().sum() * 0.0
    unit = F.normalize(vectors.float(), dim=-1)
    rows = len(unit) // texts
    first, others = unit[:rows], unit[rows:]
    if scores is not None:
        return F.mse_loss((first * others).sum(-1), scores.to(first.dtype))
    return F.cross_entropy(SHARPNESS * first @ others.T, torch.arange(rows, device=unit.device))


class Batches:
    """Pads the texts of some rows: the first texts of all rows, then the second ones, ….

    A batch of rows with several texts says how many, as `texts`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __call__(self, features: Sequence[dict[str, Any]]) -> dict[str, Any]:
        rows = [np.split(np.asarray(f["input_ids"]), np.cumsum(f["parts"])[:-1]) for f in features]
        ids = [{"input_ids": text.tolist()} for column in zip(*rows, strict=True) for text in column]
        padded = self.tokenizer.pad(ids, padding=True, return_tensors="pt", return_attention_mask=True)
        batch: dict[str, Any] = {name: padded[name] for name in ("input_ids", "attention_mask")}
        if len(rows[0]) > 1:
            batch["texts"] = len(rows[0])
        if "labels" in features[0]:
            batch["labels"] = torch.tensor([f["labels"] for f in features], dtype=torch.float32)
        return batch


def _distinct(columns: Sequence[Sequence[str]]) -> list[str]:
    return list(dict.fromkeys(text for column in columns for text in column))


def _lines(text: str, where: str, column: str) -> formats.Columns:
    """One text a line; empty lines are none."""
    return {column: [line for line in formats.lines_of(text) if line.strip()]}


add(Embeddings(name="embeddings"))
add(Embeddings(name="sts", main="spearman", text_columns=SCORED, label_column="score"))
add(Embeddings(name="retrieval", main="mrr@10", text_columns=("query", "passage")))
