"""Accelerated encoders against the models they were made from: every family, masks, odd input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf

import pinscher
from pinscher.errors import InputError
from pinscher.models.families import FAMILIES
from tiny_accelerated import CONFIGS, batch, model_of


def test_every_family_is_tried():
    native = {name for name, family in FAMILIES.items() if family.is_native}
    assert {config.model_type for config in CONFIGS.values()} == native


@pytest.mark.parametrize("name", CONFIGS)
def test_outputs_are_those_of_the_model(name):
    model = model_of(name)
    fast = pinscher.accelerate(model, mode="fp32")
    for rows, tokens in ((1, 1), (1, 8), (3, 37), (2, 64), (5, 65)):
        given = batch(rows, tokens)
        wanted, found = model(**given), fast(**given)
        assert type(found) is type(wanted)
        assert torch.allclose(found.logits, wanted.logits, atol=2e-5)
    assert isinstance(fast, type(model))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_bare_model_too(name):
    model = model_of(name, hf.AutoModel)
    fast = pinscher.accelerate(model, mode="fp32")
    given = batch()
    seen = given["attention_mask"].bool()
    wanted = model(**given, output_hidden_states=True)
    found = fast(**given, output_hidden_states=True)
    assert type(found) is type(wanted)
    assert torch.allclose(found.last_hidden_state[seen], wanted.last_hidden_state[seen], atol=2e-5)
    assert (found.last_hidden_state[~seen] == 0).all()
    assert len(found.hidden_states) == len(wanted.hidden_states)
    for some, other in zip(found.hidden_states, wanted.hidden_states, strict=True):
        assert torch.allclose(some[seen], other[seen], atol=2e-5)
    as_tuple = fast(**given, return_dict=False)
    assert torch.equal(as_tuple[0], found.last_hidden_state)
    assert ("pooler_output" in found) == ("pooler_output" in wanted)


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "electra-projected"])
def test_holes_in_the_mask_are_holes(name):
    model = model_of(name, hf.AutoModel)
    fast = pinscher.accelerate(model, mode="fp32")
    given = batch(3, 20, padded=False)
    given["attention_mask"][:, 4:9] = 0
    given["attention_mask"][1, 0] = 0
    seen = given["attention_mask"].bool()
    wanted, found = model(**given).last_hidden_state, fast(**given).last_hidden_state
    assert torch.allclose(found[seen], wanted[seen], atol=2e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_other_ways_to_say_it(name):
    model = model_of(name, hf.AutoModel)
    fast = pinscher.accelerate(model, mode="fp32")
    ids = batch(2, 9)["input_ids"]
    embeds = model.get_input_embeddings()(ids)
    pairs: list[dict[str, Any]] = [{"input_ids": ids}, {"inputs_embeds": embeds}]
    if name not in ("mpnet", "distilbert"):
        types = (torch.arange(9) > 4).long().expand(2, 9).contiguous()
        pairs.append({"input_ids": ids, "token_type_ids": types % model.config.type_vocab_size})
    pairs.append({"input_ids": ids, "position_ids": torch.arange(9).flip(0).expand(2, 9) + 2})
    for given in pairs:
        wanted, found = model(**given).last_hidden_state, fast(**given).last_hidden_state
        assert torch.allclose(found, wanted, atol=2e-5), list(given)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_models_of_other_precision(dtype):
    model = model_of("bert")
    wanted = model(**batch()).logits
    for fast in (pinscher.accelerate(model_of("bert").to(dtype), mode="fp32"), pinscher.accelerate(model).to(dtype)):
        found = fast(**batch(), output_hidden_states=True)
        assert found.logits.dtype == found.hidden_states[0].dtype == dtype
        assert torch.allclose(found.logits.float(), wanted, atol=0.05)


def test_arguments_without_names_are_the_models_own():
    ids, mask = batch(2, 6, padded=False)["input_ids"], torch.ones(2, 6, dtype=torch.long)
    positions = torch.arange(9, 15).expand(2, 6)
    for name, third in (("mpnet", positions), ("bert", torch.ones_like(ids)), ("roberta", torch.zeros_like(ids))):
        model = model_of(name, hf.AutoModel)
        fast = pinscher.accelerate(model, mode="fp32")
        found, wanted = fast(ids, mask, third), model(ids, mask, third)
        assert torch.allclose(found.last_hidden_state, wanted.last_hidden_state, atol=2e-5), name
    model = model_of("distilbert", hf.AutoModel)
    embeds = torch.randn(2, 6, 48)
    found, wanted = pinscher.accelerate(model, mode="fp32")(None, mask, embeds), model(None, mask, embeds)
    assert torch.allclose(found.last_hidden_state, wanted.last_hidden_state, atol=2e-5)


def test_left_padding_where_distances_count():
    model = model_of("mpnet", hf.AutoModel)
    ids = batch(2, 8, padded=False)["input_ids"]
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 0], [1] * 8])
    ids[mask == 0] = model.config.pad_token_id
    found = pinscher.accelerate(model, mode="fp32")(input_ids=ids, attention_mask=mask).last_hidden_state
    wanted = model(input_ids=ids, attention_mask=mask).last_hidden_state
    assert torch.allclose(found[mask.bool()], wanted[mask.bool()], atol=2e-5)
    with pytest.raises(InputError, match="not its inside"):
        pinscher.accelerate(model)(input_ids=ids, attention_mask=torch.tensor([[1, 0, 1, 1, 1, 1, 1, 1]] * 2))


ODD: list[tuple[dict[str, Any], str]] = [
    ({}, "either input_ids or inputs_embeds"),
    ({"input_ids": torch.zeros(2, 71, dtype=torch.long)}, "71 tokens in a row: the model takes 70"),
    ({"input_ids": torch.zeros(7, dtype=torch.long)}, "1 dimensions"),
    ({"input_ids": torch.zeros(2, 7)}, "float32"),
    ({"input_ids": torch.zeros(2, 7, dtype=torch.long), "attention_mask": torch.ones(2, 8)}, "shape"),
    ({"input_ids": torch.zeros(2, 7, dtype=torch.long), "attention_mask": torch.ones(2, 1, 7, 7)}, "shape"),
    ({"input_ids": torch.zeros(2, 7, dtype=torch.long), "token_type_ids": torch.zeros(2, 6).long()}, "token_type_ids"),
    ({"input_ids": torch.zeros(2, 7, dtype=torch.long), "token_type_ids": torch.zeros(2, 7)}, "float32"),
    ({"input_ids": torch.zeros(2, 7, dtype=torch.long), "output_attentions": True}, "output_attentions"),
    ({"input_ids": [[1, 2]]}, "must be tensors, not list"),
]


@pytest.mark.parametrize(("given", "message"), ODD, ids=[message for _, message in ODD])
def test_odd_input_is_refused(given, message):
    fast = pinscher.accelerate(model_of("bert", hf.AutoModel))
    with pytest.raises(InputError, match=message):
        fast(**given)


def test_tokens_out_of_range_are_refused():
    fast = pinscher.accelerate(model_of("bert", hf.AutoModel))
    for token in (-1, 99, 2**40):
        with pytest.raises(IndexError):
            fast(input_ids=torch.tensor([[5, token]]))


def test_empty_and_wholly_masked_rows():
    fast = pinscher.accelerate(model_of("bert", hf.AutoModel))
    assert fast(input_ids=torch.zeros(0, 7, dtype=torch.long)).last_hidden_state.shape == (0, 7, 48)
    ids = batch(2, 6, padded=False)["input_ids"]
    mask = torch.tensor([[1] * 6, [0] * 6])
    found = fast(input_ids=ids, attention_mask=mask).last_hidden_state
    assert (found[1] == 0).all()
    assert torch.equal(found[:1], fast(input_ids=ids[:1]).last_hidden_state)


def test_nan_in_one_row_stays_there():
    model = model_of("bert", hf.AutoModel)
    fast = pinscher.accelerate(model)
    embeds = torch.randn(2, 6, 48)
    clean = fast(inputs_embeds=embeds).last_hidden_state
    embeds[0, 3] = float("nan")
    found = fast(inputs_embeds=embeds).last_hidden_state
    assert found[0].isnan().all()
    assert torch.equal(found[1], clean[1])
