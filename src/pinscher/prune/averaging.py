"""The mean of the weights over the last steps of a run, which is less noisy than the last step.

In the cool-down the mask hardly changes, so the mean of the surviving weights is meaningful. Weights that are zero at
the end stay zero.

    average = WeightAverage(model, start=schedule.settled_at)
    ...
    average.update(t)          # after every optimiser step
    ...
    pruner.finish()
    average.apply_()
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pinscher.prune.sharding import local


class WeightAverage:
    """A running mean of a model's trainable parameters, in fp32.

    Args:
        model: the model; read after each step, written only by `apply_`.
        start: the first step that counts.
    """

    def __init__(self, model: nn.Module, start: int) -> None:
        self.start, self.count = start, 0
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._means: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, t: int) -> None:
        """Adds the weights after t completed steps to the mean, from the first step that counts."""
        if t < self.start:
            return
        self.count += 1
        for name, parameter in self._parameters.items():
            now = local(parameter).float()
            if self.count == 1:
                self._means[name] = now.clone()
            else:
                self._means[name] += (now - self._means[name]) / self.count

    @torch.no_grad()
    def apply_(self) -> None:
        """Sets the weights to their mean; zeros stay zero, also outside of pruned matrices."""
        for name, mean in self._means.items():
            weight = local(self._parameters[name])
            weight.copy_(torch.where(weight == 0, weight, mean.to(weight.dtype)))

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "means": dict(self._means)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        self._means = {name: mean.clone() for name, mean in state["means"].items()}
