"""One matrix as bytes with a header and a checksum; docs/format.md describes every byte.

pack(weight, values="int8") -> bytes        unpack(bytes) -> tensor
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from pinscher.errors import InputError
from pinscher.registry import unknown
from pinscher.store import unpacking
from pinscher.store.codecs import CODECS, codec, smallest
from pinscher.store.integers import Coded
from pinscher.store.quantize import LARGEST, Quantized, quantize
from pinscher.store.streams import DamagedError, stream
from pinscher.store.unpacking import (
    EXPANSION,
    FREE,
    HEADER,
    MAGIC,
    SCALED,
    TRANSPOSED,
    VERSION,
    Head,
    declared,
    head,
    weight_bytes,
)

# The types of values; a file has the index in this list.
KINDS: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in unpacking.KINDS)
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
KEPT = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
VALUES = (*LARGEST, *KEPT)


def pack(
    weight: Tensor,
    values: str | None = None,
    *,
    transposed: bool = False,
    codecs: tuple[str, ...] = tuple(CODECS),
    importance: Tensor | None = None,
    search: bool = True,
) -> bytes:
    """A matrix as bytes.

    Args:
        weight: any two-dimensional tensor.
        values: "int8", "int6", "int4", "fp32", "fp16", "bf16", or None to keep them as they are, bit for bit.
        transposed: the module stores [inputs, outputs]; in the file, output rows come first in any case.
        codecs: the candidates; the smallest result is chosen.
        importance: mean square of each input, for the scales.
        search: see `quantize`.

    Raises:
        InputError: for NaN, an unknown name or a tensor that is not a matrix.
    """
    if weight.dim() != 2:
        raise InputError(f"a tensor of {weight.dim()} dimensions is not a matrix")
    weight = weight.detach().cpu()
    matrix = (weight.T if transposed else weight).contiguous()
    scales = b""
    if values in LARGEST:
        matrix, scale = quantize(matrix, values, importance, search=search)
        scales = stream(scale.bfloat16().view(torch.uint16).numpy())
    elif values is not None:
        matrix = matrix.to(_kept(values))
        if not torch.isfinite(matrix).all():
            raise InputError(f"it holds NaN, infinity, or a number too large for {values}")
    if matrix.is_floating_point() and torch.isnan(matrix.float()).any():
        raise InputError("it holds NaN")
    return _assemble(matrix, scales, transposed, codecs)


def sizes(weight: Tensor, values: str = "int8") -> dict[str, int]:
    """Bytes that `pack` makes of a matrix, outputs first, with each codec alone."""
    codes, scale = quantize(weight, values)
    fixed = HEADER.size + len(stream(scale.bfloat16().view(torch.uint16).numpy()))
    least = -(-(weight_bytes(len(codes), codes.shape[1], 4) - FREE) // EXPANSION)
    return {name: max(fixed + len(each.encode(codes.numpy())), least) for name, each in CODECS.items()}


def _kept(values: str) -> torch.dtype:
    if values not in KEPT:
        raise InputError(unknown("values", values, VALUES) + ".")
    return KEPT[values]


def _assemble(matrix: Tensor, scales: bytes, transposed: bool, names: tuple[str, ...]) -> bytes:
    rows, columns = matrix.shape
    if max(rows, columns) >= 1 << 32 or matrix.dtype not in KINDS:
        raise InputError(f"cannot store a matrix of {rows} x {columns} {matrix.dtype}")
    chosen, body = smallest(integers(matrix), names) if len(names) > 1 else _only(matrix, names[0])
    body = scales + body
    wanted = weight_bytes(rows, columns, 4 if scales else matrix.element_size()) - FREE
    body += bytes(max(0, -(-wanted // EXPANSION) - len(body) - HEADER.size))
    flags = TRANSPOSED * transposed | SCALED * bool(scales)
    fields = (MAGIC, VERSION, chosen.number, KINDS.index(matrix.dtype), flags, rows, columns)
    return _sealed(fields, body)


def _only(matrix: Tensor, name: str) -> tuple[Any, bytes]:
    return codec(name), codec(name).encode(integers(matrix))


def padded(data: memoryview, count: int) -> bytes:
    """The same payload with `count` more zero bytes at its end."""
    *fields, _ = HEADER.unpack_from(data)
    body = bytes(data[HEADER.size :]) + bytes(count)
    return _sealed(fields, body)


def _sealed(fields: Iterable[Any], body: bytes) -> bytes:
    """Header and body, with their checksum."""
    fields = tuple(fields)
    return HEADER.pack(*fields, zlib.crc32(body, zlib.crc32(HEADER.pack(*fields, 0)))) + body


def unpack(data: bytes | memoryview | Tensor) -> Tensor:
    """The matrix in its module's layout: fp32 if it was quantised, else in its own type.

    Raises:
        DamagedError: for anything that `pack` cannot have written.
    """
    matrix, found = unpacking.unpack(view(data))
    weight = torch.from_numpy(matrix)
    if not found.scaled:
        weight = weight.view(getattr(torch, found.kind))
    return weight.T.contiguous() if found.transposed else weight


def unpack_rows(data: bytes | memoryview | Tensor) -> Quantized | Tensor:
    """The matrix with output rows first, whatever its module's layout: codes and scales if it was quantised.

    Raises:
        DamagedError: for anything that `pack` cannot have written.
    """
    made, found = unpacking.unpack_rows(view(data))
    if isinstance(made, Coded):
        return Quantized(torch.from_numpy(made.codes), torch.from_numpy(made.scale))
    return torch.from_numpy(made).view(getattr(torch, found.kind))


_STARTING = threading.Lock()


def workers(count: int) -> ThreadPoolExecutor:
    """Threads that may use torch; each sets torch's own threads in turn, because torch does not synchronise that."""

    def start() -> None:
        with _STARTING:
            torch.get_num_threads()

    start()
    return ThreadPoolExecutor(count, initializer=start)


def view(data: bytes | memoryview | Tensor) -> memoryview:
    """The bytes of a payload, from any kind of buffer."""
    if isinstance(data, Tensor):
        if data.dtype != torch.uint8 or data.dim() != 1:
            raise DamagedError("it is not a packed matrix")
        return unpacking.view(data.contiguous().numpy())
    return unpacking.view(data)


def integers(matrix: Tensor) -> Any:
    """The bits of a matrix as signed integers of its size: zero is zero, and -0.0 is not."""
    return matrix.contiguous().view(BITS[matrix.element_size()]).numpy()


__all__ = ["EXPANSION", "FREE", "HEADER", "TRANSPOSED", "Head", "declared", "head", "pack", "unpack", "unpack_rows"]
