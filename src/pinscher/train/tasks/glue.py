"""Tasks over one sentence or a pair: GLUE, and a user's own classification, pairs and regression.

Labels are names: ids in a file are looked up in the task's names, so answers, submissions and model cards read well.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from datasets import ClassLabel, Dataset

from pinscher.errors import InputError
from pinscher.train import formats, metrics
from pinscher.train.tasks.task import UNLABELLED, Outputs, Reader, Task, add, write_lines

BINARY: dict[str, Callable[[list[int], list[int]], float]] = {"f1": metrics.f1, "matthews": metrics.matthews}


@dataclass(frozen=True, kw_only=True)
class Sentences(Task):
    """Assigns a class to a text or a pair of texts.

    Args:
        text_columns: one or two columns.
        label_column: names of classes, or their ids.
        also: further scores beside the main one.
        files: name of the submission file for each split; by default predictions_SPLIT.tsv.
        writes_ids: whether the submission holds ids instead of names.
    """

    text_columns: tuple[str, ...] = ("sentence",)
    label_column: str = "label"
    main: str = "accuracy"
    also: tuple[str, ...] = ()
    files: tuple[tuple[str, str], ...] = ()
    writes_ids: bool = False

    kind: ClassVar[str] = "classes"
    architecture: ClassVar[str] = "AutoModelForSequenceClassification"
    text_fields: ClassVar[tuple[str, ...]] = ("text_columns",)
    label_field: ClassVar[str] = "label_column"

    def with_columns(self, text: Sequence[str], label: str | None) -> Task:
        return self.replace(text_columns=tuple(text) or None, label_column=label)

    def reader(self, suffix: str) -> Reader | None:
        form = GLUE.get(self.name) if suffix in (".tsv", ".txt") else None
        return None if form is None else partial(_table, form=form)

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.text_columns, self.label_column)

    def check(self, rows: Dataset, where: str) -> None:
        super().check(rows, where)
        if not 1 <= len(self.text_columns) <= 2:
            raise InputError(f"task {self.name!r} takes one or two text columns, not {len(self.text_columns)}.")
        for column in self.columns:
            values = rows[column][:]
            empty = next((i for i, value in enumerate(values) if value is None), None)
            if empty is not None:
                raise InputError(f"{where}: row {empty + 1} has nothing in column {column!r}.")
            if column != self.label_column and not isinstance(values[0], str):
                raise InputError(f"{where}: column {column!r} holds {type(values[0]).__name__}, not text.")

    def labels(self, rows: Dataset) -> tuple[str, ...]:
        if self.names:
            return self.names
        feature = rows.features[self.label_column]
        if isinstance(feature, ClassLabel):
            return tuple(feature.names)
        found = set(rows[self.label_column][:])
        if any(isinstance(value, float) and not value.is_integer() for value in found):
            raise InputError(f"column {self.label_column!r} holds fractions, not classes. Use --task regression.")
        if len(found) < 2:
            raise InputError(f"column {self.label_column!r} holds only one class: {found.pop()!r}.")
        if len(found) > 1000:
            raise InputError(f"column {self.label_column!r} has {len(found)} different values: is it the right column?")
        return tuple(_name(value) for value in sorted(found))

    def features(self, rows: Dataset, tokenizer: Any, labels: Sequence[str], training: bool) -> Dataset:
        encoded = tokenizer(
            *(rows[column][:] for column in self.text_columns), truncation=True, max_length=self.max_length
        )
        columns = {name: encoded[name] for name in encoded if name in tokenizer.model_input_names}
        columns["labels"] = self.targets(rows, labels)
        return Dataset.from_dict({**columns, "row": list(range(len(rows)))})

    def targets(self, rows: Dataset, labels: Sequence[str]) -> list[Any]:
        """The label ids; UNLABELLED if the label is secret."""
        given = self._given(rows, labels)
        places = {name: i for i, name in enumerate(labels)}
        unknown = next((name for name in given if name not in places and name != str(UNLABELLED)), None)
        if unknown is not None:
            raise InputError(
                f"label {unknown!r} is not one of the {len(labels)} classes ({', '.join(labels[:10])}): "
                "the training rows must show every class."
            )
        return [places.get(name, UNLABELLED) for name in given]

    def _given(self, rows: Dataset, labels: Sequence[str]) -> list[str]:
        """Each row's label as a name."""
        feature, values = rows.features[self.label_column], rows[self.label_column][:]
        named = tuple(feature.names) if isinstance(feature, ClassLabel) else self.names
        if not named:
            return [_name(value) for value in values]
        return [named[v] if isinstance(v, int) and 0 <= v < len(named) else _name(v) for v in values]

    def collator(self, tokenizer: Any) -> Any:
        return Padded(tokenizer)

    def answers(self, outputs: Outputs, features: Dataset, rows: Dataset, labels: Sequence[str]) -> list[Any]:
        return [labels[int(np.argmax(logits))] for (logits,) in outputs]

    def scores(self, answers: Sequence[Any], rows: Dataset) -> dict[str, float]:
        true = self._given(rows, self.names)
        found = {"accuracy": metrics.accuracy(list(answers), true)}
        for name in [name for name in (self.main, *self.also) if name != "accuracy"]:
            ids = [[self.names.index(label) for label in side] for side in (answers, true)]
            found[name] = BINARY[name](*ids)
        if not self.names:
            found["macro_f1"] = metrics.macro_f1(list(answers), true)
        return found

    def write(self, answers: Sequence[Any], rows: Dataset, folder: Path, split: str) -> Path:
        said = [str(self.names.index(a)) if self.writes_ids else a for a in answers]
        return self._table(said, folder, split)

    def _table(self, said: Sequence[str], folder: Path, split: str) -> Path:
        name = dict(self.files).get(split, f"predictions_{split}.tsv")
        return write_lines(folder / name, ["index\tprediction", *(f"{i}\t{text}" for i, text in enumerate(said))])


