"""Every snippet of README.md and docs/ runs, with tiny models and files under the names that the pages use.

What trains is planned (--dry-run), what needs a network or times engines is parsed by the real command, and the rest is
run as it stands. A block that is none of these must be listed with a reason: none is left out in silence.
"""

from __future__ import annotations

import csv
import itertools
import json
import os
import re
import shlex
import shutil
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
)

import pinscher
import tiny_models
import tiny_sentences
import tiny_tasks
from pinscher.commands import app as cli
from pinscher.compare import grid
from pinscher.models import hub
from pinscher.models.families import FAMILIES
from pinscher.prune import CRITERIA
from pinscher.store.codecs import CODECS
from pinscher.train import data
from pinscher.train.config import RunConfig
from pinscher.train.tasks import TASKS
from tiny_command import SHORT, outcome

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WRITTEN = sorted({*PAGES, *ROOT.glob("*.md"), *(ROOT / "benchmarks").rglob("*.md"), *(ROOT / "examples").rglob("*.md")})
CODE = ("python", "py", "sh", "console", "yaml")
ENCODER = "sentence-transformers/all-MiniLM-L6-v2"
HUB = (
    "google-bert/bert-base-uncased",
    "openai-community/gpt2",
    ENCODER,
)  # folders of these names are found before the hub
FILLED = ["--model", "./my-model", "--task", "sst2", "--data", "glue/SST-2"]  # what … stands for

CURL = """curl localhost:8080/predict -H 'content-type: application/json' -d '{"inputs": "a gripping, funny film"}'"""
# Blocks that are not run here, by page and first line, and why.
NOT_RUN = {
    ("docs/guides/processes.md", "import torch.distributed as dist"): "needs torchrun's processes; tiny_sharded.py",
    ("docs/serve.md", 'client = openai.OpenAI(base_url="http://localhost:8080/v1", api_key="none")'): "test_app.py",
    ("docs/serve.md", CURL): "needs a server; test_app.py",
    ("README.md", "dense   pruned   stored"): "output of the command above it, kept in benchmarks/results/demo.txt",
    ("README.md", "import torch, pinscher"): "test_readme.py runs it and compares what it prints",
}
# Commands that are only parsed, by a word in them, and why.
PARSED = {
    "bench": "times engines in processes of their own",
    "serve": "runs until it is stopped; test_app.py",
    "compare": "trains for hours; test_compare.py",
    "--push-to-hub": "needs the hub",
    "onnx": "test_onnx.py",
}


@dataclass(frozen=True)
class Block:
    page: str
    language: str
    text: str

    @property
    def key(self) -> tuple[str, str]:
        return self.page, next((line.strip() for line in self.text.splitlines() if line.strip()), "")


def blocks(path: Path) -> list[Block]:
    """The fenced blocks of a page that are code by their language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)
    name = path.relative_to(ROOT).as_posix()
    return [Block(name, language, text) for language, text in found if language in CODE]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder in which everything that the pages name is there, tiny."""
    root = tmp_path_factory.mktemp("world")
    for task in ("sst2", "rte", "cola", "stsb", "squad", "e2e"):
        tiny_tasks.write_files(task, root / "data" / task)
    shutil.copytree(root / "data" / "sst2", root / "glue" / "SST-2")
    shutil.copytree(root / "data" / "e2e", root / "data" / "e2e_nlg")
    tiny_tasks.tiny_model("rte", root / "my-model")
    tiny_tasks.tiny_model("e2e", root / "openai-community" / "gpt2")
    shutil.copytree(root / "my-model", root / HUB[0])
    shutil.copytree(root / "my-model", root / "e5-small")
    for name in ("stories15m", "my-lm"):
        shutil.copytree(root / "openai-community" / "gpt2", root / name)
    _write_tables(root)
    (root / "run.yaml").write_text(json.dumps({"model": "./my-model", "task": "sst2", "data": "glue/SST-2"}))
    words = ["prune", "--model", root / "my-model", "--task", "rte", "--data", root / "data" / "rte", *SHORT]
    assert outcome([*words, "--output", root / "runs" / "rte"])[0] == 0
    words[2], words[4], words[6] = root / "openai-community" / "gpt2", "e2e", root / "data" / "e2e"
    assert outcome([*words, "--test-rows", "2", "--no-export", "--output", root / "runs" / "e2e"])[0] == 0
    _make_encoder(root)
    for name in ("RUN", "runs/demo", "runs/rte-pins-80", "runs/rte-magnitude-80"):
        shutil.copytree(root / "runs" / "rte", root / name)
    shutil.copytree(root / "runs" / "rte" / "model", root / "any-model")
    tuned = AutoModelForSequenceClassification.from_pretrained(root / "any-model")
    torch.save(tuned.state_dict(), root / "pytorch_model.bin")
    return root


