"""A new task is one registered value: runs read its files, train, test and answer without knowing of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

import pinscher
import tiny_tasks
from pinscher.errors import InputError
from pinscher.train import plan
from pinscher.train.tasks import TASKS
from pinscher.train.tasks.glue import Sentences
from pinscher.train.tasks.task import Reader, add, write_lines
from tiny_command import outcome

NAME = "rare-spam"


def blocks(text: str, where: str) -> dict[str, list[Any]]:
    """The file format of this task: a verdict in brackets, then the review, one line a row."""
    found: dict[str, list[Any]] = {"review": [], "verdict": []}
    for number, line in enumerate(text.splitlines(), 1):
        verdict, bracket, review = line.removeprefix("[").partition("] ")
        if not bracket:
            raise InputError(f"{where}, line {number}: no verdict in brackets.")
        found["review"].append(review)
        found["verdict"].append(verdict)
    return found


@dataclass(frozen=True, kw_only=True)
class Balanced(Sentences):
    """Accuracy that counts every class equally; files and submissions of its own."""

    main: str = "balanced"

    def reader(self, suffix: str) -> Reader | None:
        return blocks if suffix == ".txt" else None

    def scores(self, answers: Sequence[Any], rows: Dataset) -> dict[str, float]:
        hits: dict[str, list[bool]] = {}
        for said, right in zip(answers, rows[self.label_column], strict=True):
            hits.setdefault(right, []).append(said == right)
        return {"balanced": 100 * sum(sum(some) / len(some) for some in hits.values()) / len(hits)}

    def write(self, answers: Sequence[Any], rows: Dataset, folder: Path, split: str) -> Path:
        return write_lines(folder / f"{split}.txt", [f"[{said}]" for said in answers])


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    add(Balanced(name=NAME, text_columns=("review",), label_column="verdict", names=("ham", "spam")))
    yield
    del TASKS._entries[NAME]


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """A tiny model, and files in which one review in four is spam."""
    tiny_tasks.tiny_model("sst2", tmp_path / "model", dropout=0.0)
    for split, count in (("train", 96), ("test", 24)):
        rows = [row for i, row in enumerate(tiny_tasks.rows_of("sst2", split, count)) if row["class"] or i % 6 == 0]
        lines = [f"[{('spam', 'ham')[row['class']]}] {row['text']}\n" for row in rows]
        (tmp_path / f"{split}.txt").write_text("".join(lines))
    files = {f"{split}_file": str(tmp_path / f"{split}.txt") for split in ("train", "test")}
    learning = {"max_steps": 60, "batch_size": 8, "learning_rate": 3e-3, "eval_every": 20, "sparsity": 0.5}
    return {"model": str(tmp_path / "model"), "task": NAME, **files, **learning, "output": str(tmp_path / "run")}


def test_it_is_planned_trained_tested_and_answers(settings, tmp_path, capsys):
    config = pinscher.RunConfig(**settings)
    assert plan.make(config).task.name == NAME
    result = pinscher.run(config)
    assert (result.main, set(result.scores)) == ("balanced", {"balanced"})
    assert result.scores["balanced"] > 90  # a tiny model learns it
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert all("eval_balanced" in line for line in log if line["event"] == "eval")
    assert json.loads((tmp_path / "run" / "result.json").read_text())["main"] == "balanced"
    code, said, err = outcome(["eval", tmp_path / "run"], capsys)
    assert code == 0, err
    assert "balanced" in said
    written = list((tmp_path / "run").rglob("test.txt"))  # of the run, and of the command
    assert {path.read_text().count("\n") for path in written} == {16}


def test_its_files_are_checked_by_its_own_reader(settings, tmp_path):
    (tmp_path / "train.txt").write_text("[ham] good film\nbad film\n")
    with pytest.raises(InputError, match=r"train\.txt, line 2: no verdict in brackets"):
        pinscher.run(pinscher.RunConfig(**settings))
    assert not (tmp_path / "run").exists()


def test_right_answers_score_100_and_lazy_ones_do_not():
    rows = Dataset.from_dict({"review": ["a", "b", "c", "d"], "verdict": ["ham", "ham", "ham", "spam"]})
    assert TASKS[NAME].scores(["ham", "ham", "ham", "spam"], rows) == {"balanced": 100}
    assert TASKS[NAME].scores(["ham"] * 4, rows) == {"balanced": 50}


def test_its_name_is_taken_and_suggested():
    with pytest.raises(ValueError, match="task 'rare-spam' is registered twice"):
        add(Balanced(name=NAME))
    with pytest.raises(ValueError, match=r"unknown task 'rare-sham'\. Did you mean 'rare-spam'\?"):
        TASKS["rare-sham"]
