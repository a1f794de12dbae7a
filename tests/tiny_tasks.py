"""Tiny files for every task, in the form in which its data really comes, and tiny models that can learn them.

What is to be learnt is simple: a class is decided by a word, likeness by shared words, an entity by its words, an
answer by the word before it, and a sentence follows from its facts.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape, quoteattr

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not survive a fork

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from pinscher.train.tasks import TASKS

Row = dict[str, Any]
SIDES = ("train", "test")  # what differs between the rows of these is only chance

NOUNS = ("cat", "dog", "horse", "café", "piano", "letter", "tower", "garden")
PLACES = ("Köln", "Paris", "Rome", "Oslo", "Lima", "São_Paulo", "Tokyo", "Bern")
PEOPLE = ("Zoë", "Ann", "Bob", "Eve", "Ian", "Mia", "Tom", "Uma")
ENDINGS = (".", "!", '— "really" .', "…", "; it 's so .", "( again ) .")


# ---------------------------------------------------------------- what the rows say


def _classes(count: int, chance: random.Random, cues: Sequence[Sequence[str]]) -> list[Row]:
    """A word decides the class."""
    rows = []
    for i in range(count):
        text = f"the {chance.choice(NOUNS)} of {chance.choice(PEOPLE)} is {chance.choice(cues[i % len(cues)])}"
        rows.append({"text": f"{text} {chance.choice(ENDINGS)}", "class": i % len(cues)})
    return rows


def _pairs(count: int, chance: random.Random, forms: Sequence[str], classes: int = 2) -> list[Row]:
    """Class 0 speaks of the same thing twice, class 1 of two things, class 2 says that it is not there."""
    rows = []
    for i in range(count):
        first, other = chance.sample(NOUNS, 2)
        place, kind = chance.choice(PLACES), i % classes
        second = (first, other, f"no {first}")[kind]
        rows.append({"first": forms[0].format(first, place), "second": forms[1].format(second, place), "class": kind})
    return rows


def _alike(count: int, chance: random.Random) -> list[Row]:
    """The score is how many of four words are shared, and one more if all are."""
    rows = []
    for i in range(count):
        words = chance.sample(NOUNS, 4)
        shared = i % 5
        others = chance.sample([noun for noun in NOUNS if noun not in words], 4 - shared)
        rows.append(
            {
                "first": " ".join(words) + " .",
                "second": " ".join(words[:shared] + others) + ' "',
                "score": shared * 1.25,
            }
        )
    return rows


def _amounts(count: int, chance: random.Random) -> list[Row]:
    """Each `very` adds to the number."""
    return [
        {
            "text": f"a {'very ' * (i % 4)}fine {chance.choice(NOUNS)} from {chance.choice(PLACES)}, “neu”",
            "amount": round(0.75 * (i % 4) - 0.5, 2),
        }
        for i in range(count)
    ]


def _tagged(count: int, chance: random.Random, kinds: Sequence[str]) -> list[Row]:
    """Words of which each is always part of the same kind of entity, or of none."""
    person, place = kinds
    rows = []
    for i in range(count):
        name, (one, other) = chance.choice(PEOPLE), chance.sample(PLACES, 2)
        words = [(name, f"B-{person}"), *([("Müller", f"I-{person}")] * (i % 2)), ("saw", "O"), ("the", "O")]
        words += [(chance.choice(NOUNS), "O"), ('"', "O"), (one, f"B-{place}")]
        words += [(other, f"B-{place}")] * (i % 3 == 0) + [(".", "O")]  # two entities side by side
        rows.append({"words": [word for word, _ in words], "tags": [tag for _, tag in words]})
    return rows


def _asked(count: int, chance: random.Random) -> list[Row]:
    """Who came is said after `when`, where to after `to`; some contexts are too long for one window."""
    rows = []
    for i in range(count):
        who, where, what = chance.choice(PEOPLE), chance.choice(PLACES), chance.choice(NOUNS)
        before = f'“Été” : the {chance.choice(NOUNS)} was "old" . ' * (1 if i % 4 else 6)
        context = f"{before}It rained when {who} took the {what} to {where} ."
        question, answer = (("Who took it?", who), ("Where to?", where))[i % 2]
        rows.append(
            {
                "id": f"56be{i:04x}é",
                "context": context,
                "question": question,
                "answer": answer,
                "start": context.rindex(answer),
            }
        )
    return rows


def _told(count: int, chance: random.Random) -> list[Row]:
    """Three facts become a sentence, for some in two ways."""
    rows = []
    for i in range(count):
        name = f"{PEOPLE[i % 8]} {NOUNS[i // 8 % 8]}"  # each only once
        kind, near = chance.choice(("pub", "bar", "inn", "café")), chance.choice(PLACES)
        texts = [f"{name} is a “{kind}” near {near}."]
        texts += [f"Near {near} one finds {name}, a {kind}."] * (i % 8 == 0)
        rows.append({"facts": [("name", name), ("eatType", kind), ("near", near)], "texts": texts})
    return rows


PAIR = ("a {} was seen in {} .", 'in {1} , they say , " there was a {0} "')
QUESTIONS = ("where is the {} of {} ?", "how do I find the {} in {} ?")
GOOD, BAD = ("superb", "witty", "bright", "fine"), ("dull", "weak", "stale", "poor")

ROWS: dict[str, Callable[[int, random.Random], list[Row]]] = {
    "rte": lambda n, r: _pairs(n, r, PAIR),
    "mrpc": lambda n, r: _pairs(n, r, PAIR),
    "qqp": lambda n, r: _pairs(n, r, QUESTIONS),
    "qnli": lambda n, r: _pairs(n, r, (QUESTIONS[0], PAIR[1])),
    "mnli": lambda n, r: _pairs(n, r, PAIR, classes=3),
    "pairs": lambda n, r: _pairs(n, r, PAIR),
    "cola": lambda n, r: _classes(n, r, (("colourless", "asleep the"), ("green", "asleep"))),
    "sst2": lambda n, r: _classes(n, r, (BAD, GOOD)),
    "classification": lambda n, r: _classes(n, r, (BAD, GOOD, ("so so,\nreally", "fair, you know"))),
    "stsb": _alike,
    "regression": _amounts,
    "conll2003": lambda n, r: _tagged(n, r, ("PER", "LOC")),
    "tokens": lambda n, r: _tagged(n, r, ("DRUG", "maßeinheit")),
    "squad": _asked,
    "qa": _asked,
    "e2e": _told,
    "dart": _told,
    "webnlg": _told,
    "text": _told,
    "embeddings": lambda n, r: _classes(n, r, (BAD, GOOD)),
    "sts": _alike,
    "retrieval": _told,
    "reranking": _alike,
}


def rows_of(task: str, side: str, count: int) -> list[Row]:
    """The rows of one side, in this module's own form. The same count always gives the same rows."""
    return ROWS[task](count, random.Random(f"{task} {side}"))


