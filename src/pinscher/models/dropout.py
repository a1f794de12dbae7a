"""The dropout of a model, wherever its modules keep it."""

from __future__ import annotations

from typing import Any


def set_dropout_(model: Any, probability: float) -> None:
    """Gives every dropout of a model this probability; its configuration stays as it is.

    Some modules hold a dropout module, others only the number, which their attention takes.
    """
    from torch import nn

    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = probability
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, probability)
