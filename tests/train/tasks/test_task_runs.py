"""Every task through the command, on files as they really come: run, kill and resume, evaluate, overfit."""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
import yaml

import pinscher.commands.app
import tiny_tasks
from pinscher.train import metrics
from pinscher.train.tasks import TASKS

NAMES = [name for name in TASKS if name != "rotten-tomatoes"]  # its rows come in a package: there are no files
ROWS, TESTS = 32, 12
STEPS, EVAL, SAVE, TARGET = 20, 5, 4, 0.8
SECONDS = 300  # only against hangs

# Lengths at which some contexts need several windows, and few beams: texts take long enough.
LENGTHS = {
    "spans": ["--max-length", "48", "--stride", "12"],
    "causal-lm": ["--max-length", "128", "--beams", "2"],
}

# Tasks that say no more about reading and scoring than others do try something else besides.
VARIANTS = {
    "qnli": ["--batch-size", "6", "--gradient-accumulation", "2"],
    "sst2": ["--select", "best"],
    "qqp": ["--method", "movement"],
}

# What a child would otherwise load again each time.
for module in ("pinscher.train.scoring", "pinscher.commands.views"):
    importlib.import_module(module)
for module in (
    "rouge_score.rouge_scorer",
    "sacrebleu.metrics.bleu",
    "scipy.stats",
    "seqeval.metrics",
    "sklearn.metrics",
):
    importlib.import_module(module)


# ---------------------------------------------------------------- the command, in a child


def start(log: Path, *arguments: object, before: Callable[[], None] = lambda: None) -> int:
    """Forks a process that runs the command: far quicker than a fresh interpreter. Gives its id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        gc.freeze()  # what the parent has is not the child's to look through
        with open(log, "w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            sys.stdout = sys.stderr = file
            sys.argv = ["pinscher", *map(str, arguments)]
            metrics.meteor = lambda said, references: None  # ten seconds of Java each time
            before()
            pinscher.commands.app.main()
            code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        log.write_text(log.read_text() + traceback.format_exc())
    finally:
        os._exit(code)


def wait(child: int, until: Callable[[], bool] = lambda: False) -> int:
    """The child's exit code; it is killed as soon as `until` says so."""
    began = time.monotonic()
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if until() or time.monotonic() > began + SECONDS:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.002)


def succeeds(log: Path, *arguments: object) -> str:
    """Runs the command to its end; gives what it printed."""
    code = wait(start(log, *arguments))
    said = log.read_text()
    assert code == 0, said
    return said


@dataclass(frozen=True)
class Run:
    """A task's files, a model, and the unbroken run that was made with them."""

    task: str
    root: Path
    files: tiny_tasks.Files
    model: Path

    @property
    def folder(self) -> Path:
        return self.root / "unbroken"

    def prune(self, output: Path) -> list[object]:
        """The command's arguments for the run."""
        flags = ["--model", self.model, "--task", self.task, "--data", self.files.folder, "--output", output]
        flags += ["--max-steps", STEPS, "--eval-every", EVAL, "--save-every", SAVE, "--sparsity", TARGET]
        # Three batches make an epoch, so most checkpoints, and the last one too, lie within one.
        flags += ["--batch-size", 12, "--learning-rate", 3e-3, "--recipe", "none", *self.files.columns]
        return ["prune", *flags, *LENGTHS.get(TASKS[self.task].kind, []), *VARIANTS.get(self.task, [])]


@pytest.fixture(scope="module", params=NAMES)
def run(request, tmp_path_factory) -> Run:
    task = request.param
    root = tmp_path_factory.mktemp(task)
    files = tiny_tasks.write_files(task, root / "data", ROWS, TESTS)
    made = Run(task, root, files, tiny_tasks.tiny_model(task, root / "model"))
    succeeds(root / "unbroken.out", *made.prune(made.folder))
    return made


# ---------------------------------------------------------------- what a run leaves

# task -> split -> the file that the benchmark's server or script takes
FILES = {
    "rte": {"validation": "RTE.tsv"},
    "mrpc": {"validation": "MRPC.tsv"},
    "cola": {"validation": "CoLA.tsv"},
    "sst2": {"validation": "SST-2.tsv"},
    "qnli": {"validation": "QNLI.tsv"},
    "qqp": {"validation": "QQP.tsv"},
    "stsb": {"validation": "STS-B.tsv"},
    "mnli": {"validation_matched": "MNLI-m.tsv", "validation_mismatched": "MNLI-mm.tsv"},
    "squad": {"validation": "predictions_validation.json"},
    "qa": {"test": "predictions_test.json"},
    **{name: {"test": "predictions_test.tsv"} for name in ("classification", "pairs", "regression")},
    **{name: {"test": "predictions_test.tsv"} for name in ("sts", "retrieval", "reranking")},
    "embeddings": {"test": "embeddings_test.npy"},
    **{name: {"test": "predictions_test.txt"} for name in ("conll2003", "tokens", "e2e", "dart", "webnlg", "text")},
}
CLASSES = {
    **{name: {"entailment", "not_entailment"} for name in ("rte", "qnli")},
    **{name: {"0", "1"} for name in ("mrpc", "cola", "sst2", "qqp")},
    "mnli": {"entailment", "neutral", "contradiction"},
    "classification": {"gut", "schlecht", "mäßig"},
    "pairs": {"True", "False"},
}
CORRELATIONS = {"pearson", "spearman", "matthews", "cosine"}


