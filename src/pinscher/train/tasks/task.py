"""Task: everything a run must know about its data, as a frozen value. One file per family; TASKS has them by name.

A task turns rows (as read from a file) into features (model inputs), model outputs into answers (for people), and
answers into scores and into the benchmark's submission file. What a task can do is an attribute or a method of this
class; its type is never checked. To add a task, write one subclass and `add` it.
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

from pinscher import files
from pinscher.errors import InputError
from pinscher.registry import Registry
from pinscher.train import formats

UNLABELLED = -1  # the label of a row with a secret label
REFERENCE = "reference"  # the column with the answers of the model before it is pruned
Reader = formats.Reader  # a file's text and its name for messages -> columns
Outputs = Sequence[tuple[np.ndarray, ...]]  # for each feature its logits; for spans start and end


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """One task.

    Args:
        name: what the user calls it.
        main: the main score (percent), one of those that `scores` gives.
        hub: arguments of `datasets.load_dataset`, if the data is on the hub.
        train_split: the split to train on; a part of it becomes the validation set.
        test_splits: the original development sets, used for testing only.
        max_length: maximum number of tokens of an example.
        names: the classes in the order of their ids; empty: those found in the training rows, if there are classes.
    """

    name: str
    main: str
    hub: tuple[str, ...] = ()
    train_split: str = "train"
    test_splits: tuple[str, ...] = ("validation",)
    max_length: int = 128
    names: tuple[str, ...] = ()

    kind: ClassVar[str]  # what the teacher compares: classes, regression, tokens, spans, causal-lm, embeddings
    architecture: ClassVar[str]  # the class that loads the model, e.g. AutoModelForSequenceClassification
    generates: ClassVar[bool] = False  # whether answers are generated (`generate`), not read off logits (`answers`)
    judged_by_loss: ClassVar[bool] = False  # whether validation uses the loss, because answers take too long to make
    loads_as: ClassVar[str | None] = None  # the class of sentence-transformers that is to load the result
    joins_texts: ClassVar[bool] = True  # whether the texts of a row are one input of the model
    text_fields: ClassVar[tuple[str, ...]]  # the fields that --text-column sets, in this order
    label_field: ClassVar[str]  # the field that --label-column sets

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """The columns that rows must have; the label is the last."""

    @property
    def teaches(self) -> bool:
        """Whether the model, as it is before it is pruned, is the default teacher."""
        return False

    @property
    def needs_reference(self) -> bool:
        """Whether scores compare with the answers of the model before it is pruned, in the column REFERENCE."""
        return False

    @property
    def inputs(self) -> tuple[str, ...]:
        """Those of the columns that are not the label."""
        return self.columns[:-1]

    def of_model(self, model: str) -> Task:
        """This task with what the model's own files say of it."""
        return self

    def adapted(self, model: Any) -> Any:
        """A loaded model as this task trains and asks it."""
        return model

    def check_dense(self) -> None:
        """Raises InputError if there is nothing to learn without a teacher."""
        return

    def bundled(self) -> Mapping[str, Dataset]:
        """The splits of a data set from an installed package; empty for most tasks."""
        return {}

    def reader(self, suffix: str) -> Reader | None:
        """The task's own reader of files with this suffix, one of `formats.SUFFIXES`; None leaves them to `formats`."""
        return None

    def normalized(self, rows: Dataset) -> Dataset:
        """Converts the column names and values of this data set's known variants to those used here."""
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

    def check_batch(self, size: int) -> None:  # noqa: B027  (most tasks take any)
        """Raises InputError if nothing can be learned from batches of so many rows."""

    def lacks_labels(self, rows: Dataset) -> bool:
        """Whether these rows have no labels, as a benchmark's secret test set."""
        column = self.columns[-1]
        return column in rows.column_names and len(rows) > 0 and all(v in (UNLABELLED, None) for v in rows[column])

    def labels(self, rows: Dataset) -> tuple[str, ...]:
        """The names of the classes, in the order of their ids; empty if there are no classes."""
        return ()

    @abstractmethod
    def features(self, rows: Dataset, tokenizer: Any, labels: Sequence[str], training: bool) -> Dataset:
        """Tokenised examples for the model. If training is False, there may be several for a row, or no labels.

        Always has the columns input_ids and `row`, the number of the row an example comes from.
        """

    @abstractmethod
    def collator(self, tokenizer: Any) -> Any:
        """Makes a padded batch of some features."""

    def answers(self, outputs: Outputs, features: Dataset, rows: Dataset, labels: Sequence[str]) -> list[Any]:
        """The answer to each row, from the model's outputs; for tasks that do not generate."""
        raise NotImplementedError(f"task {self.name!r} generates its answers: call generate()")

    def generate(self, model: Any, tokenizer: Any, features: Dataset, batch_size: int) -> list[Any]:
        """The answer to each feature, generated by the model; for tasks that generate."""
        raise NotImplementedError(f"task {self.name!r} does not generate: call answers()")

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
        """This task with other settings; None keeps a setting, and one that the task does not have is an error."""
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
    """Registers a task in TASKS."""
    return TASKS.register(task.name)(task)


def write_lines(path: Path, lines: Sequence[str]) -> Path:
    """Writes a text file, completely or not at all."""
    return files.write_text(path, "".join(f"{line}\n" for line in lines))
