"""A teacher that would teach nonsense is refused in one sentence, before anything is written or overwritten."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import transformers
from safetensors.torch import load_file, save_file

import tiny_tasks
from tiny_command import SHORT, complaint

TAUGHT = ["--objective", "knowledge-distillation", "--teacher", "./teacher", "--no-export", *SHORT]


@pytest.fixture(scope="module")
def tuned(sst2, tmp_path_factory) -> Path:
    """The model with a head, and its tokenizer."""
    place = tmp_path_factory.mktemp("tuned") / "teacher"
    transformers.AutoModelForSequenceClassification.from_pretrained(sst2[1]).save_pretrained(place)
    transformers.AutoTokenizer.from_pretrained(sst2[1]).save_pretrained(place)
    return place


def remake(folder: Path, **settings: int) -> None:
    """Another model of the same kind."""
    config = transformers.BertConfig.from_pretrained(folder, **settings)
    transformers.BertForSequenceClassification(config).save_pretrained(folder)


def no_head(folder: Path) -> None:
    held = load_file(folder / "model.safetensors")
    save_file({n: t for n, t in held.items() if n.startswith("bert.")}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["BertModel"]}))


def lack(folder: Path) -> None:
    held = load_file(folder / "model.safetensors")
    del held["bert.encoder.layer.1.output.dense.bias"]
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})


def other_tokens(folder: Path) -> None:
    words = json.loads((folder / "tokenizer.json").read_text())
    known = words["model"]["vocab"]
    (one, first), (other, second) = sorted(known.items(), key=lambda item: item[1])[-2:]
    known |= {one: second, other: first}
    (folder / "tokenizer.json").write_text(json.dumps(words))


def fewer_tokens(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    remake(folder, vocab_size=99)


WRONG = {
    "no head": (no_head, [], "teacher is not fine-tuned for sst2: it has no classifier.bias"),
    "a weight is missing": (lack, [], "teacher lacks bert.encoder.layer.1.output.dense.bias"),
    "a head of three": (lambda folder: remake(folder, num_labels=3), [], "was fine-tuned for 3 labels"),
    "other tokens": (other_tokens, [], "has other tokens than the model: give one with the same tokenizer."),
    "fewer tokens": (fewer_tokens, [], "knows 99 tokens, fewer than the model"),
    "fewer positions": (lambda folder: remake(folder, max_position_embeddings=20), [], "takes 20 tokens"),
    "another width": (
        lambda folder: remake(folder, hidden_size=24),
        ["--hidden-weight", "1"],
        "teacher cannot teach {}: hidden states of student (2, ",
    ),
}


@pytest.fixture
def teacher(tuned, tmp_path) -> Path:
    return Path(shutil.copytree(tuned, tmp_path / "teacher"))


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_teacher_costs_nothing(wrong, command, sst2, teacher, tmp_path):
    change, flags, says = WRONG[wrong]
    change(teacher)
    words = ["prune", *sst2, *TAUGHT, *flags, "--output", "out"]
    assert says.format(sst2[1]) in complaint(command(*words))
    assert [path.name for path in tmp_path.iterdir()] == ["teacher"]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.yaml").write_text("run: {}")
    complaint(command(*words, "--overwrite"))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["config.yaml"]


def test_a_start_without_a_head_is_refused_too(command, sst2, teacher, tmp_path):
    no_head(teacher)
    assert "not fine-tuned" in complaint(command("prune", *sst2, *TAUGHT, "--dense-start", "--output", "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: None,
        lambda folder: remake(folder, hidden_size=24),
        lambda folder: (folder / "tokenizer.json").unlink(),
    ],
    ids=["the same", "another width", "no tokenizer"],
)
def test_a_right_teacher_teaches(change, command, sst2, teacher):
    change(teacher)
    code, _, err = command("prune", *sst2, *TAUGHT, "--output", "out")
    assert code == 0, err


def test_hidden_states_of_any_teacher(command, sst2, teacher):
    remake(teacher, num_hidden_layers=4)
    weights = ["--hidden-weight", "1", "--embeddings-weight", "0.5", "--hardness", "0.5"]
    code, _, err = command("prune", *sst2, *TAUGHT, *weights, "--output", "out")
    assert code == 0, err


def test_other_tasks_try_their_models_too(command, tmp_path):
    """Text is generated and its tokens are labels; nothing of the trial is seen."""
    tiny_tasks.write_files("e2e", tmp_path / "data")
    tiny_tasks.tiny_model("e2e", tmp_path / "model")
    words = ["--model", "./model", "--task", "e2e", "--data", "data", *SHORT, "--no-export", "--hidden-weight", "1"]
    code, _, err = command("prune", *words, "--beams", "1", "--output", "out")
    assert code == 0, err
