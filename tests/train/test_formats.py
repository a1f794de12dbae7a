"""Plain files give their rows; every failure is one sentence. What benchmarks ship: tasks/test_task_files.py."""

import contextlib
import csv
import gzip
import io
import json
import string
import warnings
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pinscher.errors import InputError
from pinscher.train import formats
from pinscher.train.tasks import TASKS
from tiny_files import as_parquet, sentence, tsv, write

ROWS = [{"text": "a, \"b\"\u2028", "label": 0, "score": 1.5}, {"text": "", "label": 1, "score": -2e-05}]  # fmt: skip


def as_csv(rows, **options):
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, rows[0], **options)
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


@pytest.mark.parametrize("gz", ["", ".gz", ".GZ"])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.jsonl", "\n\n".join(map(json.dumps, ROWS))),
        ("x.JSON", "\r\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)),
        ("x.json", json.dumps(ROWS, indent=1)),
        ("x.jsonl", " " + json.dumps(ROWS)),
        ("x.csv", as_csv(ROWS)),
        ("x.csv", "\ufeff" + as_csv(ROWS, lineterminator="\n")),
        ("x.tsv", tsv(["text", "label", "score"], *([str(v) for v in row.values()] for row in ROWS))),
        ("x.parquet", as_parquet(ROWS)),
    ],
)
def test_plain_formats(tmp_path, name, content, gz):
    assert formats.read(write(tmp_path / (name + gz), content)).to_list() == ROWS


def test_columns_without_type_get_one(tmp_path):
    rows = formats.read(write(tmp_path / "x.csv", ",a,b,c,d,e\n0,1,007,1,x,\n1,,1,1.5,2,\n"))
    assert rows.to_dict() == {"a": [1, None], "b": ["007", "1"], "c": [1.0, 1.5], "d": ["x", "2"], "e": ["", ""]}
    big = formats.read(write(tmp_path / "x.csv", "a,b\n9223372036854775808,nan\n1,inf\n"))
    assert big.to_dict() == {"a": [9.223372036854775808e18, 1.0], "b": ["nan", "inf"]}


def test_rows_may_differ_in_their_keys(tmp_path):
    rows = formats.read(write(tmp_path / "x.jsonl", '{"b": 1}\n{"a": [2], "b": null}\n{"c": {"d": "e"}}'))
    assert rows.column_names == ["b", "a", "c"]
    assert rows[1] == {"b": None, "a": [2], "c": None}


def test_parquet_keeps_class_names_and_loses_the_index(tmp_path):
    features = datasets.Features({"label": datasets.ClassLabel(names=["no", "yes"])})
    Dataset.from_dict({"label": [1, 0]}, features=features).to_parquet(tmp_path / "x.parquet")
    assert formats.read(tmp_path / "x.parquet").features == features
    table = pa.table({"a": [1], "__index_level_0__": [7]})
    pq.write_table(table, tmp_path / "y.parquet")
    assert formats.read(tmp_path / "y.parquet").column_names == ["a"]


# ---------------------------------------------------------------- every failure is one sentence

