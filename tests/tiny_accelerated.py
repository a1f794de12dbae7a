"""Tiny pruned models of every family that the runtime knows, and batches for them."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf

SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 70,
}
CONFIGS: dict[str, Any] = {
    "bert": hf.BertConfig(**SIZES),
    "bert-tanh": hf.BertConfig(**SIZES, hidden_act="gelu_new"),
    "bert-relu": hf.BertConfig(**SIZES, hidden_act="relu"),
    "camembert": hf.CamembertConfig(**SIZES),
    "distilbert": hf.DistilBertConfig(
        vocab_size=99, dim=48, n_layers=2, n_heads=4, hidden_dim=80, max_position_embeddings=70
    ),
    "electra": hf.ElectraConfig(**SIZES, embedding_size=48),
    "electra-projected": hf.ElectraConfig(**SIZES, embedding_size=32),
    "mpnet": hf.MPNetConfig(**SIZES),
    "roberta": hf.RobertaConfig(**SIZES, type_vocab_size=1),
    "xlm-roberta": hf.XLMRobertaConfig(**SIZES),
}


def pruned_(model: Any, density: float = 0.2) -> Any:
    """Random zeros in the blocks; biases and norms that are not what they start as."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if (parameter.dim() == 2 and "layer" in name) or (".h." in name and parameter.dim() == 2):
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.data *= torch.rand(parameter.shape, generator=generator) < density
        elif parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def model_of(name: str, head: Any = hf.AutoModelForSequenceClassification) -> Any:
    torch.manual_seed(0)
    return pruned_(head.from_config(CONFIGS[name]))


def batch(rows: int = 3, tokens: int = 37, padded: bool = True) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * tokens)
    ids = torch.randint(5, 99, (rows, tokens), generator=generator)
    mask = torch.ones_like(ids)
    if padded and tokens > 4:
        mask[0, tokens // 2 :] = 0
        mask[-1, tokens - 3 :] = 0
        ids[mask == 0] = 1
    return {"input_ids": ids, "attention_mask": mask}


DECODERS = {
    "gpt2": hf.GPT2Config(
        vocab_size=99, n_embd=48, n_layer=2, n_head=4, n_positions=64, eos_token_id=0, bos_token_id=0
    ),
    "llama": hf.LlamaConfig(**{**SIZES, "num_key_value_heads": 2}, eos_token_id=0, bos_token_id=0),
}
