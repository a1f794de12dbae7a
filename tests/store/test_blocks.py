"""The blocks codec finds the blocks that were pruned, codes them near their entropy, and decodes them exactly."""

import itertools
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pinscher import native
from pinscher.store import blocks, entropy, payload, twoway
from pinscher.store.codecs import CODECS, smallest
from pinscher.store.streams import DamagedError, Reader, stream, varint
from tiny_store import INTEGERS, identical, pruned

SHAPES = [(1, 2), (1, 4), (1, 8), (1, 16), (2, 1), (4, 1), (16, 1), (2, 2), (4, 4), (2, 8), (3, 6), (16, 16), (32, 4)]
OTHERS = tuple(name for name in CODECS if name != "blocks")  # the codecs of the first files


def weights(shape: tuple[int, int], block: tuple[int, int], density: float, seed: int = 0) -> torch.Tensor:
    """Normal weights of which some blocks are kept, by the sum of their sizes."""
    weight = np.random.default_rng(seed).normal(0, 0.04, shape).astype(np.float32)
    rows, columns = shape[0] // block[0], shape[1] // block[1]
    scores = np.abs(weight).reshape(rows, block[0], columns, block[1]).sum((1, 3))
    kept = scores >= np.quantile(scores, 1 - density)
    return torch.from_numpy(np.where(np.kron(kept, np.ones(block)), weight, np.float32(0)))


def codes(shape: tuple[int, int], block: tuple[int, int], density: float, values: str = "int8") -> np.ndarray:
    return payload.quantize(weights(shape, block, density), values).codes.numpy()


def decoded(data: bytes, matrix: np.ndarray) -> np.ndarray:
    """The matrix by native code, which the reference must agree with; every byte is read."""
    found = []
    for core in (native.core(), None):
        reader = Reader(memoryview(data))
        with mock.patch.object(native, "core", return_value=core):
            found.append(blocks.decode(reader, *matrix.shape, matrix.dtype))
        reader.finished()
    fast, slow = found
    assert fast.dtype == slow.dtype == matrix.dtype
    assert fast.tobytes() == slow.tobytes()
    return fast


@st.composite
def blocked(draw: st.DrawFn) -> tuple[np.ndarray, tuple[int, int], list[twoway.Classes]]:
    """A matrix, blocks that need not be its own, and classes that have nothing to do with it."""
    grid = draw(st.integers(0, 12)), draw(st.integers(0, 12))
    block = tuple(draw(st.integers(1, 5 if count else 1)) for count in grid)
    rows, columns = (side * count for side, count in zip(block, grid, strict=True))
    density = draw(st.sampled_from([0.0, 0.05, 0.5, 0.95, 1.0]) | st.floats(0, 1))
    pattern = draw(st.sampled_from(["random", "both", "x".join(map(str, block))]))
    matrix = pruned(rows, columns, density, draw(st.sampled_from(INTEGERS)), pattern, draw(st.integers(0, 2**31)))
    most, random = draw(st.sampled_from([1, 3, twoway.MOST])), np.random.default_rng(draw(st.integers(0, 2**31)))
    sides = [[random.integers(0, most, count).astype(np.uint8) for count in shape] for shape in (grid, matrix.shape)]
    return matrix, block, [twoway.Classes(*side) for side in sides]


@settings(max_examples=300, deadline=None)
@given(made=blocked())
def test_any_blocks_and_any_classes_decode_exactly_by_native_code_and_by_the_reference(made):
    matrix, block, (mask, sizes) = made
    with (
        mock.patch.object(twoway, "mask_classes", return_value=mask),
        mock.patch.object(twoway, "value_classes", return_value=sizes),
    ):
        data = blocks.coded(matrix, block)
    assert (decoded(blocks.plain(matrix, block), matrix) == matrix).all()
    if block != (1, 1):
        assert (decoded(data, matrix) == matrix).all()


@settings(max_examples=100, deadline=None)
@given(made=blocked())
def test_a_block_is_kept_if_one_of_its_weights_is(made):
    matrix, (tall, wide), _ = made
    mask = blocks.joined(matrix != 0, (tall, wide))
    for row, column in np.ndindex(mask.shape):
        part = matrix[row * tall : (row + 1) * tall, column * wide : (column + 1) * wide]
        assert mask[row, column] == part.any()
    assert (blocks.spread(mask, (tall, wide)) == np.kron(mask, np.ones((tall, wide), bool))).all()