def check_predictions(task: str, path: Path) -> None:
    """The file is what the benchmark takes: its header, a line for each row, and nothing but possible answers."""
    rows = tiny_tasks.rows_of(task, "test", TESTS)
    if path.suffix == ".npy":
        vectors = np.load(path)
        assert (vectors.shape, vectors.dtype) == ((len(rows), 48), np.float32)  # as wide as the model
        assert np.isfinite(vectors).all()
        return
    kind, text = TASKS[task].kind, path.read_text(encoding="utf-8")
    lines = text.split("\n")
    assert lines.pop() == ""  # the last line ends too
    if kind in ("classes", "regression", "embeddings"):
        table = [line.split("\t") for line in lines]
        assert table[0] == ["index", "prediction"]
        assert [line[0] for line in table[1:]] == [str(i) for i in range(len(rows))]
        said = [line[1] for line in table[1:]]
        if kind == "classes":
            assert set(said) <= CLASSES[task]
        elif kind == "embeddings":
            assert all(-1 <= float(value) <= 1 for value in said)
        else:
            digits = 6 if task == "reranking" else 3
            assert all(len(value.partition(".")[2]) == digits for value in said)
            assert task != "stsb" or all(0.0 <= float(value) <= 5.0 for value in said)
    elif kind == "spans":
        answers = json.loads(text)
        assert list(answers) == [row["id"] if task == "squad" else str(i) for i, row in enumerate(rows)]
        assert all(answer in row["context"] for answer, row in zip(answers.values(), rows, strict=True))
    elif kind == "tokens":
        sentences = [[line.split(" ") for line in part.split("\n")] for part in text.strip().split("\n\n")]
        assert [[word for word, _, _ in sentence] for sentence in sentences] == [row["words"] for row in rows]
        assert [[tag for _, tag, _ in sentence] for sentence in sentences] == [row["tags"] for row in rows]
        assert all(said == "O" or said[:2] in ("B-", "I-") for sentence in sentences for _, _, said in sentence)
    else:
        assert kind == "causal-lm"
        assert len(lines) == len(rows)  # each source once, however many references it has


def digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of the weights and of all predictions."""
    files = [folder / "model" / "model.safetensors", *sorted((folder / "predictions").iterdir())]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def events(folder: Path) -> list[dict[str, Any]]:
    """The log without the time that things took."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def outcome(folder: Path) -> dict[str, Any]:
    """result.json without the time that it took."""
    return json.loads((folder / "result.json").read_text()) | {"seconds": None}


def check_folder(folder: Path) -> None:
    """What should be there is there, and nothing else."""
    assert {path.name for path in folder.iterdir()} - {"eval", "eval-export"} == {
        *("config.yaml", "export", "log.jsonl", "model", "predictions", "result.json")
    }
    assert not [path for path in folder.rglob("*") if path.name.endswith((".new", ".old"))]


def test_a_run_leaves_what_it_should(run):
    task = TASKS[run.task]
    check_folder(run.folder)

    told = yaml.safe_load((run.folder / "config.yaml").read_text())
    splits = FILES[run.task]
    assert told["run"]["task"] == run.task
    assert all(told["data"]["rows"][f"test: {split}"] == TESTS for split in splits)

    log = events(run.folder)
    assert {line["event"] for line in log} == {"train", "eval", "teacher"}
    assert [line["step"] for line in log if line["event"] == "train"] == list(range(1, STEPS + 1))
    assert [line["step"] for line in log if line["event"] == "eval"] == list(range(0, STEPS + 1, EVAL))

    result = outcome(run.folder)
    assert (result["status"], result["steps"], result["main"]) == ("finished", STEPS, task.main)
    assert set(result["metrics"]["splits"]) == set(splits)
    for scores in (result["metrics"]["pruned"], *result["metrics"]["splits"].values()):
        assert task.main in scores
        for name, score in scores.items():
            assert (-100.0 if name in CORRELATIONS else 0.0) <= score <= 100.0, name

    model = getattr(transformers, task.architecture).from_pretrained(run.folder / "model")
    transformers.AutoTokenizer.from_pretrained(run.folder / "model")
    blocks = [p for name, p in model.named_parameters() if p.ndim == 2 and (".layer." in name or ".h." in name)]
    assert len(blocks) == 2 * (4 if task.kind == "causal-lm" else 6)
    prunable = sum(p.numel() for p in blocks)
    zeros = sum(int((p == 0).sum()) for p in blocks) / prunable
    assert abs(zeros - TARGET) <= 1 / prunable
    assert result["sparsity"] == pytest.approx(zeros, abs=1e-12)

    assert {path.name for path in (run.folder / "predictions").iterdir()} == set(splits.values())
    for name in splits.values():
        check_predictions(run.task, run.folder / "predictions" / name)


