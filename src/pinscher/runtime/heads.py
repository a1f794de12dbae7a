"""Poolers and heads of an accelerated model: the same modules, their dense layers computed by the core.

So a model gives the same numbers wherever it runs: here, or without torch in an Engine. Weights are those at the time
of acceleration.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from pinscher.models import surgery
from pinscher.models.families import Family
from pinscher.runtime import guards
from pinscher.runtime.core import Tail

TOKEN_HEADS = {"ForTokenClassification": "classifier", "ForQuestionAnswering": "qa_outputs"}


def use_heads_(model: Any, family: Family, threads: int) -> None:
    """Makes faces of the pooler and the head of one of transformers' own models."""
    kind = type(model)
    if not kind.__module__.startswith("transformers.models."):
        return
    base = model.base_model
    if family.pooler and getattr(base, "pooler", None) is not None:
        holder, _, dense = family.pooler.partition(".")
        _face_(base.get_submodule(holder), ((dense, "tanh"),), threads)
    if kind.__name__.endswith("ForSequenceClassification"):
        _use_classifier_(model, family, threads)
    for ending, name in TOKEN_HEADS.items():
        if kind.__name__.endswith(ending):
            _face_(getattr(model, name), (("", "none"),), threads)


def _use_classifier_(model: Any, family: Family, threads: int) -> None:
    names = [name for name, _ in family.classifier]
    holders = {name.rpartition(".")[0] for name in names}
    if holders == {""}:  # layers of their own, with an activation in between that is exact in any case
        for name in names:
            _face_(getattr(model, name), (("", "none"),), threads)
        return
    (holder,) = holders
    steps = tuple((name.rpartition(".")[2], activation) for name, activation in family.classifier)
    _face_(model.get_submodule(holder), steps, threads)


def _face_(module: nn.Module, steps: tuple[tuple[str, str], ...], threads: int) -> None:
    """Gives a module the core's dense layers: its own, if the name of a step is empty, else those inside."""
    layers: list[tuple[Any, str]] = [(getattr(module, name, None) if name else module, then) for name, then in steps]
    own = type(module).__module__.startswith(("transformers.models.", "torch.nn."))
    if not own or not all(type(layer) is nn.Linear for layer, _ in layers):
        return  # somebody's own head
    made = [(_array(layer.weight), _array(layer.bias), activation) for layer, activation in layers]
    kind: Any = type(module)
    linear = kind is nn.Linear
    module.tail = Tail(layers[0][0].in_features, "none" if linear else "first", made, threads)  # type: ignore[assignment]
    surgery.become_(module, face_of(kind))


def _array(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.detach().float().contiguous().numpy()


@functools.cache
def face_of(kind: type) -> type:
    """The same class, whose forward pass is the core's: a linear layer reads every vector, others first tokens only."""

    @functools.wraps(kind.forward)  # type: ignore[attr-defined]
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self: Any, x: Tensor, *given: Any, **named: Any) -> Tensor:
        guards.refuse_tracing()
        if _are_watched(self):
            return kind.forward(self, x, *given, **named)  # type: ignore[attr-defined, no-any-return]
        guards.check_tensors(features=x)
        picked = x if kind is nn.Linear else x[:, 0]
        out = torch.from_numpy(self.tail.run(picked.detach().float().reshape(-1, x.shape[-1]).numpy()))
        return out.to(x.dtype).view(*picked.shape[:-1], self.tail.features)

    return surgery.subclass(kind, guards.Unpicklable, forward=forward)


def _are_watched(module: nn.Module) -> bool:
    """Whether somebody looks at the layers inside."""
    return any(
        part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part)
        for part in module.modules()
        if part is not module
    )
