"""Finds, reads and splits a task's rows for training, validation and test.

The original development sets are only used for testing. The validation set, which chooses a teacher or a model, is
split off the training rows unless the user gives one.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from re import sub

import datasets
import numpy as np
from datasets import Dataset, DatasetDict

from pinscher.errors import InputError, first_line
from pinscher.models.hub import offline_if_unreachable
from pinscher.registry import did_you_mean
from pinscher.settings import COUNT, SHARE, number
from pinscher.train import formats
from pinscher.train.tasks.task import UNLABELLED, Task

TEST_FRACTION = 0.1
TEST_SEED = 0  # fixed, so that runs with different seeds have the same test rows

# Names of a split's files besides the split's own name. A single shard of a hub's Parquet counts as the split.
ALIASES = {
    "train": ("trainset", "eng.train", "msr_paraphrase_train", "train-v*", "*-train"),
    "validation": ("valid", "dev", "devset", "eng.testa", "dev-v*", "*-dev", "*-validation"),
    "validation_matched": ("dev_matched",),
    "validation_mismatched": ("dev_mismatched",),
    "test": ("testset", "testset_w_refs", "eng.testb", "msr_paraphrase_test", "testdata_with_lex", "*-test"),
}
# Benchmarks ship both, and only the second is right: E2E's test set with its references; MRPC's training rows without
# those of dev.tsv.
BETTER = {"testset": "testset_w_refs", "msr_paraphrase_train": "train", "msr_paraphrase_test": "test"}


@dataclass(frozen=True)
class Source:
    """Where the user's rows are; if empty, they come with the package or from the hub."""

    data: str | None = None
    train_file: str | None = None
    validation_file: str | None = None
    test_file: str | None = None


@dataclass(frozen=True)
class Splits:
    """The rows for training, validation and testing.

    Args:
        train: None only where nothing is trained.
        validation: None only where nothing is trained.
        tests: the name of each test split -> its rows.
        notes: sentences for the user: what was split off, how many rows were dropped.
        fingerprint: a hash of all rows as read, before splitting: the same on any machine and for any seed.
    """

    train: Dataset | None
    validation: Dataset | None
    tests: dict[str, Dataset]
    notes: tuple[str, ...]
    fingerprint: str


