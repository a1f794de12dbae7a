"""Every file that benchmarks ship gives the rows that `datasets` has; every failure is one sentence."""

import json

import pytest

from pinscher.errors import InputError
from pinscher.train import formats
from pinscher.train.tasks import TASKS
from tiny_files import MNLI, QQP, SHIPPED, sentence, tsv, write


def read(path, task):
    return formats.read(path, TASKS[task].reader)


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
    assert read(path, task).to_list() == rows


@pytest.mark.parametrize("name", ["dev-v1.1.json", "dev-v1.1.json.gz", "dev.jsonl"])
@pytest.mark.parametrize("indent", [None, 1])
def test_squad(tmp_path, name, indent):
    flat = "\n".join(map(json.dumps, SQUAD)) if "jsonl" in name else json.dumps(SQUAD, indent=indent)
    assert read(write(tmp_path / name, flat), "squad").to_list() == SQUAD
    if "jsonl" not in name:
        nested = json.dumps({"version": "1.1", "data": [ARTICLE]}, indent=indent)
        assert read(write(tmp_path / name, nested), "squad").to_list() == SQUAD
        assert read(write(tmp_path / name, json.dumps({"data": SQUAD})), "squad").to_list() == SQUAD


def test_rows_that_lack_fields_are_skipped_and_counted(tmp_path):
    text = tsv(QQP, [*"abcde1"], ["x", "y"], [*"abcde", ""], [*"abcde0"], [*"fghij1"])
    with pytest.warns(formats.RowsSkipped, match=r"train.tsv: 2 of 5 rows lack fields and were skipped"):
        rows = read(write(tmp_path / "train.tsv", text), "qqp")
    assert rows["label"][:] == [1, 0, 1]
    assert rows["idx"][:] == [0, 3, 4]  # rows keep their number in the file, as in `datasets`
    undecided = tsv(
        [*MNLI, "gold_label"], *(["0", *"pqgxxyy", "p", "h", "neutral", label] for label in ("-", "neutral"))
    )
    with pytest.warns(formats.RowsSkipped, match="1 of 2"):
        assert read(write(tmp_path / "mnli.tsv", undecided), "mnli")["label"][:] == [1]


ERRORS = {
    "glue header only": ("x.tsv", "index\tsentence\n", "sst2", "has no rows"),
    "squad without id": ("x.json", '{"data": [{"paragraphs": [{"context": "", "qas": [{}]}]}]}', "squad", "question 1"),
    "glue without column": ("x.tsv", "index\tsentence1\tlabel\n0\ta\tb\n", "rte", "line 1: no column 'sentence2'"),
    "glue label": ("x.tsv", "sentence1\tsentence2\tlabel\na\tb\tmaybe\n", "rte", "line 2: 'maybe' is no label"),
    "glue number": ("x.tsv", "sentence1\tsentence2\tscore\na\tb\thigh\n", "stsb", "line 2: 'high' is no label"),
    "glue id": ("x.tsv", "sentence\tlabel\na\t2\n", "sst2", "line 2: '2' is no label"),
    "glue with spaces": ("x.tsv", "sentence\tlabel\na 1\nb 1\nc\t1\n", "sst2", "2 of 3 rows lack fields"),
    "no conll": ("x.txt", "EU B-ORG\nHello you there\n", "conll2003", "line 2: no CoNLL line"),
    "conll of one column": ("eng.testa", "EU\n", "tokens", "line 1: no CoNLL line"),
    "conll of documents only": ("x.conll", "-DOCSTART- -X- O O\n", "tokens", "has no rows"),
    "broken xml": ("x.xml", "<a>\n<b></a>", "webnlg", "line 2: broken XML"),
    "other xml": ("x.xml", "<a/>", "dart", "has no <entry>"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "content", "task", "message"), ERRORS.values(), ids=ERRORS)
def test_failures_say_where_and_what_to_do(tmp_path, name, content, task, message):
    path = write(tmp_path / name, content)
    with pytest.raises(InputError, match=message) as error:
        read(path, task)
    sentence(error, path)
