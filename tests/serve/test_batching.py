"""Requests computed together: the right rows for everyone, turns for all, a limit to the queue."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pinscher.errors import InputError
from pinscher.serve import batching
from pinscher.serve.batching import Batcher, BusyError
from pinscher.serve.metrics import Metrics


class Slow:
    """A model whose rows become their sums, when it is let."""

    def __init__(self) -> None:
        self.gate, self.batches = threading.Semaphore(0), list[list[list[int]]]()

    def vectors(self, ids: Any, types: Any = None, normalize: Any = None) -> Any:
        assert self.gate.acquire(timeout=5)
        self.batches.append(ids)
        if any(row[0] < 0 for row in ids):
            raise InputError("a negative token")
        return np.array([[sum(row)] for row in ids], np.float32)


@pytest.fixture
def batcher():
    made = Batcher(Metrics(), limit=10)
    yield made
    made.close()


def until(true: Any) -> None:
    """Waits for what a thread does at once."""
    end = time.monotonic() + 5
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


def slow() -> Any:
    return Slow()


def test_what_waits_is_the_next_batch(batcher):
    model = slow()
    futures = [batcher.submit(model, [[1, 2]])]
    until(lambda: not batcher.waiting)
    futures += [batcher.submit(model, [[number], [number, 1]]) for number in range(4)]
    assert batcher.waiting == 8
    for _ in range(3):
        model.gate.release()
    assert futures[0].result(10).tolist() == [[3]]
    for number, future in enumerate(futures[1:]):
        assert future.result(10).tolist() == [[number], [number + 1]]
    assert [len(batch) for batch in model.batches] == [1, 8]
    assert batcher.waiting == 0


def test_a_large_request_does_not_keep_small_ones_waiting(batcher, monkeypatch):
    monkeypatch.setattr(batching, "TOGETHER", 4)
    model = slow()
    large = batcher.submit(model, [[1]] * 9)
    until(lambda: batcher.waiting <= 5)
    small = batcher.submit(model, [[7]])
    model.gate.release()
    model.gate.release()
    assert small.result(10).tolist() == [[7]]
    assert not large.done()
    for _ in range(5):
        model.gate.release()
    assert large.result(10).shape == (9, 1)


def test_models_take_turns(batcher, monkeypatch):
    monkeypatch.setattr(batching, "TOGETHER", 1)
    one, other = slow(), slow()
    first = batcher.submit(one, [[1]] * 5)
    second = batcher.submit(other, [[2]])
    one.gate.release()
    other.gate.release()
    assert second.result(10).tolist() == [[2]]
    assert not first.done()
    for _ in range(5):
        one.gate.release()
    assert first.result(10).shape == (5, 1)


def test_a_full_queue(batcher):
    model = slow()
    futures = [batcher.submit(model, [[1]])]
    until(lambda: not batcher.waiting)
    futures += [batcher.submit(model, [[1]] * 10)]
    with pytest.raises(BusyError, match="10 texts are waiting, and there is room for 10"):
        batcher.submit(model, [[1]])
    for _ in range(4):
        model.gate.release()
    assert [len(future.result(10)) for future in futures] == [1, 10]


def test_an_error_reaches_those_who_wait_and_nobody_else(batcher):
    model = slow()
    wrong = batcher.submit(model, [[-1]] + [[1]] * 3)
    until(lambda: not batcher.waiting)
    right = batcher.submit(model, [[4]])
    model.gate.release()
    model.gate.release()
    with pytest.raises(InputError, match="a negative token"):
        wrong.result(10)
    assert right.result(10).tolist() == [[4]]
    assert batcher.waiting == 0


def test_nobody_computes_for_clients_that_left(batcher):
    model = slow()
    first = batcher.submit(model, [[1]])
    until(lambda: not batcher.waiting)
    left, stayed = batcher.submit(model, [[2]] * 4), batcher.submit(model, [[3]])
    assert left.cancel()
    for _ in range(3):
        model.gate.release()
    assert (first.result(10).tolist(), stayed.result(10).tolist()) == ([[1]], [[3]])
    assert model.batches[1] == [[3]]
    assert batcher.waiting == 0


def test_no_texts(batcher):
    engine: Any = SimpleNamespace(vectors=lambda ids: np.empty((len(ids), 3), np.float32))
    assert batcher.submit(engine, []).result(1).shape == (0, 3)