def _make_encoder(root: Path) -> None:
    tiny_sentences.sentence_encoder(root / ENCODER)
    shutil.copytree(root / ENCODER, root / "my-reranker")
    config = BertConfig.from_pretrained(root / ENCODER, num_labels=1)
    BertForSequenceClassification(config).save_pretrained(root / "my-reranker")
    names = {"embeddings": "texts.txt", "sts": "sts.jsonl", "retrieval": "questions.tsv", "reranking": "rated.jsonl"}
    for task, name in names.items():
        shutil.copy(tiny_tasks.write_files(task, root / "data" / task).train, root / name)
    words = ["prune", "--model", root / ENCODER, "--task", "embeddings", "--train-file", root / "texts.txt", *SHORT]
    assert outcome([*words, "--output", root / "runs" / "embeddings-pins-80"])[0] == 0


def _write_tables(root: Path) -> None:
    rows = tiny_tasks.rows_of("pairs", "train", 40)
    for name in ("train.csv", "test.csv"):
        with (root / name).open("w", newline="") as file:
            lines = [[row["first"], row["second"], row["class"]] for row in rows[:: 1 if name[1] == "r" else 4]]
            csv.writer(file).writerows([["question", "answer", "good"], *lines])
    with (root / "reviews.csv").open("w", newline="") as file:
        lines = [[row["text"], row["class"]] for row in tiny_tasks.rows_of("sst2", "train", 40)]
        csv.writer(file).writerows([["review", "verdict"], *lines])
    facts = tiny_tasks.rows_of("text", "train", 40)
    (root / "facts.jsonl").write_text(
        "".join(json.dumps({"facts": str(row["facts"]), "said": row["texts"][0]}) + "\n" for row in facts)
    )


@pytest.fixture
def here(world, tmp_path, monkeypatch):
    """A copy of that folder to work in. The hub's data sets are its tiny files."""
    place = tmp_path / "here"
    shutil.copytree(world, place)
    monkeypatch.chdir(place)
    monkeypatch.setenv("DATA", str(place / "data"))
    monkeypatch.setenv("MODELS", str(place))
    find = data._find

    def nearby(task, source, *rest):
        if source == data.Source() and (place / "data" / task.name).is_dir():
            source = data.Source(data=str(place / "data" / task.name))
        return find(task, source, *rest)

    monkeypatch.setattr(data, "_find", nearby)
    return place


# ---------------------------------------------------------------- what a block means


def commands(text: str) -> list[list[str]]:
    """The commands of a shell block: continued lines joined, comments gone, variables filled in."""
    joined = text.replace("\\\n", " ")
    lines = (shlex.split(line, comments=True) for line in joined.splitlines())
    found = [[os.path.expandvars(word) for word in words] for words in lines if words]
    return [list(itertools.dropwhile(lambda word: re.match(r"[A-Z_]+=", word), words)) for words in found]


