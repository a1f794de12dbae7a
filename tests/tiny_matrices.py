"""Matrices and inputs for the methods that look at calibration data."""

from __future__ import annotations

import torch


def matrix(out: int, features: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(out, features, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs(features: int, tokens: int = 200) -> torch.Tensor:
    """Correlated features of very uneven size, as in a transformer."""
    mixed = matrix(tokens, features, 1) @ (
        torch.eye(features, dtype=torch.float64) + 0.5 * matrix(features, features, 2)
    )
    order = torch.randperm(features, generator=torch.Generator().manual_seed(3))
    return mixed * torch.logspace(-0.5, 0.5, features, dtype=torch.float64)[order]


def error(x: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> float:
    return float((x @ (before - after).T).square().sum())
