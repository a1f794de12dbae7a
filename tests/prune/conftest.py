"""Every test of pruning starts from the same random numbers; runs of a teacher can be counted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pinscher import Teacher
from pinscher.prune.snapshot import Snapshot


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def runs(monkeypatch):
    """Starts to note the number of examples in each run of a teacher's snapshot."""

    def start(teacher: Teacher) -> list[int]:
        calls: list[int] = []
        plain = Snapshot.__call__

        def noting(self: Snapshot, batch: dict[str, Tensor]) -> object:
            if self is teacher.snapshot:
                calls.append(len(next(iter(batch.values()))))
            return plain(self, batch)

        monkeypatch.setattr(Snapshot, "__call__", noting)
        return calls

    return start
