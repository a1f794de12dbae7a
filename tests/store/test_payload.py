"""A packed matrix: its bytes are fixed for ever, it comes back exactly, and damage anywhere is told."""

import struct
import zlib
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pinscher import native
from pinscher.errors import InputError
from pinscher.store import entropy, payload
from pinscher.store.codecs import CODECS
from pinscher.store.streams import DamagedError, Reader, stream
from tiny_store import (
    KIND_OF,
    MB,
    PATTERNS,
    bits,
    confined,
    dequantised,
    flips,
    identical,
    pruned,
    resealed,
    sealed,
    vector,
)

FLOATS = [d for d in payload.KINDS if d.is_floating_point]
NARROW = torch.tensor([[1.5, 0, -0.0, 0, 2], [0, 0, 0, 0, 0], [-3, 0, 0.25, 0, 0]])
LEVELS = torch.tensor([[5, 0, -7, 1], [0, 0, 0, 2], [127, -128, 3, 0]], dtype=torch.int8)
PAIRS = torch.tensor([[5, -7, 0, 0], [0, 0, 127, 0], [0, 0, 0, 0], [1, 2, 0, -128]], dtype=torch.int8)
FAR = torch.zeros(2, 300, dtype=torch.int8)
FAR[0, 3], FAR[1, 299] = 5, -7
# Files with these bytes exist: a pinscher that reads them otherwise, or no longer, has broken somebody's model.
GOLDEN = {
    "dense": (
        NARROW,
        "504e535201000100030000000500000053736be00000c03f00000000000000800000000000000040"
        "0000000000000000000000000000000000000000000040c0000000000000803e0000000000000000",
    ),
    "csr": (
        NARROW,
        "504e535201010100030000000500000019fa1f7a0000000003000000030000000500000000000200"
        "0400000002000000c03f0000008000000040000040c00000803e",
    ),
    "delta": (
        NARROW,
        "504e5352010201000300000005000000da2d88900500010105010000c03f0000008000000040000040c00000803e",
    ),
    "delta, far": (FAR, "504e535201020000020000002c0100005110a83a0403ffff5505f9"),
    "bitmask": (
        NARROW,
        "504e5352010301000300000005000000265fc247a8280000c03f0000008000000040000040c00000803e",
    ),
    "entropy": (
        NARROW,
        "504e5352010401000300000005000000539675de0000050500070010000018481a000005051d0010"
        "000000000000010000c0bf00000000000000c000004040000080be",
    ),
    "entropy, bf16": (
        NARROW.bfloat16(),
        "504e53520104030003000000050000008836e55c0000050500070010000018481a0000050310001000000080c0bf000000c0404080be",
    ),
    "entropy, levels": (
        LEVELS,
        "504e5352010400000300000004000000f968394803000600100000102104000600100000080a0000030100050010000000030100050010000000010100050010000000030006001000000804040006001000000808020106001000c8230c05010a00100000408281ff830000",
    ),
    "blocks": (PAIRS, "504e53520105000004000000040000009eef0b390102009305f97f0001020080"),
    "blocks, coded": (
        PAIRS,
        "504e53520105000004000000040000007d7cb6fd01020104000600100000106102000600100000080200000300010100050010000800000004000600100000080a04000600100000080a010105001000280404010a002200308ff807a6001e030109002200000004140a20",
    ),
    "bitmask, int8": (
        torch.tensor([[95, 0, 0, 0, 127], [0, 0, 0, 0, 0], [-127, 0, 11, 0, 0]])
        * torch.tensor([[0.0157470703125], [0], [0.023681640625]]),
        "504e5352010300020300000005000000294173f603020d00220000000018c8730022008288285f7f810b",
    ),
    "csr, int4, transposed": (
        torch.tensor([[4, 0, 0, 0, 7], [0, 0, 0, 0, 0], [-7, 0, 7, 0, 0]])
        * torch.tensor([0.427734375, 0, 0.03564453125, 0, 0.28515625]),
        "504e53520101000305000000030000000346ece1050210002300100000a0444f029405480e003000"
        "0000000200000002000000030000000300000004000000000002000200000004f90707",
    ),
}


