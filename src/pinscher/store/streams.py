"""The coders behind the codecs: streams of numbers near their entropy, and small integers in few bytes.

The entropy coder is pcodec's: tANS over bins it chooses itself, written in Rust, maintained, with a stable format. A
stream is chunks of pages in its "wrapped" form. docs/format.md compares it with others.

    stream   varint count | then, if count > 0: u8 kind | varint bytes | each chunk's meta and pages, as pcodec has them

A Reader never reads past its end and never allocates more numbers than the caller allows.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pcodec import ChunkConfig, DeltaSpec, ModeSpec, PagingSpec
from pcodec.wrapped import FileCompressor, FileDecompressor

from pinscher.errors import InputError

Array = NDArray[Any]
# The types of numbers in a stream, which stores the index in this list.
KINDS = tuple(np.dtype(kind) for kind in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"))
NAMES = ("u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64")
PAGE = 1 << 23  # numbers in one page
CHUNK = 2 * PAGE  # numbers in one chunk, pcodec's maximum
CLASSIC = 0  # the start of a chunk without any of pcodec's transforms
LEVEL = 12  # as many bins as there are codes: decoding is as fast with few


class DamagedError(InputError):
    """A stored matrix or file cannot be what was written."""


def small_unsigned(values: Array) -> Array:
    """The same numbers in the smallest unsigned type that holds them."""
    most = int(values.max()) if values.size else 0
    kind = next(k for k in ("uint8", "uint16", "uint32", "uint64") if most <= np.iinfo(k).max)
    return values.astype(kind)


def varint(number: int) -> bytes:
    """LEB128: seven bits a byte, lowest first."""
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


@functools.cache
def _file() -> tuple[Any, Any]:
    """The coder and the decoder; pcodec's own file header has only its version, which ours implies."""
    coder = FileCompressor()
    return coder, FileDecompressor.new(coder.write_header())[0]


def _config(count: int) -> ChunkConfig:
    pages = [PAGE] * (count // PAGE) + ([count % PAGE] if count % PAGE else [])
    return ChunkConfig(
        compression_level=LEVEL,
        mode_spec=ModeSpec.classic(),
        delta_spec=DeltaSpec.no_op(),
        paging_spec=PagingSpec.exact_page_sizes(pages),
        enable_8_bit=True,
    )


def stream(values: Array) -> bytes:
    """One-dimensional integers as a stream."""
    if not values.size:
        return varint(0)
    parts: list[bytes] = []
    for start in range(0, values.size, CHUNK):
        some = np.ascontiguousarray(values[start : start + CHUNK])
        chunk = _file()[0].chunk_compressor(some, _config(some.size))
        parts += [chunk.write_meta(), *(chunk.write_page(page) for page in range(len(chunk.n_per_page())))]
    body = b"".join(parts)
    return varint(values.size) + bytes([KINDS.index(values.dtype)]) + varint(len(body)) + body


class Reader:
    """Reads bytes in order, with checks at every step."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> memoryview:
        if count < 0 or count > len(self.data) - self.at:
            raise DamagedError("the data ends too early")
        self.at += count
        return self.data[self.at - count : self.at]

    def varint(self) -> int:
        number = 0
        for shift in range(0, 63, 7):
            byte = self.take(1)[0]
            number |= (byte & 127) << shift
            if byte < 128:
                return number
        raise DamagedError("a length is out of range")

    def array(self, dtype: np.dtype[Any], count: int) -> Array:
        return np.frombuffer(self.take(count * dtype.itemsize), dtype=dtype)

    def bits(self, count: int) -> Array:
        """So many bits as booleans, most significant first; those that fill the last byte must be zero."""
        bits = np.unpackbits(self.array(np.dtype(np.uint8), -(-count // 8)))
        if bits[count:].any():
            raise DamagedError("bits are set past the last place")
        return bits[:count].view(bool)

    def stream(self, most: int) -> Array:
        """The numbers of a stream; more than `most` of them are refused before memory is allocated."""
        count = self.varint()
        if count > most:
            raise DamagedError(f"a stream of {count} numbers where at most {most} can be")
        if not count:
            return np.empty(0, np.uint8)
        kind = self.take(1)[0]
        if kind >= len(KINDS):
            raise DamagedError(f"unknown kind of number {kind}")
        body = bytes(self.take(self.varint()))
        out = np.empty(count, KINDS[kind])
        try:
            _fill(out, body, NAMES[kind])
        except DamagedError:
            raise
        except BaseException as error:  # a panic in Rust is not an Exception
            if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
                raise
            raise DamagedError(f"a stream cannot be decoded ({type(error).__name__})") from None
        return out

    def finished(self) -> None:
        if self.at != len(self.data):
            raise DamagedError(f"{len(self.data) - self.at} bytes too many")


def _fill(out: Array, body: bytes, name: str) -> None:
    at = 0
    chunk: Any = None
    for start in range(0, len(out), PAGE):
        if start % CHUNK == 0:
            if body[at : at + 1] != bytes([CLASSIC]):
                raise DamagedError("a stream is coded in a way that is never written")
            chunk, used = _file()[1].chunk_decompressor(body[at:], name)
            at += used
        part = out[start : start + PAGE]
        progress, used = chunk.read_page_into(body[at:], len(part), part)
        if progress.n_processed != len(part):
            raise DamagedError("a stream holds fewer numbers than it says")
        at += used
    if at != len(body):
        raise DamagedError("a stream is longer than its numbers")


__all__ = ["DamagedError", "Reader", "small_unsigned", "stream", "varint"]
