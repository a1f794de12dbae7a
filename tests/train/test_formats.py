"""Every file that benchmarks ship gives the rows that `datasets` has; every failure is one sentence."""

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
from tiny_files import MNLI, QQP, SHIPPED, as_parquet, sentence, tsv, write

# ---------------------------------------------------------------- files, as benchmarks ship them

QUESTION = {
    "id": "q1",
    "question": "Wo?",
    "answers": [{"text": "dort", "answer_start": 3}, {"text": "da", "answer_start": 9}],
}
ARTICLE = {
    "title": "T",
    "paragraphs": [{"context": " Es dort. da", "qas": [QUESTION, {"id": "q2", "question": "Was?"}]}],
}
SQUAD = [
    {"id": "q1", "title": "T", "context": " Es dort. da", "question": "Wo?",
     "answers": {"text": ["dort", "da"], "answer_start": [3, 9]}},
    {"id": "q2", "title": "T", "context": " Es dort. da", "question": "Was?",
     "answers": {"text": [], "answer_start": []}},
]  # fmt: skip


@pytest.mark.parametrize("variant", ["plain", "gz", "crlf"])
@pytest.mark.parametrize(("task", "name", "text", "rows"), SHIPPED.values(), ids=SHIPPED)
def test_what_benchmarks_ship(tmp_path, task, name, text, rows, variant):
    if variant == "crlf":
        text = text.replace("\n", "\r\n")
        rows = json.loads(json.dumps(rows).replace(".\\nC", ".\\r\\nC"))  # a line break inside quotes is the text's own
    path = write(tmp_path / (name + ".gz" * (variant == "gz")), text)
    assert formats.read(path, task).to_list() == rows


@pytest.mark.parametrize("name", ["dev-v1.1.json", "dev-v1.1.json.gz", "dev.jsonl"])
@pytest.mark.parametrize("indent", [None, 1])
def test_squad(tmp_path, name, indent):
    flat = "\n".join(map(json.dumps, SQUAD)) if "jsonl" in name else json.dumps(SQUAD, indent=indent)
    assert formats.read(write(tmp_path / name, flat), "squad").to_list() == SQUAD
    if "jsonl" not in name:
        nested = json.dumps({"version": "1.1", "data": [ARTICLE]}, indent=indent)
        assert formats.read(write(tmp_path / name, nested)).to_list() == SQUAD
        assert formats.read(write(tmp_path / name, json.dumps({"data": SQUAD}))).to_list() == SQUAD