def made(dtype: torch.dtype, rows: int = 9, columns: int = 14, density: float = 0.4, seed: int = 0) -> torch.Tensor:
    """A pruned matrix of any type, with -0.0 and the ends of the range where it has them."""
    generator = torch.Generator().manual_seed(seed)
    matrix = (torch.randn(rows, columns, generator=generator) * 20).to(dtype)
    matrix = torch.where(torch.rand(rows, columns, generator=generator) < density, matrix, torch.zeros((), dtype=dtype))
    if matrix.numel() > 3 and dtype in FLOATS:
        matrix.view(payload.BITS[dtype.itemsize])[0, 0] = torch.iinfo(payload.BITS[dtype.itemsize]).min  # -0.0
        matrix[-1, -1] = torch.finfo(dtype).max
    return matrix


@pytest.mark.parametrize("name", GOLDEN)
def test_the_bytes_of_a_stored_matrix_mean_what_they_always_meant(name):
    weight, data = GOLDEN[name]
    found = payload.unpack(bytes.fromhex(data))
    assert identical(found, weight)
    with mock.patch.object(native, "core", return_value=None):
        assert identical(payload.unpack(bytes.fromhex(data)), weight)


@pytest.mark.parametrize("name", ["dense", "csr", "delta", "delta, far", "bitmask", "blocks"])
def test_a_matrix_is_stored_in_the_same_bytes_as_ever(name):
    """The entropy codec's bytes may get better with pcodec; these are ours alone."""
    assert payload.pack(GOLDEN[name][0], codecs=(name.split(",")[0],)).hex() == GOLDEN[name][1]
    assert payload.pack(NARROW, "int8", codecs=("bitmask",), search=False).hex() == GOLDEN["bitmask, int8"][1]


def test_the_header_is_as_written_down():
    data = payload.pack(made(torch.float32, 3, 5), "int8", transposed=True, codecs=("csr",))
    magic, version, codec, kind, flags, rows, columns, checksum = struct.unpack("<4sBBBBIII", data[:20])
    assert (magic, version, codec, kind, flags, rows, columns) == (b"PNSR", 1, 1, 0, 3, 5, 3)
    assert checksum == zlib.crc32(data[:16] + bytes(4) + data[20:])
    found = payload.head(memoryview(data))
    assert found == payload.Head(1, "int8", 5, 3, True, True)
    assert found.shape == (3, 5)


def test_the_numbers_of_the_types_never_change():
    names = "int8 float32 float16 bfloat16 float64 uint8 int16 int32 int64 bool float8_e4m3fn float8_e5m2"
    assert [str(dtype).removeprefix("torch.") for dtype in payload.KINDS] == names.split()


@pytest.mark.parametrize("dtype", payload.KINDS, ids=str)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("transposed", [False, True])
def test_a_matrix_of_any_type_comes_back_bit_for_bit(dtype, codec, transposed):
    for shape in ((9, 14), (1, 1), (0, 3), (3, 0), (0, 0), (33, 2)):
        for density in (0.0, 0.3, 1.0):
            matrix = made(dtype, *shape, density)
            data = payload.pack(matrix, transposed=transposed, codecs=(codec,))
            for given_as in (data, memoryview(data), vector(data)):  # a float64 starts at no multiple of 8 there
                assert identical(payload.unpack(given_as), matrix)


