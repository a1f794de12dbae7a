"""A whole run that others are compared with, and losses in double precision."""

from __future__ import annotations

import pytest
import torch

from tiny_trainer import copied, resumable


@pytest.fixture
def double_losses(monkeypatch):
    """Losses that upcast to float32 stay in float64, so that rounding hides nothing."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory):
    """A whole run of `resumable`: its folder and its last weights."""
    folder = tmp_path_factory.mktemp("unbroken")
    trainer = resumable(folder)
    trainer.train()
    return folder, copied(trainer.model.state_dict())
