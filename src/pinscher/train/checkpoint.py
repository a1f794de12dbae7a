"""Atomic checkpoints without pickle: one safetensors file and one JSON file in a folder.

    checkpoint.save(folder, model=model.state_dict(), optimizer=optimizer.state_dict(), pruner=pruner.state_dict())
    state = checkpoint.load(folder)

The folder is written under a temporary name, synced to disk and renamed. A process killed at any moment leaves the last
whole checkpoint readable; what it left half-written is removed by the next save. Checksums tell a damaged one.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from pinscher.errors import first_line
from pinscher.files import last_whole, whole
from pinscher.train import checksums
from pinscher.train.checksums import DamagedError

TENSORS, VALUES = "state.safetensors", "state.json"
FORMAT = 1
CHECKED = "checked"  # marks a folder that was written with checksums; earlier versions wrote none


def save(folder: str | os.PathLike[str], **states: Any) -> Path:
    """Stores nested dicts, lists, numbers, strings and tensors atomically; replaces what the folder held.

    Raises:
        TypeError: for a value that is not plain data or a tensor, naming its place. Nothing is written then.
    """
    with whole(folder) as fresh:
        write(fresh, **states)
        checksums.write(fresh)
    return Path(folder)


def write(folder: Path, **states: Any) -> None:
    """The same into an existing folder, one given by `whole`; the caller writes the checksums."""
    tensors: dict[str, Tensor] = {}
    text = json.dumps({"format": FORMAT, CHECKED: True, "states": plain(states, tensors)})
    # Copies of their own: safetensors refuses tensors that share memory.
    save_file({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}, folder / TENSORS)
    (folder / VALUES).write_text(text)


def load(folder: str | os.PathLike[str], *, verified: bool = False) -> dict[str, Any]:
    """Reads what `save` stored. Checksums are compared first, unless the caller has `verified` them.

    Raises:
        FileNotFoundError: if there is no checkpoint.
        ValueError: if it is damaged or of another format.
    """
    folder = last_whole(folder)
    if not folder.exists():
        raise FileNotFoundError(f"no checkpoint in {folder}")
    if not verified:
        checksums.verify(folder)
    values = read_values(folder / VALUES, FORMAT)
    tensors = read_tensors(folder / TENSORS)
    return restored_states(values, tensors, folder)


def read_values(path: Path, wanted: int) -> dict[str, Any]:
    """The plain part of a checkpoint, of the format that is wanted.

    Raises:
        FileNotFoundError: if there is none.
        ValueError: if it is damaged or of another format.
    """
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError:
        raise FileNotFoundError(f"no checkpoint in {path.parent}: {path.name} is missing") from None
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path} is damaged: {first_line(error)}") from None
    if not isinstance(values, dict) or "format" not in values:
        raise DamagedError(f"{path} is damaged: it is not a checkpoint's")
    if values["format"] != wanted:
        raise ValueError(f"the checkpoint in {path.parent} has format {values['format']}; this pinscher reads {wanted}")
    if values.get(CHECKED) and not (path.parent / checksums.NAME).exists():
        raise DamagedError(f"{path.parent / checksums.NAME} is missing")
    return values


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file.

    Raises:
        DamagedError: if it cannot be read.
    """
    try:
        return load_file(path)
    except FileNotFoundError:
        raise DamagedError(f"{path} is missing") from None
    except SafetensorError as error:
        raise DamagedError(f"{path} is damaged: {first_line(error)}") from None


def restored_states(values: dict[str, Any], tensors: dict[str, Tensor], folder: Path) -> dict[str, Any]:
    """The states that a checkpoint's values and tensors make."""
    try:
        states = restored(values["states"], tensors)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise DamagedError(f"the checkpoint in {folder} is damaged: {first_line(error)}") from None
    if not isinstance(states, dict):
        raise DamagedError(f"the checkpoint in {folder} is damaged: its states have no names")
    return states


def exists(folder: str | os.PathLike[str]) -> bool:
    """Whether there is a whole checkpoint to load."""
    return last_whole(folder).exists()


def plain(value: Any, tensors: dict[str, Tensor], place: str = "") -> Any:
    """JSON for a nested value; tensors are put into `tensors` unchanged and replaced by a reference."""
    if isinstance(value, Tensor):
        name = f"{len(tensors)}{place}"  # the number keeps keys that hold slashes apart
        tensors[name] = value
        return {"$tensor": name}
    if isinstance(value, dict):
        # Optimisers number their parameters: JSON keys are strings, so pairs keep the keys as they are.
        pairs = [[key, plain(item, tensors, f"{place}/{key}")] for key, item in value.items()]
        return {"$dict": pairs}
    if isinstance(value, list | tuple):
        items = [plain(item, tensors, f"{place}/{i}") for i, item in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"cannot store {place.lstrip('/')}: a {type(value).__name__} is neither plain data nor a tensor")


def restored(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The inverse of `plain`."""
    if isinstance(value, dict):
        if "$tensor" in value:
            return tensors[value["$tensor"]]
        if "$tuple" in value:
            return tuple(restored(item, tensors) for item in value["$tuple"])
        return {key: restored(item, tensors) for key, item in value["$dict"]}
    return [restored(item, tensors) for item in value] if isinstance(value, list) else value
