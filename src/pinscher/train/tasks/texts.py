"""What embeddings and reranking share: rows of texts whose scores may be missing.

Without scores a model learns what it said itself before it was pruned: it is its own teacher, and test scores compare
it with its answers from then.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from datasets import Dataset

from pinscher.errors import InputError
from pinscher.train.tasks.task import REFERENCE, Task


@dataclass(frozen=True, kw_only=True)
class Texts(Task):
    """Rows of texts.

    Args:
        text_columns: their columns.
        label_column: the score of the texts of a row; None for rows without scores.
    """

    test_splits: tuple[str, ...] = ("test",)
    text_columns: tuple[str, ...]
    label_column: str | None = None

    text_fields: ClassVar[tuple[str, ...]] = ("text_columns",)
    label_field: ClassVar[str] = "label_column"

    @property
    @abstractmethod
    def needs_reference(self) -> bool: ...

    @property
    def columns(self) -> tuple[str, ...]:
        return self.text_columns if self.label_column is None else (*self.text_columns, self.label_column)

    @property
    def inputs(self) -> tuple[str, ...]:
        return self.text_columns

    def lacks_labels(self, rows: Dataset) -> bool:
        return self.label_column is not None and super().lacks_labels(rows)

    def check(self, rows: Dataset, where: str) -> None:
        super().check(rows, where)
        for column in self.text_columns:
            wrong = next((i for i, text in enumerate(rows[column][:]) if not isinstance(text, str)), None)
            if wrong is not None:
                raise InputError(f"{where}: row {wrong + 1} has no text in column {column!r}.")
            if not any(text.strip() for text in rows[column][:]):
                raise InputError(f"{where}: every text in column {column!r} is empty.")
        if self.label_column is None:
            return
        for i, value in enumerate(rows[self.label_column][:]):
            if not isinstance(value, int | float) or not np.isfinite(value):
                raise InputError(f"{where}: row {i + 1} has {value!r} in column {self.label_column!r}: not a number.")

    def check_dense(self) -> None:
        if self.needs_reference:
            raise InputError(
                "texts without labels teach only what the model does already: there is nothing to learn in a dense "
                "run, so leave --baseline and --method dense out, or give labelled rows."
            )

    def true(self, rows: Dataset) -> list[float]:
        """The scores of all rows."""
        return [float(value) for value in rows[self.label_column][:]]

    def targets(self, rows: Dataset, least: float, why: str) -> list[float]:
        """The same to learn from: refuses those that are not between `least` and 1, and says why not."""
        found = self.true(rows)
        if worst := next((value for value in found if not least <= value <= 1), None):
            raise InputError(
                f"column {self.label_column!r} has the score {worst:g}: {why}, so divide all scores by the highest "
                "one possible."
            )
        return found

    def referred(self, rows: Dataset, instead: str) -> Any:
        """The answers of the model before pruning."""
        if REFERENCE not in rows.column_names:
            raise InputError(
                "rows without labels have no scores but those against the model before pruning, which only a run "
                f"knows: evaluate on {instead}."
            )
        return np.asarray(rows[REFERENCE][:])
