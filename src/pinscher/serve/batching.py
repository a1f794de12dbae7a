"""Texts of many clients computed together: whatever waits when the threads are free is the next batch.

Nobody waits for a batch to fill, and nothing is padded. Texts are taken from all waiting requests in turn, so that a
large request does not keep small ones waiting. All models of a process share its threads.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import Future
from typing import Any

import numpy as np

from pinscher.errors import InputError
from pinscher.runtime.engine import Engine
from pinscher.runtime.kernels import Array
from pinscher.serve.metrics import Metrics

TOGETHER = 1 << 12  # tokens of a batch, about: more are not faster, and keep others waiting
QUEUE = 2048  # texts that may wait


class BusyError(InputError):
    """Too many texts are waiting."""


class Job:
    """The texts of one request."""

    def __init__(self, engine: Engine, ids: list[list[int]], types: list[list[int]] | None, normalize: bool | None):
        self.engine, self.ids, self.types, self.normalize = engine, ids, types, normalize
        self.taken, self.left = 0, len(ids)
        self.rows: list[Array | None] = [None] * len(ids)
        self.future: Future[Array] = Future()

    @property
    def key(self) -> tuple[int, bool | None, bool]:
        """Jobs with the same one can be computed together."""
        return id(self.engine), self.normalize, self.types is None


class Batcher:
    """Computes jobs in a thread of its own.

    Args:
        metrics: where batches are counted.
        limit: texts that may wait.
    """

    def __init__(self, metrics: Metrics, limit: int = QUEUE) -> None:
        self.metrics, self.limit = metrics, limit
        self._waiting: deque[Job] = deque()
        self._texts = 0  # of waiting jobs that are not taken yet
        self._changed = threading.Condition()
        self._closing = False
        self._last: Any = None
        self._thread = threading.Thread(target=self._work, name="pinscher-batches", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Texts that wait."""
        return self._texts

    def submit(
        self, engine: Engine, ids: list[list[int]], types: list[list[int]] | None = None, normalize: bool | None = None
    ) -> Future[Array]:
        """The vectors of some rows of tokens, as soon as they are there.

        Raises:
            BusyError: if too many texts are waiting.
        """
        job = Job(engine, ids, types, normalize)
        if not ids:
            job.future.set_result(engine.vectors([]))
            return job.future
        with self._changed:
            if self._closing:
                raise BusyError("the server is shutting down.")
            if self._texts + len(ids) > self.limit:
                raise BusyError(f"{self._texts} texts are waiting, and there is room for {self.limit}: try later.")
            self._texts += len(ids)
            self._waiting.append(job)
            self._changed.notify()
        return job.future

    def close(self) -> None:
        """Finishes what waits, and ends the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closing:
                    self._changed.wait()
                if not self._waiting:
                    return
                picked = self._pick()
            if picked:
                self._compute(picked)

    def _pick(self) -> list[tuple[Job, int]]:
        """The next batch: jobs and numbers of their texts; models take turns."""
        for job in [one for one in self._waiting if one.future.cancelled()]:
            self._texts -= len(job.ids) - job.taken
            self._waiting.remove(job)
        others = [job.key for job in self._waiting if job.key != self._last]
        key = others[0] if others else self._last
        jobs = [job for job in self._waiting if job.key == key]
        self._last, picked, tokens = key, [], 0
        while jobs and tokens < TOGETHER:
            for job in list(jobs):
                picked.append((job, job.taken))
                tokens += len(job.ids[job.taken])
                job.taken += 1
                self._texts -= 1
                if job.taken == len(job.ids):
                    jobs.remove(job)
                    self._waiting.remove(job)
                if tokens >= TOGETHER:
                    break
        return picked

    def _compute(self, picked: list[tuple[Job, int]]) -> None:
        first = picked[0][0]
        ids = [job.ids[number] for job, number in picked]
        types = None if first.types is None else [(job.types or [])[number] for job, number in picked]
        start = time.perf_counter()
        try:
            found = first.engine.vectors(ids, types, first.normalize)
        except Exception as error:  # whatever it is, the ones who wait must learn of it
            self._fail(picked, error)
            return
        self.metrics.count_batch(len(ids), sum(map(len, ids)), time.perf_counter() - start)
        for (job, number), row in zip(picked, found, strict=True):
            job.rows[number] = row
            job.left -= 1
            if not job.left and not job.future.cancelled():
                job.future.set_result(np.stack([some for some in job.rows if some is not None]))

    def _fail(self, picked: list[tuple[Job, int]], error: Exception) -> None:
        for job in {id(job): job for job, _ in picked}.values():
            with self._changed:
                if job in self._waiting:
                    self._texts -= len(job.ids) - job.taken
                    self._waiting.remove(job)
            if not job.future.done():
                job.future.set_exception(error)
