"""Every file that benchmarks ship gives the rows that `datasets` has, and rows are split honestly and reproducibly."""

import contextlib
import csv
import gzip
import io
import json
import os
import re
import string
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pinscher.errors import InputError
from pinscher.train import data, formats, hub
from pinscher.train.data import Source, load
from pinscher.train.tasks import TASKS
from pinscher.train.tasks.task import Task

# ---------------------------------------------------------------- files, as benchmarks ship them

# A quote that is never closed, and characters that str.splitlines and str.split take for more than they are.
ODD = 'Sie sagte "na\u00efve \u2014 \u65e5\u672c", "\u2028 weird \x85 \u00a0 spaces'


def tsv(*rows):
    return "".join("\t".join(row) + "\n" for row in rows)


STSB = ["index", "genre", "filename", "year", "old_index", "source1", "source2", "sentence1", "sentence2"]
PARSES = ["sentence1_binary_parse", "sentence2_binary_parse", "sentence1_parse", "sentence2_parse"]
MNLI = ["index", "promptID", "pairID", "genre", *PARSES, "sentence1", "sentence2", "label1"]
QQP = ["id", "qid1", "qid2", "question1", "question2", "is_duplicate"]
MRPC = ["#1 ID", "#2 ID", "#1 String", "#2 String"]

