"""The distance of the student's hidden states from the teacher's, layer by layer (SquareHead).

    D_hidden = mean over layers of  Σ‖student − teacher‖² / Σ‖teacher‖²,  over the tokens that are not padding

The division gives all layers the same weight, whatever the size of their features. A student with fewer layers than
its teacher is compared with evenly spaced ones, the last with the last.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pinscher.prune.distillation import IGNORED, named

TINY = 1e-12  # the least divisor, for a teacher whose features are all zero
# Fields of a model's outputs that hold hidden states, and the mask that says which of their tokens count.
STREAMS = (
    ("hidden_states", "attention_mask"),
    ("encoder_hidden_states", "attention_mask"),
    ("decoder_hidden_states", "decoder_attention_mask"),
)


class Stream:
    """The embeddings and the outputs of all layers of one stack, [batch, tokens, features] each."""

    def __init__(self, states: Sequence[Tensor], mask: Tensor | None) -> None:
        self.embeddings, self.layers, self.mask = states[0], list(states[1:]), mask


def streams_of(outputs: Any, batch: Mapping[str, Any]) -> list[Stream]:
    """The hidden states of a model's outputs: one stack, or encoder and decoder.

    Raises:
        ValueError: if the outputs have none.
    """
    found = {} if isinstance(outputs, Tensor) else named(outputs)
    made = [Stream(found[name], _mask(mask, batch)) for name, mask in STREAMS if found.get(name) is not None]
    if not made:
        raise ValueError(
            "the terms for hidden states and embeddings need the model's hidden states: call the student with "
            "output_hidden_states=True"
        )
    return made


def _mask(name: str, batch: Mapping[str, Any]) -> Tensor | None:
    mask = batch.get(name)
    if mask is None and name == "decoder_attention_mask" and batch.get("labels") is not None:
        mask = batch["labels"] != IGNORED  # a decoder's inputs are its labels, shifted
    return mask


def layers_term(student: Sequence[Stream], teacher: Sequence[Stream]) -> Tensor:
    """Mean over the student's layers of their relative distance to the teacher's."""
    terms = []
    for mine, its in zip(student, teacher, strict=True):
        for layer, other in matched(len(mine.layers), len(its.layers)):
            terms.append(distance(mine.layers[layer], its.layers[other], mine.mask))
    return torch.stack(terms).mean()


def embeddings_term(student: Sequence[Stream], teacher: Sequence[Stream]) -> Tensor:
    """Relative distance of what enters the first layer."""
    pairs = zip(student, teacher, strict=True)
    return torch.stack([distance(mine.embeddings, its.embeddings, mine.mask) for mine, its in pairs]).mean()


def matched(mine: int, others: int) -> list[tuple[int, int]]:
    """The teacher's layer for each of the student's layers; both counted from 0."""
    if mine < 1 or others < 1:
        raise ValueError(f"hidden states of {mine} and {others} layers cannot be compared")
    return [(layer, math.ceil((layer + 1) * others / mine) - 1) for layer in range(mine)]


def distance(student: Tensor, teacher: Tensor, mask: Tensor | None) -> Tensor:
    """Σ‖student − teacher‖² / Σ‖teacher‖² over the tokens that count, in fp32."""
    if student.shape != teacher.shape:
        raise ValueError(
            f"hidden states of student {tuple(student.shape)} and teacher {tuple(teacher.shape)} differ in shape: "
            "their terms need a teacher of the same width and tokenizer. Use the logits alone (hidden_weight=0, "
            "embeddings_weight=0)."
        )
    student, teacher = student.float(), teacher.to(student.device).float()
    if mask is not None and mask.shape == student.shape[:2]:
        student, teacher = student[mask != 0], teacher[mask != 0]
    return (student - teacher).square().sum() / teacher.square().sum().clamp(min=TINY)
