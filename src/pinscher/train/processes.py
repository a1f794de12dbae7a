"""The processes that train one model together: one, or those that torchrun or accelerate launched."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import PartialState


def processes() -> Any:
    """Who we are among them; joins them at the first call. Without a GPU they speak through gloo."""
    return PartialState(cpu=not torch.cuda.is_available())
