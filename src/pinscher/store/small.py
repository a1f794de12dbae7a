"""The small file, first version: every matrix in INT8 with a scale for each row, zeros as one bit each.

    matrix W [rows, columns]   scale_i = max_j |W_ij| / 127,  code_ij = round(W_ij / scale_i)
    NAME.scale   float32 [rows]
    NAME.codes   int8, the codes of the kept weights in row order (all of them where a mask would not pay)
    NAME.mask    uint8, one bit a weight, 1 = kept, most significant bit first, rows not padded

Everything else is stored as it is, tied weights once. One safetensors file, written whole or not at all. A kept weight
whose code is 0 stays a kept weight: reading gives zeros where there were zeros, and perhaps a few more.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

NAME, FORMAT = "small.safetensors", "pinscher-small-1"
FULL = 127


def write(state: Mapping[str, Tensor], folder: str | os.PathLike[str]) -> Path:
    """Stores a model's state dict; returns the file.

    Raises:
        ValueError: for weights that are not finite. Nothing is written then.
    """
    path = Path(folder) / NAME
    tensors: dict[str, Tensor] = {}
    shapes: dict[str, list[int]] = {}
    tied: dict[str, str] = {}
    seen: dict[tuple[int, torch.Size], str] = {}
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tensor.shape)
        if key in seen and tensor.numel():
            tied[name] = seen[key]
            continue
        seen[key] = name
        if not is_packed(tensor):
            tensors[name] = tensor.detach().cpu().contiguous().clone()
            continue
        shapes[name] = list(tensor.shape)
        tensors |= {f"{name}.{part}": value for part, value in encode(tensor.detach().cpu().float(), name).items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.new")
    metadata = {"format": FORMAT, "shapes": json.dumps(shapes), "tied": json.dumps(tied)}
    save_file(tensors, fresh, metadata=metadata)
    with open(fresh, "rb") as file:
        os.fsync(file.fileno())
    fresh.replace(path)
    return path


def read(folder: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The state dict in fp32, with the zeros where they were.

    Raises:
        ValueError: if the file is damaged or of another format.
    """
    path = Path(folder) / NAME
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError(f"{path} is not a file of format {FORMAT}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
        shapes, tied = json.loads(metadata["shapes"]), json.loads(metadata["tied"])
    except (SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    packed = {f"{name}.{part}" for name in shapes for part in ("scale", "codes", "mask")}
    state = {name: tensor for name, tensor in tensors.items() if name not in packed}
    for name, shape in shapes.items():
        parts = {part: tensors.get(f"{name}.{part}") for part in ("scale", "codes", "mask")}
        state[name] = decode(parts, torch.Size(shape), name)
    return state | {name: state[other] for name, other in tied.items()}


def is_packed(tensor: Tensor) -> bool:
    """Whether a tensor is stored as INT8: every matrix of numbers."""
    return tensor.dim() == 2 and tensor.is_floating_point() and tensor.numel() > 0


def encode(weight: Tensor, name: str) -> dict[str, Tensor]:
    """A matrix as its parts."""
    if not torch.isfinite(weight).all():
        raise ValueError(f"{name} holds values that are not finite")
    scale = weight.abs().amax(1) / FULL
    codes = torch.round(weight / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).to(torch.int8)
    kept = weight != 0
    if not mask_pays(weight.numel(), int(kept.sum())):
        return {"scale": scale, "codes": codes.reshape(-1).clone()}
    return {"scale": scale, "codes": codes[kept], "mask": _packed_bits(kept.reshape(-1))}


def decode(parts: Mapping[str, Tensor | None], shape: torch.Size, name: str) -> Tensor:
    """The matrix that `encode` stored, in fp32."""
    scale, codes, mask = parts["scale"], parts["codes"], parts.get("mask")
    if scale is None or codes is None or len(shape) != 2 or scale.shape != shape[:1]:
        raise ValueError(f"{name} is damaged: its parts do not fit its shape")
    values = torch.zeros(shape.numel(), dtype=torch.int8)
    if mask is None:
        if codes.numel() != shape.numel():
            raise ValueError(f"{name} is damaged: {codes.numel()} codes for {shape.numel()} weights")
        values.copy_(codes)
    else:
        kept = _bits(mask, shape.numel(), name)
        if int(kept.sum()) != codes.numel():
            raise ValueError(f"{name} is damaged: {codes.numel()} codes for {int(kept.sum())} kept weights")
        values[kept] = codes
    return values.view(shape).float() * scale[:, None]


def matrix_bytes(rows: int, columns: int, kept: int) -> int:
    """What a matrix takes in the file, without its entry in the header."""
    weights = rows * columns
    return 4 * rows + (kept + -(-weights // 8) if mask_pays(weights, kept) else weights)


def mask_pays(weights: int, kept: int) -> bool:
    return kept + -(-weights // 8) < weights


def _packed_bits(kept: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(kept.to(torch.uint8), (0, -kept.numel() % 8)).view(-1, 8)
    return (padded << torch.arange(7, -1, -1, dtype=torch.uint8)).sum(1).to(torch.uint8)


def _bits(mask: Tensor, count: int, name: str) -> Tensor:
    if mask.dtype != torch.uint8 or mask.numel() != -(-count // 8):
        raise ValueError(f"{name} is damaged: its mask does not fit its shape")
    bits = (mask[:, None] >> torch.arange(7, -1, -1, dtype=torch.uint8)) & 1
    return bits.reshape(-1)[:count].bool()