# task, file, text, the rows that it must give
SHIPPED = {
    "cola": ("cola", "train.tsv", tsv(["gj04", "1", "", "Out. ", ], ["gj04", "0", "*", ODD]),
             [{"sentence": "Out. ", "label": 1, "idx": 0}, {"sentence": ODD, "label": 0, "idx": 1}]),
    "cola test": ("cola", "test.tsv", tsv(["index", "sentence"], ["0", ODD]),
                  [{"sentence": ODD, "label": -1, "idx": 0}]),
    "sst2": ("sst2", "dev.tsv", tsv(["sentence", "label"], [ODD + " ", "1"]),
             [{"sentence": ODD + " ", "label": 1, "idx": 0}]),
    "sst2 test": ("sst2", "test.tsv", tsv(["index", "sentence"], ["0", "uneasy ."]),
                  [{"sentence": "uneasy .", "label": -1, "idx": 0}]),
    "mrpc": ("mrpc", "train.tsv", tsv(["Quality", *MRPC], ["1", "7", "8", '" a', 'b " c']),
             [{"sentence1": '" a', "sentence2": 'b " c', "label": 1, "idx": 0}]),
    "mrpc microsoft": ("mrpc", "msr_paraphrase_train.txt",
                       "\ufeff" + tsv(["Quality", *MRPC], ["0", "7", "8", "a", ODD]),
                       [{"sentence1": "a", "sentence2": ODD, "label": 0, "idx": 0}]),
    "mrpc test": ("mrpc", "test.tsv", tsv(["index", *MRPC], ["0", "7", "8", "a", "b"]),
                  [{"sentence1": "a", "sentence2": "b", "label": -1, "idx": 0}]),
    "stsb": ("stsb", "train.tsv", tsv([*STSB, "score"], ["0", *"gfyonn", "A plane.", ODD, "5.000"]),
             [{"sentence1": "A plane.", "sentence2": ODD, "label": 5.0, "idx": 0}]),
    "stsb test": ("stsb", "test.tsv", tsv(STSB, ["0", *"gfyonn", "a", "b"]),
                  [{"sentence1": "a", "sentence2": "b", "label": -1.0, "idx": 0}]),
    "qqp": ("qqp", "train.tsv",
            tsv(QQP, ["9", "1", "2", ODD, "", "1"]),
            [{"question1": ODD, "question2": "", "label": 1, "idx": 0}]),
    "qqp test": ("qqp", "test.tsv", tsv(["id", "question1", "question2"], ["0", "a?", "b?"]),
                 [{"question1": "a?", "question2": "b?", "label": -1, "idx": 0}]),
    "qnli": ("qnli", "dev.tsv",
             tsv(["index", "question", "sentence", "label"], ["0", "q?", ODD, "not_entailment"],
                 ["1", "r?", "s", "entailment"]),
             [{"question": "q?", "sentence": ODD, "label": 1, "idx": 0},
              {"question": "r?", "sentence": "s", "label": 0, "idx": 1}]),
    "rte": ("rte", "train.tsv",
            tsv(["index", "sentence1", "sentence2", "label"], ["0", ODD, "b", "entailment"],
                ["1", "c", "d", "not_entailment"]),
            [{"sentence1": ODD, "sentence2": "b", "label": 0, "idx": 0},
             {"sentence1": "c", "sentence2": "d", "label": 1, "idx": 1}]),
    "rte test": ("rte", "test.tsv", tsv(["index", "sentence1", "sentence2"], ["0", "a", "b"]),
                 [{"sentence1": "a", "sentence2": "b", "label": -1, "idx": 0}]),
    "mnli": ("mnli", "train.tsv",
             tsv([*MNLI, "gold_label"], *(["0", *"pqgxxyy", "p", "h", label, label]
                                          for label in ("neutral", "entailment", "contradiction"))),
             [{"premise": "p", "hypothesis": "h", "label": label, "idx": i} for i, label in enumerate((1, 0, 2))]),
    "mnli dev": ("mnli", "dev_matched.tsv",
                 tsv([*MNLI, "label2", "label3", "label4", "label5", "gold_label"],
                     ["0", *"pqgxxyy", "p", ODD, *"abcde", "neutral"]),
                 [{"premise": "p", "hypothesis": ODD, "label": 1, "idx": 0}]),
    "mnli test": ("mnli", "test_matched.tsv", tsv(MNLI[:-1], ["0", *"pqgxxyy", "p", "h"]),
                  [{"premise": "p", "hypothesis": "h", "label": -1, "idx": 0}]),
    "rte, the user's own": ("rte", "train.tsv",
                            tsv(["sentence1", "label", "sentence2"], ["a", "1", "b"], ["c", "-1", "d"]),
                            [{"sentence1": "a", "sentence2": "b", "label": 1, "idx": 0},
                             {"sentence1": "c", "sentence2": "d", "label": -1, "idx": 1}]),
    "mnli, the user's own": ("mnli", "train.tsv", tsv(["premise", "hypothesis", "label"], ["a", "b", "neutral"]),
                             [{"premise": "a", "hypothesis": "b", "label": 1, "idx": 0}]),
    "conll, IOB1": ("conll2003", "eng.train",
                    "-DOCSTART- -X- O O\n\nU.N. NNP I-NP I-ORG\nofficial NN I-NP O\nRolf NNP I-NP I-PER\n"
                    "Ek\u00e9us NNP I-NP I-PER\n\n\nParis NNP I-NP I-LOC\nRome NNP B-NP B-LOC\n"
                    "Bonn NNP B-NP I-LOC\nEU NNP I-NP I-ORG\n",
                    [{"tokens": ["U.N.", "official", "Rolf", "Ek\u00e9us"],
                      "ner_tags": ["B-ORG", "O", "B-PER", "I-PER"]},
                     {"tokens": ["Paris", "Rome", "Bonn", "EU"], "ner_tags": ["B-LOC", "B-LOC", "I-LOC", "B-ORG"]}]),
    "conll, IOB2": ("ner", "valid.txt",
                    "-DOCSTART- -X- -X- O\n\nParis\tNNP\tB-NP\tB-LOC\nRome\tNNP\tB-NP\tB-LOC\n"
                    "Eternal\tNNP\tI-NP\tI-LOC\n\n-DOCSTART- -X- -X- O\n\na\u00a0b X X O",
                    [{"tokens": ["Paris", "Rome", "Eternal"], "ner_tags": ["B-LOC", "B-LOC", "I-LOC"]},
                     {"tokens": ["a\u00a0b"], "ner_tags": ["O"]}]),
    "conll, two columns": ("", "x.conll", "EU B-ORG\n", [{"tokens": ["EU"], "ner_tags": ["B-ORG"]}]),
    "e2e": ("e2e", "trainset.csv",
            'mr,ref\n"name[Caf\u00e9, The ""A""], near[x]","A ""b"".\nC."\nname[B],D\n',
            [{"meaning_representation": 'name[Caf\u00e9, The "A"], near[x]', "human_reference": 'A "b".\nC.'},
             {"meaning_representation": "name[B]", "human_reference": "D"}]),
    "e2e, no references": ("e2e", "testset.csv", "MR\nname[B]\n", [{"meaning_representation": "name[B]"}]),
    "dart": ("dart", "dart-v1.1.1-full-dev.json",
             json.dumps([{"tripleset": [["a", "B", "c"]], "subtree_was_extended": True,
                          "annotations": [{"source": "s", "text": "t"}, {"source": "u", "text": "\u00fc"}]}], indent=2),
             [{"tripleset": [["a", "B", "c"]], "subtree_was_extended": True,
               "annotations": {"source": ["s", "u"], "text": ["t", "\u00fc"]}}]),
    "dart xml": ("dart", "dart-v1.1.1-full-test.xml",
                 "<?xml version='1.0' encoding='utf-8'?>\n<benchmark>\n<entries>\n"
                 '<entry category="MISC" eid="Id1" size="2">\n'
                 "<modifiedtripleset><mtriple>a | B | c | d</mtriple>"
                 "<mtriple>e | F | &#34;g&#34;</mtriple></modifiedtripleset>\n"
                 '<lex comment="WikiSQL" lid="Id1">T \u00e9.</lex><lex comment="e2e" lid="Id2">U</lex></entry>'
                 "</entries></benchmark>",
                 [{"tripleset": [["a", "B", "c | d"], ["e", "F", '"g"']], "subtree_was_extended": None,
                   "annotations": {"source": ["WikiSQL", "e2e"], "text": ["T \u00e9.", "U"]}}]),
    "webnlg": ("webnlg", "train.xml",
               '<benchmark><entries><entry category="Airport" eid="Id1" size="1">'
               "<originaltripleset><otriple>x | y | z</otriple></originaltripleset>"
               "<modifiedtripleset>\n<mtriple>Aarhus | city | \"Aarhus, D\u00e4nemark\"</mtriple>\n</modifiedtripleset>"
               '<lex comment="good" lid="Id1">Text one.</lex><lex comment="" lid="Id2"><text>Two.</text></lex></entry>'
               '<entry category="A" eid="Id2"><modifiedtripleset><mtriple>a | b | c</mtriple></modifiedtripleset>'
               "</entry></entries></benchmark>",
               [{"category": "Airport", "eid": "Id1",
                 "modified_triple_sets": {"mtriple_set": [['Aarhus | city | "Aarhus, D\u00e4nemark"']]},
                 "lex": {"comment": ["good", ""], "lid": ["Id1", "Id2"], "text": ["Text one.", "Two."]}},
                {"category": "A", "eid": "Id2", "modified_triple_sets": {"mtriple_set": [["a | b | c"]]},
                 "lex": {"comment": [], "lid": [], "text": []}}]),
}  # fmt: skip

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


