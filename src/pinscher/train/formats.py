"""One file to rows: JSON, CSV, TSV and Parquet, and the files that GLUE, SQuAD, CoNLL-2003, E2E, DART and WebNLG ship.

Rows come out with the column names and label ids of the Hugging Face version of each data set. Every failure is an
InputError in one sentence that names the file, the line where there is one, and what to do.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset

from pinscher.errors import InputError, first_line

Columns = dict[str, list[Any]]
Reader = Callable[[str, str], Columns]  # a file's text and its name for messages
SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt", ".conll", ".xml")
CONLL_NAMES = ("eng.train", "eng.testa", "eng.testb")  # shipped without a suffix
INT = re.compile(r"-?(0|[1-9][0-9]{0,17})")  # no 007: that is a name; and never wider than 64 bits
FLOAT = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")


class RowsSkipped(UserWarning):
    """Some rows of a file could not be used: how many, and why."""


def read(path: Path, task: str = "", own: Callable[[str], Reader | None] = lambda suffix: None) -> Dataset:
    """The rows of one file.

    Args:
        path: the file.
        task: the task's name, which decides where a suffix says too little (a GLUE table, DART's XML).
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
        rows = _dataset((own(found[1]) or _reader(found[1], task))(_text(content, str(path)), str(path)), str(path))
    if len(rows) == 0:
        raise InputError(f"{path} has no rows: give a file with at least one.")
    return rows


def split_name(name: str) -> tuple[str, str] | None:
    """A file's name without its suffix and the suffix that says how to read it, lower case; None if it is no data."""
    name = name.lower().removesuffix(".gz")
    if name in CONLL_NAMES:
        return name, ".conll"
    suffix = next((s for s in SUFFIXES if name.endswith(s) and name != s), None)
    return None if suffix is None else (name.removesuffix(suffix), suffix)


def _reader(suffix: str, task: str) -> Reader:
    if suffix in (".tsv", ".txt") and task in GLUE:
        return lambda text, where: _glue(text, where, GLUE[task])
    if suffix == ".xml" and task.startswith("dart"):
        return _dart_xml
    readers = {".jsonl": _json_lines, ".json": _json, ".csv": _csv, ".tsv": _tsv, ".xml": _webnlg}
    return readers.get(suffix, _conll)


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
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        reason = first_line(error)
        raise InputError(f"{where}: a column mixes kinds of values ({reason}); give each column one kind.") from None


def _parquet(content: bytes, where: str) -> Dataset:
    try:
        table = pq.read_table(io.BytesIO(content))
        # What pandas adds for its index is no column of the data.
        return Dataset(table.select([name for name in table.column_names if not name.startswith("__index_level_")]))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise InputError(f"{where} is not a Parquet file ({first_line(error)}): fetch or write it again.") from None


def _lines(text: str) -> list[str]:
    """Lines as files have them: str.splitlines would also cut at characters that occur inside sentences."""
    return [line.removesuffix("\r") for line in text.split("\n")]


# JSON: lines, one list, {"data": [...]}, SQuAD's tree, DART's list


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
    if any(isinstance(row, dict) and "paragraphs" in row for row in rows):
        return _squad(rows, where)
    return _columns(((f"row {i}", row) for i, row in enumerate(rows, 1)), where)


def _json_lines(text: str, where: str, listed: bool = True) -> Columns:
    if listed and text[:100].lstrip().startswith("["):  # one list, in spite of its name
        return _json(text, where)

    def rows() -> Iterable[tuple[str, Any]]:
        for number, line in enumerate(_lines(text), 1):
            if line.strip():
                try:
                    yield f"line {number}", json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise _broken_json(error, where, number) from None

    return _columns(rows(), where)


def _broken_json(error: Exception, where: str, line: int) -> InputError:
    return InputError(f"{where}, line {line}: broken JSON ({getattr(error, 'msg', error)}); fix that line.")


