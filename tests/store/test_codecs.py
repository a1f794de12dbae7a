"""Every codec gives back the matrix it was given, bit for bit, and refuses bytes that it cannot have written."""

from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pinscher import native
from pinscher.errors import InputError
from pinscher.store import entropy, streams, twoway
from pinscher.store.codecs import CODECS, codec, smallest
from pinscher.store.streams import DamagedError, Reader, small_unsigned, stream, varint
from tiny_store import INTEGERS, MB, PATTERNS, confined, pruned

I8 = np.dtype(np.int8)
U8 = np.dtype(np.uint8)
SHAPES = [(0, 0), (0, 5), (5, 0), (1, 1), (1, 9), (9, 1), (7, 13), (64, 48), (3, 300)]


def reader(data: bytes) -> Reader:
    return Reader(memoryview(data))


def decoded(name: str, data: bytes, shape: tuple[int, int], dtype: np.dtype = I8) -> np.ndarray:
    """The matrix; the codec must have read every byte."""
    walk = reader(data)
    matrix = CODECS[name].decode(walk, *shape, dtype)
    walk.finished()
    return matrix


def check(name: str, matrix: np.ndarray) -> None:
    before = matrix.copy()
    found = decoded(name, CODECS[name].encode(matrix), matrix.shape, matrix.dtype)
    assert found.dtype == matrix.dtype
    assert found.shape == matrix.shape
    assert (found == matrix).all()
    assert (matrix == before).all()  # what is encoded stays as it was


def both(data: bytes, shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
    """What the native code and the reference make of the bytes, which must be the same."""
    fast = entropy._decode(native.core(), reader(data), *shape, dtype, None)
    slow = entropy._decode_slowly(reader(data), *shape, dtype)
    if dtype == np.int8:
        scale = np.linspace(0, 3, shape[0], dtype=np.float32)
        weights = entropy.decode(reader(data), *shape, dtype, scale)
        assert weights.dtype == np.float32
        assert (weights == slow * scale[:, None]).all()
    assert fast.dtype == slow.dtype == dtype
    assert fast.tobytes() == slow.tobytes()
    assert fast.shape == slow.shape == shape
    return fast


def classes(draw: st.DrawFn, rows: int, columns: int) -> twoway.Classes:
    most = draw(st.sampled_from([1, 2, 5, twoway.MOST]))
    random = np.random.default_rng(draw(st.integers(0, 2**31)))
    return twoway.Classes(*(random.integers(0, most, count).astype(np.uint8) for count in (rows, columns)))


@st.composite
def matrices(draw: st.DrawFn) -> np.ndarray:
    rows, columns = draw(st.integers(0, 40)), draw(st.integers(0, 40))
    density = draw(st.sampled_from([0.0, 0.02, 0.2, 0.5, 0.8, 0.98, 1.0]) | st.floats(0, 1))
    made = (draw(st.sampled_from(INTEGERS)), draw(st.sampled_from(PATTERNS)), draw(st.integers(0, 2**31)))
    matrix = pruned(rows, columns, density, *made)
    if rows and draw(st.booleans()):
        matrix[draw(st.integers(0, rows - 1))] = draw(st.sampled_from([0, 1, -128]))
    return matrix


@st.composite
def grouped(draw: st.DrawFn) -> tuple[np.ndarray, twoway.Classes, twoway.Classes]:
    """A matrix with classes that have nothing to do with it: any classes must decode exactly."""
    matrix = draw(matrices())
    return matrix, classes(draw, *matrix.shape), classes(draw, *matrix.shape)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_matrix_comes_back_bit_for_bit(name, shape):
    for dtype in INTEGERS:
        for density in (0.0, 0.01, 0.3, 0.5, 0.7, 0.99, 1.0):
            for pattern in ("random", "both", "1x4"):
                check(name, pruned(*shape, density, dtype, pattern, seed=3))


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=60, deadline=None)
@given(matrix=matrices())
def test_any_matrix_comes_back_bit_for_bit(name, matrix):
    check(name, matrix)


@pytest.mark.parametrize("name", CODECS)
def test_a_matrix_that_is_not_in_row_order_in_memory_comes_back(name):
    matrix = pruned(20, 30, 0.4, seed=1)
    for view in (matrix.T, matrix[::2, 1::3], np.asfortranarray(matrix)):
        assert (decoded(name, CODECS[name].encode(view), view.shape) == view).all()


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("columns", [(1 << 16) - 1, 1 << 16, (1 << 16) + 1])
def test_rows_longer_than_a_small_index_come_back(name, columns):
    matrix = np.zeros((2, columns), np.int8)
    matrix[0, 0], matrix[0, -1], matrix[1, columns // 2], matrix[1, -1] = 1, -2, 3, -128
    check(name, matrix)


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 509, 510, 511, 765])
def test_delta_skips_any_distance(gap):
    matrix = np.zeros((1, gap + 2), np.int8)
    matrix[0, gap] = matrix[0, -1] = 9
    check("delta", matrix)