def parse(words: list[str]) -> None:
    """Parses a command as typer does, running nothing; a wrong flag is an error."""
    group: Any = cli.complete()
    command = group.commands[words[0]]
    command.make_context(words[0], list(words[1:]))


def shell(words: list[str], capsys: Any) -> None:
    program, *rest = words
    if program in ("torchrun", "accelerate"):
        assert rest[rest.index("-m") + 1] == "pinscher"
        shell(["pinscher", *rest[rest.index("-m") + 2 :]], capsys)
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        name, _, extra = rest[1].rstrip("]").partition("[")
        assert (rest[0], name) == ("install", "pinscher")
        assert set(extra.split(",")) - {""} <= set(extras)
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(rest) <= set(targets)
    elif program == "python":
        assert (ROOT / rest[0]).is_file()
    else:
        assert program == "pinscher", f"nobody says how to check {program}"
        command(rest, capsys)


def command(words: list[str], capsys: Any) -> None:
    more = [] if words[0] == "compare" else FILLED
    words = [filled for word in words for filled in (more if word == "…" else [word])]
    words = ["./my-model" if word.startswith("pypi:") else word for word in words]
    if any(word in PARSED for word in words):
        parse(words)
        return
    if "--max-length" in words:
        words[words.index("--max-length") + 1] = "128"  # what the tiny models take
    expected = 0
    if words[0] == "prune" and "--resume" in words:
        expected = 2  # the run there is finished: the command is right, and says so
    elif words[0] == "prune":
        if not {"--model", "--config", "--recipe"} & set(words):  # the demo
            words += ["--model", "./my-model", "--rows", "200", "--test-rows", "50"]
        open_ended = "--recipe" in words and "--epochs" not in words
        words += ["--max-steps", "3000"] if open_ended else []  # the paper's schedules are long
        words += [] if "--dry-run" in words else ["--dry-run"]
    code, _, err = outcome(words, capsys)
    assert code == expected, f"pinscher {shlex.join(words)}: {err}"
    assert code == 0 or "is finished: there is nothing to resume" in err


def names(place: Path) -> dict[str, Any]:
    """What a page may take for granted: a model in training, its tokenizer, a batch, a Trainer's arguments."""
    model = AutoModelForSequenceClassification.from_pretrained(place / "my-model")
    tokenizer = AutoTokenizer.from_pretrained(place / "runs" / "rte" / "model")
    pruner = pinscher.Pruner(model, pinscher.PruningConfig(sparsity=0.9, total_steps=20))
    optimizer = torch.optim.AdamW(pruner.param_groups(), lr=1e-4)
    pruner.attach(optimizer)
    rows = tokenizer(["a cat", "a dog in Rome"] * 4)
    dataset = [{name: rows[name][i] for name in rows} | {"labels": i % 2} for i in range(8)]
    batch = dict(tokenizer(["a cat", "a fine dog"], return_tensors="pt", padding=True)) | {
        "labels": torch.tensor([0, 1])
    }
    quiet: TrainingArguments = tiny_models.arguments(place / "trained", max_steps=20, per_device_train_batch_size=1)
    outputs = model(**batch)
    return {
        "model": model,
        "tokenizer": tokenizer,
        "pruner": pruner,
        "optimizer": optimizer,
        "Trainer": Trainer,
        "batch": batch,
        "outputs": outputs,
        "args": quiet,
        "train": dataset,
        "validation": dataset,
        "validation_score": 0.5,
        "texts": ["a cat", "a dog in Rome"],
        "pinscher": pinscher,
    }


# ---------------------------------------------------------------- every block


