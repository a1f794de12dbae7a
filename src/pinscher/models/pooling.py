"""One vector for a text, from the hidden states of its tokens, as sentence-transformers makes it.

[texts, tokens, features] and a mask [texts, tokens] become [texts, features], or several of those side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pinscher.errors import InputError, first_line
from pinscher.models.sentences import WEIGHTS, Projection, Sentences

TINY = 1e-9
LOWEST = -1e9  # less than any feature
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "Identity": lambda x: x,
    "GELU": F.gelu,
    "ReLU": F.relu,
    "Sigmoid": torch.sigmoid,
    "SiLU": F.silu,
    "Tanh": torch.tanh,
}


def pooled(states: Tensor, mask: Tensor, how: str) -> Tensor:
    """The vector of each text, by one way of pooling."""
    seen = mask.unsqueeze(-1).to(states.dtype)
    if how == "cls":
        return states[:, 0]
    if how == "lasttoken":
        places = torch.arange(1, mask.shape[1] + 1, device=mask.device)
        last = (places * (mask != 0)).argmax(1)
        return states[torch.arange(len(states), device=states.device), last]
    if how == "max":
        return states.masked_fill(seen == 0, LOWEST).amax(1)
    if how == "weightedmean":
        seen = seen * torch.arange(1, mask.shape[1] + 1, device=mask.device, dtype=states.dtype)[:, None]
    count = seen.sum(1).clamp(min=TINY)
    return (states * seen).sum(1) / (count.sqrt() if how == "mean_sqrt_len_tokens" else count)


class Embedder:
    """All that follows the layers: pooling, projections, normalisation. Its own weights are never trained."""

    def __init__(self, sentences: Sentences, width: int = 0) -> None:
        """`width`: features of a token; 0 if they are not known, and the first projection is not checked."""
        self.sentences = sentences
        self.projections: list[tuple[Tensor, Tensor | None, Callable[[Tensor], Tensor]]] = []
        inputs = width * len(sentences.pooling)
        for told in sentences.projections:
            self.projections.append(_projection(sentences, told, inputs))
            inputs = len(self.projections[-1][0])

    def __call__(self, states: Tensor, mask: Tensor | None) -> Tensor:
        if mask is None:
            mask = torch.ones(states.shape[:2], dtype=torch.long, device=states.device)
        found = torch.cat([pooled(states, mask, how) for how in self.sentences.pooling], dim=-1)
        for weight, bias, activation in self.projections:
            to: dict[str, Any] = {"device": found.device, "dtype": found.dtype}
            found = activation(F.linear(found, weight.to(**to), None if bias is None else bias.to(**to)))
        return F.normalize(found, dim=-1) if self.sentences.normalizes else found


def _projection(
    sentences: Sentences, told: Projection, inputs: int
) -> tuple[Tensor, Tensor | None, Callable[[Tensor], Tensor]]:
    name = told.activation.rpartition(".")[2] or "Tanh"  # sentence-transformers' own default
    if name not in ACTIVATIONS:
        raise InputError(f"{told.folder} has the activation {name}: there are {', '.join(ACTIVATIONS)}.")
    tensors = _tensors(sentences, told.folder)
    if "linear.weight" not in tensors:
        raise InputError(
            f"{told.folder}/{WEIGHTS} has no linear.weight, or is missing: load the model with "
            "sentence-transformers and save it again."
        )
    weight, bias = tensors["linear.weight"], tensors.get("linear.bias")
    if weight.dim() != 2 or not weight.is_floating_point() or (inputs and weight.shape[1] != inputs):
        raise InputError(f"{told.folder}/{WEIGHTS} does not hold a dense layer for {inputs or 'its'} features.")
    if bias is not None and (bias.shape != weight.shape[:1] or not bias.is_floating_point()):
        raise InputError(f"{told.folder}/{WEIGHTS} has a bias that does not fit its dense layer.")
    if not all(bool(tensor.isfinite().all()) for tensor in (weight, bias) if tensor is not None):
        raise InputError(f"{told.folder}/{WEIGHTS} holds values that are not finite (NaN or infinity): copy it again.")
    return weight, bias, ACTIVATIONS[name]


def _tensors(sentences: Sentences, folder: str) -> dict[str, Tensor]:
    from safetensors.torch import load

    content = sentences.files.get(f"{folder}/{WEIGHTS}")
    try:
        return {} if content is None else load(content)
    except Exception as error:  # safetensors has several names for what is damaged
        raise InputError(f"the weights in {folder} are damaged ({first_line(error)}): copy them again.") from None