@settings(max_examples=300, deadline=None)
@given(made=grouped())
def test_native_decoding_is_the_reference(made):
    matrix, mask, sizes = made
    with (
        mock.patch.object(twoway, "mask_classes", return_value=mask),
        mock.patch.object(twoway, "value_classes", return_value=sizes),
    ):
        data = entropy.encode(matrix)
    assert (both(data, matrix.shape, matrix.dtype) == matrix).all()


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("density", [0.03, 0.45, 0.9])
def test_matrices_whose_rows_and_columns_differ_have_many_levels_and_come_back(dtype, density):
    matrix = pruned(200, 150, density, dtype, "both", seed=5)
    assert twoway.mask_classes(matrix != 0).levels > 3
    data = entropy.encode(matrix)
    assert (both(data, matrix.shape, matrix.dtype) == matrix).all()


def test_levels_with_more_ones_than_zeros_list_the_zeros():
    """The complement is what makes a dense level cheap: both kinds stand in one matrix here."""
    matrix = np.zeros((64, 64), np.int8)
    matrix[:32] = pruned(32, 64, 0.95, seed=2)
    matrix[32:] = pruned(32, 64, 0.05, seed=3)
    mask = twoway.Classes(np.repeat(np.array([0, 1], np.uint8), 32), np.zeros(64, np.uint8))
    with mock.patch.object(twoway, "mask_classes", return_value=mask):
        data = entropy.encode(matrix)
    walk = reader(data)
    entropy.decode_classes(walk, 64, 64)
    (many, zeros), (few, ones) = entropy._decode_gaps(walk, 2048), entropy._decode_gaps(walk, 2048)
    assert many > 1900
    assert zeros.size == 2048 - many
    assert few == ones.size < 150
    assert (both(data, matrix.shape, I8) == matrix).all()


def test_large_kept_codes_in_some_rows_are_told_by_value_classes():
    random = np.random.default_rng(0)
    width = np.where(np.arange(200) % 2, 3, 90)[:, None]
    matrix = (random.integers(1, 2**20, (200, 300)) % width + 1).astype(np.int8)
    row, column = np.nonzero(matrix)
    assert twoway.value_classes(matrix[row, column], row, column, matrix.shape).levels > 1
    data = entropy.encode(matrix)
    assert (both(data, matrix.shape, I8) == matrix).all()
    with mock.patch.object(twoway, "value_classes", return_value=twoway.flat(*matrix.shape)):
        assert len(data) < len(entropy.encode(matrix))


def test_classes_pay_where_the_mask_is_uneven_and_cost_nothing_where_it_is_not():
    uneven, even = pruned(256, 256, 0.1, pattern="both", seed=1), pruned(256, 256, 0.1, seed=1)
    with mock.patch.object(twoway, "mask_classes", lambda kept: twoway.flat(*kept.shape)):
        flat = len(entropy.encode(uneven)), len(entropy.encode(even))
    assert len(entropy.encode(uneven)) < 0.93 * flat[0]
    assert len(entropy.encode(even)) == flat[1]


def test_the_entropy_codec_is_near_the_entropy():
    matrix = pruned(768, 768, 0.2, seed=4)
    kept = matrix != 0
    counts = np.bincount(matrix[kept].view(np.uint8), minlength=256)
    bound = twoway.entropy(np.array([kept.sum(), kept.size - kept.sum()])) + twoway.entropy(counts)
    assert bound / 8 < len(entropy.encode(matrix)) < 1.02 * bound / 8


def test_decoding_in_many_threads_gives_the_same():
    made = [pruned(90, 70, 0.3, pattern="both", seed=seed) for seed in range(16)]
    packed = [entropy.encode(matrix) for matrix in made]
    with ThreadPoolExecutor(4) as pool:
        for matrix, found in zip(made, pool.map(lambda d: decoded("entropy", d, (90, 70)), packed), strict=True):
            assert (found == matrix).all()


