"""Reads rows from a file: JSON, CSV, TSV and Parquet. A task may read further formats of its own (`Task.reader`).

Rows come out with the column names and label ids of the Hugging Face version of each data set. Every failure is an
InputError in one sentence that names the file, the line where there is one, and what to do.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset

from pinscher.errors import InputError, first_line

Columns = dict[str, list[Any]]
Reader = Callable[[str, str], Columns]  # a file's text and its name for messages
SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt", ".conll", ".xml")
CONLL_NAMES = ("eng.train", "eng.testa", "eng.testb")  # files without a suffix
INT = re.compile(r"-?(0|[1-9][0-9]{0,17})")  # 007 is a name, not a number; at most 64 bits
FLOAT = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")


class RowsSkipped(UserWarning):
    """Some rows of a file could not be used: how many, and why."""


def read(path: Path, own: Callable[[str], Reader | None] = lambda suffix: None) -> Dataset:
    """The rows of one file.

    Args:
        path: the file.
        own: the task's own reader of files with a suffix, if it has one.
    """
    found = split_name(path.name)
    if found is None:
        raise InputError(
            f"{path} is of an unknown kind: name it *{', *'.join(SUFFIXES)} (each also with .gz), or eng.train as "
            "CoNLL-2003 does."
        )
    content = _content(path)
    if not content or content.isspace():
        raise InputError(f"{path} is empty: give a file with at least one row.")
    if found[1] == ".parquet":
        rows = _parquet(content, str(path))
    else:
        reader = own(found[1]) or PLAIN.get(found[1])
        if reader is None:
            raise InputError(f"{path}: this task reads no {found[1]} files; give {', '.join([*PLAIN, '.parquet'])}.")
        rows = _dataset(reader(_text(content, str(path)), str(path)), str(path))
    if len(rows) == 0:
        raise InputError(f"{path} has no rows: give a file with at least one.")
    return rows


def split_name(name: str) -> tuple[str, str] | None:
    """A file's name without suffixes, and the suffix of its format, in lower case; None for any other file."""
    name = name.lower().removesuffix(".gz")
    if name in CONLL_NAMES:
        return name, ".conll"
    suffix = next((s for s in SUFFIXES if name.endswith(s) and name != s), None)
    return None if suffix is None else (name.removesuffix(suffix), suffix)


def _content(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"{path} does not exist: check the path.") from None
    except IsADirectoryError:
        raise InputError(f"{path} is a folder: give the file in it, or the folder with --data.") from None
    except PermissionError:
        raise InputError(f"{path} cannot be read (permission denied): change its permissions.") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror or error}): check the path and the disk.") from None
    if not path.name.lower().endswith(".gz"):
        return content
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} is not a whole gzip file ({error}): fetch or pack it again.") from None


def _text(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8-sig")  # Microsoft's MRPC files begin with a byte order mark
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(f"{where}, line {line}: not UTF-8 text; save the file as UTF-8.") from None


def _dataset(columns: Columns, where: str) -> Dataset:
    try:
        return Dataset.from_dict(columns)
    except UnicodeEncodeError:
        raise InputError(
            f"{where}: a text holds half of a character, which is not valid Unicode: write it anew."
        ) from None
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        reason = first_line(error)
        raise InputError(f"{where}: a column mixes kinds of values ({reason}); give each column one kind.") from None


def _parquet(content: bytes, where: str) -> Dataset:
    try:
        table = pq.read_table(io.BytesIO(content))
        # The column that pandas adds for its index is not data.
        return Dataset(table.select([name for name in table.column_names if not name.startswith("__index_level_")]))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise InputError(f"{where} is not a Parquet file ({first_line(error)}): fetch or write it again.") from None


def lines_of(text: str) -> list[str]:
    """The lines of a text; str.splitlines would also cut at characters that occur inside sentences."""
    return [line.removesuffix("\r") for line in text.split("\n")]


# JSON: lines, one list, {"data": [...]}


def _json(text: str, where: str) -> Columns:
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError) as error:
        if getattr(error, "msg", "") == "Extra data":  # a first value, then another: one object a line
            return _json_lines(text, where, listed=False)
        raise _broken_json(error, where, getattr(error, "lineno", 1)) from None
    rows = whole.get("data", [whole]) if isinstance(whole, dict) else whole
    if not isinstance(rows, list):
        raise InputError(f"{where}: not a list of rows; give a list of objects, or one object a line.")
    return _columns(((f"row {i}", row) for i, row in enumerate(rows, 1)), where)


def _json_lines(text: str, where: str, listed: bool = True) -> Columns:
    if listed and text[:100].lstrip().startswith("["):  # one list, in spite of its name
        return _json(text, where)

    def rows() -> Iterable[tuple[str, Any]]:
        for number, line in enumerate(lines_of(text), 1):
            if line.strip():
                try:
                    yield f"line {number}", json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise _broken_json(error, where, number) from None

    return _columns(rows(), where)


def _broken_json(error: Exception, where: str, line: int) -> InputError:
    return InputError(f"{where}, line {line}: broken JSON ({getattr(error, 'msg', error)}); fix that line.")


def _columns(rows: Iterable[tuple[str, Any]], where: str) -> Columns:
    """Rows, each with its place in the file, as columns; missing values are None."""
    columns: Columns = {}
    for count, (place, row) in enumerate(rows):
        if not isinstance(row, dict):
            raise InputError(f'{where}, {place}: not an object; give one object a row, such as {{"sentence": …}}.')
        for name in row:
            if name not in columns:
                columns[name] = [None] * count
        for name, values in columns.items():
            values.append(row.get(name))
    return columns


# CSV and TSV with a header


def _csv(text: str, where: str) -> Columns:
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))  # a field may be a whole document
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        return _table(((reader.line_num, row) for row in reader if row), where)
    except csv.Error as error:
        raise InputError(f"{where}, line {reader.line_num}: broken CSV ({error}); fix its quotes.") from None


def _tsv(text: str, where: str) -> Columns:
    # As in GLUE a quote is a character like any other: TSV has no quoting.
    return _table(((n, line.split("\t")) for n, line in enumerate(lines_of(text), 1) if line), where)


def _table(rows: Iterable[tuple[int, list[str]]], where: str) -> Columns:
    rows = iter(rows)
    _, header = next(rows, (1, [""]))
    names = [name.strip() for name in header]
    if len(set(names)) < len(names) or "" in names[1:] or names == [""] or any(map(FLOAT.fullmatch, names)):
        raise InputError(f"{where}, line 1: not a header; begin the file with one name for each column.")
    columns: list[list[str]] = [[] for _ in names]
    for number, row in rows:
        if len(row) != len(names):
            raise InputError(
                f"{where}, line {number}: {len(row)} fields where the header has {len(names)}; fix or quote this line."
            )
        for values, value in zip(columns, row, strict=True):
            values.append(value)
    # A first column without a name is the index that pandas writes.
    return {name: _typed(values) for name, values in zip(names, columns, strict=True) if name}


def _typed(values: list[str]) -> list[Any]:
    """Numbers if all values are numbers, with None for empty ones; else the texts."""
    for pattern, kind in ((INT, int), (FLOAT, float)):
        if any(values) and all(not value or pattern.fullmatch(value) for value in values):
            return [kind(value) if value else None for value in values]
    return list(values)


PLAIN: dict[str, Reader] = {".jsonl": _json_lines, ".json": _json, ".csv": _csv, ".tsv": _tsv}
