"""The hidden-state and embedding terms, against their formula written out token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pinscher.prune import hidden


def by_hand(student: Tensor, teacher: Tensor, mask: Tensor) -> float:
    above = below = 0.0
    for row in range(student.shape[0]):
        for token in range(student.shape[1]):
            if mask[row, token]:
                above += float(((student[row, token] - teacher[row, token]) ** 2).sum())
                below += float((teacher[row, token] ** 2).sum())
    return above / below


def states(layers: int, seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, 5, 4, generator=generator) * 10**layer for layer in range(layers + 1))


MASK = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]])


def stream(layers: int, seed: int, mask: Tensor | None = MASK) -> hidden.Stream:
    return hidden.Stream(states(layers, seed), mask)


def test_the_formula_is_that_of_squarehead():
    mine, its = stream(3, 0), stream(3, 1)
    wanted = sum(by_hand(s, t, MASK) for s, t in zip(mine.layers, its.layers, strict=True)) / 3
    assert float(hidden.layers_term([mine], [its])) == pytest.approx(wanted, rel=1e-5)
    wanted = by_hand(mine.embeddings, its.embeddings, MASK)
    assert float(hidden.embeddings_term([mine], [its])) == pytest.approx(wanted, rel=1e-5)


def test_equal_states_have_no_distance_and_layers_count_alike():
    mine = stream(3, 0)
    assert float(hidden.layers_term([mine], [mine])) == 0.0
    doubled = hidden.Stream([2 * state for state in states(3, 0)], MASK)
    assert float(hidden.layers_term([doubled], [mine])) == pytest.approx(1.0)  # whatever the size of the features


def test_padding_does_not_count_even_if_it_is_not_finite():
    mine, its = stream(2, 0), stream(2, 1)
    before = hidden.layers_term([mine], [its])
    mine.layers[0][0, 4] = float("nan")
    assert torch.equal(hidden.layers_term([mine], [its]), before)


@pytest.mark.parametrize(
    ("mine", "others", "pairs"),
    [(3, 3, [0, 1, 2]), (2, 6, [2, 5]), (3, 6, [1, 3, 5]), (2, 5, [2, 4]), (4, 2, [0, 0, 1, 1]), (1, 12, [11])],
)
def test_students_of_any_depth_are_compared_with_evenly_spaced_layers(mine, others, pairs):
    assert hidden.matched(mine, others) == list(enumerate(pairs))


def test_the_term_reaches_every_layer_of_the_student():
    mine, its = stream(3, 0), stream(6, 1)
    for layer in mine.layers:
        layer.requires_grad_(True)
    hidden.layers_term([mine], [its]).backward()
    assert all(layer.grad is not None and layer.grad[0, 0].abs().sum() > 0 for layer in mine.layers)
    assert all(float(layer.grad[0, 3].abs().sum()) == 0 for layer in mine.layers)  # padding


def test_encoder_and_decoder_have_a_mask_each():
    labels = torch.tensor([[5, 6, 1, -100, -100], [7, 8, 9, 1, -100]])
    outputs = {"encoder_hidden_states": states(1, 0), "decoder_hidden_states": states(2, 1)}
    encoder, decoder = hidden.streams_of(outputs, {"attention_mask": MASK, "labels": labels})
    assert len(encoder.layers) == 1
    assert torch.equal(encoder.mask, MASK)
    assert len(decoder.layers) == 2
    assert torch.equal(decoder.mask, labels != -100)


def test_what_cannot_be_compared_is_named():
    with pytest.raises(ValueError, match="output_hidden_states=True"):
        hidden.streams_of({"logits": torch.zeros(2, 2)}, {})
    with pytest.raises(ValueError, match="a teacher of the same width"):
        hidden.distance(torch.zeros(2, 5, 4), torch.zeros(2, 5, 8), None)