def test_the_smallest_codec_wins_and_the_simpler_one_if_equal():
    for density in (0.0, 0.001, 0.1, 0.5, 1.0):
        matrix = pruned(60, 80, density, seed=7)
        sizes = {name: len(CODECS[name].encode(matrix)) for name in CODECS}
        chosen, body = smallest(matrix)
        assert len(body) == min(sizes.values())
        assert chosen.number == min(CODECS[name].number for name in sizes if sizes[name] == len(body))
    empty = np.zeros((0, 5), np.int8)
    assert CODECS["bitmask"].encode(empty) == CODECS["dense"].encode(empty) == b""
    assert smallest(empty, ("entropy", "bitmask", "dense"))[0] is CODECS["dense"]


def test_the_numbers_of_the_codecs_never_change():
    numbers = {name: found.number for name, found in CODECS.items()}
    assert numbers == {"dense": 0, "csr": 1, "delta": 2, "bitmask": 3, "entropy": 4, "blocks": 5}


def test_an_unknown_codec_is_named_with_a_hint():
    with pytest.raises(InputError, match=r"unknown codec 'bitmsk'\. Did you mean 'bitmask'\?"):
        codec("bitmsk")
    with pytest.raises(InputError, match=r"unknown codec 'zip'\. Known: dense, csr, delta, bitmask, entropy, blocks"):
        codec("zip")


# What each codec refuses: one cause a line.
def u32(*numbers: int) -> bytes:
    return np.array(numbers, "<u4").tobytes()


def u16(*numbers: int) -> bytes:
    return np.array(numbers, "<u2").tobytes()


def ones(count: int) -> bytes:
    return stream(np.ones(count, np.int8))


def gaps(*numbers: int, kind: str = "uint8") -> bytes:
    return stream(np.array(numbers, kind))


NO_CLASSES = varint(0) * 2
REFUSED = {
    "dense too short": ("dense", b"123", "ends too early"),
    "csr does not start at 0": ("csr", u32(1, 1, 1) + u16(0) + b"1", "row pointers"),
    "csr runs back": ("csr", u32(0, 2, 1) + u16(0) + b"1", "row pointers"),
    "csr row too full": ("csr", u32(0, 3, 3) + u16(0, 1, 1) + b"123", "row pointers"),
    "csr column out of range": ("csr", u32(0, 1, 1) + u16(2) + b"1", "index is out of range"),
    "csr columns swapped": ("csr", u32(0, 2, 2) + u16(1, 0) + b"12", "not in order"),
    "csr column twice": ("csr", u32(0, 2, 2) + u16(1, 1) + b"12", "not in order"),
    "csr zero kept": ("csr", u32(0, 1, 1) + u16(0) + b"\0", "without a value"),
    "csr more than there is": ("csr", u32(0, 2, 4) + u16(0, 1) + b"12", "ends too early"),
    "delta out of range": ("delta", b"\x01\x04" + b"1", "index is out of range"),
    "delta skip at the end": ("delta", b"\x02\x00\xff" + b"1", "leads nowhere"),
    "delta skips past the end": ("delta", b"\x02\xff\x00" + b"1", "index is out of range"),
    "delta zero kept": ("delta", b"\x01\x00\x00", "without a value"),
    "delta length past the end": ("delta", b"\x7f\x00", "ends too early"),
    "delta length out of range": ("delta", b"\xff" * 9 + b"\x01", "length is out of range"),
    "bitmask bits after the last place": ("bitmask", b"\x08" + b"1", "past the last place"),
    "bitmask zero kept": ("bitmask", b"\x80\x00", "without a value"),
    "bitmask values missing": ("bitmask", b"\xf0\x01\x02", "ends too early"),
    "more ones than places": ("entropy", NO_CLASSES + varint(5), "more kept weights than places"),
    "gap past the end": (
        "entropy",
        NO_CLASSES + varint(1) + gaps(4) + NO_CLASSES + ones(1),
        "index is out of range",
    ),
    "gap of zeros past the end": (
        "entropy",
        NO_CLASSES + varint(3) + gaps(200) + NO_CLASSES + ones(3),
        "index is out of range",
    ),
    "gaps fewer than ones": ("entropy", NO_CLASSES + varint(2) + gaps(0) + NO_CLASSES + ones(2), "gaps do not fit"),
    "signed gaps": ("entropy", NO_CLASSES + varint(1) + gaps(1, kind="int8"), "gaps do not fit"),
    "wide gaps": ("entropy", NO_CLASSES + varint(1) + gaps(1, kind="uint64"), "gaps do not fit"),
    "values too few": ("entropy", NO_CLASSES + varint(2) + gaps(0, 0) + NO_CLASSES + ones(1), "values do not fit"),
    "values too many": ("entropy", NO_CLASSES + varint(1) + gaps(0) + NO_CLASSES + ones(2), "at most|do not fit"),
    "a value zero": (
        "entropy",
        NO_CLASSES + varint(1) + gaps(0) + NO_CLASSES + stream(np.zeros(1, np.int8)),
        "without a value",
    ),
    "values of another type": (
        "entropy",
        NO_CLASSES + varint(1) + gaps(0) + NO_CLASSES + stream(np.ones(1, np.int16)),
        "wrong type",
    ),
    "class out of range": (
        "entropy",
        stream(np.array([0, twoway.MOST], np.uint8)) + varint(0),
        "classes do not fit",
    ),
    "classes fewer than rows": ("entropy", stream(np.zeros(1, np.uint8)), "classes do not fit"),
    "classes more than rows": ("entropy", stream(np.zeros(3, np.uint8)), "at most 2"),
    "classes of another type": ("entropy", stream(np.zeros(2, np.int8)), "classes do not fit"),
    "unknown kind of number": ("entropy", b"\x02\x08\x01\x00", "unknown kind of number 8"),
    "no stream": ("entropy", b"\x02\x00\x03abc", "a stream "),
}


