"""A finished comparison that the tests share, made with one thread as are the processes that they start."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from tiny_command import outcome
from tiny_comparison import TWO, words_for, write_world


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """The last bits of a result depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    return write_world(tmp_path_factory.mktemp("compare"))


@pytest.fixture(scope="session")
def words(root):
    return words_for(root)


@pytest.fixture(scope="session")
def finished(root, words):
    """Two methods, one task, two seeds. Tests leave it as it is."""
    with one_thread():
        assert outcome([*words, *TWO, "--output", root / "out"])[0] == 0
    return root / "out"
