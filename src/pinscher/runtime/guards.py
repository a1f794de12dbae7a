"""Refuses what the sparse runtime cannot do, in one sentence, before anything is computed."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from pinscher.errors import InputError, first_line
from pinscher.runtime.kernels import OutOfRangeError

NO_GRAPH = "an accelerated model cannot be traced or exported (take the model it was made from)"


def refuse_tracing() -> None:
    """Native code leaves nothing in a traced graph: its outputs would become constants.

    Raises:
        InputError: within `torch.jit.trace` and `make_fx`. `torch.export` gives itself away by its tensors, see
            `check_tensors`; `torch.compile` is fine, since it leaves native code alone.
    """
    jit: Any = torch.jit
    if jit.is_tracing() or get_proxy_mode() is not None:
        raise InputError(f"{NO_GRAPH}.")


def check_tensors(**given: Any) -> None:
    """Whether inputs are tensors with numbers in them, where the kernels can read them; None is fine.

    Raises:
        InputError: for anything else.
    """
    for name, value in given.items():
        if value is None:
            continue
        if not isinstance(value, Tensor):
            raise InputError(f"{name}: the inputs must be tensors, not {type(value).__name__}.")
        if isinstance(value, FakeTensor):
            raise InputError(f"{NO_GRAPH}: {name} is a fake tensor, without numbers.")
        if value.device.type != "cpu":
            raise InputError(f"{name} is on {value.device}: an accelerated model runs on the CPU, so move it there.")
        if value.layout != torch.strided or value.is_quantized:
            raise InputError(f"{name} is sparse or quantized: give an ordinary tensor.")


def as_mask(mask: Any) -> Any:
    """An attention mask as a tensor; lists and arrays are taken too.

    Raises:
        InputError: if it cannot be one.
    """
    if mask is None or isinstance(mask, Tensor):
        return mask
    try:
        made = torch.as_tensor(mask)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"attention_mask is no array of numbers: {first_line(error)}") from None
    if not made.dim():
        raise InputError(f"attention_mask is {mask}: give a number for each token.")
    return made


def check_not_empty(**given: Tensor | None) -> None:
    """Whether inputs have a row, and a token in each; None is fine.

    Raises:
        InputError: if not.
    """
    for name, value in given.items():
        if value is not None and not value.numel():
            raise InputError(
                f"{name} have shape {list(value.shape)}, the rows have no tokens or there are none: give at least one "
                "row, and each at least one token."
            )


def check_indices(shape: tuple[int, int], **given: Tensor | None) -> None:
    """Whether indices are integers of the inputs' shape, or of one that is repeated to it.

    Raises:
        InputError: if not.
    """
    for name, value in given.items():
        if value is None:
            continue
        fits = value.dim() <= 2 and all(
            size in (1, wanted) for size, wanted in zip(reversed(value.shape), reversed(shape), strict=False)
        )
        if not fits or value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
            raise InputError(
                f"{name} have shape {list(value.shape)} and type {value.dtype}; they must be integers, {list(shape)}."
            )


def check_tokens(**given: Tensor | None) -> None:
    """Whether tokens are of a type that torch's own embeddings look up; None is fine.

    Raises:
        InputError: if not.
    """
    for name, value in given.items():
        if value is not None and value.dtype not in (torch.int64, torch.int32):
            raise InputError(
                f"{name} have shape {list(value.shape)} and type {value.dtype}; they must be integers, int64 or int32."
            )


def check_numbers(wanted: torch.dtype, **given: Tensor | None) -> None:
    """Whether embeddings are of a type that goes with the model's; None is fine.

    Raises:
        InputError: if not.
    """
    for name, value in given.items():
        if value is not None and value.dtype != wanted and (value.is_complex() or value.dtype == torch.float64):
            raise InputError(f"{name} have type {value.dtype}, the model {wanted}: give them in that.")


def check_range(name: str, index: Tensor | None, table: Any) -> None:
    """Whether all of an index is in a table of embeddings.

    Raises:
        OutOfRangeError: if not, with the first number that is not.
    """
    if index is None or table is None:
        return
    wrong = index[(index < 0) | (index >= table.num_embeddings)]
    if wrong.numel():
        raise OutOfRangeError(f"{name} contain {wrong[0].item()}: the model has 0 to {table.num_embeddings - 1}.")


@contextmanager
def naming_what_is_out_of_range(tables: Mapping[str, Any], **given: Tensor | None) -> Iterator[None]:
    """Turns an IndexError of the embeddings, which look at every index themselves, into a sentence."""
    try:
        yield
    except IndexError:
        for name, index in given.items():
            check_range(name, index, tables.get(name))
        raise


class Unpicklable:
    """Mixed into what holds native code: it can be copied, not pickled."""

    def __reduce_ex__(self, _: Any) -> Any:
        raise InputError(
            "an accelerated model cannot be pickled: save the model it was made from (pinscher.save_pretrained), and "
            "load that in every process that needs it (pinscher.load)."
        )

    def __copy__(self) -> Any:
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made
