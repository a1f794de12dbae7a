"""Models whose layers the runtime does not know: their matrices alone are fast."""

from __future__ import annotations

import pytest
import torch
import transformers as hf

import pinscher
from pinscher.runtime.sparse import SparseLinear
from tiny_accelerated import DECODERS, pruned_
from tiny_models import HEADS, VOCABULARY


@pytest.mark.parametrize("name", HEADS)
def test_every_architecture_runs(name):
    model = pruned_(HEADS[name].make())
    fast = pinscher.accelerate(model, mode="fp32")
    inputs = {"input_ids": torch.randint(3, VOCABULARY, (2, 9))}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    found, wanted = fast(**inputs), model(**inputs)
    for key in ("logits", "start_logits"):
        if key in wanted:
            assert torch.allclose(found[key], wanted[key], atol=1e-4)


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_generate_the_same(name):
    torch.manual_seed(0)
    model = pruned_(hf.AutoModelForCausalLM.from_config(DECODERS[name]))
    fast = pinscher.accelerate(model, mode="fp32")
    assert sum(isinstance(module, SparseLinear) for module in fast.modules()) == (8 if name == "gpt2" else 14)
    ids = torch.randint(5, 99, (2, 7))
    assert torch.allclose(fast(ids).logits, model(ids).logits, atol=3e-5)
    how = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(fast.generate(ids, **how), model.generate(ids, **how))
    assert torch.equal(fast.generate(ids, **how, num_beams=3), model.generate(ids, **how, num_beams=3))