@pytest.mark.parametrize("path", PAGES, ids=[p.relative_to(ROOT).as_posix() for p in PAGES])
def test_every_snippet_runs(path, here, capsys, monkeypatch):
    todo = [block for block in blocks(path) if block.key not in NOT_RUN]
    known = names(here) if any(block.language in ("python", "py") for block in todo) else {}
    for registry in (CRITERIA, TASKS, FAMILIES, CODECS):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))  # what a page registers is gone afterwards
    for block in todo:
        if block.language in ("python", "py"):
            if 'output="runs/rte"' in block.text:
                shutil.rmtree(here / "runs" / "rte")
            exec(compile(block.text, block.page, "exec"), known)
        elif block.language == "yaml":
            (here / "some.yaml").write_text(block.text)
            if "tasks:" in block.text:
                assert grid.read(here / "some.yaml", {}).cells(here / "out")
            else:
                RunConfig.from_dict(RunConfig.settings_of(here / "some.yaml"))
        else:
            assert block.language == "sh", f"{block.key}: output must be listed in NOT_RUN"
            seen = set()
            for words in commands(block.text):
                # Trials that differ only in their figures are planned once; of the others the flags are parsed.
                kind = tuple(word for word in words if not re.fullmatch(r"[\d.e-]+", word))
                shell(words, capsys) if kind not in seen else parse(words[1:])
                seen.add(kind)


def test_what_is_not_run_is_there():
    there = {block.key for path in PAGES for block in blocks(path)}
    assert set(NOT_RUN) <= there
    assert all(NOT_RUN.values())


def test_a_wrong_flag_fails(here, capsys):
    for words in (["pinscher", "bench", "RUN", "--speed", "3"], ["torchrun", "-m", "pinscher", "bench", "--x"]):
        with pytest.raises(Exception, match="No such option"):
            shell(words, capsys)
    for line in ("pinscher prune --model ./my-model --spars 0.8", "pip install 'pinscher[none]'", "make nothing"):
        with pytest.raises(AssertionError):
            shell(commands(line)[0], capsys)


def test_hub_ids_in_the_pages_are_stood_for(here):
    text = " ".join(block.text for path in PAGES for block in blocks(path))
    for name in re.findall(r"""(?:--model |model=")([\w-]+/[\w.-]+)""", text):
        assert name in HUB
        assert Path(hub.locate(name)).is_dir()


# ---------------------------------------------------------------- lines


def too_wide(text: str) -> list[str]:
    """Lines of more than 120 characters, but for rows of tables and lines that are a single word, such as a URL."""
    lines = [line for line in text.splitlines() if len(line) > 120]
    return [line for line in lines if not line.startswith("|") and " " in line.strip()]


@pytest.mark.parametrize("path", WRITTEN, ids=[p.relative_to(ROOT).as_posix() for p in WRITTEN])
def test_no_line_is_too_wide_to_read(path):
    assert too_wide(path.read_text()) == []


def test_rows_of_tables_and_urls_may_be_wide():
    assert too_wide(f"| {'wide ' * 30}|\nhttps://{'a' * 130}\n{'short ' * 20}") == []
    assert too_wide(f"short\n{'wide ' * 25}") == ["wide " * 25]


def test_a_change_is_one_line():
    lines = (ROOT / "CHANGELOG.md").read_text().partition("## [Unreleased]")[2].splitlines()
    assert [line for line in lines if line and not line.startswith(("- ", "#"))] == []


# ---------------------------------------------------------------- the site


def test_every_page_is_in_the_site_and_it_builds_strictly(tmp_path):
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    config = load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(tmp_path))
    build(config)
    listed = set(re.findall(r"[\w/-]+\.md", str(config["nav"])))
    assert listed == {path.relative_to(ROOT / "docs").as_posix() for path in PAGES[1:]}
    home = (tmp_path / "index.html").read_text()
    assert not re.findall(r"""(?:src|href)="https?://(?:fonts|unpkg|cdn)""", home)
    reference = (tmp_path / "api" / "index.html").read_text()
    for name in set(pinscher.__all__) - {"__version__"}:
        assert re.search(rf'id="pinscher\.[\w.]*\b{name}"', reference), name
    assert (tmp_path / "benchmarks" / "results" / "demo.txt").exists()
