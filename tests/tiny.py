"""A transformer-like model small enough to train in a test, and a task that it really learns."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pinscher import Pruner, PruningConfig


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(self.dropout(torch.tanh(self.up(x)))))


class Net(nn.Module):
    """Blocks in a ModuleList between an input layer and a head: 6 sites, 3072 weights at the default width."""

    def __init__(self, width: int = 16, blocks: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.input = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(blocks))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.input(x)
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(x)}


def task(rows: int = 256, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Three classes that need two products of inputs to tell apart."""
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    return x, (x[:, 0] > 0).long() + (x[:, 1] * x[:, 2] > 0).long()


def batches(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Calibration data."""
    return list(task(96, dtype)[0].split(32))


def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(net(x)["logits"], y)


def accuracy(net: nn.Module) -> float:
    x, y = task()
    training = net.training
    net.eval()
    with torch.no_grad():
        right = float((net(x)["logits"].argmax(1) == y).float().mean())
    net.train(training)
    return right


def train(net: nn.Module, pruner: Pruner, steps: int, lr: float = 3e-3, **adamw: object) -> torch.optim.Optimizer:
    """A plain loop: batches of 32, AdamW."""
    x, y = task(dtype=next(net.parameters()).dtype)
    optimizer = torch.optim.AdamW(pruner.param_groups(), lr=lr, **adamw)
    pruner.attach(optimizer)
    for _ in range(steps):
        rows = torch.randint(0, len(x), (32,))
        optimizer.zero_grad()
        loss_of(net, x[rows], y[rows]).backward()
        optimizer.step()
    return optimizer


def config(method: str = "pins", steps: int = 60, **settings: object) -> PruningConfig:
    return PruningConfig(method=method, total_steps=steps, **settings)