@pytest.mark.parametrize("block", SHAPES, ids=str)
@pytest.mark.parametrize("density", [0.05, 0.2, 0.5, 0.9])
@pytest.mark.parametrize("values", ["int8", "int4"])
def test_the_blocks_that_were_pruned_are_found_whatever_rounding_made_of_their_weights(block, density, values):
    matrix = codes((384, 192), block, density, values)
    assert not blocks.spread(blocks.joined(matrix != 0, block), block)[matrix == 0].all()  # zeros in kept blocks
    assert blocks.block_shape(matrix != 0) == block


@pytest.mark.parametrize("block", [(1, 4), (4, 4), (2, 3), (6, 1)], ids=str)
def test_no_other_shape_takes_fewer_bits(block):
    """The reference tries all of them; the search goes along one axis, then along the other."""
    kept = codes((48, 96), block, 0.3) != 0
    ones = int(kept.sum())
    divisors = [[side for side in range(1, size + 1) if size % side == 0] for size in kept.shape]
    shapes = itertools.product(*divisors)
    bits = {shape: blocks._bits(blocks.joined(kept, shape), shape, ones) for shape in shapes}
    assert min(bits, key=bits.__getitem__) == blocks.block_shape(kept) == block


@pytest.mark.parametrize("pattern", ["random", "rows", "columns", "both", "block"])
@pytest.mark.parametrize("density", [0.03, 0.2, 0.5, 0.9, 1.0])
def test_what_was_pruned_weight_by_weight_is_stored_in_the_same_bytes_as_before_there_were_blocks(pattern, density):
    for seed, dtype in itertools.product(range(3), (np.int8, np.int32)):
        matrix = pruned(192, 256, density, dtype, pattern, seed)
        chosen, body = smallest(matrix)
        assert (chosen, body) == smallest(matrix, OTHERS)


def test_a_head_that_is_gone_makes_no_blocks():
    matrix = pruned(256, 256, 0.3, seed=1)
    matrix[64:128] = 0
    assert smallest(matrix) == smallest(matrix, OTHERS)


@pytest.mark.parametrize("block", [(1, 4), (4, 4), (16, 16)], ids=str)
@pytest.mark.parametrize("density", [0.1, 0.2])
def test_blocks_are_stored_near_the_entropy_of_blocks_and_smaller_than_by_any_other_codec(block, density):
    matrix = codes((768, 768), block, density)
    mask = blocks.joined(matrix != 0, block)
    kept = matrix[blocks.spread(mask, block)]
    bound = twoway.entropy(np.bincount(mask.reshape(-1))) + twoway.entropy(np.bincount(kept.view(np.uint8)))
    chosen, body = smallest(matrix)
    assert chosen is CODECS["blocks"]
    assert bound / 8 < len(body) < 1.015 * bound / 8
    assert len(body) < 0.95 * len(smallest(matrix, OTHERS)[1])


def test_the_mask_of_the_blocks_has_classes_where_it_is_uneven():
    random = np.random.default_rng(0)
    chance = np.exp(random.normal(-2, 1.5, (256, 1)) + random.normal(0, 1.5, (1, 64)))
    kept = np.repeat(random.random((256, 64)) < chance, 4, axis=1)
    matrix = np.where(kept, random.integers(1, 9, kept.shape), 0).astype(np.int8)
    data = blocks.encode(matrix)
    assert blocks.block_shape(kept) == (1, 4)
    with mock.patch.object(twoway, "mask_classes", lambda kept: twoway.flat(*kept.shape)):
        assert len(data) < len(blocks.encode(matrix)) - 0.05 * kept[:, ::4].size / 8
    assert (decoded(data, matrix) == matrix).all()


def test_a_few_blocks_are_written_plain_and_many_are_coded():
    few, many = codes((16, 16), (4, 4), 0.25), codes((256, 256), (4, 4), 0.25)
    assert blocks.encode(few)[:3] == bytes([4, 4, blocks.PLAIN])
    assert blocks.encode(many)[:3] == bytes([4, 4, blocks.CODED])
    for matrix in (few, many):
        assert (decoded(blocks.encode(matrix), matrix) == matrix).all()


@pytest.mark.parametrize("values", ["int8", "int4", "bf16", None])
@pytest.mark.parametrize("transposed", [False, True])
def test_weights_in_blocks_come_back_from_a_payload(values, transposed):
    weight = weights((192, 256), (1, 4), 0.2)
    if values in ("int8", "int4"):
        weight = payload.unpack(payload.pack(weight, values))
    data = payload.pack(weight.T.contiguous() if transposed else weight, values, transposed=transposed, search=False)
    assert payload.head(memoryview(data)).codec == CODECS["blocks"].number
    found = payload.unpack(data)
    again = payload.pack(found, values, transposed=transposed, search=False)
    assert identical(payload.unpack(again), found)
    assert torch.equal((found.T if transposed else found) != 0, weight != 0)


