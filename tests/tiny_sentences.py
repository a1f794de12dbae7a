"""Tiny sentence encoders in folders of sentence-transformers, which are written by hand as its versions write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import tiny_tasks

WIDTH = 48
TEXTS = ["the cat of Ann is superb !", "the garden of Bob is dull .", "a cat", "Rome , Oslo and a piano from Lima ; it"]


def sentence_encoder(
    folder: Path,
    pooling: str = "mean",
    *,
    normalize: bool = True,
    dense: int = 0,
    prompts: dict[str, str] | None = None,
    default: str | None = None,
    length: int | None = 24,
    old: bool = True,
    **settings: Any,
) -> Path:
    """A random encoder; `old` writes the pooling as versions before 5.4 did."""
    tiny_tasks.tiny_model("embeddings", folder, dropout=0.0, **settings)
    steps = [("Transformer", ""), ("Pooling", "1_Pooling")]
    modes = {"cls_token": "cls", "mean_tokens": "mean", "max_tokens": "max", "lasttoken": "lasttoken"}
    modes |= {"mean_sqrt_len_tokens": "mean_sqrt_len_tokens", "weightedmean_tokens": "weightedmean"}
    said: dict[str, Any] = {"pooling_mode": pooling}
    if old:
        said = {f"pooling_mode_{mode}": name == pooling for mode, name in modes.items()}
    put(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": WIDTH, **said})
    if dense:
        steps.append(("Dense", "2_Dense"))
        told = {"in_features": WIDTH, "out_features": dense, "bias": True}
        put(folder / "2_Dense" / "config.json", told | {"activation_function": "torch.nn.modules.activation.Tanh"})
        chance = torch.Generator().manual_seed(3)
        weight = torch.randn(dense, WIDTH, generator=chance) / WIDTH**0.5
        save_file({"linear.weight": weight, "linear.bias": torch.ones(dense)}, folder / "2_Dense" / "model.safetensors")
    if normalize:
        steps.append(("Normalize", f"{len(steps)}_Normalize"))
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(steps)
    ]
    put(folder / "modules.json", modules)
    put(folder / "sentence_bert_config.json", {"max_seq_length": length, "do_lower_case": False})
    put(folder / "config_sentence_transformers.json", {"prompts": prompts or {}, "default_prompt_name": default})
    return folder


def put(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