@dataclass(frozen=True, kw_only=True)
class Regression(Sentences):
    """Assigns a number to a text or a pair of texts.

    Args:
        span: the lowest and highest value of a submission, if the benchmark limits it.
    """

    main: str = "pearson"
    span: tuple[float, float] | None = None

    kind: ClassVar[str] = "regression"

    def check(self, rows: Dataset, where: str) -> None:
        super().check(rows, where)
        for i, value in enumerate(rows[self.label_column][:]):
            try:
                good = np.isfinite(float(value))
            except (TypeError, ValueError):
                good = False
            if not good:
                raise InputError(f"{where}: row {i + 1} has {value!r} in column {self.label_column!r}: not a number.")

    def labels(self, rows: Dataset) -> tuple[str, ...]:
        return ()

    def targets(self, rows: Dataset, labels: Sequence[str]) -> list[Any]:
        return [float(value) for value in rows[self.label_column][:]]

    def answers(self, outputs: Outputs, features: Dataset, rows: Dataset, labels: Sequence[str]) -> list[Any]:
        return [float(logits.reshape(-1)[0]) for (logits,) in outputs]

    def scores(self, answers: Sequence[Any], rows: Dataset) -> dict[str, float]:
        true = self.targets(rows, ())
        return {"pearson": metrics.pearson(answers, true), "spearman": metrics.spearman(answers, true)}

    def write(self, answers: Sequence[Any], rows: Dataset, folder: Path, split: str) -> Path:
        values = answers if self.span is None else np.clip(answers, *self.span)
        return self._table([f"{value:.3f}" for value in values], folder, split)


class Padded:
    """Pads a batch to its longest text, without columns that the model does not take."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __call__(self, features: list[dict[str, Any]]) -> Any:
        known = [*self.tokenizer.model_input_names, "labels"]
        texts = [{name: value for name, value in feature.items() if name in known} for feature in features]
        return self.tokenizer.pad(texts, padding=True, return_tensors="pt")


def _name(value: Any) -> str:
    """A label as text: 3 and 3.0 are the same class."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


ENTAILMENT = ("entailment", "not_entailment")
PAIR = ("sentence1", "sentence2")


# ------------------------------------------------------------ GLUE's files


@dataclass(frozen=True)
class Glue:
    """The files of one GLUE task, and the names that `datasets` uses.

    Args:
        text: column of the file -> our name.
        label: the column of the label, which test files lack.
        names: the classes in the order of their ids; empty for numbers.
        header: the first line, for files without one.
    """

    text: Mapping[str, str]
    label: str = "label"
    names: tuple[str, ...] = ("0", "1")
    header: tuple[str, ...] = ()

    def ids(self) -> dict[str, int]:
        """The spellings of each label: its name or its id, and -1 for a secret one."""
        return {"-1": -1} | {str(i): i for i in range(len(self.names))} | {n: i for i, n in enumerate(self.names)}


