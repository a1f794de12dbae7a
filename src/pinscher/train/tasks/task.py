"""Task: all that a run must know of its data, as a frozen value. One file a family; TASKS holds every task by name.

A task turns rows (as they are read) into features (what the model sees), the model's outputs into answers (what a
person reads), answers into scores, and answers into the file that the benchmark's own server takes.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from datasets import Dataset

from pinscher import checkpoint
from pinscher.errors import InputError
from pinscher.prune.registry import Registry

Outputs = Sequence[tuple[np.ndarray, ...]]  # for each feature its logits; for spans start and end


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """One task.

    Args:
        name: what the user calls it.
        main: the score that decides (percent), one of those that `scores` gives.
        hub: what `datasets.load_dataset` is called with, where the data is on the hub.
        train_split: the split to train on; a part of it becomes the validation set.
        test_splits: the original development sets. They are only ever the test.
        max_length: tokens an example may have.
    """

    name: str
    main: str
    hub: tuple[str, ...] = ()
    train_split: str = "train"
    test_splits: tuple[str, ...] = ("validation",)
    max_length: int = 128

    kind: ClassVar[str]  # what the teacher compares: classes, regression, tokens, spans, causal-lm
    architecture: ClassVar[str]  # the class that loads the model, e.g. AutoModelForSequenceClassification
    judged_by_loss: ClassVar[bool] = False  # whether validation is by loss: where answers are dear to make
    text_fields: ClassVar[tuple[str, ...]]  # the fields that --text-column sets, in this order
    label_field: ClassVar[str]  # the field that --label-column sets

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """The columns that rows must have."""

    def normalized(self, rows: Dataset) -> Dataset:
        """Brings the column names and values of this data set's known variants to the ones used here."""
        return rows

    def check(self, rows: Dataset, where: str) -> None:
        """Raises InputError if these rows cannot be used, naming the file or split `where`."""
        if len(rows) == 0:
            raise InputError(f"{where} has no rows.")
        missing = [name for name in self.columns if name not in rows.column_names]
        if missing:
            raise InputError(
                f"{where} has no column {missing[0]!r}, which task {self.name!r} needs. "
                f"It has: {', '.join(rows.column_names)}."
            )

    def labels(self, rows: Dataset) -> tuple[str, ...]:
        """The names of the classes, in the order of their ids; none where there are no classes."""
        return ()

    @abstractmethod
    def features(self, rows: Dataset, tokenizer: Any, labels: Sequence[str], training: bool) -> Dataset:
        """Tokenised examples for the model. Where training is False there may be several for a row, or no labels.

        Always has the columns input_ids and `row`, the number of the row an example comes from.
        """

    @abstractmethod
    def collator(self, tokenizer: Any) -> Any:
        """Makes a padded batch of some features."""

    @abstractmethod
    def answers(self, outputs: Outputs, features: Dataset, rows: Dataset, labels: Sequence[str]) -> list[Any]:
        """What the model says to each row."""

    @abstractmethod
    def scores(self, answers: Sequence[Any], rows: Dataset) -> dict[str, float]:
        """Scores in percent; correct answers give exactly 100."""

    @abstractmethod
    def write(self, answers: Sequence[Any], rows: Dataset, folder: Path, split: str) -> Path:
        """Writes the answers to one split in the benchmark's own submission format; returns the file."""

    def combined(self, scores: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        """The scores of all test splits as one: their mean (MNLI averages matched and mismatched)."""
        each = list(scores.values())
        return {name: sum(s[name] for s in each) / len(each) for name in each[0]}

    def replace(self, **changes: Any) -> Task:
        """This task with other settings; those that are None stay, those that it does not have are an error."""
        changes = {name: value for name, value in changes.items() if value is not None}
        known = {f.name for f in dataclasses.fields(self)}
        odd = next((name for name in changes if name not in known), None)
        if odd is not None:
            raise InputError(f"task {self.name!r} has no {odd.replace('_', ' ')} to set.")
        return dataclasses.replace(self, **changes)

    def with_columns(self, text: Sequence[str], label: str | None) -> Task:
        """This task reading other columns."""
        if text and len(text) != len(self.text_fields):
            wanted = " and ".join(name.removesuffix("_column") for name in self.text_fields)
            raise InputError(f"task {self.name!r} needs --text-column {len(self.text_fields)} times: {wanted}.")
        return self.replace(**dict(zip(self.text_fields, text, strict=False)), **{self.label_field: label})


TASKS: Registry[Task] = Registry("task")


def add(task: Task) -> Task:
    """Gives a task its place in TASKS."""
    return TASKS.register(task.name)(task)


def write_lines(path: Path, lines: Sequence[str]) -> Path:
    """Writes a text file that is whole or not there."""
    return checkpoint.write_text(path, "".join(f"{line}\n" for line in lines))
