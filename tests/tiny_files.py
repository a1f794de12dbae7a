"""Files as benchmarks ship them with the rows that they must give, and a task whose rows are numbers."""

import gzip
import io
import json
from dataclasses import dataclass, field
from typing import ClassVar

import pyarrow as pa
import pyarrow.parquet as pq

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
    "conll, IOB2": ("tokens", "valid.txt",
                    "-DOCSTART- -X- -X- O\n\nParis\tNNP\tB-NP\tB-LOC\nRome\tNNP\tB-NP\tB-LOC\n"
                    "Eternal\tNNP\tI-NP\tI-LOC\n\n-DOCSTART- -X- -X- O\n\na\u00a0b X X O",
                    [{"tokens": ["Paris", "Rome", "Eternal"], "ner_tags": ["B-LOC", "B-LOC", "I-LOC"]},
                     {"tokens": ["a\u00a0b"], "ner_tags": ["O"]}]),
    "conll, two columns": ("tokens", "x.conll", "EU B-ORG\n", [{"tokens": ["EU"], "ner_tags": ["B-ORG"]}]),
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


def write(path, text):
    content = text.encode() if isinstance(text, str) else text
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.name.lower().endswith(".gz") else content)
    return path


def as_parquet(rows):
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file.getvalue()


# ---------------------------------------------------------------- every failure is one sentence


def sentence(error, path):
    """An error's text, once it is what a user should see: one line that begins with the file's name."""
    text = str(error.value)
    assert "\n" not in text
    assert text.startswith(str(path))
    assert text.endswith(".")
    assert error.value.__cause__ is None
    return text


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
