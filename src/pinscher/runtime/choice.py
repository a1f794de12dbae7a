"""Chooses the kernel of each matrix: the fastest on this machine, unless it would cost too much accuracy."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pinscher import native
from pinscher.errors import InputError
from pinscher.models.families import Family, max_positions
from pinscher.runtime.encoder import Layers, embedded, native_layers
from pinscher.runtime.kernels import Weights, core
from pinscher.store.streams import DamagedError

Lazy = Callable[[], Weights]  # a matrix, read when it is asked for
MODES = ("auto", "int8", "fp32")
LIMIT = 0.02  # how far int8 may move the last hidden state; see docs/runtime.md for what that means for predictions
SAMPLE = 64  # tokens that are looked at for it


def kind_of(weights: Weights, mode: str) -> str:
    """The kind that the mode allows and that is fastest for this density."""
    limits = core().break_even(native.isa())  # native/isas.inc: 0 for int8 where fp32 is always faster
    kind = "int8" if mode != "fp32" and limits["int8"] else "fp32"
    return kind if weights.density < limits[kind] else "dense"


def packed_as(name: str, weights: Lazy, mode: str) -> Any:
    """A matrix in the kernels' layout; only its own numbers are in memory meanwhile."""
    try:
        found = weights()
        return found.pack(kind_of(found, mode))
    except DamagedError:
        raise  # which names the file and the matrix
    except InputError as error:
        raise InputError(f"{name}: {error}") from None


def chosen_layers(base: Any, family: Family, layers: list[list[tuple[str, Lazy]]], mode: str, threads: int) -> Layers:
    """The native layers of a base model; each matrix, named and read in its turn, as the kind that suits it."""
    flat = [one for layer in layers for one in layer]
    packed = [packed_as(name, weights, mode) for name, weights in flat]

    def made_of(matrices: list[Any]) -> Layers:
        some = iter(matrices)
        return native_layers(base, family, [[next(some) for _ in layer] for layer in layers], threads)

    if mode == "auto":
        sample = _sample(base)
        with torch.no_grad():
            hidden = embedded(base, sample, None, None, None).float()
        shape = (1, sample.shape[1])
        correct_(
            packed, [weights for _, weights in flat], lambda mixed: made_of(mixed)(hidden, [], shape, None, False)[0]
        )
    return made_of(packed)


def correct_(packed: list[Any], weights: list[Lazy], hidden: Callable[[list[Any]], Tensor]) -> None:
    """Replaces int8 matrices by fp32 ones until the hidden states of a sample are off by LIMIT at most.

    They are compared with int8 in all places and, if that is too far off, in one place at a time; the matrices that
    hurt most go first.

    Args:
        packed: the model's matrices.
        weights: where each comes from.
        hidden: the last hidden states of the sample, with these matrices.
    """
    places = [number for number, matrix in enumerate(packed) if matrix.kind == "i8"]
    if not places:
        return
    exact = list(packed)
    for number in places:
        exact[number] = weights[number]().pack("fp32")
    wanted = hidden(exact)

    def off(mixed: list[Any]) -> float:
        return float((hidden(mixed) - wanted).norm() / wanted.norm())

    if off(packed) <= LIMIT:
        return
    alone = {number: off([*exact[:number], packed[number], *exact[number + 1 :]]) for number in places}
    for number in sorted(places, key=lambda number: -alone[number]):
        packed[number] = exact[number]
        if off(packed) <= LIMIT:
            return


def correct_linears_(model: Any, linears: list[Any], weights: list[Lazy]) -> None:
    """The same for a model whose matrices are SparseLinear modules: the whole of it is run."""
    sample = _sample(model.base_model)
    inputs = {"input_ids": sample}
    if getattr(model.config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = sample

    def hidden(mixed: list[Any]) -> Tensor:
        for linear, matrix in zip(linears, mixed, strict=True):
            linear.matrix = matrix
        with torch.no_grad():
            found: Tensor = model.base_model(**inputs)[0]
        return found.float()

    packed = [linear.matrix for linear in linears]
    correct_(packed, weights, hidden)
    for linear, matrix in zip(linears, packed, strict=True):
        linear.matrix = matrix


def reads_tokens(model: Any) -> bool:
    """Whether a sample for a model can be made here."""
    takes = inspect.signature(model.base_model.forward).parameters
    return "input_ids" in takes and hasattr(model.config.get_text_config(), "vocab_size")


def _sample(base: Any) -> Tensor:
    """Random tokens [1, some], always the same."""
    generator = torch.Generator().manual_seed(0)
    config = base.config.get_text_config()
    return torch.randint(0, config.vocab_size, (1, min(SAMPLE, max_positions(config))), generator=generator)