def test_rows_that_lack_fields_are_skipped_and_counted(tmp_path):
    text = tsv(QQP, [*"abcde1"], ["x", "y"], [*"abcde", ""], [*"abcde0"], [*"fghij1"])
    with pytest.warns(formats.RowsSkipped, match=r"train.tsv: 2 of 5 rows lack fields and were skipped"):
        rows = formats.read(write(tmp_path / "train.tsv", text), "qqp")
    assert rows["label"][:] == [1, 0, 1]
    assert rows["idx"][:] == [0, 3, 4]  # rows keep their number in the file, as in `datasets`
    undecided = tsv(
        [*MNLI, "gold_label"], *(["0", *"pqgxxyy", "p", "h", "neutral", label] for label in ("-", "neutral"))
    )
    with pytest.warns(formats.RowsSkipped, match="1 of 2"):
        assert formats.read(write(tmp_path / "mnli.tsv", undecided), "mnli")["label"][:] == [1]


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
    "unknown kind": ("x.docx", "a", "", r"unknown kind: name it \*\.jsonl, \*\.json, \*\.csv"),
    "no suffix": ("x", "a", "", "unknown kind"),
    "only a suffix": (".csv", "a", "", "unknown kind"),
    "empty": ("x.jsonl", "", "", "is empty"),
    "blank": ("x.tsv", " \n\n", "", "is empty"),
    "empty gz": ("x.csv.gz", "", "", "is empty"),
    "header only": ("x.csv", "a,b\n", "", "has no rows"),
    "empty list": ("x.json", "[]", "", "has no rows"),
    "glue header only": ("x.tsv", "index\tsentence\n", "sst2", "has no rows"),
    "empty parquet": ("x.parquet", as_parquet([{"a": 1}])[:0] + b"PAR1", "", "not a Parquet file"),
    "zero parquet rows": ("x.parquet", None, "", "has no rows"),
    "not gzip": ("x.jsonl.gz", b"{}", "", r"not a whole gzip file .*again"),
    "half a gzip": ("x.jsonl.gz", gzip.compress(b'{"a": 1}' * 99)[:-12], "", "not a whole gzip file"),
    "bad bytes in gzip": ("x.jsonl.gz", gzip.compress(b"abc")[:10] + b"\xff" * 20, "", "not a whole gzip file"),
    "broken line": ("x.jsonl", '{"a": 1}\n\n{"a": 2\n{"a": 3}', "", r"line 3: broken JSON \(.*\); fix that line"),
    "broken first line": ("x.jsonl", '{"a": 1,\n{"a": 2}', "", "line 1: broken JSON"),
    "broken line in json": ("x.json", '{"a": 1}\n{"a": 2', "", "line 2: broken JSON"),
    "broken list": ("x.json", '[\n{"a": 1},\n{"a" 2}]', "", "line 3: broken JSON"),
    "deep": ("x.json", "[" * 200_000, "", "line 1: broken JSON"),
    "deep line": ("x.jsonl", '{"a": ' + "[" * 200_000, "", "line 1: broken JSON"),
    "huge number": ("x.jsonl", '{"a": ' + "9" * 5000 + "}", "", "line 1: broken JSON"),
    "wide number": ("x.jsonl", '{"a": 1' + "0" * 30 + "}", "", "mixes kinds of values"),
    "not a row": ("x.jsonl", '{"a": 1}\n3', "", "line 2: not an object"),
    "lists for rows": ("x.jsonl", "[1]\n[2]", "", "line 1: not an object"),
    "not a row in a list": ("x.json", '[{"a": 1}, 2]', "", "row 2: not an object"),
    "not a list": ("x.json", '{"data": 3}', "", "not a list of rows"),
    "a value": ("x.json", "3", "", "not a list of rows"),
    "mixed kinds": ("x.jsonl", '{"a": 1}\n{"a": "x"}', "", "mixes kinds of values"),
    "surrogate": ("x.jsonl", r'{"a": "\ud800"}', "", "mixes kinds of values"),
    "squad without id": ("x.json", '{"data": [{"paragraphs": [{"context": "", "qas": [{}]}]}]}', "", "question 1 is"),
    "no header": ("x.csv", "1,good film\n0,bad film\n", "", "line 1: not a header"),
    "no name": ("x.csv", "a,,b\n1,2,3\n", "", "line 1: not a header"),
    "name twice": ("x.tsv", "a\ta\n1\t2\n", "", "line 1: not a header"),
    "ragged": ("x.csv", "a,b\n1,2\n1,2,3\n", "", "line 3: 3 fields where the header has 2"),
    "ragged tsv": ("x.tsv", "a\tb\n\n1\n", "", "line 3: 1 fields where the header has 2"),
    "open quote": ("x.csv", 'a,b\n1,"2\n', "", r"line 2: broken CSV \(.*\); fix its quotes"),
    "bad quote": ("x.csv", 'a,b\n1,"2"3\n', "", "line 2: broken CSV"),
    "latin-1": ("x.csv", "a,b\n1,é\n".encode("latin-1"), "", "line 2: not UTF-8"),
    "utf-16": ("x.csv", "a,b\n".encode("utf-16"), "", "line 1: not UTF-8"),
    "not parquet": ("x.parquet", "a,b\n", "", "not a Parquet file"),
    "glue without column": ("x.tsv", "index\tsentence1\tlabel\n0\ta\tb\n", "rte", "line 1: no column 'sentence2'"),
    "glue label": ("x.tsv", "sentence1\tsentence2\tlabel\na\tb\tmaybe\n", "rte", "line 2: 'maybe' is no label"),
    "glue number": ("x.tsv", "sentence1\tsentence2\tscore\na\tb\thigh\n", "stsb", "line 2: 'high' is no label"),
    "glue id": ("x.tsv", "sentence\tlabel\na\t2\n", "sst2", "line 2: '2' is no label"),
    "glue with spaces": ("x.tsv", "sentence\tlabel\na 1\nb 1\nc\t1\n", "sst2", "2 of 3 rows lack fields"),
    "no conll": ("x.txt", "EU B-ORG\nHello you there\n", "conll2003", "line 2: no CoNLL line"),
    "conll of one column": ("eng.testa", "EU\n", "", "line 1: no CoNLL line"),
    "conll of documents only": ("x.conll", "-DOCSTART- -X- O O\n", "", "has no rows"),
    "broken xml": ("x.xml", "<a>\n<b></a>", "", "line 2: broken XML"),
    "other xml": ("x.xml", "<a/>", "dart", "has no <entry>"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "content", "task", "message"), ERRORS.values(), ids=ERRORS)
def test_failures_say_where_and_what_to_do(tmp_path, name, content, task, message):
    path = tmp_path / name
    if content is None:
        pq.write_table(pa.table({"a": pa.array([], pa.int64())}), path)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        write(path, content)
    with pytest.raises(InputError, match=message) as error:
        formats.read(path, task)
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
    names = {"mr", "ref", "MR", "REF"}  # E2E's own, which are renamed
    if not names & set(rows[0]):
        assert formats.read(path).to_list() == rows


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.binary(max_size=60),
    name=st.sampled_from(["x" + suffix for suffix in formats.SUFFIXES]),
    task=st.sampled_from(["", *formats.GLUE]),
)
def test_garbage_is_never_a_crash(tmp_path, content, name, task):
    (tmp_path / name).write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", formats.RowsSkipped)
        with contextlib.suppress(InputError):
            assert len(formats.read(tmp_path / name, task)) > 0