ERRORS = {
    "unknown kind": ("x.docx", "a", r"unknown kind: name it \*\.jsonl, \*\.json, \*\.csv"),
    "no suffix": ("x", "a", "unknown kind"),
    "only a suffix": (".csv", "a", "unknown kind"),
    "empty": ("x.jsonl", "", "is empty"),
    "blank": ("x.tsv", " \n\n", "is empty"),
    "empty gz": ("x.csv.gz", "", "is empty"),
    "header only": ("x.csv", "a,b\n", "has no rows"),
    "empty list": ("x.json", "[]", "has no rows"),
    "empty parquet": ("x.parquet", as_parquet([{"a": 1}])[:0] + b"PAR1", "not a Parquet file"),
    "zero parquet rows": ("x.parquet", None, "has no rows"),
    "not gzip": ("x.jsonl.gz", b"{}", r"not a whole gzip file .*again"),
    "half a gzip": ("x.jsonl.gz", gzip.compress(b'{"a": 1}' * 99)[:-12], "not a whole gzip file"),
    "bad bytes in gzip": ("x.jsonl.gz", gzip.compress(b"abc")[:10] + b"\xff" * 20, "not a whole gzip file"),
    "broken line": ("x.jsonl", '{"a": 1}\n\n{"a": 2\n{"a": 3}', r"line 3: broken JSON \(.*\); fix that line"),
    "broken first line": ("x.jsonl", '{"a": 1,\n{"a": 2}', "line 1: broken JSON"),
    "broken line in json": ("x.json", '{"a": 1}\n{"a": 2', "line 2: broken JSON"),
    "broken list": ("x.json", '[\n{"a": 1},\n{"a" 2}]', "line 3: broken JSON"),
    "deep": ("x.json", "[" * 200_000, "line 1: broken JSON"),
    "deep line": ("x.jsonl", '{"a": ' + "[" * 200_000, "line 1: broken JSON"),
    "huge number": ("x.jsonl", '{"a": ' + "9" * 5000 + "}", "line 1: broken JSON"),
    "wide number": ("x.jsonl", '{"a": 1' + "0" * 30 + "}", "mixes kinds of values"),
    "not a row": ("x.jsonl", '{"a": 1}\n3', "line 2: not an object"),
    "lists for rows": ("x.jsonl", "[1]\n[2]", "line 1: not an object"),
    "not a row in a list": ("x.json", '[{"a": 1}, 2]', "row 2: not an object"),
    "not a list": ("x.json", '{"data": 3}', "not a list of rows"),
    "a value": ("x.json", "3", "not a list of rows"),
    "mixed kinds": ("x.jsonl", '{"a": 1}\n{"a": "x"}', "mixes kinds of values"),
    "surrogate": ("x.jsonl", r'{"a": "\ud800"}', "a text holds half of a character"),
    "no header": ("x.csv", "1,good film\n0,bad film\n", "line 1: not a header"),
    "no name": ("x.csv", "a,,b\n1,2,3\n", "line 1: not a header"),
    "name twice": ("x.tsv", "a\ta\n1\t2\n", "line 1: not a header"),
    "ragged": ("x.csv", "a,b\n1,2\n1,2,3\n", "line 3: 3 fields where the header has 2"),
    "ragged tsv": ("x.tsv", "a\tb\n\n1\n", "line 3: 1 fields where the header has 2"),
    "open quote": ("x.csv", 'a,b\n1,"2\n', r"line 2: broken CSV \(.*\); fix its quotes"),
    "bad quote": ("x.csv", 'a,b\n1,"2"3\n', "line 2: broken CSV"),
    "latin-1": ("x.csv", "a,b\n1,é\n".encode("latin-1"), "line 2: not UTF-8"),
    "utf-16": ("x.csv", "a,b\n".encode("utf-16"), "line 1: not UTF-8"),
    "not parquet": ("x.parquet", "a,b\n", "not a Parquet file"),
    "a task's own kind": ("x.xml", "<a/>", r"this task reads no \.xml files; give \.jsonl, "),
}  # fmt: skip


@pytest.mark.parametrize(("name", "content", "message"), ERRORS.values(), ids=ERRORS)
def test_failures_say_where_and_what_to_do(tmp_path, name, content, message):
    path = tmp_path / name
    if content is None:
        pq.write_table(pa.table({"a": pa.array([], pa.int64())}), path)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        write(path, content)
    with pytest.raises(InputError, match=message) as error:
        formats.read(path)
    sentence(error, path)


def test_files_that_cannot_be_read(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="does not exist") as error:
        formats.read(tmp_path / "x.csv")
    sentence(error, tmp_path / "x.csv")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(InputError, match=r"is a folder: .* --data"):
        formats.read(tmp_path / "folder.csv")
    for cause, message in (
        (PermissionError(13, "Permission denied"), "permission denied"),
        (OSError(5, "I/O error"), "I/O error"),
    ):

        def refuse(_, cause=cause):
            raise cause

        monkeypatch.setattr(Path, "read_bytes", refuse)
        with pytest.raises(InputError, match=message) as error:
            formats.read(tmp_path / "x.csv")
        sentence(error, tmp_path / "x.csv")


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
NAME = st.text(string.ascii_letters, min_size=2, max_size=6)
TABLES = st.lists(NAME, min_size=1, max_size=4, unique=True).flatmap(
    lambda names: st.lists(
        st.tuples(
            *(TEXT.map("t".__add__) if i % 2 == 0 else st.integers(-(10**17), 10**17) for i in range(len(names)))
        ),
        min_size=1,
        max_size=8,
    ).map(lambda rows: [dict(zip(names, row, strict=True)) for row in rows])
)


def test_a_field_of_any_length_is_read(tmp_path):
    long = "word " * 60_000
    path = tmp_path / "train.csv"
    path.write_text(f'text,label\n"{long}",1\nshort,0\n')
    columns = formats.read(path)
    assert columns["text"] == [long, "short"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=TABLES, kind=st.sampled_from(["jsonl", "json", "csv", "parquet"]), gz=st.booleans())
def test_round_trips(tmp_path, rows, kind, gz):
    content = {
        "jsonl": lambda: "\n".join(json.dumps(row, ensure_ascii=False) for row in rows),
        "json": lambda: json.dumps(rows),
        "csv": lambda: as_csv(rows),
        "parquet": lambda: as_parquet(rows),
    }[kind]()
    path = write(tmp_path / f"x.{kind}{'.gz' * gz}", content)
    assert formats.read(path).to_list() == rows


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.binary(max_size=60),
    name=st.sampled_from(["x" + suffix for suffix in formats.SUFFIXES]),
    task=st.sampled_from([None, *TASKS]),
)
def test_garbage_is_never_a_crash(tmp_path, content, name, task):
    (tmp_path / name).write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", formats.RowsSkipped)
        with contextlib.suppress(InputError):
            assert len(formats.read(tmp_path / name, *([TASKS[task].reader] if task else []))) > 0
