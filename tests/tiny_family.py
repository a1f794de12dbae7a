"""A made-up family of models, the terriers: BERT's computation under names that nothing else has.

Whatever knows a family by its row alone can prune, store, run, export and time it. `register()` makes transformers and
pinscher know it, in a test as well as in the engines' processes.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput, SequenceClassifierOutput

from pinscher.models.families import FAMILIES, Family

ROW = Family(
    layers="pack",
    attention="nose",
    qkv=("nose.seek", "nose.find", "nose.fetch"),
    out="nose.bring",
    up="dig",
    down="bury",
    attention_norm="sit",
    mlp_norm="stay",
    inner="paws",
    heads="ears",
    activation="temper",
    embeddings=("kennel.words", "kennel.places", "kennel.sorts"),
    embeddings_norm="kennel.calm",
    counts_from_padding=True,
    tokenizer_gives_types=True,
    pooling="first",
    result="BaseModelOutput",
)


class TerrierConfig(transformers.PreTrainedConfig):
    model_type = "terrier"

    def __init__(self, ears: int = 4, paws: int = 64, temper: str = "gelu", pad_token_id: int = 2, **more: Any) -> None:
        self.vocab_size, self.hidden_size, self.num_hidden_layers = 60, 32, 2
        self.max_position_embeddings = 40
        self.ears, self.paws, self.temper = ears, paws, temper
        super().__init__(pad_token_id=pad_token_id, **more)


class Kennel(nn.Module):
    def __init__(self, config: TerrierConfig) -> None:
        super().__init__()
        self.padding_idx = config.pad_token_id
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        self.places = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.sorts = nn.Embedding(2, config.hidden_size)
        self.calm = nn.LayerNorm(config.hidden_size)

    def forward(
        self,
        input_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        words = self.words(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            real = torch.ones(words.shape[:2]).long() if input_ids is None else (input_ids != self.padding_idx).long()
            position_ids = real.cumsum(1) * real + self.padding_idx
        sorts = torch.zeros_like(position_ids) if token_type_ids is None else token_type_ids
        return self.calm(words + self.places(position_ids) + self.sorts(sorts))


class Nose(nn.Module):
    def __init__(self, config: TerrierConfig) -> None:
        super().__init__()
        self.n_heads, self.head_dim = config.ears, config.hidden_size // config.ears
        for name in ("seek", "find", "fetch", "bring"):
            setattr(self, name, nn.Linear(config.hidden_size, config.hidden_size))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (self.n_heads, self.head_dim)).transpose(1, 2) for part in self._three())
        scores = q @ k.transpose(-1, -2) * self.head_dim**-0.5 + mask
        return self.bring((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def _three(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        return self.seek, self.find, self.fetch


class Terrier(nn.Module):
    def __init__(self, config: TerrierConfig) -> None:
        super().__init__()
        self.nose, self.sit = Nose(config), nn.LayerNorm(config.hidden_size)
        self.dig, self.bury = nn.Linear(config.hidden_size, config.paws), nn.Linear(config.paws, config.hidden_size)
        self.stay, self.act = nn.LayerNorm(config.hidden_size), transformers.activations.ACT2FN[config.temper]

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.sit(x + self.nose(x, mask))
        return self.stay(x + self.bury(self.act(self.dig(x))))


class TerrierPreTrainedModel(transformers.PreTrainedModel):
    config_class = TerrierConfig
    base_model_prefix = "terrier"


class TerrierModel(TerrierPreTrainedModel):
    def __init__(self, config: TerrierConfig) -> None:
        super().__init__(config)
        self.kennel = Kennel(config)
        self.pack = nn.ModuleList(Terrier(config) for _ in range(config.num_hidden_layers))
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **_: Any,
    ) -> BaseModelOutput:
        hidden = self.kennel(input_ids, token_type_ids, position_ids, inputs_embeds)
        mask = torch.ones(hidden.shape[:2]) if attention_mask is None else attention_mask
        if mask.dim() == 2:
            mask = (1.0 - mask[:, None, None, :].float()) * torch.finfo(torch.float32).min
        for dog in self.pack:
            hidden = dog(hidden, mask)
        return BaseModelOutput(last_hidden_state=hidden)


class TerrierForSequenceClassification(TerrierPreTrainedModel):
    def __init__(self, config: TerrierConfig) -> None:
        super().__init__(config)
        self.terrier, self.bark = TerrierModel(config), nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(self, input_ids: Tensor | None = None, labels: Tensor | None = None, **more: Any) -> Any:
        more.pop("return_dict", None)
        logits = self.bark(self.terrier(input_ids, **more).last_hidden_state[:, 0])
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


def make() -> Any:
    """A tiny terrier with three classes whose weights are large enough to matter."""
    torch.manual_seed(0)
    model = TerrierForSequenceClassification(TerrierConfig(num_labels=3)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def register() -> None:
    """Makes the family known for good, as an edit of families.py and a package with its model would."""
    FAMILIES[TerrierConfig.model_type] = ROW
    transformers.AutoConfig.register(TerrierConfig.model_type, TerrierConfig)
    setattr(transformers, TerrierForSequenceClassification.__name__, TerrierForSequenceClassification)
