"""Tiny stored models of every family and task that an Engine runs, with tokenizers of a few words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import transformers as hf
from tokenizers import models, normalizers, pre_tokenizers, processors

import pinscher
from tiny_accelerated import CONFIGS, model_of

TASKS: dict[str, Any] = {
    "classification": hf.AutoModelForSequenceClassification,
    "tokens": hf.AutoModelForTokenClassification,
    "answers": hf.AutoModelForQuestionAnswering,
    "embeddings": hf.AutoModel,
}
WORDS = [
    "a",
    "good",
    "bad",
    "film",
    "that",
    "is",
    "long",
    "and",
    "winding",
    "story",
    "by",
    "who",
    "where",
    "in",
    "paris",
    "rome",
    "the",
    "dog",
    "sat",
    "on",
    "mat",
]
TEXTS = ["a good film", "bad", "the long and winding story that is by a dog in rome"]
NER = {0: "O", 1: "B-PER", 2: "I-PER", 3: "B-LOC", 4: "I-LOC"}


def write_tokenizer(folder: Path, *, longest: int | None = None) -> None:
    """A tokenizer of whole words, letters and marks of BERT's kind."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    letters = [mark for letter in "abcdefghijklmnopqrstuvwxyz" for mark in (letter, f"##{letter}")]
    vocabulary = {word: number for number, word in enumerate([*special, *WORDS, *letters[2:]])}
    made = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    made.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings if longest is None else settings | {"model_max_length": longest})
    )


def store(folder: Path, name: str = "bert", task: str = "classification", **settings: Any) -> Path:
    """A stored model; `settings` go into its config."""
    config = CONFIGS[name]
    before = {key: getattr(config, key, None) for key in settings}
    try:
        for key, value in settings.items():
            setattr(config, key, value)
        model = model_of(name, TASKS[task])
        pinscher.save_pretrained(model, folder, embeddings="int8", head="int8")
    finally:
        for key, value in before.items():
            setattr(config, key, value)
    write_tokenizer(folder)
    return folder


def write_sentences(folder: Path, *modules: str, pooling: str = "mean_tokens", **settings: Any) -> None:
    """The files of sentence-transformers."""
    listed = [("Transformer", ""), ("Pooling", "1_Pooling"), *((name, f"{i}_{name}") for i, name in enumerate(modules))]
    (folder / "modules.json").write_text(
        json.dumps(
            [
                {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{name}"}
                for number, (name, path) in enumerate(listed)
            ]
        )
    )
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = {f"pooling_mode_{name}": name == pooling for name in ("cls_token", "mean_tokens", "max_tokens")}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 48} | modes))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