@dataclass
class _Found:
    """The splits that a source has: rows, and the name of their place in messages."""

    train: tuple[Dataset, str] | None = None
    validation: tuple[Dataset, str] | None = None
    tests: dict[str, tuple[Dataset, str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def load(
    task: Task,
    source: Source,
    *,
    validation_fraction: float = 0.1,
    rows: int | None = None,
    seed: int = 42,
    training: bool = True,
    only: str | None = None,
) -> Splits:
    """Reads, checks and splits a task's rows.

    Args:
        task: names the splits for training and testing, and checks rows.
        source: where they are.
        validation_fraction: part of the training rows that becomes the validation set if there is no other.
        rows: maximum number of training rows, the validation set included.
        seed: of the order in which training rows are picked.
        training: if False, there may be no training rows, and test rows may lack labels.
        only: the test split that must exist; no other replaces it.

    Raises:
        InputError: one sentence that names the file or split and says what to do.
    """
    validation_fraction = number(SHARE, validation_fraction, "--validation-fraction")
    if rows is not None:
        rows = number(COUNT, rows, "--rows", whole=True)
    found = _find(task, source, training, only)
    notes = found.notes
    train = found.train and _prepared(task, *found.train, training, notes)
    validation = found.validation and _prepared(task, *found.validation, training, notes)
    tests = {name: _prepared(task, *part, training, notes) for name, part in found.tests.items()}
    every = {"train": train, "validation": validation, **{f"test {name}": test for name, test in tests.items()}}
    fingerprint = _fingerprint(every)
    if train is not None and found.train is not None:
        where = found.train[1]
        if not tests:
            train, tests["test"] = _cut(train, _order(len(train), TEST_SEED), TEST_FRACTION, where, "test")
            notes.append(f"There are no test rows: {len(tests['test'])} of the rows of {where} were split off as test.")
        order = _order(len(train), seed)[:rows]
        if len(order) < len(train):
            notes.append(f"Only {len(order)} of {len(train)} training rows are used.")
        if validation is None:
            train, validation = _cut(train, order, validation_fraction, where, "validation")
            notes.append(
                f"The validation set is {len(validation)} of {len(order)} training rows, split off by seed {seed}."
            )
        else:
            train = train.select(np.sort(order))
        notes += _overlaps(task, train, tests)
    if only is not None and only not in tests:
        raise _no_split(only, "the data", tests)
    return Splits(train, validation, tests, tuple(notes), fingerprint)


# Finding the splits


def _find(task: Task, source: Source, training: bool, only: str | None) -> _Found:
    files = (source.train_file, source.validation_file, source.test_file)
    if source.data and any(files):
        raise InputError("--data and --train-file, --validation-file or --test-file exclude each other: give one kind.")
    if source.data:
        return _in_folder(task, Path(source.data), training, only)
    if any(files):
        return _in_files(task, source, training)
    if bundled := task.bundled():
        return _in_mapping(task, bundled, f"the data of task {task.name!r}", training, only)
    if task.hub:
        return _in_mapping(task, _from_hub(task.hub), "/".join(task.hub), training, only)
    raise InputError(f"task {task.name!r} has no data of its own: give --train-file FILE or --data DIR.")


def _in_files(task: Task, source: Source, training: bool) -> _Found:
    if not source.train_file and (training or not source.test_file):
        raise InputError(f"{'training' if training else 'a test'} needs --{'train' if training else 'test'}-file too.")
    found = _Found()
    read = partial(_read, task=task, notes=found.notes)
    found.train = read(Path(source.train_file)) if source.train_file else None
    found.validation = read(Path(source.validation_file)) if source.validation_file else None
    found.tests = {"test": read(Path(source.test_file))} if source.test_file else {}
    return found


def _in_folder(task: Task, folder: Path, training: bool, only: str | None) -> _Found:
    try:
        files = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except NotADirectoryError:
        raise InputError(f"{folder} is not a folder: give it with --train-file.") from None
    except OSError as error:
        raise InputError(f"{folder} cannot be read ({error.strerror}): check --data.") from None
    names = {path.name for path in files}
    if "dataset_dict.json" in names or {"dataset_info.json", "state.json"} <= names:
        return _in_mapping(task, _saved(folder), str(folder), training, only)
    paths = {path.name: path for path in files if path.is_file() and formats.split_name(path.name)}
    found = _Found()
    read = partial(_read, task=task, notes=found.notes)
    return _choose(task, list(paths), lambda name: read(paths[name]), str(folder), training, only, found)


def _saved(folder: Path) -> Dataset | DatasetDict:
    try:
        return datasets.load_from_disk(str(folder))
    except Exception as error:  # whatever `datasets` and pyarrow raise for a damaged folder
        raise InputError(f"{folder} cannot be loaded ({first_line(error)}): save it again with save_to_disk.") from None


def _in_mapping(
    task: Task, splits: Dataset | Mapping[str, Dataset], place: str, training: bool, only: str | None
) -> _Found:
    if isinstance(splits, Dataset):
        return _Found(train=(splits, place))
    return _choose(
        task, list(splits), lambda name: (splits[name], f"split {name!r} of {place}"), place, training, only, _Found()
    )


def _choose(
    task: Task,
    names: Sequence[str],
    get: Callable[[str], tuple[Dataset, str]],
    place: str,
    training: bool,
    only: str | None,
    found: _Found,
) -> _Found:
    """Fills `found` with those of the named files or splits that the task wants."""
    match = partial(_match, names=names, place=place)
    wanted = {task.train_split: match(task.train_split), **{name: match(name) for name in task.test_splits}}
    train = wanted.pop(task.train_split)
    if only is not None and wanted.get(only) is None:
        raise _no_split(only, place, [name for name in dict.fromkeys([*ALIASES, *task.test_splits]) if match(name)])
    if not any(wanted.values()) and (other := match("test")):
        wanted = {"test": other}
        found.notes.append(f"{place} has no split {task.test_splits[0]!r}: {other} is the test.")
    lacking = [name for name, file in wanted.items() if file is None]
    if train is None and training:
        lacking.insert(0, task.train_split)
    if lacking:
        raise InputError(f"{place} has no file or split {lacking[0]!r}: add it to what is there ({_listed(names)}).")
    validation = match("validation") if "validation" not in task.test_splits else None
    found.train = get(train) if train and training else None
    found.validation = get(validation) if validation and training else None
    found.tests = {name: get(file) for name, file in wanted.items() if file}
    return found


def _no_split(split: str, place: str, known: Iterable[str]) -> InputError:
    """`train` and `validation` always exist: they are the rows that a run trains on and validates on."""
    names = list(dict.fromkeys(["train", "validation", *known]))
    return InputError(f"{place} has no split {split!r}.{did_you_mean(split, names)} Known: {', '.join(names)}.")


def _match(split: str, names: Sequence[str], place: str) -> str | None:
    """The file or split with the name of this split."""
    patterns = (split, *ALIASES.get(split, ()))
    stems = {name: sub(r"-00000-of-00001$", "", (formats.split_name(name) or (name.lower(),))[0]) for name in names}
    hits = [name for name in names if any(fnmatchcase(stems[name], pattern) for pattern in patterns)]
    hits = [name for name in hits if BETTER.get(stems[name]) not in [stems[hit] for hit in hits]]
    # DART ships one split as JSON and XML: the same rows twice.
    twins = [stems[name] for name in hits if ".json" in name.lower()]
    hits = [name for name in hits if ".xml" not in name.lower() or stems[name] not in twins]
    if len(hits) > 1:
        raise InputError(f"{place} has {len(hits)} files for split {split!r} ({_listed(hits)}): leave only one there.")
    return hits[0] if hits else None


def _listed(names: Sequence[str]) -> str:
    return ", ".join([*names[:20], *(["…"] if len(names) > 20 else [])]) or "nothing that can be read"


def _read(path: Path, task: Task, notes: list[str]) -> tuple[Dataset, str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", formats.RowsSkipped)
        rows = formats.read(path, task.reader)
    for warning in caught:
        if issubclass(warning.category, formats.RowsSkipped):
            notes.append(str(warning.message))
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    return rows, str(path)


# The hub


def _from_hub(hub: Sequence[str]) -> Mapping[str, Dataset]:
    try:
        with offline_if_unreachable():
            found: Mapping[str, Dataset] = datasets.load_dataset(*hub)
            return found
    except Exception as error:  # of some twenty kinds: no network, no such data set, one that is a script, …
        raise InputError(
            f"{'/'.join(hub)} could not be reached (no network?). Give the files with --data DIR. "
            f"({type(error).__name__}: {first_line(error)})"
        ) from None


# Checking and splitting rows


def _prepared(task: Task, rows: Dataset, where: str, training: bool, notes: list[str]) -> Dataset:
    try:
        rows = task.normalized(rows)
    except InputError as error:
        raise InputError(str(error) if where in str(error) else f"{where}: {error}") from None
    if task.lacks_labels(rows):
        if training:
            label = task.columns[-1]
            raise InputError(
                f"{where} has no labels ({label} is {UNLABELLED}), and scores need them: give labelled rows."
            )
        notes.append(f"{where} has no labels: there are answers to it but no scores.")
    task.check(rows, where)
    return rows


def _order(count: int, seed: int) -> np.ndarray:
    """A random order. RandomState, since its stream is the one that numpy promises never to change."""
    return np.random.RandomState(seed % 2**32).permutation(count)


def _cut(rows: Dataset, order: np.ndarray, fraction: float, where: str, name: str) -> tuple[Dataset, Dataset]:
    """Divides the rows of `order`: the remaining ones, and the fraction (at least one row) that is split off."""
    count = max(1, int(len(order) * fraction + 0.5))
    if count >= len(order):
        raise InputError(
            f"{where}: of {len(order)} rows none remains beside the {name} set; give more, or --{name}-file."
        )
    return rows.select(np.sort(order[count:])), rows.select(np.sort(order[:count]))


def _digests(rows: Dataset, columns: Sequence[str]) -> Iterator[bytes]:
    """A hash of each row, over its values only: not how they are stored."""
    for batch in rows.select_columns(list(columns)).with_format("arrow").iter(batch_size=1000):
        for row in batch.to_pylist():
            yield hashlib.blake2b(json.dumps(row, sort_keys=True, default=str).encode(), digest_size=16).digest()


def _fingerprint(splits: Mapping[str, Dataset | None]) -> str:
    whole = hashlib.sha256()
    for name, rows in sorted(splits.items()):
        if rows is not None:
            whole.update(f"{name} {len(rows)}\n".encode())
            for digest in _digests(rows, rows.column_names):
                whole.update(digest)
    return whole.hexdigest()


def _overlaps(task: Task, train: Dataset, tests: Mapping[str, Dataset]) -> list[str]:
    """How many test rows are also in the training set: those with the same inputs, whatever their labels."""
    present = train.column_names
    inputs = [column for column in task.inputs if column in present] or present[:-1]
    seen = set(_digests(train, inputs))
    counts = {name: sum(digest in seen for digest in _digests(test, inputs)) for name, test in tests.items()}
    same = f"are also in the training set (same {', '.join(inputs)})"
    return [f"{both} of {len(tests[name])} rows of test {name!r} {same}." for name, both in counts.items()]
