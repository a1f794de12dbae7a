"""load(folder): from the small file straight to the kernels' layout; dense weights are never built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from pinscher import native
from pinscher.errors import InputError
from pinscher.runtime import choice, kernels
from pinscher.runtime.kernels import Weights
from pinscher.runtime.sparse import assemble, weights_of
from pinscher.store import payload
from pinscher.store.anatomy import resize_
from pinscher.store.file import Stored, files_of, is_packed
from pinscher.store.quantize import Quantized
from pinscher.store.saving import matrices
from pinscher.store.streams import DamagedError

RUNTIMES = ("sparse", "torch")


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
    folder = _folder(model)
    kind, config = _class_of(folder, task)
    if runtime == "torch" or native.core() is None:
        return kind.from_pretrained(folder)
    with Stored(files_of(folder)) as stored:
        made = _empty(kind, config)
        packed = _fill_(made, stored)

        def source(name: str) -> Weights:
            if f"{name}.weight" not in packed:  # stored as it was
                return weights_of(made, name)
            found = payload.unpack_rows(stored.raw(packed[f"{name}.weight"]))
            return Weights(codes=found) if isinstance(found, Quantized) else Weights(dense=found)

        return assemble(made, source, mode, kernels.threads_of(threads))


def _folder(model: str | Path) -> Path:
    folder = Path(model)
    if folder.is_dir():
        return folder
    if isinstance(model, Path) or folder.exists() or str(model).count("/") > 1:
        raise InputError(f"{model} is not a folder.")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(model)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise InputError(f"{model} is neither a folder nor a model that the hub gives: {error}") from None


def _class_of(folder: Path, task: Any) -> tuple[Any, Any]:
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    if (getattr(config, "quantization_config", None) or {}).get("quant_method") != "pinscher":
        raise InputError(f"{folder} is not stored in pinscher's format: load it with transformers and accelerate it.")
    if task is not None:
        return task, config
    names = config.architectures or ["none"]
    kind = getattr(transformers, names[0], None)
    if kind is None:
        raise InputError(f"{folder} names the class {names[0]}, which transformers does not have: give task=.")
    return kind, config


def _empty(kind: Any, config: Any) -> Any:
    """The model without room for its weights."""
    from accelerate import init_empty_weights

    sizes = config.quantization_config.get("shrunk")
    del config.quantization_config
    with init_empty_weights(include_buffers=False):
        made = kind(config)
        if sizes is not None:
            resize_(made, sizes)
    return made


def _fill_(model: nn.Module, stored: Stored) -> dict[str, str]:
    """Puts in all but the matrices of the blocks; gives those their names in the file."""
    blocks = {name for name, matrix in matrices(model).items() if matrix.role == "matrix"}
    names = set(stored.names())
    found: dict[str, str] = {}
    missing = []
    for name, parameter in model.named_parameters():
        held = name if name in names else name.removeprefix(f"{getattr(model, 'base_model_prefix', '')}.")
        if held not in names:
            missing.append((name, parameter))
            continue
        raw = stored.raw(held)
        if name in blocks and is_packed(raw):
            found[name] = held
            continue
        value = payload.unpack(raw) if is_packed(raw) else raw.clone()
        if value.shape != parameter.shape:
            raise DamagedError(f"{held} is stored as {list(value.shape)}, the model has {list(parameter.shape)}")
        _put_(model, name, value.float())
    model.tie_weights()  # type: ignore[operator]
    if empty := [name for name, parameter in model.named_parameters() if parameter.is_meta and name not in found]:
        raise InputError(f"the file has no {empty[0]}: it is not a model of this kind.")
    return found


def _put_(model: nn.Module, name: str, value: Any) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, nn.Parameter(value, requires_grad=False))