# ---------------------------------------------------------------- how files hold them


@dataclass(frozen=True)
class Files:
    """A task's files.

    Args:
        folder: what --data takes.
        train: what --train-file takes.
        tests: the labelled test files by split.
        columns: what the command must be told of a user's own columns.
    """

    folder: Path
    train: Path
    tests: dict[str, Path]
    columns: tuple[str, ...] = ()


def write_files(task: str, folder: Path, rows: int = 32, tests: int = 12) -> Files:
    """Writes a task's files into a folder: a number of training rows, and of other ones for each test."""
    folder.mkdir(parents=True, exist_ok=True)
    writer = WRITERS[task]
    made = {side: rows_of(task, side, count) for side, count in zip(SIDES, (rows, tests), strict=True)}
    names = writer.names
    for split, name in names.items():
        (folder / name).write_bytes(writer.encode(made["train" if split == "train" else "test"], split))
    labelled = {split: folder / names[split] for split in TASKS[task].test_splits}
    return Files(folder, folder / names["train"], labelled, writer.columns)


@dataclass(frozen=True)
class Writer:
    names: dict[str, str]  # split -> its file
    encode: Callable[[list[Row], str], bytes]  # rows, split
    columns: tuple[str, ...] = ()


def _tsv(lines: Iterable[Iterable[object]]) -> bytes:
    return "".join("\t".join(map(str, line)) + "\n" for line in lines).encode()


def _glue(
    header: str,
    fields: Callable[[int, Row], Sequence[object]],
    secret: str,
    masked: Callable[[int, Row], Sequence[object]],
) -> Callable[[list[Row], str], bytes]:
    """Files with labels, and those of the test, which have none."""

    def encode(rows: list[Row], split: str) -> bytes:
        top, line = (secret, masked) if split.startswith("test") else (header, fields)
        return _tsv([*([top.split()] if top else []), *(line(i, row) for i, row in enumerate(rows))])

    return encode