def write(path, text):
    content = text.encode() if isinstance(text, str) else text
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.name.lower().endswith(".gz") else content)
    return path


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


def as_parquet(rows):
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file)
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
    "broken line": ("x.jsonl", '{"a": 1}\n\n{"a": 2\n{"a": 3}', "", r"line 3: broken JSON \(.*\); mend it"),
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
    "open quote": ("x.csv", 'a,b\n1,"2\n', "", r"line 2: broken CSV \(.*\); mend its quotes"),
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


def sentence(error, path):
    """An error's text, once it is what a user should see: one line that begins with the file's name."""
    text = str(error.value)
    assert "\n" not in text
    assert text.startswith(str(path))
    assert text.endswith(".")
    assert error.value.__cause__ is None
    return text


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


# ---------------------------------------------------------------- splits


@dataclass(frozen=True, kw_only=True)
class Tiny(Task):
    """Texts with a label."""

    name: str = "tiny"
    main: str = "accuracy"
    seen: list[str] = field(default_factory=list)
    kind: ClassVar[str] = "classes"
    architecture: ClassVar[str] = "AutoModelForSequenceClassification"

    @property
    def columns(self):
        return ("text", "label")

    def normalized(self, rows):
        return rows.rename_column("sentence", "text") if "sentence" in rows.column_names else rows

    def check(self, rows, where):
        super().check(rows, where)
        self.seen.append(where)

    def unused(self, *_, **__):
        raise AssertionError

    features = collator = answers = scores = write = unused


def table(count, start=0, label=None):
    return [{"text": f"text {i}", "label": i % 2 if label is None else label} for i in range(start, start + count)]


def put(path, rows):
    return str(write(path, "\n".join(map(json.dumps, rows))))


def numbers(rows):
    return [int(text.split()[1]) for text in rows["text"]]


