"""Real architectures, tiny and random: train, prune, distil, save, load again, with every zero in its place."""

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from pinscher import Pruner, PruningConfig, Teacher, sparsity

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
MODELS = {
    "bert": (lambda: BertForSequenceClassification(BertConfig(vocab_size=50, **SMALL)), "classes"),
    "deberta": (lambda: DebertaV2ForSequenceClassification(DebertaV2Config(vocab_size=50, **SMALL)), "classes"),
    "gpt2": (lambda: GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2)), "causal-lm"),
    "llama": (lambda: LlamaForCausalLM(LlamaConfig(vocab_size=50, **SMALL)), "causal-lm"),
    "t5": (
        lambda: T5ForConditionalGeneration(
            T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0)
        ),
        "seq2seq-lm",
    ),
}


@pytest.mark.parametrize("method", ["pins", "movement", "l0", "pst"])
@pytest.mark.parametrize("name", MODELS)
def test_train_prune_save_and_load(name, method, tmp_path):
    torch.manual_seed(0)
    make, kind = MODELS[name]
    model = make()
    pruner = Pruner(model, PruningConfig(method=method, sparsity=0.7, total_steps=20, interval=4))
    optimizer = torch.optim.AdamW(pruner.param_groups(), lr=1e-3)
    pruner.attach(optimizer)
    teacher = Teacher(model, kind=kind)
    for t in range(20):
        if t % 5 == 0:
            assert teacher.consider(float(t))
        ids = torch.randint(3, 50, (4, 9))
        batch = {"input_ids": ids, "labels": ids[:, 0] % 2 if kind == "classes" else ids}
        outputs = model(**batch)
        loss = outputs.loss + teacher.loss(batch, outputs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    pruner.finish()
    assert torch.isfinite(loss)
    exact = (pruner.total - pruner.kept) / pruner.total
    assert sparsity(model) == exact
    assert abs(exact - 0.7) < 1e-3
    model.eval().save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert sparsity(again) == exact
    with torch.no_grad():
        assert torch.equal(again(**batch).logits, model(**batch).logits)