def _mrpc(rows: list[Row], split: str) -> bytes:
    first = "index" if split == "test" else "Quality"
    lines = [
        [i if split == "test" else 1 - r["class"], i, i + 900, r["first"], r["second"]] for i, r in enumerate(rows)
    ]
    return _tsv([[first, "#1 ID", "#2 ID", "#1 String", "#2 String"], *lines])


def _mnli(rows: list[Row], split: str) -> bytes:
    parses = ["sentence1_binary_parse", "sentence2_binary_parse", "sentence1_parse", "sentence2_parse"]
    header = ["index", "promptID", "pairID", "genre", *parses, "sentence1", "sentence2"]
    votes = {"train": 1, "validation": 5}.get(split.split("_")[0], 0)
    header += [f"label{i + 1}" for i in range(votes)] + ["gold_label"] * bool(votes)
    names = ("entailment", "neutral", "contradiction")
    lines = []
    for i, row in enumerate(rows):
        parse = [f"( {row['first']} )", f"( {row['second']} )"] * 2
        label = names[row["class"]]
        labels = [label] * votes + [label] * bool(votes)
        lines.append([i, 31193 + i, f"{31193 + i}n", "fiction", *parse, row["first"], row["second"], *labels])
    return _tsv([header, *lines])


ENTAILMENT = ("entailment", "not_entailment")
STSB = "index genre filename year old_index source1 source2 sentence1 sentence2"
GLUE = {
    "rte": _glue(
        "index sentence1 sentence2 label",
        lambda i, r: (i, r["first"], r["second"], ENTAILMENT[r["class"]]),
        "index sentence1 sentence2",
        lambda i, r: (i, r["first"], r["second"]),
    ),
    "qnli": _glue(
        "index question sentence label",
        lambda i, r: (i, r["first"], r["second"], ENTAILMENT[r["class"]]),
        "index question sentence",
        lambda i, r: (i, r["first"], r["second"]),
    ),
    "qqp": _glue(
        "id qid1 qid2 question1 question2 is_duplicate",
        lambda i, r: (i + 133, 2 * i, 2 * i + 1, r["first"], r["second"], 1 - r["class"]),
        "id question1 question2",
        lambda i, r: (i, r["first"], r["second"]),
    ),
    "stsb": _glue(
        f"{STSB} score",
        lambda i, r: (i, *"gfyonn", r["first"], r["second"], f"{r['score']:.3f}"),
        STSB,
        lambda i, r: (i, *"gfyonn", r["first"], r["second"]),
    ),
    "cola": _glue(
        "",
        lambda i, r: ("gj04", r["class"], "" if r["class"] else "*", r["text"]),
        "index sentence",
        lambda i, r: (i, r["text"]),
    ),
    "sst2": _glue(
        "sentence label",
        lambda i, r: (r["text"] + " ", r["class"]),
        "index sentence",
        lambda i, r: (i, r["text"]),
    ),
    "mrpc": _mrpc,
}


def _squad(rows: list[Row], split: str) -> bytes:
    """The official tree: articles, paragraphs, questions; several people answered those of the dev set."""
    people = 1 if split == "train" else 3

    def question(row: Row) -> Row:
        answers = [{"answer_start": row["start"], "text": row["answer"]}] * people
        return {"answers": answers, "question": row["question"], "id": row["id"]}

    paragraphs = [{"context": row["context"], "qas": [question(row)]} for row in rows]
    articles = [{"title": f"Article_{i}", "paragraphs": paragraphs[i : i + 8]} for i in range(0, len(paragraphs), 8)]
    return json.dumps({"data": articles, "version": "1.1"}).encode()


def _conll(rows: list[Row], split: str) -> bytes:
    """Four columns, in IOB1: B- only where an entity follows another one of its kind at once."""
    text = "-DOCSTART- -X- O O\n"
    for row in rows:
        text += "\n"
        for before, word, tag in zip(["O", *row["tags"]], row["words"], row["tags"], strict=False):
            touches = tag[:2] == "B-" and before[2:] == tag[2:]
            text += f"{word} NN I-NP {tag if touches or tag == 'O' else f'I-{tag[2:]}'}\n"
    return f"{text}\n".encode()


