"""Whether a checkpoint is the whole model: which weights it must have.

transformers initialises whatever is missing at random. That is right for a new head, and for nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn


def lacking(model: Any, missing: Iterable[str]) -> list[str]:
    """The weights missing from a checkpoint that it must have, sorted.

    If the checkpoint is of the model's own class, as `architectures` says, these are all of them. Otherwise the head
    may be new, and so may a pooler that is missing as a whole: not every class has one, and bare models may be saved
    without it. Only parameters count; buffers are computed.

    Args:
        model: the model that was loaded, or is to be.
        missing: names of parameters and buffers that are neither in the checkpoint nor tied to one that is.
    """
    absent = {name for name, _ in model.named_parameters(remove_duplicate=False)} & set(missing)
    base = model.base_model
    is_own = type(model).__name__ in (getattr(model.config, "architectures", None) or ())
    if not absent or (is_own and base is not model):
        return sorted(absent)
    prefix = next(f"{name}." if name else "" for name, module in model.named_modules() if module is base)
    new = [
        f"{prefix}{name}."
        for name, part in base.named_children()
        if ("pooler" in name or (base is model and not is_own and _is_head(model, part)))
        and all(f"{prefix}{name}.{inner}" in absent for inner, _ in part.named_parameters())
    ]
    return sorted(name for name in absent if name.startswith(prefix) and not name.startswith(tuple(new)))


def _is_head(model: Any, part: nn.Module) -> bool:
    """Whether a part is the head, for a model such as T5's that has its base's parts among its own."""
    return "For" in type(model).__name__ and isinstance(part, nn.Linear)