def _columns(rows: Iterable[tuple[str, Any]], where: str) -> Columns:
    """Rows, each with its place in the file, as columns; what a row lacks is None."""
    columns: Columns = {}
    for count, (place, row) in enumerate(rows):
        if not isinstance(row, dict):
            raise InputError(f'{where}, {place}: not an object; give one object a row, such as {{"sentence": …}}.')
        notes = row.get("annotations")
        if "tripleset" in row and isinstance(notes, list) and all(isinstance(note, dict) for note in notes):
            # DART ships a list of {source, text}; `datasets` turns it round.
            row["annotations"] = {key: [note.get(key) for note in notes] for key in ("source", "text")}
        for name in row:
            if name not in columns:
                columns[name] = [None] * count
        for name, values in columns.items():
            values.append(row.get(name))
    return columns


def _squad(articles: Sequence[Any], where: str) -> Columns:
    columns: Columns = {"id": [], "title": [], "context": [], "question": [], "answers": []}
    try:
        for article in articles:
            for paragraph in article["paragraphs"]:
                for qa in paragraph["qas"]:
                    given = qa.get("answers") or []
                    answers = {key: [answer[key] for answer in given] for key in ("text", "answer_start")}
                    row = (qa["id"], article.get("title", ""), paragraph["context"], qa["question"], answers)
                    for values, value in zip(columns.values(), row, strict=True):
                        values.append(value)
    except (KeyError, TypeError, AttributeError) as error:
        at = len(columns["id"]) + 1
        raise InputError(f"{where}: question {at} is not in SQuAD's form ({error}); fetch the file again.") from None
    return columns


# CSV and TSV with a header


def _csv(text: str, where: str) -> Columns:
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))  # a field may be a whole document
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        columns = _table(((reader.line_num, row) for row in reader if row), where)
    except csv.Error as error:
        raise InputError(f"{where}, line {reader.line_num}: broken CSV ({error}); fix its quotes.") from None
    if [name.lower() for name in columns][:2] in (["mr", "ref"], ["mr"]):  # E2E; its bare test set has no ref
        names = dict(zip(columns, ("meaning_representation", "human_reference"), strict=False))
        columns = {names.get(name, name): values for name, values in columns.items()}
    return columns


def _tsv(text: str, where: str) -> Columns:
    # As in GLUE a quote is a character like any other: TSV has no quoting.
    return _table(((n, line.split("\t")) for n, line in enumerate(_lines(text), 1) if line), where)


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
    """Numbers, if all that is there are numbers, and None where nothing is; else the text itself."""
    for pattern, kind in ((INT, int), (FLOAT, float)):
        if any(values) and all(not value or pattern.fullmatch(value) for value in values):
            return [kind(value) if value else None for value in values]
    return list(values)


# GLUE


@dataclass(frozen=True)
class Glue:
    """How GLUE ships one task, next to how `datasets` names it.

    Args:
        text: a column of the shipped file -> our name.
        label: the column of the label, which test files lack.
        names: its classes in the order of their ids; none: it is a number.
        header: what stands in for a missing first line.
    """

    text: Mapping[str, str]
    label: str = "label"
    names: tuple[str, ...] = ("0", "1")
    header: tuple[str, ...] = ()

    def ids(self) -> dict[str, int]:
        """What may stand for a label: its name or its id, and -1 where it is kept secret."""
        return {"-1": -1} | {str(i): i for i in range(len(self.names))} | {n: i for i, n in enumerate(self.names)}


ENTAILMENT = ("entailment", "not_entailment")
PAIR = {"sentence1": "sentence1", "sentence2": "sentence2"}
GLUE = {
    "cola": Glue({"sentence": "sentence"}, header=("source", "label", "star", "sentence")),
    "sst2": Glue({"sentence": "sentence"}),
    "mrpc": Glue({"#1 String": "sentence1", "#2 String": "sentence2"}, label="Quality"),
    "stsb": Glue(PAIR, label="score", names=()),
    "qqp": Glue({"question1": "question1", "question2": "question2"}, label="is_duplicate"),
    "qnli": Glue({"question": "question", "sentence": "sentence"}, names=ENTAILMENT),
    "rte": Glue(PAIR, names=ENTAILMENT),
    "mnli": Glue(
        {"sentence1": "premise", "sentence2": "hypothesis"},
        label="gold_label",
        names=("entailment", "neutral", "contradiction"),
    ),
}


