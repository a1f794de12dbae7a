"""Every example runs, on models and rows that are tiny, and says what it is to say."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest
from sentence_transformers import SentenceTransformer

import pinscher
from tiny_sentences import TEXTS, sentence_encoder

EXAMPLES = Path(__file__).parents[1] / "examples"


def says(name: str, words: list[object], capsys, monkeypatch) -> str:
    monkeypatch.setattr("sys.argv", [name, *map(str, words)])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def test_all_are_here():
    assert {path.name for path in EXAMPLES.glob("*.py")} == {
        "few_shot_head.py",
        "plain_loop.py",  # a minute: its parts are those of the README, which test_readme.py runs
        "sentence_trainer.py",
    }


def test_sentence_trainer(tmp_path, capsys, monkeypatch):
    lines = [{"anchor": f"{text} {n}", "positive": f"{text} again"} for n in "abcdefghijklmnop" for text in TEXTS]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = [sentence_encoder(tmp_path / "model"), tmp_path / "pairs.jsonl", tmp_path / "small", "--steps", 20]
    said = says("sentence_trainer.py", words, capsys, monkeypatch)
    assert "80.0% of the weights of the blocks are zero" in said
    assert float(re.search(r"a cosine of ([\d.]+)", said)[1]) > 0.99
    assert hasattr(SentenceTransformer(str(tmp_path / "small"), device="cpu")[0].auto_model, "fast_layers")


def test_few_shot_head(tmp_path, capsys, monkeypatch):
    model = SentenceTransformer(str(sentence_encoder(tmp_path / "model")), device="cpu")
    pinscher.save_pretrained(model, tmp_path / "small")
    words = [tmp_path / "small", "--shots", 4, "--tests", 10]
    said = says("few_shot_head.py", words, capsys, monkeypatch)
    assert re.search(r"[\d.]+% of 10 sentences are right, from 8 labelled ones", said)


@pytest.mark.parametrize("resumed", [False, True])
def test_the_callback_prunes_in_the_trainer_of_sentence_transformers(tmp_path, resumed):
    """Resumed from its checkpoint it ends with the same bits."""
    import torch
    from datasets import Dataset
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss

    folder = sentence_encoder(tmp_path / "model")
    rows = Dataset.from_dict({"a": TEXTS * 8, "b": [f"{text} a" for text in TEXTS] * 8, "score": [0.9, 0.1] * 16})
    quiet = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_steps": 6, "seed": 3}
    models = []
    for resume in (None, str(tmp_path / "out" / "checkpoint-6"))[: 1 + resumed]:
        model = SentenceTransformer(str(folder), device="cpu")
        args = SentenceTransformerTrainingArguments(
            output_dir=str(tmp_path / "out"), max_steps=12, per_device_train_batch_size=4, **quiet
        )
        callback = pinscher.PruningCallback(pinscher.PruningConfig(sparsity=0.8, interval=2))
        loss = CosineSimilarityLoss(model)
        trainer = SentenceTransformerTrainer(
            model=model, args=args, train_dataset=rows, loss=loss, callbacks=[callback]
        )
        trainer.train(resume_from_checkpoint=resume)
        models.append(model)
        assert pinscher.sparsity(model) == pytest.approx(0.8, abs=1e-4)
    states = [model.state_dict() for model in models]
    assert all(torch.equal(states[0][name], states[-1][name]) for name in states[0])
