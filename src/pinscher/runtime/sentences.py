"""What becomes of hidden states in an embedding model, by sentence-transformers' files and in native code."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load

from pinscher.errors import InputError, first_line
from pinscher.models import sentences
from pinscher.models.sentences import WEIGHTS, Projection, Sentences
from pinscher.runtime.core import Tail
from pinscher.runtime.kernels import Array

# Their names of ways of pooling, and the kernels' names.
POOLINGS = {"cls": "first", "mean": "mean", "max": "max", "mean_sqrt_len_tokens": "mean_sqrt", "lasttoken": "last"}
ACTIVATIONS = {"Tanh": "tanh", "Identity": "none", "ReLU": "relu", "GELU": "gelu", "": "tanh"}


class Embedder(NamedTuple):
    """How a model makes embeddings."""

    told: Sentences
    tails: dict[bool, Tail]  # of unit length or not


def read(folder: Path, width: int, threads: int) -> Embedder:
    """What the files in a folder say.

    Args:
        folder: of the model.
        width: features of a token.
        threads: how many to use.

    Raises:
        InputError: for files that are damaged, or steps that need torch.
    """
    told = sentences.read(str(folder), width)
    if len(told.pooling) != 1 or told.pooling[0] not in POOLINGS:
        raise InputError(
            f"{folder} pools by {' and '.join(told.pooling)}: without PyTorch there are {', '.join(POOLINGS)}, one at "
            "a time."
        )
    steps: list[tuple[Array, Array | None, str]] = []
    for step in told.projections:
        steps.append(_dense(folder, step, told, len(steps[-1][0]) if steps else width))
    pooling = POOLINGS[told.pooling[0]]
    return Embedder(told, {each: Tail(width, pooling, steps, threads, each) for each in (False, True)})


def _dense(folder: Path, step: Projection, told: Sentences, inputs: int) -> tuple[Array, Array | None, str]:
    path = f"{step.folder}/{WEIGHTS}"
    if path not in told.files:
        raise InputError(f"{folder} lacks {path}: copy the model again.")
    try:
        held = load(told.files[path])
    except (SafetensorError, ValueError, TypeError, KeyError) as error:
        raise InputError(f"cannot read {folder / path}: {first_line(error)}.") from None
    weight, bias = held.get("linear.weight"), held.get("linear.bias")
    if weight is None or weight.ndim != 2 or weight.shape[1] != inputs or not len(weight):
        raise InputError(f"{folder / path} does not hold a dense layer for {inputs} features.")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InputError(f"{folder / path} has a bias that does not fit its dense layer.")
    if not all(one.dtype.kind == "f" and np.isfinite(one).all() for one in (weight, bias) if one is not None):
        raise InputError(f"{folder / path} holds values that are not finite (NaN or infinity): copy it again.")
    name = step.activation.rpartition(".")[2]
    if name not in ACTIVATIONS:
        raise InputError(
            f"{folder} has a dense layer with the activation {name[:80]}: without PyTorch there are "
            f"{', '.join(filter(None, ACTIVATIONS))}."
        )
    plain = None if bias is None else bias.astype("float32")
    return weight.astype("float32"), plain, ACTIVATIONS[name]