SAME = {name: name for name in PAIR}
GLUE = {
    "cola": Glue({"sentence": "sentence"}, header=("source", "label", "star", "sentence")),
    "sst2": Glue({"sentence": "sentence"}),
    "mrpc": Glue({"#1 String": "sentence1", "#2 String": "sentence2"}, label="Quality"),
    "stsb": Glue(SAME, label="score", names=()),
    "qqp": Glue({"question1": "question1", "question2": "question2"}, label="is_duplicate"),
    "qnli": Glue({"question": "question", "sentence": "sentence"}, names=ENTAILMENT),
    "rte": Glue(SAME, names=ENTAILMENT),
    "mnli": Glue(
        {"sentence1": "premise", "sentence2": "hypothesis"},
        label="gold_label",
        names=("entailment", "neutral", "contradiction"),
    ),
}


def _table(text: str, where: str, form: Glue) -> formats.Columns:
    lines = [(number, line.split("\t")) for number, line in enumerate(formats.lines_of(text), 1) if line]
    ours = list(form.text.values())
    header = lines[0][1]
    if form.header and not set(ours) <= set(header):
        header = list(form.header)
    else:
        lines = lines[1:]
    places = [next((header.index(n) for n in pair if n in header), None) for pair in form.text.items()]
    label = next((header.index(name) for name in (form.label, "label") if name in header), None)
    if None in places:
        raise InputError(f"{where}, line 1: no column {ours[places.index(None)]!r}; begin the file with GLUE's header.")
    needed = [place for place in (*places, label) if place is not None]

    target: Callable[[str], float] = form.ids().__getitem__ if form.names else float
    columns: formats.Columns = {name: [] for name in (*ours, "label", "idx")}
    for idx, (number, fields) in enumerate(lines):
        if len(fields) <= max(needed) or (label is not None and fields[label] in ("", "-")):
            continue  # broken in the original, or (MNLI) without agreement of the annotators
        try:
            value = target("-1" if label is None else fields[label])
        except (KeyError, ValueError):
            raise InputError(f"{where}, line {number}: {fields[label or 0]!r} is no label; fix this line.") from None
        row = (*(fields[place] for place in needed[: len(ours)]), value, idx)
        for values, item in zip(columns.values(), row, strict=True):
            values.append(item)
    _warn_of_skipped(len(lines) - len(columns["idx"]), len(lines), where)
    return columns


def _warn_of_skipped(skipped: int, total: int, where: str) -> None:
    if skipped > total / 2:  # too many for broken lines: another format
        raise InputError(
            f"{where}: {skipped} of {total} rows lack fields; give the file with tabs between its columns."
        )
    if skipped:
        warnings.warn(
            f"{where}: {skipped} of {total} rows lack fields and were skipped.", formats.RowsSkipped, stacklevel=2
        )


# ------------------------------------------------------------ tasks


def _glue(
    name: str,
    official: str,
    text: tuple[str, ...],
    names: tuple[str, ...],
    main: str = "accuracy",
    also: tuple[str, ...] = (),
    writes_ids: bool = True,
) -> None:
    files = (("validation", f"{official}.tsv"), ("test", f"{official}.tsv"))
    add(
        Sentences(
            name=name,
            main=main,
            hub=("nyu-mll/glue", name),
            text_columns=text,
            names=names,
            also=also,
            files=files,
            writes_ids=writes_ids,
        )
    )


_glue("rte", "RTE", PAIR, ENTAILMENT, writes_ids=False)
_glue("mrpc", "MRPC", PAIR, ("not_equivalent", "equivalent"), main="f1")
_glue("cola", "CoLA", ("sentence",), ("unacceptable", "acceptable"), main="matthews")
_glue("sst2", "SST-2", ("sentence",), ("negative", "positive"))
_glue("qnli", "QNLI", ("question", "sentence"), ENTAILMENT, writes_ids=False)
_glue("qqp", "QQP", ("question1", "question2"), ("not_duplicate", "duplicate"), also=("f1",))
add(
    Sentences(
        name="mnli",
        hub=("nyu-mll/glue", "mnli"),
        test_splits=("validation_matched", "validation_mismatched"),
        text_columns=("premise", "hypothesis"),
        names=("entailment", "neutral", "contradiction"),
        files=tuple(
            (f"{split}_{kind}", f"MNLI-{short}.tsv")
            for split in ("validation", "test")
            for kind, short in (("matched", "m"), ("mismatched", "mm"))
        ),
    )
)
add(
    Regression(
        name="stsb",
        hub=("nyu-mll/glue", "stsb"),
        text_columns=PAIR,
        span=(0.0, 5.0),
        files=(("validation", "STS-B.tsv"), ("test", "STS-B.tsv")),
    )
)
add(Sentences(name="classification", test_splits=("test",), text_columns=("text",)))
add(Sentences(name="pairs", test_splits=("test",), text_columns=PAIR))
add(Regression(name="regression", test_splits=("test",), text_columns=("text",)))