def _e2e(rows: list[Row], split: str) -> bytes:
    file = io.StringIO(newline="")
    writer = csv.writer(file, lineterminator="\n")
    facts = [", ".join(f"{key}[{value}]" for key, value in row["facts"]) for row in rows]
    if split == "bare":
        writer.writerows([["MR"], *([fact] for fact in facts)])
    else:
        lines = [[fact, text] for fact, row in zip(facts, rows, strict=True) for text in row["texts"]]
        writer.writerows([["mr", "ref"], *lines])
    return file.getvalue().encode()


def _triples(row: Row) -> list[list[str]]:
    (_, name), *rest = row["facts"]
    return [[name, key, value] for key, value in rest]


def _dart(rows: list[Row], split: str) -> bytes:
    return gzip.compress(
        _json_lines(
            {
                "tripleset": _triples(row),
                "subtree_was_extended": False,
                "annotations": {"source": ["e2e"] * len(row["texts"]), "text": row["texts"]},
            }
            for row in rows
        )
    )


def _webnlg(rows: list[Row], split: str) -> bytes:
    """The challenge's XML."""
    text = "<benchmark>\n <entries>\n"
    for i, row in enumerate(rows, 1):
        triples = "".join(f"<mtriple>{escape(' | '.join(triple))}</mtriple>" for triple in _triples(row))
        said = "".join(
            f'<lex comment="good" lid={quoteattr(f"Id{n}")}>{escape(t)}</lex>' for n, t in enumerate(row["texts"], 1)
        )
        text += f'  <entry category="Food" eid="Id{i}" size="2">\n   <originaltripleset><otriple>x | y | z</otriple>'
        text += f"</originaltripleset>\n   <modifiedtripleset>{triples}</modifiedtripleset>\n   {said}\n  </entry>\n"
    return f"{text} </entries>\n</benchmark>\n".encode()