# ---------------------------------------------------------------- killed and resumed

# Files that are being synced when the second kill comes; the first comes at a random step.
MOMENTS = {
    "in a checkpoint": "/checkpoints/.checkpoint-16.new/",
    "between two checkpoints": "/checkpoints",
    "in the model": "/.model.new/",
    "in the predictions": "/predictions/.",
    "in the result": "/.result.json.new",
}


def dying(place: str) -> None:
    """Lets this process die when it syncs a file at that place."""
    sync = os.fsync

    def fsync(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if path.endswith(place) or (place.endswith(("/", ".")) and place in path):
            os.kill(os.getpid(), signal.SIGKILL)
        sync(descriptor)

    os.fsync = fsync


def test_killed_and_resumed_it_ends_the_same(run):
    folder, out = run.root / "killed", run.root / "killed.out"
    step = random.Random(f"killed {run.task}").randrange(1, 16)

    def reached() -> bool:
        log = folder / "log.jsonl"
        return log.exists() and f'"event": "train", "step": {step},' in log.read_text()

    assert wait(start(out, *run.prune(folder)), reached) == -signal.SIGKILL, out.read_text()
    assert not (folder / "model").exists()

    moment = list(MOMENTS.values())[NAMES.index(run.task) % len(MOMENTS)]
    again = start(out, "prune", "--resume", folder, before=lambda: dying(moment))
    assert wait(again) == -signal.SIGKILL, out.read_text()
    assert not (folder / "result.json").exists()

    succeeds(out, "prune", "--resume", folder)
    assert digests(folder) == digests(run.folder)
    assert outcome(folder) == outcome(run.folder)
    assert events(folder) == events(run.folder)
    check_folder(folder)


@pytest.mark.parametrize("run", ["pairs"], indirect=True)
def test_a_fresh_interpreter_ends_the_same(run):
    folder = run.root / "fresh"
    alone = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-m", "pinscher", *map(str, run.prune(folder))]
    done = subprocess.run(command, env=os.environ | alone, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert digests(folder) == digests(run.folder)
    assert events(folder) == events(run.folder)


# ---------------------------------------------------------------- evaluated

UNLABELLED = {"rte": ("test", "RTE.tsv"), "stsb": ("test", "STS-B.tsv"), "mnli": ("test_mismatched", "MNLI-mm.tsv")}


def test_eval_repeats_the_scores(run):
    said = succeeds(run.root / "eval.out", "eval", run.folder)
    metrics_ = outcome(run.folder)["metrics"]
    scores = json.loads((run.folder / "eval" / "scores.json").read_text())
    assert scores["metrics"] == metrics_["pruned"]
    assert scores["splits"] == metrics_["splits"]
    for name in FILES[run.task].values():
        path = run.folder / "eval" / name
        assert path.read_bytes() == (run.folder / "predictions" / name).read_bytes()
        assert str(path) in said


@pytest.mark.parametrize("run", list(UNLABELLED), indirect=True)
def test_eval_answers_rows_without_labels(run):
    split, name = UNLABELLED[run.task]
    folder = run.root / "submission"
    said = succeeds(run.root / "submission.out", "eval", run.folder, "--split", split, "--output", folder)
    assert "no scores" in said
    assert json.loads((folder / "scores.json").read_text())["metrics"] == {}
    check_predictions(run.task, folder / name)


# ---------------------------------------------------------------- learnt


@pytest.mark.parametrize("task", NAMES)
def test_it_learns_32_rows_by_heart(task, tmp_path):
    files = tiny_tasks.write_files(task, tmp_path / "data", ROWS)
    model = tiny_tasks.tiny_model(task, tmp_path / "model", width=64, dropout=0.0)
    flags = ["--model", model, "--task", task, "--output", tmp_path / "run", *files.columns]
    for split in ("train", "validation", "test"):
        flags += [f"--{split}-file", files.train]
    flags += ["--sparsity", 0.5, "--max-steps", 100, "--eval-every", 25, "--save-every", 100, "--learning-rate", 3e-3]
    flags += ["--recipe", "none"]
    succeeds(tmp_path / "out", "prune", *flags, *LENGTHS.get(TASKS[task].kind, []))
    result = outcome(tmp_path / "run")
    assert result["metrics"]["pruned"][result["main"]] >= 95.0