@settings(max_examples=80, deadline=None)
@given(
    shape=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    density=st.floats(0, 1),
    pattern=st.sampled_from(PATTERNS),
    values=st.sampled_from([None, *payload.VALUES]),
    transposed=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_a_matrix_comes_back_as_its_values_say(shape, density, pattern, values, transposed, seed):
    weight = torch.from_numpy(pruned(*shape, density, np.int16, pattern, seed) / np.float32(37)).float()
    before = weight.clone()
    found = payload.unpack(payload.pack(weight, values, transposed=transposed))
    wanted = dequantised(weight, values or "keep", transposed)
    kept = payload.KEPT.get(values, torch.float32)
    assert found.dtype == kept
    assert identical(found, wanted.to(kept))
    assert identical(weight, before)
    assert found.is_contiguous()


def test_minus_zero_is_kept_and_is_no_pruned_weight():
    weight = torch.tensor([[-0.0, 0.0, 1.0]])
    for name in CODECS:
        found = payload.unpack(payload.pack(weight, codecs=(name,)))
        assert bits(found) == bits(weight)
        assert torch.signbit(found).tolist() == [[True, False, False]]


@pytest.mark.parametrize("values", [None, *payload.VALUES])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nan_is_refused(values, dtype):
    weight = torch.ones(2, 3).to(dtype)
    weight[1, 1] = float("nan")
    with pytest.raises(InputError, match="NaN"):
        payload.pack(weight, values)


@pytest.mark.parametrize("values", ["fp16", "int8", "int6", "int4"])
def test_a_weight_too_large_for_its_type_is_refused_and_not_made_infinite(values):
    weight = torch.tensor([[1.0, 70000.0 if values == "fp16" else float("inf")]])
    with pytest.raises(InputError):
        payload.pack(weight, values)


def test_what_cannot_be_packed_is_refused_by_name():
    weight = torch.ones(2, 2)
    for bad, settings_, message in (
        (torch.ones(3), {}, "1 dimensions is not a matrix"),
        (torch.ones(2, 2, 2), {}, "3 dimensions is not a matrix"),
        (
            weight,
            {"values": "int9"},
            r"unknown values 'int9'\. Did you mean 'int8'\? Known: int8, int7",
        ),
        (weight, {"codecs": ("zip",)}, "unknown codec 'zip'"),
        (weight.to(torch.complex64), {}, r"cannot store a matrix of 2 x 2 torch\.complex64"),
    ):
        with pytest.raises(InputError, match=message):
            payload.pack(bad, **settings_)


def test_the_smallest_codec_is_chosen_by_size():
    weight = torch.from_numpy(pruned(64, 64, 0.1, seed=1)).float()
    sizes = [len(payload.pack(weight, "int8", codecs=(name,))) for name in CODECS]
    assert len(payload.pack(weight, "int8")) == min(sizes) < max(sizes)


def test_without_native_code_the_weights_are_the_same():
    weight = torch.from_numpy(pruned(120, 90, 0.3, pattern="both", seed=2)).float() / 7
    data = payload.pack(weight, "int8", codecs=("entropy",))
    with mock.patch.object(native, "core", return_value=None):
        slow = payload.unpack(data)
    assert native.core() is not None
    assert identical(payload.unpack(data), slow)
    assert identical(slow, dequantised(weight, "int8"))


def test_what_is_unpacked_has_memory_of_its_own():
    """Training writes into the weights: that must not reach the stored bytes, which may be a mapped file."""
    for values in (None, "int8"):
        packed = vector(payload.pack(NARROW, values, codecs=("dense",)))
        before = packed.clone()
        payload.unpack(packed).fill_(7)
        assert identical(packed, before)


def test_importance_reaches_the_scales():
    torch.manual_seed(0)
    weight = torch.randn(20, 50)
    importance = torch.rand(50) ** 6
    data = payload.pack(weight, "int4", importance=importance)
    assert identical(payload.unpack(data), dequantised(weight, "int4", importance=importance))
    assert data != payload.pack(weight, "int4")
    turned = payload.pack(weight.T.contiguous(), "int4", transposed=True, importance=importance)
    assert identical(payload.unpack(turned).T.contiguous(), payload.unpack(data))


def test_an_empty_matrix_is_padded_to_what_a_reader_makes_room_for():
    """A file may ask for 16 MB and 2048 times its size: a large matrix without weights is written accordingly."""
    weight = torch.zeros(1100, 8192)
    weight[5, 7] = 127.0
    for values, name in (("int8", "entropy"), (None, "delta")):
        data = payload.pack(weight, values, codecs=(name,))
        assert (weight.numel() * 4 - 16 * MB) / 2048 <= len(data) < 15_000
        assert identical(payload.unpack(data), weight)
        with pytest.raises(DamagedError, match="declares 1100 x 8192 weights, more than"):
            payload.head(memoryview(resealed(data[: len(data) // 2])))
        with pytest.raises(DamagedError, match="left over"):
            payload.unpack(resealed(data[:-1] + b"\1"))


# Damage. `edited` has the right checksum, as an attacker would make it.
def edited(place: int, change: bytes) -> bytes:
    data = payload.pack(NARROW, "int8", codecs=("csr",))
    return resealed(data[:place] + change + data[place + len(change) :])


@pytest.mark.parametrize(
    ("data", "message"),
    {
        "nothing": (b"", "too short"),
        "header cut": (bytes.fromhex(GOLDEN["csr"][1])[:19], "too short"),
        "another magic": (edited(0, b"PNG!"), "not a packed matrix"),
        "a newer version": (edited(4, b"\2"), "format version 2, this pinscher reads 1"),
        "unknown codec": (edited(5, b"\6"), "codec or type that this pinscher does not know"),
        "unknown type": (edited(6, bytes([len(payload.KINDS)])), "codec or type that this pinscher does not know"),
        "unknown flag": (edited(7, b"\6"), "codec or type that this pinscher does not know"),
        "scales for fp32": (edited(6, b"\1"), "scales without int8 codes"),
        "too many rows": (edited(8, b"\xff\xff\xff\xff"), "declares 4294967295 x 5 weights, more than"),
        "too many columns": (edited(12, b"\xff\xff\xff\xff"), "declares 3 x 4294967295 weights, more than"),
        "more rows than scales": (edited(8, b"\4"), "scales do not fit"),
        "fewer rows than scales": (edited(8, b"\2"), "at most 2"),
    }.values(),
)
def test_a_header_that_cannot_be_is_told_by_its_cause(data, message):
    with pytest.raises(DamagedError, match=message):
        payload.unpack(data)


@pytest.mark.parametrize("bits_", [0x7F80, 0xFF80, 0x7FC0, 0xBF80], ids=["inf", "-inf", "nan", "negative"])
def test_scales_that_are_no_scales_are_refused(bits_):
    body = stream(np.array([0x3F80, bits_], np.uint16)) + bytes([1, 2, 3, 4])
    with pytest.raises(DamagedError, match="scale is not a positive number"):
        payload.unpack(sealed(0, 0, 2, 2, 2, body))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.int8])
def test_a_tensor_that_is_no_row_of_bytes_is_no_packed_matrix(dtype):
    with pytest.raises(DamagedError, match="not a packed matrix"):
        payload.unpack(torch.ones(30, 2, dtype=dtype))


@pytest.mark.parametrize("codec", CODECS)
def test_a_changed_byte_is_told_wherever_it_is(codec):
    data = payload.pack(made(torch.float32, 6, 11), "int8", codecs=(codec,))
    for damaged in flips(data):
        with pytest.raises(DamagedError):
            payload.unpack(damaged)


@pytest.mark.parametrize("codec", CODECS)
def test_missing_and_added_bytes_are_told(codec):
    data = payload.pack(made(torch.bfloat16, 6, 11), codecs=(codec,))
    for end in range(len(data)):
        with pytest.raises(DamagedError):
            payload.unpack(data[:end])
        with pytest.raises(DamagedError):
            payload.unpack(resealed(data[:end]) if end >= 20 else data[:end])
    for added in (b"\0", b"\1"):
        with pytest.raises(DamagedError):
            payload.unpack(data + added)
    with pytest.raises(DamagedError, match="left over"):
        payload.unpack(resealed(data + b"\1"))


@pytest.mark.parametrize("codec", CODECS)
def test_a_changed_byte_under_a_right_checksum_gives_the_declared_matrix_or_an_error(codec):
    """Nobody can tell such a file from a real one; it must only do no harm. The fuzzer tries many more."""
    data = payload.pack(made(torch.float32, 6, 11), "int8", codecs=(codec,))

    def work() -> str:
        for damaged in flips(data):
            whole = resealed(damaged)
            try:
                found = payload.unpack(whole)
            except DamagedError:
                continue
            wanted = payload.head(memoryview(whole))
            assert found.shape == wanted.shape
            assert found.dtype == (torch.float32 if wanted.scaled else getattr(torch, wanted.kind))
        return "fine"

    assert confined(work) == ("returned", "'fine'")


def test_kinds_are_numbered_as_the_header_says():
    for dtype, number in KIND_OF.items():
        assert payload.pack(made(dtype))[6] == number


def test_the_golden_bytes_fix_the_order_of_levels_too():
    body = memoryview(bytes.fromhex(GOLDEN["entropy, levels"][1]))[20:]
    classes = entropy.decode_classes(Reader(body), 3, 4)
    assert (classes.rows.tolist(), classes.columns.tolist()) == ([1, 0, 2], [0, 1, 0, 1])
