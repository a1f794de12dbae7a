"""One matrix as bytes with a header and a checksum; docs/format.md describes every byte.

pack(weight, values="int8") -> bytes        unpack(bytes) -> tensor
"""

from __future__ import annotations

import struct
import threading
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pinscher.errors import InputError
from pinscher.registry import unknown
from pinscher.store import entropy
from pinscher.store.codecs import BY_NUMBER, CODECS, codec, smallest
from pinscher.store.quantize import LARGEST, Quantized, dequantize, quantize
from pinscher.store.streams import DamagedError, Reader, stream

MAGIC, VERSION = b"PNSR", 1
HEADER = struct.Struct("<4sBBBBIII")  # magic, version, codec, kind, flags, rows, columns, checksum
TRANSPOSED, SCALED = 1, 2  # flags
# The types of values; a file has the index in this list.
KINDS: tuple[torch.dtype, ...] = (
    torch.int8,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
KEPT = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
VALUES = (*LARGEST, *KEPT)
# A matrix of B bytes may hold at most FREE + EXPANSION * B bytes of weights; an emptier one is padded with zero bytes.
# All matrices of a model together share one FREE (file.py).
FREE, EXPANSION = 1 << 24, 2048


@dataclass(frozen=True)
class Head:
    """The header of a payload, checked."""

    codec: int
    dtype: torch.dtype
    rows: int
    columns: int
    transposed: bool
    scaled: bool

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the weight as its module has it."""
        return (self.columns, self.rows) if self.transposed else (self.rows, self.columns)


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
    least = -(-(_weight_bytes(len(codes), codes.shape[1], 4) - FREE) // EXPANSION)
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
    wanted = _weight_bytes(rows, columns, 4 if scales else matrix.element_size()) - FREE
    body += bytes(max(0, -(-wanted // EXPANSION) - len(body) - HEADER.size))
    flags = TRANSPOSED * transposed | SCALED * bool(scales)
    fields = (MAGIC, VERSION, chosen.number, KINDS.index(matrix.dtype), flags, rows, columns)
    return _sealed(fields, body)


def _weight_bytes(rows: int, columns: int, size: int) -> int:
    """The bytes of the weights; for an empty matrix those of its longer side, which has classes and scales too."""
    return max(rows, 1) * max(columns, 1) * size


def _only(matrix: Tensor, name: str) -> tuple[Any, bytes]:
    return codec(name), codec(name).encode(integers(matrix))


def declared(data: memoryview) -> int:
    """The bytes of the weights that a payload claims to hold, unverified; 0 if it is not a payload."""
    if len(data) < HEADER.size or bytes(data[:4]) != MAGIC:
        return 0
    _, _, _, kind, flags, rows, columns, _ = HEADER.unpack_from(data)
    size = 4 if flags & SCALED or kind >= len(KINDS) else KINDS[kind].itemsize
    return _weight_bytes(rows, columns, size)


def padded(data: memoryview, count: int) -> bytes:
    """The same payload with `count` more zero bytes at its end."""
    *fields, _ = HEADER.unpack_from(data)
    body = bytes(data[HEADER.size :]) + bytes(count)
    return _sealed(fields, body)


def _sealed(fields: Iterable[Any], body: bytes) -> bytes:
    """Header and body, with their checksum."""
    fields = tuple(fields)
    return HEADER.pack(*fields, zlib.crc32(body, zlib.crc32(HEADER.pack(*fields, 0)))) + body


def head(data: memoryview) -> Head:
    """The header of a payload, its checksum verified.

    Raises:
        DamagedError: with the cause.
    """
    if len(data) < HEADER.size:
        raise DamagedError("it is too short")
    magic, version, number, kind, flags, rows, columns, checksum = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise DamagedError("it is not a packed matrix")
    if version != VERSION:
        raise DamagedError(f"it has format version {version}, this pinscher reads {VERSION}: a newer one may read it")
    fields = HEADER.pack(magic, version, number, kind, flags, rows, columns, 0)
    if zlib.crc32(data[HEADER.size :], zlib.crc32(fields)) != checksum:
        raise DamagedError("its checksum is wrong: the file is damaged")
    if number not in BY_NUMBER or kind >= len(KINDS) or flags > TRANSPOSED | SCALED:
        raise DamagedError("it uses a codec or type that this pinscher does not know: update pinscher")
    found = Head(number, KINDS[kind], rows, columns, bool(flags & TRANSPOSED), bool(flags & SCALED))
    if found.scaled and found.dtype != torch.int8:
        raise DamagedError("scales without int8 codes")
    size = 4 if found.scaled else found.dtype.itemsize
    if _weight_bytes(rows, columns, size) > FREE + EXPANSION * len(data):
        raise DamagedError(f"it declares {rows} x {columns} weights, more than {len(data)} bytes can hold")
    return found


def unpack(data: bytes | memoryview | Tensor) -> Tensor:
    """The matrix in its module's layout: fp32 if it was quantised, else in its own type.

    Raises:
        DamagedError: for anything that `pack` cannot have written.
    """
    whole = view(data)
    found = head(whole)
    reader = Reader(whole[HEADER.size :])
    weight = _scaled(reader, found) if found.scaled else _codes(reader, found).view(found.dtype)
    _finish(reader)
    return weight.T.contiguous() if found.transposed else weight


def _finish(reader: Reader) -> None:
    if any(reader.take(len(reader.data) - reader.at)):
        raise DamagedError("bytes are left over")


def _codes(reader: Reader, found: Head) -> Tensor:
    dtype = torch.empty(0, dtype=BITS[found.dtype.itemsize]).numpy().dtype
    matrix = BY_NUMBER[found.codec].decode(reader, found.rows, found.columns, dtype)
    return torch.from_numpy(np.require(matrix, requirements="W"))


def _scaled(reader: Reader, found: Head) -> Tensor:
    scale = _scale(reader, found.rows)
    if found.codec == CODECS["entropy"].number:  # directly to fp32, without intermediate codes
        return torch.from_numpy(entropy.decode(reader, found.rows, found.columns, np.dtype(np.int8), scale.numpy()))
    return dequantize(_codes(reader, found), scale)


def unpack_rows(data: bytes | memoryview | Tensor) -> Quantized | Tensor:
    """The matrix with output rows first, whatever its module's layout: codes and scales if it was quantised.

    Raises:
        DamagedError: for anything that `pack` cannot have written.
    """
    whole = view(data)
    found = head(whole)
    reader = Reader(whole[HEADER.size :])
    scale = _scale(reader, found.rows) if found.scaled else None
    codes = _codes(reader, found)
    _finish(reader)
    return codes.view(found.dtype) if scale is None else Quantized(codes, scale)


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
        return memoryview(data.contiguous().numpy()).cast("B")  # type: ignore[arg-type]
    return memoryview(data)


def _scale(reader: Reader, rows: int) -> Tensor:
    bits = reader.stream(rows)
    if bits.size != rows or (rows and bits.dtype != np.uint16):
        raise DamagedError("the scales do not fit the rows")
    scale = torch.from_numpy(bits.astype(np.uint16)).view(torch.bfloat16).float()
    if not (torch.isfinite(scale) & (scale >= 0)).all():
        raise DamagedError("a scale is not a positive number")
    return scale


def integers(matrix: Tensor) -> Any:
    """The bits of a matrix as signed integers of its size: zero is zero, and -0.0 is not."""
    return matrix.contiguous().view(BITS[matrix.element_size()]).numpy()
