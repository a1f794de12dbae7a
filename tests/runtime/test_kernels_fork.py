"""Fast models in forked processes, which have none of their parent's threads: same bits, no hanging."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import pinscher
from pinscher import native
from pinscher.runtime import kernels
from tiny_accelerated import batch, model_of

SECONDS = 60  # until a child counts as hanging


@pytest.fixture(autouse=True)
def _new_pools() -> Iterator[None]:
    """No pool is there before the test makes one."""
    native.pool.cache_clear()
    yield
    native.pool.cache_clear()


def in_child(compute: Callable[[], bytes]) -> bytes:
    """What a forked child computes; fails if it hangs."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writing, compute())
        finally:
            os._exit(0)
    os.close(writing)
    try:
        if not select.select([reading], [], [], SECONDS)[0]:
            os.kill(child, signal.SIGKILL)
            pytest.fail("a forked child hangs")
        return os.read(reading, 1 << 16)
    finally:
        os.close(reading)
        os.waitpid(child, 0)


def fast_model(mode: str = "int8") -> Any:
    fast = pinscher.accelerate(model_of("bert"), mode=mode, threads=1)
    fast.base_model.fast_layers.threads = 2  # on one CPU, too
    return fast


def bits(fast: Any, rows: int = 4, tokens: int = 64) -> bytes:
    found: bytes = fast(**batch(rows, tokens)).logits.numpy().tobytes()
    return found


@pytest.mark.parametrize("used", [True, False], ids=["used", "unused"])
@pytest.mark.parametrize("mode", ["int8", "fp32"])
def test_a_forked_child_gets_the_same_bits(mode, used):
    fast = fast_model(mode)
    torch.ones(1 << 20).add_(1)  # torch's threads are there, whether or not ours are
    before = bits(fast) if used else b""
    found = in_child(lambda: bits(fast))
    assert found == bits(fast)
    assert not used or found == before
    assert in_child(lambda: in_child(lambda: bits(fast))) == found  # a child's child


@pytest.mark.parametrize("rows", [1, 4])
def test_a_child_has_threads_of_its_own(rows):
    """As many as were asked for: the one that it has, and a new one."""
    fast = fast_model()
    bits(fast)

    def new_threads() -> bytes:
        before = len(os.listdir("/proc/self/task"))
        bits(fast, rows)
        return str(len(os.listdir("/proc/self/task")) - before).encode()

    assert in_child(new_threads) == b"1"


def test_a_fork_while_another_thread_has_the_pool():
    weights = np.random.default_rng(0).standard_normal((256, 512), np.float32)
    x = np.random.default_rng(1).standard_normal((512, 512), np.float32)
    matrix, pool, isa = kernels.core().Matrix.from_f32(weights, "f32"), native.pool(2), native.isa()

    def product() -> bytes:
        out = np.empty((512, 256), np.float32)
        matrix.multiply(pool, isa, x, None, "none", out)
        return out[:9].tobytes()

    wanted, stop = product(), threading.Event()

    def go() -> None:
        while not stop.is_set():
            product()

    busy = threading.Thread(target=go)
    busy.start()
    try:
        assert all(in_child(product) == wanted for _ in range(20))
    finally:
        stop.set()
        busy.join()


class Answers(Dataset[torch.Tensor]):
    """Rows that the model itself computes, in whichever process asks."""

    def __init__(self, fast: Any) -> None:
        self.fast = fast

    def __len__(self) -> int:
        return 6

    def __getitem__(self, row: int) -> torch.Tensor:
        logits: torch.Tensor = self.fast(**batch(2, 40 + row)).logits
        return logits


@pytest.mark.parametrize("used", [True, False], ids=["used", "unused"])
@pytest.mark.parametrize("where", ["dataset", "collate"])
def test_workers_of_a_data_loader(where, used):
    fast = fast_model()
    rows = Answers(fast)
    if used:
        bits(fast)
    if where == "dataset":
        data: Any = rows
        collate: Any = torch.stack
    else:
        data, collate = range(6), lambda some: torch.stack([rows[row] for row in some])
    loader = DataLoader(
        data, batch_size=2, num_workers=2, collate_fn=collate, timeout=SECONDS, multiprocessing_context="fork"
    )
    found = torch.cat(list(loader))
    assert torch.equal(found, torch.stack([rows[row] for row in range(6)]))


HELD: list[Any] = []  # what a pool's processes find, since a fast model cannot be sent to them


def answer(tokens: int) -> bytes:
    return bits(HELD[0], 3, tokens)


def test_a_pool_of_forked_processes():
    HELD[:] = [fast_model()]
    wanted = [answer(tokens) for tokens in (5, 40, 64, 17)]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map_async(answer, (5, 40, 64, 17)).get(timeout=SECONDS) == wanted