def test_a_matrix_whose_gaps_may_be_too_wide_for_native_code_is_decoded_by_the_reference():
    matrix = codes((64, 64), (1, 4), 0.2)
    data = blocks.coded(matrix, (1, 4))
    with mock.patch.object(blocks, "MOST", matrix.size), mock.patch.object(blocks, "_decode", side_effect=KeyError):
        assert (blocks.decode(Reader(memoryview(data)), *matrix.shape, matrix.dtype) == matrix).all()


# What is refused, of a matrix of 2 x 4 in blocks of 1 x 2: one cause a line.
def ones(*numbers: int, kind: str = "int8") -> bytes:
    return stream(np.array(numbers, kind))


FLAT = varint(0) * 2
HEAD = bytes([1, 2])
MASK = FLAT + varint(1) + stream(np.zeros(1, np.uint8))
REFUSED = {
    "no rows": (bytes([0, 2, 0]), "blocks of 0 x 2 do not fit 2 x 4 weights"),
    "no columns": (bytes([1, 0, 0]), "blocks of 1 x 0 do not fit"),
    "too tall": (bytes([4, 2, 0]), "blocks of 4 x 2 do not fit"),
    "too wide": (bytes([1, 8, 0]), "blocks of 1 x 8 do not fit"),
    "cut by the edge": (bytes([1, 3, 0]), "blocks of 1 x 3 do not fit"),
    "cut in the head": (bytes([1, 2]), "ends too early"),
    "unknown coding": (HEAD + b"\2", "coded in a way that is never written"),
    "single weights, coded": (bytes([1, 1, 1]) + MASK + FLAT + ones(1), "coded in a way that is never written"),
    "plain, bits past the end": (HEAD + b"\0\x08\1\1", "past the last place"),
    "plain, no bits": (HEAD + b"\0", "ends too early"),
    "plain, values missing": (HEAD + b"\0\x80\1", "ends too early"),
    "plain, an empty block": (HEAD + b"\0\x80\0\0", "a kept block without a value"),
    "an empty block": (HEAD + b"\1" + MASK + FLAT + ones(0, 0), "a kept block without a value"),
    "more blocks than there are": (HEAD + b"\1" + FLAT + varint(5), "more kept weights than places"),
    "gap past the end": (HEAD + b"\1" + FLAT + varint(1) + stream(np.array([4], np.uint8)), "out of range|too early"),
    "values too few": (HEAD + b"\1" + MASK + FLAT + ones(1), "values do not fit"),
    "values too many": (HEAD + b"\1" + MASK + FLAT + ones(1, 1, 1), "at most 2"),
    "values of another type": (HEAD + b"\1" + MASK + FLAT + ones(1, 1, kind="int16"), "wrong type"),
    "classes of the weights, not the blocks": (
        HEAD + b"\1" + stream(np.ones(2, np.uint8)) + stream(np.ones(4, np.uint8)),
        "at most 2",
    ),
}


@pytest.mark.parametrize("cause", REFUSED)
@pytest.mark.parametrize("fast", [True, False])
def test_blocks_that_cannot_have_been_written_are_refused(cause, fast):
    data, message = REFUSED[cause]
    core = native.core() if fast else None
    assert core is not None or not fast
    with mock.patch.object(native, "core", return_value=core), pytest.raises(DamagedError, match=message):
        blocks.decode(Reader(memoryview(data)), 2, 4, np.dtype(np.int8))


def test_the_reference_matrix_of_the_refused_ones_is_read():
    data = HEAD + b"\1" + MASK + FLAT + ones(0, 7)
    assert decoded(data, np.zeros((2, 4), np.int8)).tolist() == [[0, 7, 0, 0], [0, 0, 0, 0]]
    data = HEAD + b"\0\x10\5\0"
    assert decoded(data, np.zeros((2, 4), np.int8)).tolist() == [[0, 0, 0, 0], [0, 0, 5, 0]]


def test_what_the_entropy_codec_writes_has_no_zeros_among_its_values():
    data = FLAT + varint(1) + stream(np.zeros(1, np.uint8)) + FLAT + ones(0)
    for core in (native.core(), None):
        with mock.patch.object(native, "core", return_value=core), pytest.raises(DamagedError, match="without a value"):
            entropy.decode(Reader(memoryview(data)), 2, 4, np.dtype(np.int8))