@pytest.fixture
def folder(tmp_path):
    put(tmp_path / "data" / "train.jsonl", table(50))
    put(tmp_path / "data" / "validation.jsonl", table(10, 100))
    put(tmp_path / "data" / "test.jsonl.gz", table(6, 200, label=-1))
    return tmp_path / "data"


def test_the_development_set_is_the_test_and_nothing_else(folder):
    task = Tiny()
    splits = load(task, Source(data=str(folder)))
    assert numbers(splits.tests["validation"]) == list(range(100, 110))
    assert list(splits.tests) == ["validation"]
    train, validation = numbers(splits.train), numbers(splits.validation)
    assert len(validation) == 5
    assert sorted(train + validation) == list(range(50))
    assert train == sorted(train)
    assert task.seen == [str(folder / "train.jsonl"), str(folder / "validation.jsonl")]
    assert "The validation set is 5 of 50 training rows, split off by seed 42." in splits.notes
    assert "0 of 10 rows of test 'validation' are also in the training set (same text)." in splits.notes


def test_a_validation_set_of_its_own_is_used_where_the_test_is_another(folder):
    put(folder / "test.jsonl.gz", table(6, 200))
    splits = load(Tiny(test_splits=("test",)), Source(data=str(folder)))
    assert numbers(splits.train) == list(range(50))
    assert numbers(splits.validation) == list(range(100, 110))
    assert numbers(splits.tests["test"]) == list(range(200, 206))
    assert not any("split off" in note for note in splits.notes)


ALIASES = {
    "train": "train.tsv TRAIN.csv trainset.csv eng.train msr_paraphrase_train.txt train-v1.1.json dart-full-train.json",
    "validation": "validation.parquet valid.txt dev.tsv devset.csv eng.testa.gz dev-v1.1.json dart-v1.1.1-full-dev.xml "
    "validation-00000-of-00001.parquet",
    "validation_matched": "dev_matched.tsv validation_matched.jsonl.gz",
    "validation_mismatched": "dev_mismatched.tsv validation_mismatched.tsv",
    "test": "test.tsv testset.csv testset_w_refs.csv eng.testb msr_paraphrase_test.txt dart-v1.1.1-full-test.xml",
}


@pytest.mark.parametrize(
    ("split", "name"), [(split, name) for split, names in ALIASES.items() for name in names.split()]
)
def test_a_folder_names_its_splits_as_it_likes(tmp_path, monkeypatch, split, name):
    monkeypatch.setattr(
        formats, "read", lambda path, task="": Dataset.from_list([{"text": path.name, "label": i} for i in (0, 1)])
    )
    first = "training.tsv" if split == "train" else "train.tsv"
    for file in {name, first, "README.md", "dev_ids.tsv", ".train.tsv"}:
        write(tmp_path / file, "")
    (tmp_path / "train").mkdir()
    task = Tiny(train_split="train" if split != "train" else "training", test_splits=(split,))
    splits = load(task, Source(data=str(tmp_path)))
    assert splits.tests[split]["text"][:] == [name] * 2


def test_a_folder_must_have_each_split_once(folder):
    put(folder / "dev.csv", [])
    with pytest.raises(
        InputError, match=r"has 2 files for split 'validation' \(dev.csv, validation.jsonl\): leave only one"
    ) as error:
        load(Tiny(), Source(data=str(folder)))
    sentence(error, folder)
    (folder / "dev.csv").unlink()
    with pytest.raises(
        InputError, match=r"no file or split 'validation_matched': .*\(test.jsonl.gz, train.jsonl, validation.jsonl\)"
    ):
        load(Tiny(test_splits=("validation", "validation_matched")), Source(data=str(folder)))
    (folder / "train.jsonl").unlink()
    with pytest.raises(InputError, match=r"no file or split 'train': .*\(test.jsonl.gz, validation.jsonl\)"):
        load(Tiny(), Source(data=str(folder)))
    with pytest.raises(InputError, match="nothing that can be read"):
        load(Tiny(), Source(data=str(folder.parent)))
    with pytest.raises(InputError, match=r"No such file or directory.*check --data"):
        load(Tiny(), Source(data=str(folder / "nowhere")))
    with pytest.raises(InputError, match="not a folder: give it with --train-file"):
        load(Tiny(), Source(data=str(folder / "validation.jsonl")))


