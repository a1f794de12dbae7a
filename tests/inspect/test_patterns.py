"""Patterns are called by their names only where they hold."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pinscher.inspect import patterns


def n_of_m(kept: int, size: int, rows: int = 64, columns: int = 128, seed: int = 0) -> np.ndarray:
    """Exactly `kept` of each `size` neighbours in a row."""
    order = np.random.default_rng(seed).random((rows, columns // size, size)).argsort(-1)
    return (order < kept).reshape(rows, columns)


def tiles(height: int, width: int, density: float = 0.3, rows: int = 128, columns: int = 256) -> np.ndarray:
    alive = np.random.default_rng(1).random((rows // height, columns // width)) < density
    return np.kron(alive, np.ones((height, width))).astype(bool)


@pytest.mark.parametrize("seed", range(3))
def test_heads_that_were_kept_are_no_n_of_m(seed):
    """As in masks of real runs: one head nearly whole, the others nearly empty, and hardly a full group."""
    chance = np.full((12, 1, 384), 0.01)  # by head, and column
    chance[:, :, :96] = 0.15
    chance[3] = 0.55
    chance[3, :, :96] = 0.8
    mask = (np.random.default_rng(seed).random((12, 32, 384)) < chance).reshape(384, 384)
    assert patterns.find(mask).name == "unstructured"


@pytest.mark.parametrize(("kept", "size"), [(1, 2), (1, 4), (2, 4), (3, 4), (2, 8), (4, 8), (8, 16), (16, 32)])
def test_n_of_m_is_called_so_along_inputs_and_along_outputs(kept, size):
    mask = n_of_m(kept, size, rows=128, columns=256)
    assert patterns.find(mask).name == f"{kept}:{size}"
    assert patterns.find(mask.T).name == f"{kept}:{size} along outputs"
    group = mask[5].reshape(-1, size)[3]
    group[:] = True  # one group too many
    assert patterns.find(mask).name != f"{kept}:{size}"


@pytest.mark.parametrize("shape", [(4, 1), (1, 4), (2, 2), (8, 1), (16, 16), (1, 32), (32, 32)])
def test_blocks_are_called_by_their_largest_shape(shape):
    mask = tiles(*shape)
    assert patterns.find(mask).name == f"blocks {shape[0]}x{shape[1]}"
    mask[17, 33] ^= True  # one weight alone breaks it
    assert patterns.find(mask).name == "unstructured"


def test_rows_columns_and_heads():
    mask = np.ones((64, 96), bool)
    assert patterns.find(mask).name == "dense"
    assert patterns.find(~mask) == patterns.Pattern("empty", "empty", 64, 96)
    mask[[3, 9, 60]] = False
    assert patterns.find(mask, head=16) == patterns.Pattern("rows", "rows-columns", 3, 0)
    assert patterns.find(mask.T).name == "columns"
    mask[:, 7] = False
    assert patterns.find(mask).name == "rows and columns"
    heads = np.ones((64, 96), bool)
    heads[16:48] = False
    assert patterns.find(heads, head=16) == patterns.Pattern("heads", "heads", 32, 0, 2)
    assert patterns.find(heads.T, head=16, head_axis=1) == patterns.Pattern("heads", "heads", 0, 32, 2)
    assert patterns.find(heads).name == "rows"  # nobody said that there are heads
    heads[0] = False  # and a row of another head
    assert patterns.find(heads, head=16).name == "rows"


def test_what_is_left_of_a_pattern_keeps_its_name_and_its_dead_rows():
    mask = n_of_m(2, 4)
    mask[10:20] = False
    assert patterns.find(mask) == patterns.Pattern("2:4", "n:m", 10, 0)
    loose = np.random.default_rng(0).random((64, 128)) < 0.5
    loose[:, :4] = False
    assert patterns.find(loose) == patterns.Pattern("unstructured", "unstructured", 0, 4)


def test_a_tiny_matrix_proves_nothing():
    assert patterns.find(np.array([[1, 0, 0, 1], [0, 1, 1, 0]], bool)).name == "unstructured"  # 2:4, as it happens
    assert patterns.find(np.array([[1, 1], [0, 0]], bool)).name == "unstructured"


@settings(max_examples=150, deadline=None)
@given(
    rows=st.sampled_from([32, 96, 128, 384]),
    columns=st.sampled_from([32, 128, 384, 512]),
    sparsity=st.floats(0.01, 0.999),
    uneven=st.floats(0, 3),
    seed=st.integers(0, 10**9),
)
def test_random_zeros_are_never_called_a_pattern(rows, columns, sparsity, uneven, seed):
    random = np.random.default_rng(seed)
    chance = (1 - sparsity) * np.exp(uneven * random.normal(size=(rows, 1)))  # rows differ in pruned models
    found = patterns.find(random.random((rows, columns)) < chance)
    assert found.family in ("unstructured", "dense", "empty")