def _json_lines(rows: Iterable[Row]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def _reviews_csv(rows: list[Row], split: str) -> bytes:
    """As a spreadsheet writes it: quoted where need be, even over two lines, and an index without a name."""
    file = io.StringIO(newline="")
    names = ("schlecht", "gut", "mäßig")
    lines = [[i, names[row["class"]], row["text"]] for i, row in enumerate(rows)]
    csv.writer(file).writerows([["", "Das Urteil", "Review, as written"], *lines])
    return file.getvalue().encode("utf-8-sig")


def _parquet(rows: list[Row], split: str) -> bytes:
    sink = io.BytesIO()
    columns = {"price in €": [r["amount"] for r in rows], "offer": [r["text"] for r in rows], "n": [*range(len(rows))]}
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()


def _qa(row: Row) -> Row:
    """As people write it down: a list of answers, and no places."""
    return {"Frage": row["question"], "Absatz": row["context"], "Antworten": [{"text": row["answer"]}]}


def _options(*texts: str, label: str) -> tuple[str, ...]:
    return (*(word for text in texts for word in ("--text-column", text)), "--label-column", label)


TSVS = {"train": "train.tsv", "validation": "dev.tsv", "test": "test.tsv"}
WRITERS = {name: Writer(TSVS, encode) for name, encode in GLUE.items()} | {
    "mnli": Writer(
        {
            "train": "train.tsv",
            "validation_matched": "dev_matched.tsv",
            "validation_mismatched": "dev_mismatched.tsv",
            "test_matched": "test_matched.tsv",
            "test_mismatched": "test_mismatched.tsv",
        },
        _mnli,
    ),
    "squad": Writer({"train": "train-v1.1.json", "validation": "dev-v1.1.json"}, _squad),
    "conll2003": Writer({"train": "eng.train", "validation": "eng.testa", "test": "eng.testb"}, _conll),
    "e2e": Writer(
        {"train": "trainset.csv", "validation": "devset.csv", "test": "testset_w_refs.csv", "bare": "testset.csv"},
        _e2e,
    ),
    "dart": Writer({split: f"{split}.jsonl.gz" for split in ("train", "validation", "test")}, _dart),
    "webnlg": Writer({"train": "train.xml", "validation": "dev.xml", "test": "testdata_with_lex.xml"}, _webnlg),
    "classification": Writer(
        {"train": "train.csv", "test": "test.csv"}, _reviews_csv, _options("Review, as written", label="Das Urteil")
    ),
    "pairs": Writer(
        {"train": "train.jsonl", "test": "test.jsonl"},
        lambda rows, split: _json_lines({"L": r["first"], "same": r["class"] == 0, "R": r["second"]} for r in rows),
        _options("L", "R", label="same"),
    ),
    "regression": Writer(
        {"train": "train.parquet", "test": "test.parquet"}, _parquet, _options("offer", label="price in €")
    ),
    "tokens": Writer(
        {"train": "train.jsonl.gz", "test": "test.jsonl.gz"},
        lambda rows, split: gzip.compress(_json_lines({"Wörter": r["words"], "BIO": r["tags"]} for r in rows)),
        _options("Wörter", label="BIO"),
    ),
    "qa": Writer(
        {"train": "train.jsonl", "test": "test.jsonl"},
        lambda rows, split: _json_lines(map(_qa, rows)),
        _options("Frage", "Absatz", label="Antworten"),
    ),
    "text": Writer(
        {"train": "train.tsv", "test": "test.tsv"},
        lambda rows, split: _tsv(
            [["said", "facts"], *([r["texts"][0], " ; ".join(f"{k} {v}" for k, v in r["facts"])] for r in rows)]
        ),
        _options("facts", label="said"),
    ),
    "embeddings": Writer(
        {"train": "train.txt", "test": "test.txt"},
        lambda rows, split: "".join(f"{row['text']}\n\n" for row in rows).encode(),
    ),
    "sts": Writer(
        {"train": "train.jsonl", "test": "test.jsonl"},
        lambda rows, split: _json_lines(
            {"sentence1": r["first"], "sentence2": r["second"], "label": r["score"] / 5} for r in rows
        ),
    ),
    "reranking": Writer(
        {"train": "train.jsonl", "test": "test.jsonl"},
        lambda rows, split: _json_lines(
            {"query": r["first"], "text": r["second"], "fit": r["score"] / 5} for r in rows
        ),
        ("--label-column", "fit"),
    ),
    "retrieval": Writer(
        {"train": "train.tsv", "test": "test.tsv"},
        lambda rows, split: _tsv(
            [["query", "passage"], *([f"near {r['facts'][2][1]} {r['facts'][0][1]}", r["texts"][0]] for r in rows)]
        ),
    ),
}


# ---------------------------------------------------------------- models


def tiny_model(task: str, folder: Path, width: int = 48, dropout: float = 0.1) -> Path:
    """A random model of the right family, with a tokenizer that knows the task's words; always the same one."""
    texts = [text for side in SIDES for row in rows_of(task, side, 64) for text in _strings(row)]
    causal = TASKS[task].kind == "causal-lm"
    tokenizer = _byte_pairs(texts) if causal else _word_pieces(texts)
    sizes: dict[str, Any] = {"vocab_size": len(tokenizer), "initializer_range": 0.1}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any
        if causal:
            rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
            ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
            model = GPT2LMHeadModel(
                GPT2Config(**sizes, **rates, **ends, n_embd=width, n_layer=2, n_head=2, n_positions=160)
            )
        else:
            rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
            shape = {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 128}
            model = BertModel(
                BertConfig(**sizes, **rates, **shape, hidden_size=width, intermediate_size=2 * width, pad_token_id=0)
            )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [text for each in value for text in _strings(each)]
    return [value] if isinstance(value, str) else []


def _word_pieces(texts: list[str]) -> PreTrainedTokenizerFast:
    """BERT's. Words with letters beyond ASCII are cut into characters, so that some words have several tokens."""
    normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    splitter = pre_tokenizers.BertPreTokenizer()
    words = {w for text in texts for w, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text))}
    signs = {sign for word in words for sign in word}
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = sorted({word for word in words if word.isascii()} | signs | {f"##{sign}" for sign in signs})
    vocabulary = {piece: i for i, piece in enumerate([*special, *pieces])}
    made = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer, made.decoder = normalizer, splitter, decoders.WordPiece()
    made.post_processor = processors.BertProcessing(("[SEP]", vocabulary["[SEP]"]), ("[CLS]", vocabulary["[CLS]"]))
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    return PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=128, **names)


def _byte_pairs(texts: list[str]) -> PreTrainedTokenizerFast:
    """GPT-2's: bytes, and one token for start, end and padding."""
    end = "<|endoftext|>"
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=600, special_tokens=[end], initial_alphabet=alphabet, show_progress=False),
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=160, bos_token=end, eos_token=end)