def test_folders_as_benchmarks_ship_them(tmp_path):
    """MRPC and E2E come with the same rows twice, of which only one file is right; DART as JSON and as XML."""
    pairs = tsv(["Quality", *MRPC], *([str(i % 2), "1", "2", f"a {i}", f"b {i}"] for i in range(8)))
    for name in ("msr_paraphrase_train.txt", "msr_paraphrase_test.txt", "train.tsv", "dev.tsv", "test.tsv"):
        write(tmp_path / "mrpc" / name, pairs if "paraphrase" not in name else "broken")
    write(tmp_path / "mrpc" / "dev_ids.tsv", "1\t2\n")
    splits = load(TASKS["mrpc"], Source(data=str(tmp_path / "mrpc")))
    assert len(splits.tests["validation"]) == 8
    assert "7 of 8 rows of test 'validation' are also in the training set (same sentence1, sentence2)." in splits.notes

    write(tmp_path / "old" / "msr_paraphrase_train.txt", pairs)
    write(tmp_path / "old" / "msr_paraphrase_test.txt", pairs)
    splits = load(TASKS["mrpc"], Source(data=str(tmp_path / "old")))
    assert list(splits.tests) == ["test"]
    assert any("msr_paraphrase_test.txt is the test" in note for note in splits.notes)

    for name in ("trainset", "devset", "testset_w_refs"):
        write(
            tmp_path / "e2e" / f"{name}.csv", "mr,ref\n" + "".join(f"name[{name} {i}],It is {i}.\n" for i in range(4))
        )
    write(tmp_path / "e2e" / "testset.csv", "MR\nname[A]\n")
    splits = load(TASKS["e2e"], Source(data=str(tmp_path / "e2e")))
    assert (len(splits.train), len(splits.validation), len(splits.tests["test"])) == (4, 4, 4)
    assert "0 of 4 rows of test 'test' are also in the training set (same source)." in splits.notes

    for name in ("train", "dev", "test"):
        rows = [
            {"tripleset": [["a", "b", f"{name} {i}"]], "annotations": [{"source": "s", "text": "t"}]} for i in range(3)
        ]
        write(tmp_path / "dart" / f"dart-v1.1.1-full-{name}.json", json.dumps(rows))
        write(tmp_path / "dart" / f"dart-v1.1.1-full-{name}.xml", "<broken>")
    assert len(load(TASKS["dart"], Source(data=str(tmp_path / "dart"))).tests["test"]) == 3


@pytest.mark.parametrize("name", sorted({key.split(",")[0].split()[0] for key in SHIPPED} & set(formats.GLUE)))
def test_glue_folders_load_with_their_tasks(tmp_path, name):
    _, _, text, rows = SHIPPED[name]
    lines = text.split("\n")[:-1]
    body = lines if name == "cola" else lines[1:]
    many = "\n".join([*lines, *body * 3]) + "\n"
    write(tmp_path / "train.tsv", many)
    for split in TASKS[name].test_splits:
        write(tmp_path / (split.replace("validation", "dev") + ".tsv"), text)
    splits = load(TASKS[name], Source(data=str(tmp_path)))
    for test in splits.tests.values():
        assert test.to_list() == rows
    assert len(splits.train) + len(splits.validation) == len(rows) * 4


def test_what_datasets_saved(tmp_path):
    splits = DatasetDict(train=Dataset.from_list(table(20)), dev=Dataset.from_list(table(5, 50)))
    splits.save_to_disk(tmp_path / "all")
    found = load(Tiny(), Source(data=str(tmp_path / "all")))
    assert numbers(found.tests["validation"]) == list(range(50, 55))
    assert found.notes == load(Tiny(), Source(data=str(tmp_path / "all"))).notes
    with pytest.raises(InputError, match=r"no file or split 'test': .*\(train, dev\)"):
        load(Tiny(test_splits=("test",)), Source(data=str(tmp_path / "all")))
    splits["train"].save_to_disk(tmp_path / "one")
    found = load(Tiny(), Source(data=str(tmp_path / "one")))
    assert (len(found.train), len(found.validation), len(found.tests["test"])) == (16, 2, 2)
    (tmp_path / "all" / "dataset_dict.json").write_text("{")
    with pytest.raises(InputError, match=r"cannot be loaded .* save_to_disk") as error:
        load(Tiny(), Source(data=str(tmp_path / "all")))
    sentence(error, tmp_path / "all")