def _glue(text: str, where: str, form: Glue) -> Columns:
    lines = [(number, line.split("\t")) for number, line in enumerate(_lines(text), 1) if line]
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
    columns: Columns = {name: [] for name in (*ours, "label", "idx")}
    for idx, (number, fields) in enumerate(lines):
        if len(fields) <= max(needed) or (label is not None and fields[label] in ("", "-")):
            continue  # broken in the original, or (MNLI) the annotators did not agree on a label
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
    if skipped > total / 2:  # not a few broken lines but another format
        raise InputError(
            f"{where}: {skipped} of {total} rows lack fields; give the file with tabs between its columns."
        )
    if skipped:
        warnings.warn(f"{where}: {skipped} of {total} rows lack fields and were skipped.", RowsSkipped, stacklevel=2)


# CoNLL-2003


def _conll(text: str, where: str) -> Columns:
    columns: Columns = {"tokens": [], "ner_tags": []}
    tokens: list[str] = []
    tags: list[str] = []
    for number, line in enumerate([*_lines(text), ""], 1):
        fields = [field for field in re.split("[ \t]+", line) if field]  # str.split would cut at any Unicode space
        if fields and not fields[0].startswith("-DOCSTART-"):
            if len(fields) < 2 or not re.fullmatch(r"O|[A-Z]-\S+", fields[-1]):
                raise InputError(
                    f"{where}, line {number}: no CoNLL line; give a token, its columns and last a tag such as B-PER."
                )
            tokens.append(fields[0])
            tags.append(fields[-1])
        elif tokens:
            columns["tokens"].append(tokens)
            columns["ner_tags"].append(_iob2(tags))
            tokens, tags = [], []
    return columns


def _iob2(tags: Sequence[str]) -> list[str]:
    """IOB1 (an entity begins with I- unless it follows one of its kind) to IOB2 (with B- always), which stays as is."""
    pairs = zip(["O", *tags], tags, strict=False)
    return [f"B-{tag[2:]}" if tag[:2] == "I-" and last[1:] != tag[1:] else tag for last, tag in pairs]


# WebNLG, and DART in the same XML


def _entries(text: str, where: str) -> list[ElementTree.Element]:
    try:
        entries = list(ElementTree.fromstring(text).iter("entry"))
    except ElementTree.ParseError as error:
        raise InputError(f"{where}, line {error.position[0]}: broken XML ({error}); fetch the file again.") from None
    if not entries:
        raise InputError(f"{where} has no <entry>: give XML as WebNLG or DART ship it.")
    return entries


def _texts(element: ElementTree.Element, tag: str) -> list[str]:
    return [(found.findtext("text") or found.text or "").strip() for found in element.iter(tag)]


def _references(entry: ElementTree.Element, **attributes: str) -> dict[str, list[str]]:
    """The texts of an entry, beside some of their attributes: our name = the attribute."""
    found = {ours: [lex.get(name, "") for lex in entry.iter("lex")] for ours, name in attributes.items()}
    return {**found, "text": _texts(entry, "lex")}


def _webnlg(text: str, where: str) -> Columns:
    entries = _entries(text, where)
    triples = [[_texts(each, "mtriple") for each in entry.iter("modifiedtripleset")] for entry in entries]
    return {
        "category": [entry.get("category", "") for entry in entries],
        "eid": [entry.get("eid", "") for entry in entries],
        "modified_triple_sets": [{"mtriple_set": sets} for sets in triples],
        "lex": [_references(entry, comment="comment", lid="lid") for entry in entries],
    }


def _dart_xml(text: str, where: str) -> Columns:
    entries = _entries(text, where)
    return {
        "tripleset": [[triple.split(" | ", 2) for triple in _texts(entry, "mtriple")] for entry in entries],
        "subtree_was_extended": [None] * len(entries),  # the XML does not say
        "annotations": [_references(entry, source="comment") for entry in entries],
    }
