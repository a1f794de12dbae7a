"""Which tensors of a checkpoint are matrices of its blocks: by the model where it is known, else by name and shape."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

# Without a model to ask, matrices are recognised by name and shape. These are no matrices of a block:
OUTSIDE = re.compile(
    r"(^|[._])(embed\w*|\w*embeddings?|wte|wpe|tok\w*_emb\w*|pos\w*_emb\w*|shared|lm_head|classifier|score|pooler|cls"
    r"|qa_outputs|head|norm|LayerNorm|ln_\w+|relative_attention_bias)([._]|$)"
)
LOPSIDED = 8  # a matrix with one side so many times the other is a vocabulary or a head
NUMBERED = re.compile(r"^(.*?\.?\d+)\.(.+)$")
INPUTS_FIRST = re.compile(r"(^|\.)(c_attn|c_fc|c_proj|q_attn)$")  # GPT-2's Conv1D
HEADS_AS_ROWS = re.compile(r"(^|[._])(query|key|value|[qkv](_proj|_lin)?|c_attn|query_key_value|[qkv]_attn)$")
HEADS_AS_COLUMNS = re.compile(r"attention\.output\.dense$|(^|\.)(o|o_proj|out_lin|out_proj|attn\.c_proj)$")


@dataclass(frozen=True)
class Place:
    """Where a matrix belongs."""

    name: str  # of its parameter, without .weight
    parameter: str
    block: str
    kind: str
    transposed: bool = False  # stored with inputs first


def placed(tensors: Mapping[str, Tensor], places: Sequence[Place]) -> tuple[list[tuple[Place, Tensor]], int]:
    """The tensors of the model's own places under the file's own names, and how many places have none.

    These names may lack the model's prefix (`encoder.layer…` for `bert.encoder.layer…`), or have one more.
    """
    found, missing = [], 0
    for place in places:
        name = f"{place.name}.{place.parameter}"
        pieces = name.split(".")
        shorter = (".".join(pieces[cut:]) for cut in range(len(pieces) - 1) if any(map(str.isdigit, pieces[cut:])))
        hit = next((n for n in shorter if n in tensors), None)
        hit = hit or next((n for n in tensors if n.endswith(f".{name}")), None)
        if hit is None or tensors[hit].dim() != 2:
            missing += 1
        else:
            found.append((replace(place, name=hit.removesuffix(f".{place.parameter}")), tensors[hit]))
    return found, missing


def guessed(tensors: Mapping[str, Tensor]) -> list[tuple[Place, Tensor]]:
    """Matrices by name and shape alone, where no model is known.

    Every two-dimensional floating-point tensor of a numbered block (`layers.3.…`) that is not named like an embedding,
    a norm or a head. Where nothing is numbered: every such tensor of which no side is 8 times the other.
    """
    matrices = {
        name: tensor
        for name, tensor in tensors.items()
        if tensor.dim() == 2 and tensor.is_floating_point() and not OUTSIDE.search(name)
    }
    numbered = {name: match for name in matrices if (match := NUMBERED.match(name))}
    found = []
    for name, tensor in matrices.items():
        stem, _, parameter = name.rpartition(".")
        match = numbered.get(name)
        if numbered and not match:
            continue
        if not numbered and max(tensor.shape) >= LOPSIDED * max(1, min(tensor.shape)):
            continue
        kind = match[2].removesuffix(f".{parameter}") if match else stem
        flipped = bool(INPUTS_FIRST.search(stem))
        found.append((Place(stem, parameter, match[1] if match else "", kind, flipped), tensor))
    return found


def head_size(config: Mapping[str, Any]) -> int:
    """Features of one attention head, by the names that configurations give it; 0 if unknown."""
    heads = next((config[n] for n in ("num_attention_heads", "n_heads", "n_head", "num_heads") if config.get(n)), 0)
    width = next((config[n] for n in ("hidden_size", "dim", "n_embd", "d_model") if config.get(n)), 0)
    told = config.get("head_dim") or config.get("d_kv")
    return int(told or (width // heads if heads else 0))


def head_axis(kind: str) -> int | None:
    """0 where the rows of a matrix belong to attention heads, 1 where its columns do, None elsewhere."""
    return 0 if HEADS_AS_ROWS.search(kind) else 1 if HEADS_AS_COLUMNS.search(kind) else None