@pytest.mark.parametrize("cause", REFUSED)
def test_what_a_codec_cannot_have_written_is_refused(cause):
    name, data, message = REFUSED[cause]
    with pytest.raises(DamagedError, match=message):
        decoded(name, data, (2, 2))
    if name == "entropy":
        with pytest.raises(DamagedError):
            entropy._decode_slowly(reader(data), 2, 2, I8)


@pytest.mark.parametrize("name", CODECS)
def test_a_matrix_cut_short_anywhere_is_refused(name):
    data = CODECS[name].encode(pruned(12, 15, 0.3, seed=9))
    for end in range(len(data)):
        with pytest.raises(DamagedError):
            decoded(name, data[:end], (12, 15))


# Streams: what the entropy codec is written with.
@given(number=st.integers(0, 2**63 - 1))
def test_a_varint_comes_back(number):
    walk = reader(varint(number))
    assert walk.varint() == number
    walk.finished()


def test_numbers_that_are_too_long_and_bytes_left_over_are_refused():
    with pytest.raises(DamagedError, match="length is out of range"):
        reader(b"\x80" * 9 + b"\x01").varint()
    with pytest.raises(DamagedError, match="2 bytes too many"):
        reader(b"ab").finished()
    with pytest.raises(DamagedError, match="ends too early"):
        reader(b"ab").take(-1)


@settings(max_examples=100, deadline=None)
@given(kind=st.sampled_from(streams.KINDS), count=st.integers(0, 700), seed=st.integers(0, 2**31))
def test_a_stream_of_any_kind_comes_back(kind, count, seed):
    info = np.iinfo(kind)
    values = np.random.default_rng(seed).integers(info.min, info.max, count, dtype=kind, endpoint=True)
    values[: count // 2] = values[:1].repeat(count // 2)
    walk = reader(stream(values))
    found = walk.stream(count)
    walk.finished()
    assert found.size == count
    assert not count or found.dtype == kind
    assert (found == values).all()


def test_a_stream_of_several_pages_comes_back():
    values = np.arange(5000, dtype=np.uint16)
    with mock.patch.object(streams, "PAGE", 1000):
        assert (reader(stream(values)).stream(5000) == values).all()
        assert (reader(stream(values[:3001])).stream(5000) == values[:3001]).all()


@pytest.mark.parametrize("count", [1 << 24, (1 << 24) + 1, (1 << 25) + 3])
def test_a_stream_as_long_as_the_largest_matrices_comes_back(count):
    """The kept codes of a vocabulary of 30,522 words are 23 million numbers."""
    values = np.ones(count, np.uint8)
    values[-1] = 2
    walk = reader(stream(values))
    assert (walk.stream(count) == values).all()
    walk.finished()


def test_numbers_get_the_smallest_unsigned_type():
    cases = {0: "u1", 255: "u1", 256: "u2", 65535: "u2", 65536: "u4", 2**32 - 1: "u4", 2**32: "u8"}
    for most, kind in cases.items():
        assert small_unsigned(np.array([0, most])).dtype == np.dtype(kind)
    assert small_unsigned(np.array([], np.int64)).dtype == U8


def test_room_is_made_only_for_numbers_that_may_be_there():
    data = varint(1 << 40) + bytes([7]) + varint(1) + b"\0"
    kind, message = confined(lambda: reader(data).stream(1 << 20), memory=64 * MB)
    assert (kind, message) == ("raised DamagedError", f"a stream of {1 << 40} numbers where at most {1 << 20} can be")
