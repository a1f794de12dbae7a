"""A BERT-family model whose layers run in native code: the same class, the same call, the same outputs.

Tokens that the attention mask hides are not computed; their hidden states come out as zeros.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pinscher.errors import InputError
from pinscher.runtime import kernels
from pinscher.runtime.families import ACTIVATIONS, Family, relative_table

REFUSED = ("encoder_hidden_states", "encoder_attention_mask", "past_key_values", "output_attentions")


class Layers(nn.Module):
    """Stands where the layers were."""

    def __init__(self, native: Any, count: int, threads: int) -> None:
        super().__init__()
        self.native, self.count, self.threads = native, count, threads

    def forward(self, hidden: Tensor, mask: Tensor | None, every: bool) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """hidden [batch, tokens, width]; mask [batch, tokens] or None; also every layer's output, if asked for."""
        batch, tokens, width = hidden.shape
        seen = None if mask is None or bool(mask.all()) else mask.bool()
        rows = hidden.reshape(-1, width) if seen is None else hidden[seen]
        lengths = [tokens] * batch if seen is None else [n for n in seen.sum(1).tolist() if n]
        rows = rows.detach().float().contiguous()
        out = torch.empty_like(rows)
        states = torch.empty((self.count + 1) * len(rows), width) if every else None
        if len(rows):
            pool, isa = kernels.pool(self.threads), kernels.isa()
            self.native.run(pool, isa, rows.numpy(), lengths, out.numpy(), None if states is None else states.numpy())

        def placed(some: Tensor) -> Tensor:
            if seen is None:
                return some.view(batch, tokens, width)
            whole = torch.zeros(batch, tokens, width)
            whole[seen] = some
            return whole

        listed = None if states is None else tuple(placed(part) for part in states.view(self.count + 1, -1, width))
        return placed(out), listed

    def __deepcopy__(self, _: Any) -> Layers:
        return self  # weights in the kernels' layout are never changed: copies may share them


class FastEncoder:
    """Mixed into a copy of a base model (BertModel, …): its embeddings and pooler are torch's, its layers ours."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> Any:
        """As the model's own; see transformers."""
        me: Any = self
        if refused := [name for name in REFUSED if others.get(name) not in (None, False)]:
            raise InputError(f"the sparse runtime has no {refused[0]}: call the model it was made from.")
        if (input_ids is None) == (inputs_embeds is None):
            raise InputError("give either input_ids or inputs_embeds.")
        config = me.config
        every = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        as_dict = config.return_dict if return_dict is None else return_dict
        given = {"input_ids": input_ids, "position_ids": position_ids, "inputs_embeds": inputs_embeds}
        if me.takes_types:
            given["token_type_ids"] = token_type_ids
        with torch.no_grad():
            hidden = me.embeddings(**given)
            if hasattr(me, "embeddings_project"):
                hidden = me.embeddings_project(hidden)
            mask = _checked(attention_mask, hidden, whole=me.needs_whole)
            last, states = me.fast_layers(hidden, mask, bool(every))
            fields = {"last_hidden_state": last}
            if (pooler := getattr(me, "pooler", None)) is not None:
                fields["pooler_output"] = pooler(last)
            if states is not None:
                fields["hidden_states"] = states
            found = me.result_class(**fields)
        return found if as_dict else found.to_tuple()


def _checked(mask: Tensor | None, hidden: Tensor, whole: bool) -> Tensor | None:
    if mask is None:
        return None
    if mask.shape != hidden.shape[:2]:
        raise InputError(
            f"attention_mask has shape {list(mask.shape)}; the sparse runtime takes one number for each token, "
            f"{list(hidden.shape[:2])}."
        )
    if whole and bool((mask.bool()[:, 1:] & ~mask.bool()[:, :-1]).any()):
        raise InputError("this model knows where tokens are: the attention mask may only hide the end of a row.")
    return mask


def native_layers(base: Any, family: Family, packed: list[list[Any]], threads: int) -> Layers:
    """The layers of a base model; `packed` holds each layer's matrices in the order of `family.products`."""
    config, core = base.config, kernels.core()
    width, heads = config.hidden_size, getattr(config, family.heads)
    made = []
    for layer, matrices in zip(base.get_submodule(family.layers), packed, strict=True):
        biases = [_joined([layer.get_submodule(name).bias for name in names]) for names in family.products]
        norms = [layer.get_submodule(name) for name in family.norms]
        numbers = [_array(part) for norm in norms for part in (norm.weight, norm.bias)]
        made.append(core.Layer(matrices, biases, numbers, norms[0].eps))
    native = core.Encoder(width, heads, ACTIVATIONS[getattr(config, family.activation)], made)
    if (table := relative_table(base)) is not None:
        native.set_relative(table.numpy())
    return Layers(native, len(made), threads)


def _array(tensor: Tensor) -> Any:
    return tensor.detach().float().contiguous().numpy()


def _joined(biases: list[Tensor | None]) -> Any:
    some = [bias for bias in biases if bias is not None]
    return _array(torch.cat(some)) if len(some) == len(biases) else None
