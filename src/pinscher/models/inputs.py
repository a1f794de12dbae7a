"""Observes the inputs of a model's matrices while batches run through it, for pruning and for INT8 scales."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

Modules = Mapping[str, Sequence[nn.Module]]  # of each matrix, by its name; several where they share it
Look = Callable[[str, Tensor], None]


class _EnoughError(Exception):
    """Ends a forward pass early: all inputs that were asked for have been seen."""


def run(model: nn.Module, batch: Any) -> Any:
    """Calls the model with a batch: a mapping by names, a tuple or list in order, anything else as the one input."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts every module into evaluation mode while the block runs; then each gets its own mode back."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextlib.contextmanager
def watching(modules: Modules, look: Look) -> Iterator[None]:
    """While the block runs, calls `look` with name and input at every use of a matrix."""
    with contextlib.ExitStack() as stack:
        for name, users in modules.items():

            def show(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                look(name, args[0] if args else next(iter(kwargs.values())))

            for module in users:
                stack.callback(module.register_forward_pre_hook(show, with_kwargs=True).remove)
        yield


def gather(
    model: nn.Module, batches: Iterable[Any], modules: Modules, add: Look, calls_per_pass: int | None = None
) -> None:
    """Runs batches through a model, and gives `add` the inputs [rows, features] of some matrices as they come.

    Positions where a batch's `attention_mask` is 0 are padding and left out.

    Args:
        model: the model, in the mode that it is to run in.
        batches: inputs of the model.
        modules: the matrices.
        add: called with a matrix's name and its rows.
        calls_per_pass: uses of these matrices in one forward pass, which then ends after the last of them.
    """
    for batch in batches:
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        seen = 0

        def look(name: str, inputs: Tensor, mask: Any = mask) -> None:
            nonlocal seen
            if isinstance(mask, Tensor) and inputs.dim() > 2 and inputs.shape[:2] == mask.shape:
                inputs = inputs[mask.bool()]
            add(name, inputs.reshape(-1, inputs.shape[-1]))
            seen += 1
            if seen == calls_per_pass:
                raise _EnoughError

        with watching(modules, look), contextlib.suppress(_EnoughError):
            run(model, batch)
