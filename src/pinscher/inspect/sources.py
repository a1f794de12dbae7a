"""Reads the tensors of any checkpoint: a folder or a file, safetensors, a torch state dict, or our small file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from pinscher.errors import InputError, first_line
from pinscher.models.names import clean_name

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLES = ("model.safetensors", "pytorch_model.bin", "pytorch_model.pt", "model.pt")
ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
# Keys under which training scripts save the state dict.
NESTED = ("state_dict", "model_state_dict", "model", "state", "module")


@dataclass
class Checkpoint:
    """Tensors by name, the settings beside them, and notes for the user."""

    place: str
    tensors: dict[str, Tensor]
    config: dict[str, Any]
    folder: Path | None
    is_small: bool = False
    notes: list[str] = field(default_factory=list)


def read(place: str, path: Path, small: Callable[[Path], dict[str, Tensor]]) -> Checkpoint:
    """Reads a checkpoint.

    Args:
        place: its name as the user gave it.
        path: its folder or file.
        small: reads a folder that holds our small file.

    Raises:
        InputError: if it is not a checkpoint, or cannot be read.
    """
    folder = path if path.is_dir() else path.parent
    config = _json(folder / "config.json")
    notes = []
    if _is_small(config):
        return Checkpoint(place, small(folder), config, folder, is_small=True)
    files = [path] if path.is_file() else _files(folder)
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= {clean_name(name): tensor for name, tensor in _tensors(file).items()}
    other = config.get("quantization_config") or config.get("compression_config")
    if isinstance(other, dict):
        how = other.get("quant_method") or other.get("format") or "another tool"
        notes.append(f"It is quantised or compressed by {how}: only its plain matrices are analysed.")
    if (folder / "recipe.yaml").exists():
        notes.append("It comes with a recipe.yaml, as SparseML writes it; the zeros are read from the weights.")
    return Checkpoint(place, tensors, config, path if path.is_dir() else None, notes=notes)


def _is_small(config: Mapping[str, Any]) -> bool:
    told = config.get("quantization_config")
    return isinstance(told, dict) and told.get("quant_method") == "pinscher"


def _json(path: Path) -> dict[str, Any]:
    """The contents of a settings file; empty if it is missing."""
    if path.exists() and not path.is_file():  # reading a pipe would block for ever
        raise InputError(f"cannot read {path}: it is not a file.")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"cannot read {path}: {error}") from None
    return found if isinstance(found, dict) else {}


def settings_beside(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    """A further file of settings in the checkpoint's folder."""
    return {} if checkpoint.folder is None else _json(checkpoint.folder / name)


def _files(folder: Path) -> list[Path]:
    for name in INDEXES:
        members = _json(folder / name).get("weight_map")
        if isinstance(members, dict):
            files = [folder / Path(member).name for member in sorted({str(member) for member in members.values()})]
            missing = [file.name for file in files if not file.is_file()]
            if missing:
                raise InputError(f"{folder} lacks {missing[0]}, which {name} names: the model is not complete.")
            return files
    for name in SINGLES:
        if (folder / name).exists():
            return [folder / name]
    loose = sorted(file for file in folder.iterdir() if file.suffix in ENDINGS and file.name != "training_args.bin")
    if len(loose) == 1:
        return loose
    if loose:
        raise InputError(f"{folder} holds several checkpoints: name one of {', '.join(file.name for file in loose)}.")
    raise InputError(f"{folder} holds no model: there is no {SINGLES[0]} and no {SINGLES[1]}.")


def _tensors(file: Path) -> dict[str, Tensor]:
    if file.exists() and not file.is_file():
        raise InputError(f"cannot read {file}: it is not a file. Copy it again, or save the model again.")
    if file.suffix == ".safetensors":
        try:
            return load_file(file)
        except (SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:  # KeyError: an unknown type
            raise InputError(
                f"cannot read {file}: {first_line(error)}. Copy it again, or save the model again."
            ) from None
    if file.suffix not in ENDINGS:
        raise InputError(f"{file} is not a checkpoint: it must end in {', '.join(ENDINGS)}.")
    try:
        found = _loaded(file)
    except Exception:  # a zip, an old stream, or neither; torch raises many kinds of errors
        raise InputError(
            f"cannot read {file}: it is damaged, or holds more than tensors, which is not loaded since it could run "
            "code. Save model.state_dict() instead."
        ) from None
    tensors = _state_dict(found)
    if not tensors:
        raise InputError(f"{file} holds no state dict: save model.state_dict().")
    return tensors


def _loaded(file: Path) -> Any:
    """Tensors and plain values only: with weights_only, nothing in the file is executed."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise
        return torch.load(file, map_location="cpu", weights_only=True)  # written before 2020: not a zip


def _state_dict(found: Any) -> dict[str, Tensor]:
    """The tensors of a saved object, also if they are under one of the usual keys."""
    if not isinstance(found, Mapping):
        return {}
    tensors = {str(name): value for name, value in found.items() if isinstance(value, Tensor)}
    inner = next((found[name] for name in NESTED if isinstance(found.get(name), Mapping)), None)
    return tensors if inner is None else _state_dict(inner) or tensors