def test_files_one_by_one(tmp_path):
    train, valid, test = (put(tmp_path / f"{n}.jsonl", table(20, n)) for n in (0, 100, 200))
    splits = load(Tiny(), Source(train_file=train, validation_file=valid, test_file=test))
    assert [numbers(rows) for rows in (splits.train, splits.validation, splits.tests["test"])] == [
        list(range(n, n + 20)) for n in (0, 100, 200)
    ]
    splits = load(Tiny(), Source(train_file=train, test_file=test))
    assert (len(splits.train), len(splits.validation), len(splits.tests["test"])) == (18, 2, 20)
    splits = load(Tiny(), Source(train_file=train, validation_file=valid))
    assert (len(splits.train), len(splits.validation), len(splits.tests["test"])) == (18, 20, 2)
    for source in (Source(test_file=test), Source(validation_file=valid)):
        with pytest.raises(InputError, match="training needs --train-file too"):
            load(Tiny(), source)
    with pytest.raises(InputError, match="a test needs --test-file too"):
        load(Tiny(), Source(validation_file=valid), training=False)
    with pytest.raises(InputError, match="exclude each other"):
        load(Tiny(), Source(data=str(tmp_path), test_file=test))


def test_without_a_test_a_tenth_is_split_off_that_no_seed_changes(tmp_path):
    source = Source(train_file=put(tmp_path / "train.jsonl", table(200)))
    first, second = (load(Tiny(), source, seed=seed) for seed in (1, 2))
    assert any("20 of the rows of" in note and "split off as test" in note for note in first.notes)
    assert numbers(first.tests["test"]) == numbers(second.tests["test"])
    assert numbers(first.validation) != numbers(second.validation)
    assert numbers(load(Tiny(), source, seed=3, rows=10).tests["test"]) == numbers(first.tests["test"])
    for splits in (first, second):
        parts = [numbers(rows) for rows in (splits.train, splits.validation, splits.tests["test"])]
        assert [len(part) for part in parts] == [162, 18, 20]
        assert sorted(n for part in parts for n in part) == list(range(200))
    later = load(Tiny(), source, training=False)  # an evaluation finds the rows that training left out
    assert numbers(later.tests["test"]) == numbers(first.tests["test"])


def test_rows_limits_training_and_validation_together(folder):
    splits = load(Tiny(), Source(data=str(folder)), rows=20, validation_fraction=0.25)
    assert (len(splits.train), len(splits.validation), len(splits.tests["validation"])) == (15, 5, 10)
    assert "Only 20 of 50 training rows are used." in splits.notes
    more = load(Tiny(), Source(data=str(folder)), rows=30)
    few = {*numbers(splits.train), *numbers(splits.validation)}
    assert few < {*numbers(more.train), *numbers(more.validation)}
    assert len(load(Tiny(), Source(data=str(folder)), rows=1000).train) == 45
    own = Source(
        train_file=str(folder / "train.jsonl"),
        validation_file=str(folder / "validation.jsonl"),
        test_file=str(folder / "validation.jsonl"),
    )
    assert (len(load(Tiny(), own, rows=20).train), len(load(Tiny(), own, rows=1).train)) == (20, 1)


def test_what_cannot_be_split(tmp_path, folder):
    source = Source(data=str(folder))
    assert len(load(Tiny(), source, validation_fraction=0.001).validation) == 1
    assert len(load(Tiny(), source, rows=2).train) == 1
    with pytest.raises(InputError, match="of 1 rows none remains beside the validation set") as error:
        load(Tiny(), source, rows=1)
    sentence(error, folder / "train.jsonl")
    with pytest.raises(InputError, match="none remains"):
        load(Tiny(), source, validation_fraction=0.999)
    with pytest.raises(InputError, match="none remains beside the test set; give more, or --test-file"):
        load(Tiny(), Source(train_file=put(tmp_path / "one.jsonl", table(1))))
    for fraction in (0.0, 1.0, -0.1, float("nan")):
        with pytest.raises(InputError, match="--validation-fraction must lie between"):
            load(Tiny(), source, validation_fraction=fraction)
    with pytest.raises(InputError, match="--rows must be at least 1"):
        load(Tiny(), source, rows=0)


