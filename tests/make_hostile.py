"""Writes tests/hostile/: small files, each with one thing wrong, as an attacker would make them: checksums are right
unless they are what is wrong.

    python tests/make_hostile.py

FILES has the message for every file. store/test_file_hostile.py reads the folder, not this script, so the bytes
stay as they were when the fault was found. None stands for a fault that cannot be told from a real, if odd, file: then
a matrix of the declared shape is as good an answer as an error. No file may cost memory or time.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pcodec import ChunkConfig, DeltaSpec, ModeSpec, PagingSpec
from pcodec.wrapped import FileCompressor

from pinscher.store import file, payload
from pinscher.store.streams import KINDS, stream, varint
from tiny_store import joined, resealed, sealed, vector

FOLDER = Path(__file__).parent / "store" / "hostile"
DENSE, CSR, DELTA, BITMASK, ENTROPY, BLOCKS = range(6)
INT8, FP32, INT64 = 0, 1, 8
SCALED = 2
MOST = 2**32 - 1
FLAT = varint(0) * 2  # classes that are all 0
U16 = np.dtype("<u2")
BLOCK = FLAT + varint(1) + stream(np.zeros(1, np.uint8))  # the first of the blocks
WEIGHT = torch.tensor([[1.5, 0, 0, -2], [0, 0, 3, 0]])


def u32(*numbers: int) -> bytes:
    return np.array(numbers, "<u4").tobytes()


def ones(count: int, kind: str = "int8") -> bytes:
    return stream(np.ones(count, kind))


def gaps(*numbers: int, kind: str = "uint8") -> bytes:
    return stream(np.array(numbers, kind))


def raw(count: int, kind: str, body: bytes) -> bytes:
    """A stream with any bytes in it."""
    return varint(count) + bytes([KINDS.index(np.dtype(kind))]) + varint(len(body)) + body


def matrix(body: bytes, rows: int = 2, columns: int = 2, kind: int = INT8) -> bytes:
    return sealed(ENTROPY, kind, 0, rows, columns, body)


def blocks(tall: int, wide: int, body: bytes, rows: int = 2, columns: int = 4, coding: int = 1) -> bytes:
    return sealed(BLOCKS, INT8, 0, rows, columns, bytes([tall, wide, coding]) + body)


def values(made: bytes, count: int = 4, kind: int = INT8) -> bytes:
    """A row of `count` kept weights, whose stream of values is `made`."""
    return matrix(FLAT + varint(count) + varint(0) + FLAT + made, 1, count, kind)


def pcodec(numbers: np.ndarray, mode: Any = None, delta: Any = None, change: tuple[int, int] | None = None) -> bytes:
    """A stream in a way of pcodec's that we never write; `change` replaces a byte of its description."""
    config = ChunkConfig(
        compression_level=8,
        mode_spec=mode or ModeSpec.classic(),
        delta_spec=delta or DeltaSpec.no_op(),
        paging_spec=PagingSpec.exact_page_sizes([len(numbers)]),
        enable_8_bit=True,
    )
    chunk = FileCompressor().chunk_compressor(numbers, config)
    meta = bytearray(chunk.write_meta())
    if change is not None:
        meta[change[0]] = change[1]
    return raw(len(numbers), str(numbers.dtype), bytes(meta) + chunk.write_page(0))


def repeated(kind: str) -> np.ndarray:
    return (np.tile(np.arange(50), 20) * 2 + 1).astype(kind)


def edited(place: int, change: bytes) -> bytes:
    """A real payload with some header bytes replaced."""
    data = payload.pack(WEIGHT, "int8", codecs=("csr",), search=False)
    return resealed(data[:place] + change + data[place + len(change) :])


def value_levels(count: int, kind: str, number: int) -> bytes:
    """95 levels of values, each claiming all the kept weights."""
    rows = np.zeros(count, np.uint8)
    rows[0] = 47
    classes = stream(rows) + stream(np.array([47], np.uint8))
    return matrix(FLAT + varint(count) + varint(0) + classes + ones(count, kind) * 95, count, 1, number)


