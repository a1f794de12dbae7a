"""The model that a config asks for, with no room for its weights: a config of some bytes can ask for any size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import register_module_buffer_registration_hook as watch_buffers
from torch.nn.modules.module import register_module_parameter_registration_hook as watch_parameters

from pinscher.errors import InputError


class TooLargeError(InputError):
    """A config asks for more than it may."""


def outline(make: Callable[[], Any], most: int, numbers: int | None = None) -> Any:
    """What `make` makes, on the meta device.

    Args:
        make: makes a model of a config.
        most: how many parameters and buffers it may have. It is stopped as soon as it has more.
        numbers: how many numbers may be in them.

    Raises:
        TooLargeError: if it asks for more.
    """
    made = held = 0

    def count(_module: Any, _name: str, tensor: Any) -> None:
        nonlocal made, held
        made, held = made + 1, held + (0 if tensor is None else tensor.numel())
        if made > most:
            raise TooLargeError(f"it asks for more than {most:,} weights")
        if numbers is not None and held > numbers:
            raise TooLargeError(f"it asks for more than {numbers:,} numbers in its weights")

    counting = watch_parameters(count), watch_buffers(count)
    try:
        with torch.device("meta"):
            return make()
    finally:
        for hook in counting:
            hook.remove()
