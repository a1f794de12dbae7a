"""Checkpoints without pickle that are whole or not there: one safetensors file and one JSON file in a folder.

    checkpoint.save(folder, model=model.state_dict(), optimizer=optimizer.state_dict(), pruner=pruner.state_dict())
    state = checkpoint.load(folder)

The folder is written under a temporary name, synced to disk and renamed. A process killed at any moment leaves the last
whole checkpoint readable; what it left half-written is removed by the next save.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

TENSORS, VALUES = "state.safetensors", "state.json"
FORMAT = 1


def save(folder: str | os.PathLike[str], **states: Any) -> Path:
    """Stores nested dicts, lists, numbers, strings and tensors atomically; replaces what the folder held.

    Raises:
        TypeError: for a value that is not plain data or a tensor, naming its place. Nothing is written then.
    """
    with whole(folder) as fresh:
        write(fresh, **states)
    return Path(folder)


def write(folder: Path, **states: Any) -> None:
    """The same into a folder as it is, for one that `whole` gave."""
    tensors: dict[str, Tensor] = {}
    text = json.dumps({"format": FORMAT, "states": plain(states, tensors)})
    # Copies of their own: safetensors refuses tensors that share memory.
    save_file({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}, folder / TENSORS)
    (folder / VALUES).write_text(text)


@contextlib.contextmanager
def whole(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """A fresh folder to write in; it takes the place of `folder`, synced to disk, when the block ends well.

    If the block raises, `folder` is left as it was.
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = fresh_name(folder)
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(fresh, ignore_errors=True)
    if folder.exists():  # otherwise `old` is the last whole one: a process was killed between two renames
        shutil.rmtree(old, ignore_errors=True)
    fresh.mkdir()
    try:
        yield fresh
        for path in [*sorted(fresh.rglob("*")), fresh]:
            _sync(path)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    _sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def fresh_name(folder: Path) -> Path:
    """Where `whole` lets write what will be `folder`."""
    return folder.with_name(f".{folder.name}.new")


def write_text(path: str | os.PathLike[str], text: str) -> Path:
    """Writes a text file that is whole or not there."""
    return write_bytes(path, text.encode())


def write_bytes(path: str | os.PathLike[str], content: bytes) -> Path:
    """Writes a file that is whole or not there."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_bytes(content)
    _sync(fresh)
    fresh.replace(path)
    return path


def load(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads what `save` stored.

    Raises:
        FileNotFoundError: if there is no checkpoint.
        ValueError: if it is damaged or of another format.
    """
    folder = last_whole(folder)
    try:
        values = json.loads((folder / VALUES).read_text())
        tensors = load_file(folder / TENSORS)
    except FileNotFoundError:
        raise FileNotFoundError(f"no checkpoint in {folder}") from None
    except (json.JSONDecodeError, UnicodeDecodeError, SafetensorError) as error:
        raise ValueError(f"the checkpoint in {folder} is damaged: {error}") from None
    if values.get("format") != FORMAT:
        raise ValueError(f"the checkpoint in {folder} has format {values.get('format')}; this pinscher reads {FORMAT}")
    states = restored(values["states"], tensors)
    assert isinstance(states, dict)
    return states


def last_whole(folder: str | os.PathLike[str]) -> Path:
    """The folder, or the one before if a process was killed between two renames: that one is whole."""
    folder = Path(folder)
    old = folder.with_name(f".{folder.name}.old")
    return old if not folder.exists() and old.exists() else folder


def exists(folder: str | os.PathLike[str]) -> bool:
    """Whether there is a whole checkpoint to load."""
    return last_whole(folder).exists()


def plain(value: Any, tensors: dict[str, Tensor], place: str = "") -> Any:
    """JSON for a nested value; tensors go to `tensors`, as they are, and leave a reference behind."""
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
    """What `plain` was given."""
    if isinstance(value, dict):
        if "$tensor" in value:
            return tensors[value["$tensor"]]
        if "$tuple" in value:
            return tuple(restored(item, tensors) for item in value["$tuple"])
        return {key: restored(item, tensors) for key, item in value["$dict"]}
    return [restored(item, tensors) for item in value] if isinstance(value, list) else value


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
