"""The processes that train one model together: one, or those that torchrun or accelerate launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import PartialState

from pinscher.errors import InputError

T = TypeVar("T")


def processes() -> Any:
    """This process's place among them; joins them at the first call. Without a GPU they communicate through gloo."""
    return PartialState(cpu=not torch.cuda.is_available())


def agreed(look: Callable[[], T]) -> T:
    """What the first process finds, on all of them; an InputError that it raises, all raise.

    Every process must call it, after they have joined.
    """
    together = dist.is_available() and dist.is_initialized()
    found: list[Any] = [None, None]
    if not together or dist.get_rank() == 0:
        try:
            found[0] = look()
        except InputError as error:
            found[1] = type(error)(str(error))  # without a traceback, which cannot be sent
    if together:
        dist.broadcast_object_list(found)
    if found[1] is not None:
        raise found[1]
    result: T = found[0]
    return result
