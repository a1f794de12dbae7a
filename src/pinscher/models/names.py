"""What the names of modules and tensors tell by themselves, without a model and without torch.

Names are stripped of what wrappers add, and shortened for display. For a checkpoint without its model, they are used to
guess what a tensor is; with a model, blocks.py knows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# What DDP, torch.compile, FSDP, activation checkpointing, DeepSpeed and peft put between the parts of a path.
_WRAPPERS = re.compile(
    r"(^base_model\.model(?=\.))|(^|\.)(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module"
    r"|_forward_module|base_layer)(?=\.|$)"
)
_ADAPTERS = re.compile(r"(^|\.)(lora_\w+|original_module)(\.|$)")  # peft's own parts, and the heads that it replaced

HEAD_COUNTS = ("num_attention_heads", "num_heads", "n_heads", "n_head")  # names of the number of attention heads
_WIDTHS = ("hidden_size", "dim", "n_embd", "d_model")

# Without a model, matrices are recognised by name and shape. These names are not matrices of a block:
_OUTSIDE = re.compile(
    r"(^|[._])(embed\w*|\w*embeddings?|wte|wpe|tok\w*_emb\w*|pos\w*_emb\w*|shared|lm_head|classifier|score|pooler|cls"
    r"|qa_outputs|head|norm|LayerNorm|ln_\w+|relative_attention_bias)([._]|$)"
)
_LOPSIDED = 8  # a matrix with one side at least this many times the other is a vocabulary or a head
_NUMBERED = re.compile(r"^(.*?\.?\d+)\.(.+)$")
_INPUTS_FIRST = re.compile(r"(^|\.)(c_attn|c_fc|c_proj|q_attn)$")  # GPT-2's Conv1D
_HEADS_AS_ROWS = re.compile(r"(^|[._])(query|key|value|[qkv](_proj|_lin)?|c_attn|query_key_value|[qkv]_attn)$")
_HEADS_AS_COLUMNS = re.compile(r"attention\.output\.dense$|(^|\.)(o|o_proj|out_lin|out_proj|attn\.c_proj)$")


@dataclass(frozen=True)
class Place:
    """Where a matrix belongs."""

    name: str  # of its module
    parameter: str  # its own name in that module, mostly "weight"
    block: str  # the transformer block it lies in, e.g. "bert.encoder.layer.3"; "" outside of all
    kind: str  # its place in that block, e.g. "attention.self.query"
    transposed: bool = False  # stored [inputs, outputs]


# ------------------------------------------------------------ clean and short


def clean_name(name: str) -> str:
    """A path without what wrappers add to it."""
    return _WRAPPERS.sub("", name).lstrip(".")


def is_of_adapter(name: str) -> bool:
    """Whether a path leads into an adapter, or to the copy of a module that peft keeps beside the one it trains."""
    return bool(_ADAPTERS.search(name))


def short_names(names: Sequence[str]) -> list[str]:
    """Each dotted name's shortest ending that no other name has."""
    shorts = []
    for name in names:
        pieces = name.split(".")
        endings = [".".join(pieces[-length:]) for length in range(1, len(pieces) + 1)]
        alone = (e for e in endings if sum(f".{other}".endswith(f".{e}") for other in names) == 1)
        shorts.append(next(alone, name))
    return shorts


def short_blocks(blocks: Sequence[str]) -> list[str]:
    """Paths of blocks without what all of them have in common: mostly their numbers."""
    pieces = [block.split(".") for block in blocks]
    different = len({*blocks}) > 1
    common = 0
    while pieces and all(len(p) > common + 1 for p in pieces):
        if different and len({p[common] for p in pieces}) > 1:
            break
        common += 1
    return [".".join(p[common:]) or "-" for p in pieces]


# ------------------------------------------------------------ guesses


def guessed(tensors: Mapping[str, Any]) -> list[tuple[Place, Any]]:
    """The matrices among some tensors by name and shape alone, where no model is known.

    Every two-dimensional floating-point tensor of a numbered block (`layers.3.…`) that is not named like an embedding,
    a norm or a head. Where nothing is numbered: every such tensor of which no side is 8 times the other.
    """
    matrices = {
        name: tensor
        for name, tensor in tensors.items()
        if tensor.dim() == 2 and tensor.is_floating_point() and not _OUTSIDE.search(name)
    }
    numbered = {name: match for name in matrices if (match := _NUMBERED.match(name))}
    found = []
    for name, tensor in matrices.items():
        stem, _, parameter = name.rpartition(".")
        match = numbered.get(name)
        if numbered and not match:
            continue
        if not numbered and max(tensor.shape) >= _LOPSIDED * max(1, min(tensor.shape)):
            continue
        kind = match[2].removesuffix(f".{parameter}") if match else stem
        transposed = bool(_INPUTS_FIRST.search(stem))
        found.append((Place(stem, parameter, match[1] if match else "", kind, transposed), tensor))
    return found


def head_size(config: Mapping[str, Any]) -> int:
    """Features of one attention head, by the names that configurations give it; 0 if unknown."""
    heads, width, told = (_first_size(config, names) for names in (HEAD_COUNTS, _WIDTHS, ("head_dim", "d_kv")))
    return told or (width // heads if heads else 0)


def _first_size(config: Mapping[str, Any], names: Sequence[str]) -> int:
    """The first positive whole number under some names; 0 if there is none. The file may hold anything."""
    values = (config.get(name) for name in names)
    return next((value for value in values if type(value) is int and value > 0), 0)


def head_axis(kind: str) -> int | None:
    """0 where the rows of a matrix belong to attention heads, 1 where its columns do, None elsewhere."""
    return 0 if _HEADS_AS_ROWS.search(kind) else 1 if _HEADS_AS_COLUMNS.search(kind) else None
