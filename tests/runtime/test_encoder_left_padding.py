"""Rows whose first token is hidden: poolers and heads read it, so it must be what PyTorch computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf

import pinscher
from tiny_accelerated import CONFIGS, SIZES, batch, model_of, pruned_


def left_padded(model: Any, pads: list[int], tokens: int) -> dict[str, torch.Tensor]:
    """Rows that begin with a number of hidden tokens; every second one ends with two hidden ones, too."""
    given = batch(len(pads), tokens, padded=False)
    mask = (torch.arange(tokens) >= torch.tensor(pads)[:, None]).long()
    mask[1::2, tokens - 2 :] = 0
    given["input_ids"][mask == 0] = model.config.pad_token_id
    return {**given, "attention_mask": mask}


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_pytorch(name):
    model = model_of(name)
    fast = pinscher.accelerate(model, mode="fp32")
    for pads, tokens in (([3], 8), ([0, 5, 1, 30], 37), ([60, 1, 0], 64)):
        given = left_padded(model, pads, tokens)
        wanted = model(**given).logits
        assert torch.allclose(fast(**given).logits, wanted, atol=2e-5)
        assert torch.allclose(fast(**given, output_hidden_states=True).logits, wanted, atol=2e-5)
        close = pinscher.accelerate(model, mode="int8")(**given).logits
        assert torch.allclose(close, wanted, atol=0.01)


@pytest.mark.parametrize("name", CONFIGS)
def test_base_models_and_poolers(name):
    model = model_of(name, hf.AutoModel)
    fast = pinscher.accelerate(model, mode="fp32")
    given = left_padded(model, [0, 5, 1], 20)
    wanted, found = model(**given), fast(**given, output_hidden_states=True)
    computed = given["attention_mask"].bool()
    computed[:, 0] = True
    assert torch.allclose(found.last_hidden_state[computed], wanted.last_hidden_state[computed], atol=2e-5)
    for states in found.hidden_states:
        assert (states[~computed] == 0).all()
    if "pooler_output" in wanted:
        assert torch.allclose(found.pooler_output, wanted.pooler_output, atol=2e-5)


@pytest.mark.parametrize("name", ["bert", "distilbert", "electra"])
def test_heads_that_choose_among_sequences(name):
    model = model_of(name, hf.AutoModelForMultipleChoice)
    given = {key: value[:, None] for key, value in left_padded(model, [2, 4, 0], 12).items()}
    found = pinscher.accelerate(model, mode="fp32")(**given).logits
    assert torch.allclose(found, model(**given).logits, atol=2e-5)


@pytest.mark.parametrize("name", ["bert", "roberta", "xlm-roberta", "distilbert", "electra-projected"])
def test_a_mask_with_holes_that_hides_the_first_token(name):
    model = model_of(name)
    fast = pinscher.accelerate(model, mode="fp32")
    given = batch(3, 20, padded=False)
    given["attention_mask"][:, 4:9] = 0
    given["attention_mask"][1, :2] = 0
    given["attention_mask"][2, 0] = 0
    given["input_ids"][2, 0] = model.config.pad_token_id  # RoBERTa counts positions by it, hidden or not
    assert torch.allclose(fast(**given).logits, model(**given).logits, atol=2e-5)


@pytest.mark.parametrize("mode", ["fp32", "int8"])
@pytest.mark.parametrize("name", ["bert", "mpnet"])
@pytest.mark.parametrize("threads", [2, 3, 6])
def test_threads_only_divide_the_work(name, mode, threads):
    """Whole rows for each thread, slices of rows, and every step shared: the same bits."""
    torch.manual_seed(0)
    config = type(CONFIGS[name])(**{**SIZES, "max_position_embeddings": 340})
    model = pruned_(hf.AutoModelForSequenceClassification.from_config(config))
    alone, together = (pinscher.accelerate(model, mode=mode, threads=1) for _ in range(2))
    together.base_model.fast_layers.threads = threads
    for pads, tokens in (([9], 330), ([1, 40, 0], 200), ([3, 2], 20), ([7, 0, 1, 15, 2, 9, 3, 1], 90)):
        given = left_padded(model, pads, tokens)
        assert torch.equal(together(**given).logits, alone(**given).logits)
        wanted = alone(**given, output_hidden_states=True).hidden_states
        found = together(**given, output_hidden_states=True).hidden_states
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_a_row_does_not_depend_on_the_others():
    fast = pinscher.accelerate(model_of("bert", hf.AutoModel), mode="int8")
    given = left_padded(fast, [0, 5, 1, 9], 20)
    together = fast(**given).last_hidden_state
    for row in range(4):
        alone = fast(**{key: value[row : row + 1] for key, value in given.items()}).last_hidden_state
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("name", ["bert", "roberta", "mpnet"])
def test_a_row_without_a_visible_token_is_zeros(name):
    """There is nothing to attend to; what PyTorch makes of it depends on the kind of attention."""
    model = model_of(name, hf.AutoModel)
    fast = pinscher.accelerate(model, mode="fp32")
    given = left_padded(model, [3, 12, 0], 12)
    found = fast(**given, output_hidden_states=True)
    assert all((states[1] == 0).all() for states in found.hidden_states)
    others = {key: value[[0, 2]] for key, value in given.items()}
    assert torch.equal(found.last_hidden_state[[0, 2]], fast(**others).last_hidden_state)
    classifier = pinscher.accelerate(model_of(name), mode="fp32")
    assert torch.allclose(classifier(**given).logits[[0, 2]], classifier(**others).logits, atol=1e-6)
    assert classifier(**given).logits.isfinite().all()
    nothing = {**given, "attention_mask": torch.zeros_like(given["attention_mask"])}
    assert (fast(**nothing).last_hidden_state == 0).all()
