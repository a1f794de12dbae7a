"""How much each input of a matrix matters: its mean square over some real batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pinscher.errors import InputError


def importances(model: nn.Module, batches: Iterable[Mapping[str, Any]], names: Iterable[str]) -> dict[str, Tensor]:
    """Mean square of the inputs of the named modules [inputs], from forward passes over the batches.

    The model is run in evaluation mode and left as it was. Padding counts where the model computes it.

    Raises:
        InputError: if there are no batches.
    """
    wanted = set(names)
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def look(name: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        seen = inputs[0].detach().reshape(-1, inputs[0].shape[-1]).double()
        sums[name] = sums.get(name, 0) + seen.square().sum(0).cpu()
        counts[name] = counts.get(name, 0) + len(seen)

    hooks = [m.register_forward_pre_hook(partial(look, n)) for n, m in model.named_modules() if n in wanted]
    modes = [(module, module.training) for module in model.modules()]
    device = next(model.parameters()).device
    try:
        model.eval()
        with torch.no_grad():
            for batch in batches:
                model(**{key: value.to(device) for key, value in batch.items() if isinstance(value, Tensor)})
    finally:
        for module, mode in modes:
            module.training = mode
        for hook in hooks:
            hook.remove()
    if not sums:
        raise InputError("calibration needs at least one batch that reaches the model's matrices.")
    return {name: (sums[name] / counts[name]).float() for name in sums}