def mask_levels(count: int) -> bytes:
    """95 levels of the mask, each claiming a stream as long as the matrix."""
    rows = np.zeros(count, np.uint8)
    rows[0] = 47
    level = varint(1) + stream(np.zeros(count - 1, np.uint32))
    return matrix(stream(rows) + stream(np.array([47], np.uint8)) + level * 95, count, 1)


def block_value_levels(count: int) -> bytes:
    """The same for blocks of two weights."""
    rows = np.zeros(count, np.uint8)
    rows[0] = 47
    classes = stream(rows) + stream(np.array([47], np.uint8))
    body = FLAT + varint(count // 2) + varint(0) + classes + ones(count) * 95
    return blocks(2, 1, body, count, 1)


def block_mask_levels(count: int) -> bytes:
    rows = np.zeros(count, np.uint8)
    rows[0] = 47
    level = varint(1) + stream(np.zeros(count - 1, np.uint32))
    return blocks(2, 1, stream(rows) + stream(np.array([47], np.uint8)) + level * 95, 2 * count, 1)


Made = bytes | Callable[[], bytes]  # what takes a while is only made for the folder
PAYLOADS: dict[str, tuple[Made, str | None]] = {
    "empty": (b"", "too short"),
    "header-cut": (payload.pack(WEIGHT)[:19], "too short"),
    "magic": (edited(0, b"\x7fELF"), "not a packed matrix"),
    "version": (edited(4, b"\2"), "format version 2"),
    "codec-unknown": (edited(5, b"\xff"), "does not know"),
    "type-unknown": (edited(6, b"\x0c"), "does not know"),
    "flags-unknown": (edited(7, b"\x82"), "does not know"),
    "scales-for-floats": (edited(6, b"\1"), "scales without int8 codes"),
    "checksum": (payload.pack(WEIGHT)[:16] + bytes(4) + payload.pack(WEIGHT)[20:], "checksum"),
    "cut": (resealed(payload.pack(WEIGHT, codecs=("dense",))[:-1]), "too early"),
    "longer": (resealed(payload.pack(WEIGHT, codecs=("dense",)) + b"\1"), "left over"),
    "huge-square": (edited(8, u32(MOST, MOST)), "more than .* bytes can hold"),
    "huge-rows": (edited(8, u32(MOST)), "more than .* bytes can hold"),
    "huge-by-overflow": (edited(8, u32(1 << 31, 1 << 31)), "more than .* bytes can hold"),
    "just-too-large": (matrix(FLAT + varint(0) * 5, 1 << 13, 1 << 12), "more than .* bytes can hold"),
    "rows-of-nothing": (matrix(FLAT + varint(0) * 5, MOST, 0), None),
    "columns-of-nothing": (matrix(FLAT + varint(0) * 5, 0, MOST), None),
    "many-rows-of-nothing": (matrix(FLAT + varint(0) * 5, 10**8, 0), None),
    "many-columns-of-nothing": (matrix(FLAT + varint(0) * 5, 0, 10**8), None),
    "dense-rows-of-nothing": (sealed(DENSE, INT8, 0, MOST, 0, b""), None),
    "csr-columns-of-nothing": (sealed(CSR, INT8, 0, 0, MOST, u32(0)), None),
    "scales-of-nothing": (lambda: sealed(DENSE, INT8, SCALED, 1 << 24, 0, stream(np.full(1 << 24, 0x3F80, U16))), None),
    "scales-too-many-declared": (sealed(DENSE, INT8, SCALED, MOST, 0, varint(MOST) + b"\2\1\0"), None),
    "scales-too-few": (sealed(DENSE, INT8, SCALED, 2, 1, stream(np.array([1], U16)) + b"12"), "scales do not fit"),
    "scales-signed": (sealed(DENSE, INT8, SCALED, 1, 1, gaps(1, kind="int16") + b"1"), "scales do not fit"),
    "scale-nan": (sealed(DENSE, INT8, SCALED, 1, 1, gaps(0x7FC0, kind="uint16") + b"1"), "not a positive number"),
    "scale-infinite": (sealed(DENSE, INT8, SCALED, 1, 1, gaps(0x7F80, kind="uint16") + b"1"), "not a positive"),
    "scale-negative": (sealed(DENSE, INT8, SCALED, 1, 1, gaps(0xBF80, kind="uint16") + b"1"), "not a positive"),
    "csr-start": (sealed(CSR, INT8, 0, 2, 2, u32(1, 1, 1)), "row pointers"),
    "csr-back": (sealed(CSR, INT8, 0, 2, 2, u32(0, 2, 1) + bytes(4) + b"12"), "row pointers"),
    "csr-wrap": (sealed(CSR, INT8, 0, 2, 2, u32(0, MOST, 1) + bytes(2) + b"1"), "row pointers"),
    "csr-too-full": (sealed(CSR, INT8, 0, 1, 2, u32(0, 3) + bytes([0, 0, 1, 0, 1, 0]) + b"123"), "row pointers"),
    "csr-column-out-of-range": (sealed(CSR, INT8, 0, 1, 2, u32(0, 1) + b"\2\0" + b"1"), "out of range"),
    "csr-unordered": (sealed(CSR, INT8, 0, 1, 2, u32(0, 2) + b"\1\0\0\0" + b"12"), "not in order"),
    "csr-twice": (sealed(CSR, INT8, 0, 1, 2, u32(0, 2) + b"\1\0\1\0" + b"12"), "not in order"),
    "csr-zero-kept": (sealed(CSR, INT8, 0, 1, 2, u32(0, 1) + b"\1\0\0"), "without a value"),
    "delta-out-of-range": (sealed(DELTA, INT8, 0, 2, 2, b"\1\4" + b"1"), "out of range"),
    "delta-skips-out": (sealed(DELTA, INT8, 0, 2, 2, b"\3\xff\xff\0" + b"1"), "out of range"),
    "delta-skip-last": (sealed(DELTA, INT8, 0, 2, 2, b"\2\0\xff" + b"1"), "leads nowhere"),
    "delta-endless-length": (sealed(DELTA, INT8, 0, 2, 2, b"\xff" * 12), "out of range"),
    "delta-long-length": (sealed(DELTA, INT8, 0, 2, 2, b"\xff" * 8 + b"\1"), "too early"),
    "bitmask-past-the-end": (sealed(BITMASK, INT8, 0, 1, 4, b"\x81" + b"12"), "past the last place"),
    "bitmask-zero-kept": (sealed(BITMASK, INT8, 0, 1, 4, b"\x80\0"), "without a value"),
    "classes-too-few": (matrix(stream(np.zeros(1, np.uint8))), "classes do not fit"),
    "classes-too-many": (matrix(stream(np.zeros(3, np.uint8))), "at most 2"),
    "class-out-of-range": (matrix(gaps(0, 48) + varint(0)), "classes do not fit"),
    "class-255": (matrix(FLAT + varint(0) * 2 + gaps(255, 255) + gaps(255, 255)), "classes do not fit"),
    "ones-too-many": (matrix(FLAT + varint(5)), "more kept weights"),
    "ones-endless": (matrix(FLAT + b"\xff" * 12), "out of range"),
    "gap-out-of-range": (matrix(FLAT + varint(1) + gaps(4) + FLAT + ones(1)), "out of range"),
    "gap-wraps": (matrix(FLAT + varint(2) + gaps(MOST, MOST, kind="uint32") + FLAT + ones(2)), "out of range"),
    "gap-of-zeros-out-of-range": (matrix(FLAT + varint(3) + gaps(4) + FLAT + ones(3)), "out of range"),
    "gaps-signed": (matrix(FLAT + varint(1) + gaps(-1, kind="int8") + FLAT + ones(1)), "gaps do not fit"),
    "gaps-wide": (matrix(FLAT + varint(1) + gaps(2**33, kind="uint64") + FLAT + ones(1)), "gaps do not fit"),
    "gaps-too-few": (matrix(FLAT + varint(2) + gaps(0) + FLAT + ones(2)), "gaps do not fit"),
    "values-too-few": (matrix(FLAT + varint(2) + gaps(0, 0) + FLAT + ones(1)), "values do not fit"),
    "values-too-many": (matrix(FLAT + varint(1) + gaps(0) + FLAT + ones(2)), "at most|do not fit"),
    "value-zero": (matrix(FLAT + varint(1) + gaps(0) + FLAT + stream(np.zeros(1, np.int8))), "without a value"),
    "values-wide": (values(ones(4, "int64")), "wrong type"),
    "value-levels": (lambda: value_levels(1 << 24, "int8", INT8), "at most|do not fit"),
    "value-levels-wide": (lambda: value_levels(1 << 21, "int64", INT64), "at most|do not fit"),
    "mask-levels": (lambda: mask_levels(1 << 22), "at most|do not fit|out of range|more kept"),
    "blocks-of-no-rows": (blocks(0, 2, b""), "do not fit"),
    "blocks-of-no-columns": (blocks(1, 0, b""), "do not fit"),
    "blocks-larger-than-the-matrix": (blocks(4, 2, b""), "do not fit"),
    "blocks-cut-by-the-edge": (blocks(1, 3, b""), "do not fit"),
    "blocks-too-wide": (blocks(1, 129, b"", 1, 258), "do not fit"),
    "blocks-of-nothing": (blocks(1, 1, b"", 0, 10**8, 0), None),
    "blocks-of-one-weight-coded": (blocks(1, 1, FLAT + varint(8) + varint(0) + FLAT + ones(8)), "never written"),
    "blocks-coding-unknown": (blocks(1, 2, b"", coding=2), "never written"),
    "blocks-plain-cut": (blocks(1, 2, b"\x80\1", coding=0), "too early"),
    "blocks-plain-past-the-end": (blocks(1, 2, b"\x08", coding=0), "past the last place"),
    "blocks-plain-empty": (blocks(1, 2, b"\x80\0\0", coding=0), "a kept block without a value"),
    "blocks-plain-huge": (blocks(128, 128, b"\xff" * 128, 4096, 4096, 0), "too early"),
    "blocks-empty": (blocks(1, 2, BLOCK + FLAT + stream(np.zeros(2, np.int8))), "a kept block without a value"),
    "blocks-all-empty": (
        lambda: blocks(
            1, 2, FLAT + varint(1 << 23) + varint(0) + FLAT + stream(np.zeros(1 << 24, np.int8)), 4096, 4096
        ),
        "a kept block without a value",
    ),
    "blocks-too-many": (blocks(1, 2, FLAT + varint(5)), "more kept weights"),
    "blocks-gap-out-of-range": (blocks(1, 2, FLAT + varint(1) + gaps(4) + FLAT + ones(2)), "out of range"),
    "blocks-gap-wraps": (
        blocks(1, 4, FLAT + varint(1) + gaps(1 << 30, kind="uint32") + FLAT + ones(4), 2, 12),
        "out of range",
    ),
    "blocks-classes-of-weights": (
        blocks(1, 2, stream(np.ones(2, np.uint8)) + stream(np.ones(4, np.uint8))),
        "at most 2",
    ),
    "blocks-values-too-few": (blocks(1, 2, BLOCK + FLAT + ones(1)), "values do not fit"),
    "blocks-values-too-many": (blocks(1, 2, BLOCK + FLAT + ones(3)), "at most|do not fit"),
    "blocks-values-wide": (blocks(1, 2, BLOCK + FLAT + ones(2, "int64")), "wrong type"),
    "blocks-value-levels": (lambda: block_value_levels(1 << 24), "at most|do not fit"),
    "blocks-mask-levels": (lambda: block_mask_levels(1 << 22), "at most|do not fit|out of range|more kept"),
    "stream-count": (values(varint(2**60) + b"\1\1\0"), "at most"),
    "stream-kind": (values(varint(4) + b"\x2a\1\0"), "unknown kind"),
    "stream-cut": (values(ones(4)[:-1]), "too early"),
    "stream-body-too-long": (values(varint(4) + b"\1" + varint(2**50)), "too early"),
    "stream-body-empty": (values(varint(4) + b"\1" + varint(0)), "a stream "),
    "stream-body-garbage": (values(raw(4, "int8", b"\xff" * 40)), "a stream "),
    "stream-longer-than-it-says": (values(raw(4, "int8", ones(4)[3:] + b"\0")), "longer than its numbers|decoded"),
    "stream-of-two-pages": (values(raw(4, "int8", ones(4)[3:] * 2)), "longer than its numbers|decoded"),
    "pcodec-mode-unknown": (values(pcodec(repeated("int8"), change=(0, 9)), 1000), "a stream "),
    "pcodec-delta-unknown": (values(pcodec(repeated("int8"), change=(0, 0xF0)), 1000), "a stream "),
    "pcodec-many-bins": (values(raw(4, "int8", b"\0\xfe\xff" + bytes(100))), "a stream "),
    "pcodec-lookback": (values(pcodec(repeated("int8"), delta=DeltaSpec.try_lookback()), 1000), "a stream "),
    "pcodec-window": (
        values(pcodec(repeated("int8"), delta=DeltaSpec.try_lookback(), change=(1, 0x17)), 1000),
        "a stream ",
    ),
    "pcodec-window-endless": (
        values(pcodec(repeated("int64"), delta=DeltaSpec.try_lookback(), change=(1, 0x1F)), 1000, INT64),
        "a stream ",
    ),
    "pcodec-dictionary": (values(pcodec(repeated("int64"), mode=ModeSpec.try_dict()), 1000, INT64), "a stream "),
    "pcodec-consecutive": (values(pcodec(repeated("int8"), delta=DeltaSpec.try_consecutive(1)), 1000), "a stream "),
}


def header(**tensors: Any) -> dict[str, Any]:
    return {"__metadata__": {"format": "pt", "pinscher": "1", "checksums": "0" * 8 * len(tensors)}, **tensors}


def entry(dtype: str, shape: list[int], start: int = 0, end: int = 4) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def whole(name: str, tensor: torch.Tensor, **metadata: str) -> bytes:
    """A file with one tensor and a right checksum."""
    known = {"format": "pt", "pinscher": "1", "checksums": file.checksum(name, tensor)} | metadata
    kind = {torch.uint8: "U8", torch.float32: "F32"}[tensor.dtype]
    data = tensor.numpy().tobytes()
    return joined({"__metadata__": known, name: entry(kind, list(tensor.shape), 0, len(data))}, data)


QUERY = "bert.encoder.layer.0.attention.self.query.weight"
SAFETENSORS: dict[str, tuple[Made, str | None]] = {
    "empty": (b"", "cannot be read"),
    "length-only": (struct.pack("<Q", 2), "cannot be read"),
    "length-endless": (struct.pack("<Q", 2**64 - 1) + b"{}", "cannot be read"),
    "length-huge": (struct.pack("<Q", 10**8) + b"{}", "cannot be read"),
    "not-json": (joined(b"\x80\x04N.", b""), "cannot be read"),
    "deep-json": (joined(b'{"a":' * 3000, b""), "cannot be read"),
    "header-list": (joined([], b""), "cannot be read"),
    "without-metadata": (joined({"a": entry("F32", [1])}, bytes(4)), "not written by pinscher"),
    "version-2": (whole(QUERY, torch.ones(1), pinscher="2"), "format version '2'"),
    "version-long": (whole(QUERY, torch.ones(1), pinscher="9" * 9000), "format version '99999999999999999999'"),
    "checksums-short": (whole(QUERY, torch.ones(1), checksums="0"), "number of checksums"),
    "checksum-wrong": (whole(QUERY, torch.ones(1), checksums="0" * 8), "wrong checksum"),
    "shape-huge": (joined(header(a=entry("F32", [2**62])), bytes(4)), "cannot be read"),
    "shape-overflows": (joined(header(a=entry("F32", [2**32, 2**32])), bytes(4)), "cannot be read"),
    "shape-of-nothing": (joined(header(a=entry("F32", [0, 2**63 - 1, 2**63 - 1], 0, 0)), b""), "cannot be|checksum"),
    "shape-many": (joined(header(a=entry("F32", [1] * 5000)), bytes(4)), "cannot be read|checksum"),
    "offsets-past-the-end": (joined(header(a=entry("F32", [2], 0, 8)), bytes(4)), "cannot be read"),
    "offsets-turned": (joined(header(a=entry("F32", [1], 4, 0)), bytes(4)), "cannot be read"),
    "offsets-shared": (joined(header(a=entry("F32", [1]), b=entry("F32", [1])), bytes(4)), "cannot be read"),
    "offsets-with-a-hole": (joined(header(a=entry("F32", [1], 4, 8)), bytes(8)), "cannot be read"),
    "data-left-over": (joined(header(a=entry("F32", [1])), bytes(8)), "cannot be read"),
    "dtype-unknown": (joined(header(a=entry("PKL", [1])), bytes(4)), "cannot be read"),
    "dtype-of-half-bytes": (joined(header(a=entry("F4", [8])), bytes(4)), "cannot be read|checksum"),
    "name-twice": (
        joined(
            b'{"a":'
            + json.dumps(entry("F32", [1])).encode()
            + b","
            + json.dumps(header(a=entry("I32", [1]))).encode()[1:],
            bytes(4),
        ),
        "cannot be read|checksum",
    ),
    "matrix-without-bytes": (whole(QUERY, torch.empty(0, dtype=torch.uint8)), "too short"),
    "matrix-of-garbage": (whole(QUERY, torch.arange(99, dtype=torch.uint8)), "not a packed matrix"),
    "matrix-huge": (whole(QUERY, vector(edited(8, u32(MOST, MOST)))), "more than .* bytes can hold"),
    "matrix-version": (whole(QUERY, vector(edited(4, b"\7"))), "format version 7"),
    "matrix-of-value-levels": (lambda: whole(QUERY, vector(value_levels(1 << 24, "int8", INT8))), "at most|do not fit"),
    "matrix-of-rows-of-nothing": (whole(QUERY, vector(matrix(FLAT + varint(0) * 5, MOST, 0))), None),
}


def index(place: Any) -> bytes:
    return json.dumps({"metadata": {}, "weight_map": {QUERY: place}}).encode()


SHARD = "model-00001-of-00002.safetensors"  # there, with a second one
INDICES: dict[str, tuple[Made, str | None]] = {
    "above": (index(f"../{SHARD}"), "not a file of this folder"),
    "absolute": (index("/dev/zero"), "not a file of this folder"),
    "absolute-model": (index(f"/tmp/{SHARD}"), "not a file of this folder"),
    "below": (index(f"sub/{SHARD}"), "not a file of this folder"),
    "backslash": (index(f"..\\{SHARD}"), "lacks|not a file"),
    "not-a-model": (index("config.json"), "not a file of this folder"),
    "number": (index(7), "not a file of this folder"),
    "list": (index([SHARD]), "cannot be read|not a file"),
    "null": (index(None), "not a file of this folder"),
    "missing": (index("model-00003-of-00002.safetensors"), "lacks"),
    "long-name": (index("x" * 5000 + ".safetensors"), "lacks|not a file|cannot be read"),
    "nul-in-name": (index(f"\0{SHARD}"), "lacks|not a file"),
    "half-character": (index("\ud800.safetensors"), "lacks|not a file"),
    "one-shard-left-out": (index(SHARD), ""),
    "empty-map": (b'{"metadata": {}, "weight_map": {}}', ""),
    "no-map": (b"{}", "cannot be read"),
    "map-is-text": (b'{"weight_map": "x"}', "cannot be read"),
    "deep": (b"[" * 15_000, "cannot be read"),
    "not-json": (b"{", "cannot be read"),
    "not-text": (b"\xff\xfe\x00", "cannot be read"),
    "long-number": (b'{"weight_map": ' + b"9" * 9000 + b"}", "cannot be read"),
}
FILES = {
    f"{name}.{kind}": made
    for kind, table in (("payload", PAYLOADS), ("safetensors", SAFETENSORS), ("index.json", INDICES))
    for name, made in table.items()
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    total = 0
    for name, (made, _) in FILES.items():
        data = made() if callable(made) else made
        assert len(data) < 20_000, f"{name} has {len(data)} bytes"
        (FOLDER / name).write_bytes(data)
        total += len(data)
    print(f"{len(FILES)} files, {total} bytes")


if __name__ == "__main__":
    main()
