"""load(folder): from the small file straight to the kernels' layout; dense weights are never built."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from pinscher import native
from pinscher.errors import InputError, first_line
from pinscher.models import folders, hub
from pinscher.models.outline import TooLargeError, outline
from pinscher.models.sizes import resize_
from pinscher.runtime import choice, kernels
from pinscher.runtime.kernels import Weights
from pinscher.runtime.sparse import assemble, weights_of
from pinscher.store.checks import check_finite, check_format
from pinscher.store.file import Stored, files_of, is_packed
from pinscher.store.fitting import fit
from pinscher.store.integers import Coded
from pinscher.store.saving import matrices

RUNTIMES = ("sparse", "torch")
MOST_OWN = 1000  # weights that a model may have besides those of the file: tied ones, mostly


def load(
    model: str | Path, *, runtime: str = "sparse", mode: str = "auto", threads: int | None = None, task: Any = None
) -> Any:
    """A stored model, ready to run: the class that its config names, accelerated.

    Args:
        model: a folder that `pinscher.save_pretrained` or `pinscher export` wrote, or its name on the hub.
        runtime: "sparse", or "torch" for the plain dense model.
        mode: see `accelerate`.
        threads: see `accelerate`.
        task: a class of transformers to load it as, instead of the one in the config.

    Raises:
        InputError: for an unknown runtime or mode, or a folder that is not one of ours.
    """
    if runtime not in RUNTIMES or mode not in choice.MODES:
        raise InputError(f"there are the runtimes {', '.join(RUNTIMES)} and the modes {', '.join(choice.MODES)}.")
    count = kernels.threads_of(threads)
    folder = hub.stored_folder(model)
    folders.check(folder)
    kind, config = _class_of(folder, task)
    if runtime == "torch" or native.core() is None:
        return kind.from_pretrained(folder)
    with Stored(files_of(folder)) as stored:
        sizes = config.quantization_config.get("shrunk")
        del config.quantization_config
        homes = fit(_outline(kind, config, sizes, stored), stored)
        made = _empty(kind, config, sizes, stored)
        packed = _fill_(made, stored, homes)

        def source(name: str) -> Weights:
            if f"{name}.weight" not in packed:  # stored as it was
                return weights_of(made, name)
            found = stored.coded(packed[f"{name}.weight"])
            if isinstance(found, Coded):
                return Weights(codes=found)
            check_finite(stored, packed[f"{name}.weight"], found)
            return Weights(dense=found)

        return assemble(made, source, mode, count)


def _class_of(folder: Path, task: Any) -> tuple[Any, Any]:
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # every setting can be wrong in a way of its own
        raise InputError(f"cannot read {folder / folders.CONFIG}: {first_line(error)}") from None
    check_format(getattr(config, "quantization_config", None), folder)
    return (folders.class_of(config, folder) if task is None else task), config


def _outline(kind: Any, config: Any, sizes: Any, stored: Stored) -> Any:
    """The model as the config has it, with no room for anything."""

    def make() -> Any:
        model = kind(config)
        if sizes is not None:
            resize_(model, sizes)
        return model

    with _refusing(stored):
        return outline(make, len(stored.names()) + MOST_OWN)


def _empty(kind: Any, config: Any, sizes: Any, stored: Stored) -> Any:
    """The model without room for its weights."""
    from accelerate import init_empty_weights

    with _refusing(stored), init_empty_weights(include_buffers=False):
        made = kind(config)
        if sizes is not None:
            resize_(made, sizes)
    return made


@contextlib.contextmanager
def _refusing(stored: Stored) -> Iterator[None]:
    """Says what is wrong with a config.json of which no model can be made."""
    try:
        yield
    except TooLargeError as error:
        raise InputError(f"{stored.place}: {error}, the file holds {len(stored.names()):,}.") from None
    except Exception as error:  # every setting can be wrong in a way of its own
        raise InputError(f"cannot make a model of the config.json of {stored.place}: {first_line(error)}") from None


def _fill_(model: Any, stored: Stored, homes: dict[str, str]) -> dict[str, str]:
    """Puts in all but the matrices of the blocks; gives those their names in the file."""
    blocks = {name for name, matrix in matrices(model).items() if matrix.role == "matrix"}
    found: dict[str, str] = {}
    for name, held in homes.items():
        if name in blocks and is_packed(stored.raw(held)):
            found[name] = held
            continue
        value = stored.tensor(held)
        value = value.clone().float() if value.is_floating_point() else value.clone()
        if value.is_floating_point():
            check_finite(stored, held, value.numpy())
        _put_(model, name, value)
    # As from_pretrained does it: what the config ties stays apart where the file holds both and they differ.
    model.tie_weights(missing_keys={*model.state_dict()} - homes.keys(), recompute_mapping=False)
    if empty := [name for name, parameter in model.named_parameters() if parameter.is_meta and name not in found]:
        raise InputError(f"{stored.place} lacks {empty[0]}: it is not a model of this kind.")
    return found


def _put_(model: nn.Module, name: str, value: Any) -> None:
    parent, _, child = name.rpartition(".")
    module = model.get_submodule(parent)
    setattr(module, child, value if child in module._buffers else nn.Parameter(value, requires_grad=False))
