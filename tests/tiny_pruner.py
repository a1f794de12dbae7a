"""A pruner at the beginning of a plain loop."""

import torch
from torch import nn

import tiny
from pinscher import Pruner
from pinscher.prune import CRITERIA
from pinscher.prune.gates import Gated

RANKED = [name for name in CRITERIA if not issubclass(CRITERIA[name], Gated)]
LEARNED = [name for name in CRITERIA if issubclass(CRITERIA[name], Gated)]


def zeros(pruner: Pruner) -> int:
    return sum(site.zeros() for site in pruner.sites)


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    tiny.loss_of(net, *tiny.task()).backward()
    optimizer.step()


def started(method: str = "pins", optimizer=torch.optim.AdamW, seed: int = 0, **settings):
    torch.manual_seed(seed)
    net = tiny.Net()
    pruner = Pruner(net, tiny.config(method, **{"interval": 5, **settings}), calibration=tiny.batches())
    optimizer = optimizer(pruner.param_groups(), lr=3e-3)
    pruner.attach(optimizer)
    return net, pruner, optimizer
