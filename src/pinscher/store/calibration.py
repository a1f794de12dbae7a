"""The importance of each input of a matrix: its mean square over some real batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pinscher.errors import InputError
from pinscher.models.inputs import evaluating, gather


def importances(model: nn.Module, batches: Iterable[Mapping[str, Any]], names: Iterable[str]) -> dict[str, Tensor]:
    """Mean square of the inputs of the named modules [inputs], from forward passes over the batches.

    The model is run in evaluation mode and not changed. Padding (`attention_mask` 0) does not count.

    Raises:
        InputError: if there are no batches, or nothing but padding in them.
    """
    wanted = set(names)
    modules = {name: [module] for name, module in model.named_modules() if name in wanted}
    device = next(model.parameters()).device
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def add(name: str, rows: Tensor) -> None:
        sums[name] = sums.get(name, 0) + rows.detach().double().square().sum(0).cpu()
        counts[name] = counts.get(name, 0) + len(rows)

    tensors = ({k: v.to(device) for k, v in batch.items() if isinstance(v, Tensor)} for batch in batches)
    with evaluating(model), torch.no_grad():
        gather(model, tensors, modules, add)
    if not any(counts.values()):
        raise InputError("calibration needs at least one batch that reaches the model's matrices.")
    return {name: (sums[name] / count).float() for name, count in counts.items() if count}