def test_scores_need_labels(folder):
    source = Source(train_file=str(folder / "train.jsonl"), test_file=str(folder / "test.jsonl.gz"))
    with pytest.raises(InputError, match=r"has no labels \(label is -1\), and scores need them") as error:
        load(Tiny(), source)
    sentence(error, folder / "test.jsonl.gz")
    splits = load(Tiny(), Source(test_file=source.test_file), training=False)
    assert splits.train is None
    assert splits.validation is None
    assert splits.notes == (f"{source.test_file} has no labels: there are answers to it but no scores.",)
    with pytest.raises(InputError, match=r"test.jsonl.gz has no labels"):
        load(Tiny(), Source(train_file=source.test_file))


def test_rows_are_normalized_and_checked_with_the_files_name(tmp_path, folder):
    put(folder / "train.jsonl", [{"sentence": row["text"], "label": row["label"]} for row in table(9)])
    assert load(Tiny(), Source(data=str(folder))).train.column_names == ["text", "label"]
    put(folder / "validation.jsonl", [{"text": "a"}])
    with pytest.raises(InputError, match="no column 'label'") as error:
        load(Tiny(), Source(data=str(folder)))
    sentence(error, folder / "validation.jsonl")

    class Picky(Tiny):
        def normalized(self, rows):
            raise InputError("row 3 is empty.")

    with pytest.raises(InputError, match="row 3 is empty") as error:
        load(Picky(), Source(data=str(folder)))
    sentence(error, folder / "train.jsonl")


