"""What a sentence-transformers folder says of its embeddings: pooling, projection, length, prompts."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import load_file

from pinscher.errors import InputError, first_line
from pinscher.runtime.kernels import Array
from pinscher.runtime.tokens import read_object

MODULES = "modules.json"
POOLINGS = {
    "pooling_mode_cls_token": "first",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt",
    "pooling_mode_lasttoken": "last",
}
NAMED = {"cls": "first", "mean": "mean", "max": "max", "mean_sqrt_len_tokens": "mean_sqrt", "lasttoken": "last"}
ACTIVATIONS = {"Tanh": "tanh", "Identity": "none", "ReLU": "relu", "GELU": "gelu"}


@dataclass
class Sentences:
    """How embeddings are made of hidden states; without sentence-transformers' files by their mean, as it does."""

    pooling: str = "mean"
    steps: list[tuple[Array, Array | None, str]] = field(default_factory=list)  # dense layers behind the pooling
    normalise: bool = False
    longest: int | None = None  # tokens of a text
    prompts: dict[str, str] = field(default_factory=dict)
    prompt: str = ""  # the one that is used by default


def read(folder: Path, width: int) -> Sentences:
    """The settings in a folder.

    Raises:
        InputError: for modules or settings that are not known here, or files that cannot be read.
    """
    made = Sentences()
    if not (folder / MODULES).exists():
        return made
    for place, (kind, path) in enumerate(_modules(folder)):
        where = folder / path
        if kind == "Transformer" and place == 0:
            continue
        if kind == "Pooling" and place == 1:
            made.pooling = _pooling(where)
        elif kind == "Dense" and place > 1 and not made.normalise:
            made.steps.append(_dense(where, len(made.steps[-1][0]) if made.steps else width))
        elif kind == "Normalize" and place > 1:
            made.normalise = True
        else:
            raise InputError(
                f"{folder / MODULES} has a module {kind} in place {place + 1}, which needs PyTorch: use "
                "sentence-transformers with pinscher.accelerate, after pip install 'pinscher[train]'."
            )
    made.longest = _longest(folder)
    _read_prompts_(made, folder)
    return made


def _modules(folder: Path) -> list[tuple[str, str]]:
    """Each module's class, and its folder below this one."""
    path = folder / MODULES
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        listed = [(str(one["type"]).rpartition(".")[2], str(one["path"])) for one in found]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise InputError(f"cannot read {path}: {first_line(error)}.") from None
    if not listed or listed[0] != ("Transformer", ""):
        raise InputError(f"{path} does not begin with a Transformer in the same folder.")
    if any(Path(name).is_absolute() or ".." in Path(name).parts for _, name in listed):
        raise InputError(f"{path} names a place outside of its folder.")
    return listed


def _pooling(folder: Path) -> str:
    path = folder / "config.json"
    told = read_object(path)
    modes = [POOLINGS.get(name, name) for name, value in told.items() if name.startswith("pooling_mode_") and value]
    if isinstance(named := told.get("pooling_mode"), str):
        modes = [NAMED.get(named, named)]
    if len(modes) != 1 or modes[0] not in POOLINGS.values():
        listed = " and ".join(modes) or "none"
        raise InputError(f"{path} asks for pooling by {listed[:80]}: there are {', '.join(NAMED)}, one at a time.")
    if told.get("include_prompt", True) is not True:
        raise InputError(
            f"{path} leaves prompts out of the pooling (include_prompt), which needs sentence-transformers."
        )
    return modes[0]


def _dense(folder: Path, inputs: int) -> tuple[Array, Array | None, str]:
    told = read_object(folder / "config.json")
    name = str(told.get("activation_function", "Tanh")).rpartition(".")[2]
    path = folder / "model.safetensors"
    try:
        held = load_file(path)
    except (SafetensorError, OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(f"cannot read {path}: {first_line(error)}.") from None
    weight, bias = held.get("linear.weight"), held.get("linear.bias")
    if weight is None or weight.ndim != 2 or weight.shape[1] != inputs:
        raise InputError(f"{path} does not hold a dense layer for {inputs} features.")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InputError(f"{path} has a bias that does not fit its dense layer.")
    if name not in ACTIVATIONS:
        raise InputError(
            f"{folder / 'config.json'} has the activation {name[:80]}: there are {', '.join(ACTIVATIONS)}."
        )
    plain = None if bias is None else bias.astype("float32")
    return weight.astype("float32"), plain, ACTIVATIONS[name]


def _longest(folder: Path) -> int | None:
    found = read_object(folder / "sentence_bert_config.json").get("max_seq_length")
    if found is None:
        return None
    if type(found) is not int or found < 1:
        raise InputError(f"{folder / 'sentence_bert_config.json'} has max_seq_length = {str(found)[:40]}.")
    return found


def _read_prompts_(made: Sentences, folder: Path) -> None:
    path = folder / "config_sentence_transformers.json"
    told: dict[str, Any] = read_object(path)
    prompts, default = told.get("prompts") or {}, told.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise InputError(f"{path}: prompts must be texts.")
    if default is not None and default not in prompts:
        raise InputError(f"{path}: default_prompt_name is {str(default)[:80]!r}, which is none of the prompts.")
    made.prompts, made.prompt = prompts, "" if default is None else prompts[default]
