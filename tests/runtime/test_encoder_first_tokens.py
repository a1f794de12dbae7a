"""A classifier computes the end of the last layer for first tokens only, unless somebody looks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf

import pinscher
from tiny_accelerated import CONFIGS, batch, model_of


@pytest.mark.parametrize("mode", ["fp32", "int8"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_classifier_computes_the_end_of_the_last_layer_for_first_tokens_only(name, mode):
    fast = pinscher.accelerate(model_of(name), mode=mode)
    last = fast.base_model.fast_layers.packed[-1]
    given = batch(3, 20)
    before = [matrix.work for matrix in last]
    alone = fast(**given).logits
    done = [(m.work - b) // m.nonzeros for m, b in zip(last, before, strict=True)]
    assert done == [int(given["attention_mask"].sum()), 3, 3, 3]  # keys and values are of all tokens
    assert torch.equal(fast(**given, output_hidden_states=True).logits, alone)
    assert fast.base_model(**given)[0].shape == (3, 20, 48)


def watch(fast: Any, where: str) -> tuple[list[Any], Any]:
    """The shapes of the last hidden states that somebody sees, and how to stop looking."""
    seen: list[Any] = []
    base = fast.base_model
    if where == "base":
        return seen, base.register_forward_hook(lambda _, __, out: seen.append(out[0].shape)).remove
    if where == "anywhere":
        look = torch.nn.modules.module.register_module_forward_hook(
            lambda module, _, out: seen.append(out[0].shape) if module is base else None
        )
        return seen, look.remove
    if where == "method":
        own = base.forward
        base.forward = lambda *a, **k: [out := own(*a, **k), seen.append(out[0].shape)][0]
        return seen, lambda: vars(base).pop("forward")
    reader = fast.classifier if getattr(base, "pooler", None) is None else base.pooler
    return seen, reader.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape)).remove


@pytest.mark.parametrize("where", ["base", "anywhere", "method", "reader"])
@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_whoever_looks_on_sees_all_tokens(name, where):
    fast, given = pinscher.accelerate(model_of(name), mode="fp32"), batch(3, 20)
    alone = fast(**given).logits
    seen, stop = watch(fast, where)
    assert torch.equal(fast(**given).logits, alone)
    stop()
    assert seen == [(3, 20, 48)]
    assert torch.equal(fast(**given).logits, alone)
    assert len(seen) == 1


class Mean(torch.nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.mean(1)[:, :2]


HEADS_OF_ONES_OWN = {
    "mean": Mean,
    "torch": lambda: torch.nn.Sequential(torch.nn.Flatten(1), torch.nn.Linear(12 * 48, 2)),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("head", HEADS_OF_ONES_OWN)
def test_a_head_that_may_read_all_tokens_gets_them(head, when):
    model, given = model_of("roberta"), batch(2, 12, padded=False)
    own = HEADS_OF_ONES_OWN[head]().eval()
    fast = pinscher.accelerate(model, mode="fp32")
    model.classifier = own
    if when == "before":
        fast = pinscher.accelerate(model, mode="fp32")
    else:
        fast.classifier = own
    assert torch.allclose(fast(**given).logits, model(**given).logits, atol=2e-5)


def test_another_model_that_is_called_meanwhile_computes_all_tokens():
    outer, inner = pinscher.accelerate(model_of("bert")), pinscher.accelerate(model_of("bert", hf.AutoModel))
    given, seen = batch(2, 12), []
    outer.dropout.register_forward_hook(lambda *_: seen.append(inner(**given)[0].shape))
    outer(**given)
    assert seen == [(2, 12, 48)]


def test_a_row_whose_first_token_is_hidden():
    fast = pinscher.accelerate(model_of("bert"), mode="fp32")
    given = batch(2, 12, padded=False)
    given["attention_mask"][1, :3] = 0
    assert torch.equal(fast(**given).logits, fast(**given, output_hidden_states=True).logits)