def test_notes_tell_of_skipped_and_shared_rows(tmp_path):
    rows = [[*"123", f"q{i}", "r", "1"] for i in range(8)]
    write(tmp_path / "train.tsv", tsv(QQP, *rows, ["broken"]))
    write(tmp_path / "dev.tsv", tsv(QQP, *([*"987", f"q{i}", "r", "0"] for i in (0, 1, 2, 3, 100)), ["x"], ["y"]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        splits = load(TASKS["qqp"], Source(data=str(tmp_path)), validation_fraction=0.01)
    assert f"{tmp_path / 'train.tsv'}: 1 of 9 rows lack fields and were skipped." in splits.notes
    assert f"{tmp_path / 'dev.tsv'}: 2 of 7 rows lack fields and were skipped." in splits.notes
    left = 4 - sum(question in splits.validation["question1"] for question in ("q0", "q1", "q2", "q3"))
    assert (
        f"{left} of 5 rows of test 'validation' are also in the training set (same question1, question2)."
        in splits.notes
    )


# ---------------------------------------------------------------- the same everywhere

TWICE = """
import sys
from pinscher.train.data import Source, load
from pinscher.train.tasks import TASKS
splits = load(TASKS["rte"], Source(data=sys.argv[1]), seed=7)
print(splits.fingerprint, *splits.validation["sentence1"])
"""


def test_splits_and_fingerprint_are_the_same_in_any_process(tmp_path):
    rows = [{"sentence1": f"text {i}", "sentence2": "\u00e9", "label": i % 2} for i in range(40)]
    put(tmp_path / "train.jsonl", rows)
    put(tmp_path / "dev.jsonl", rows[:3])
    splits = load(TASKS["rte"], Source(data=str(tmp_path)), seed=7)
    here = " ".join([splits.fingerprint, *splits.validation["sentence1"]])
    other = "1" if os.environ.get("PYTHONHASHSEED") == "2" else "2"
    there = subprocess.run(
        [sys.executable, "-c", TWICE, str(tmp_path)],
        env={**os.environ, "PYTHONHASHSEED": other},
        capture_output=True,
        text=True,
        check=True,
    )
    assert there.stdout.strip() == here
    # Written down, so that no new version of numpy, pyarrow or Python changes what was measured.
    assert here == ("c5a63eb8e84be6c9eefe0b45520505c6f58eebcf9602283617b444b08d42461a text 17 text 18 text 34 text 37")


def test_the_fingerprint_is_of_the_contents(tmp_path, folder):
    def of(**wishes):
        return load(Tiny(), Source(data=str(folder)), **wishes).fingerprint

    first = of()
    assert re.fullmatch("[0-9a-f]{64}", first)
    assert first == of(seed=1) == of(rows=10) == of(validation_fraction=0.5)
    (folder / "train.jsonl").unlink()
    write(folder / "train.parquet", as_parquet([dict(reversed(row.items())) for row in table(50)]))
    assert of() == first  # neither the format nor the order of columns counts
    (folder / "train.parquet").unlink()
    put(folder / "train.jsonl", [*table(49), {"text": "text 49!", "label": 1}])
    assert of() != first
    put(folder / "train.jsonl", [*table(50)[1:], table(1)[0]])
    assert of() != first


@given(count=st.integers(1, 300), seed=st.integers(-(2**40), 2**70))
@settings(max_examples=50, deadline=None)
def test_any_seed_gives_an_order(count, seed):
    assert sorted(data._order(count, seed)) == list(range(count))
    assert list(data._order(count, seed)) == list(data._order(count, seed))


# ---------------------------------------------------------------- the hub, and data that comes along


def test_the_hub_is_asked_once_and_splits_come_by_name(monkeypatch):
    asked = []
    splits = DatasetDict(train=Dataset.from_list(table(20)), validation=Dataset.from_list(table(5, 50)))
    monkeypatch.setattr(hub, "_is_reachable", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset", lambda *hub: asked.append(hub) or splits)
    task = Tiny(hub=("org/set", "part"))
    found = load(task, Source())
    assert asked == [("org/set", "part")]
    assert task.seen == ["split 'train' of org/set/part", "split 'validation' of org/set/part"]
    assert numbers(found.tests["validation"]) == list(range(50, 55))
    del splits["validation"]
    with pytest.raises(InputError, match=r"org/set/part has no file or split 'validation': .*\(train\)"):
        load(task, Source())


def test_a_hub_out_of_reach_is_one_sentence_soon(monkeypatch):
    monkeypatch.setattr(hub, "_is_reachable", lambda: False)
    start = time.monotonic()
    with pytest.raises(
        InputError, match=r"could not be reached \(no network\?\)\. Give the files with --data DIR"
    ) as error:
        load(Tiny(hub=("pinscher-nobody/no-such-set",)), Source())
    assert time.monotonic() - start < 10
    assert "ConnectionError: Couldn't reach 'pinscher-nobody/no-such-set'" in str(error.value)
    assert "\n" not in str(error.value)
    assert not hub.constants.HF_HUB_OFFLINE
    assert not datasets.config.HF_HUB_OFFLINE


def test_any_failure_of_the_hub_keeps_its_first_line(monkeypatch):
    def refuse(*_):
        raise RuntimeError("Dataset scripts are no longer supported.\nmore\nlines")

    monkeypatch.setattr(hub, "_is_reachable", lambda: True)
    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(
        InputError, match=r"a/b could not be reached .*RuntimeError: Dataset scripts are no longer supported\)$"
    ):
        load(Tiny(hub=("a/b",)), Source())


def test_the_probe_gives_up(monkeypatch):
    class Session:
        def __init__(self, act):
            self.head = act

    monkeypatch.setattr(hub, "PROBE_SECONDS", 0.2)
    for act, answer in (
        (lambda *_, **__: time.sleep(2), False),
        (lambda *_, **__: 1 / 0, False),
        (lambda *_, **__: "404", True),
    ):
        monkeypatch.setattr(hub.huggingface_hub, "get_session", lambda act=act: Session(act))
        start = time.monotonic()
        assert hub._is_reachable.__wrapped__() is answer
        assert time.monotonic() - start < 1


def test_offline_mode_is_not_probed(monkeypatch):
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "_is_reachable", lambda: pytest.fail("asked the network"))
    with pytest.raises(InputError, match="could not be reached"):
        load(Tiny(hub=("pinscher-nobody/no-such-set",)), Source())


def test_bundled_data_comes_first():
    class Bundled(Tiny):
        def bundled(self):
            return {"train": Dataset.from_list(table(10)), "test": Dataset.from_list(table(2, 20))}

    splits = load(Bundled(hub=("not/asked",), test_splits=("test",)), Source())
    assert numbers(splits.tests["test"]) == [20, 21]

    class Missing(Tiny):
        def bundled(self):
            raise InputError("install the extra.")

    with pytest.raises(InputError, match="install the extra"):
        load(Missing(), Source())


def test_no_data_at_all():
    with pytest.raises(InputError, match="task 'tiny' has no data of its own: give --train-file FILE or --data DIR"):
        load(Tiny(), Source())
