"""Threads only divide the work."""

from __future__ import annotations

import threading

import hypothesis
import torch
import transformers as hf
from hypothesis import strategies as st

import pinscher
from tiny_accelerated import CONFIGS, SIZES, batch, model_of, pruned_


def test_several_threads_at_once():
    model = model_of("bert")
    fast = pinscher.accelerate(model, mode="fp32", threads=2)
    work = [batch(2, tokens) for tokens in (5, 9, 33, 64, 17, 40)]
    wanted = [model(**given).logits for given in work]
    wrong: list[int] = []

    def go(start: int) -> None:
        for turn in range(30):
            place = (start + turn) % len(work)
            if not torch.allclose(fast(**work[place]).logits, wanted[place], atol=2e-5):
                wrong.append(place)

    threads = [threading.Thread(target=go, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@hypothesis.settings(max_examples=15, deadline=None)
@hypothesis.given(
    lengths=st.lists(st.integers(1, 330), min_size=1, max_size=4),
    name=st.sampled_from(["bert", "mpnet"]),
    mode=st.sampled_from(["fp32", "int8"]),
    threads=st.sampled_from([2, 3]),
)
@hypothesis.example(lengths=[128], name="bert", mode="int8", threads=2)  # cut in the middle of the only sequence
@hypothesis.example(lengths=[70, 1, 200], name="mpnet", mode="fp32", threads=3)
@hypothesis.example(lengths=[186, 200], name="bert", mode="int8", threads=6)  # nothing is left for the last one
def test_threads_only_divide_the_work(lengths, name, mode, threads):
    """However tokens are cut up, what comes out is that of one thread to the last bit."""
    config = type(CONFIGS[name])(**{**SIZES, "max_position_embeddings": 340})
    torch.manual_seed(0)
    model = pruned_(hf.AutoModelForSequenceClassification.from_config(config))
    generator = torch.Generator().manual_seed(sum(lengths))
    ids = torch.randint(3, 99, (len(lengths), max(lengths)), generator=generator)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    given = {"input_ids": ids * mask + (1 - mask), "attention_mask": mask}
    alone, together = (pinscher.accelerate(model, mode=mode, threads=1) for _ in range(2))
    together.base_model.fast_layers.threads = threads  # whatever number of CPUs there is
    assert torch.equal(together(**given).logits, alone(**given).logits)  # the last layer is for first tokens only
    wanted = alone(**given, output_hidden_states=True).hidden_states
    found = together(**given, output_hidden_states=True).hidden_states
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    if mode == "fp32":
        assert torch.allclose(together(**given).logits, model(**given).logits, atol=5e-5)
