"""Checks of untrusted model folders, made before a library opens their files.

Reading a pipe would block for ever, and a config.json of a few bytes can ask for a model of any size.
"""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pinscher.errors import InputError, first_line

CONFIG = "config.json"
MOST_CONFIG = 1 << 26  # bytes of a config.json
# Names of the number of layers in configs. Each layer has tensors of its own, unless all layers share theirs.
LAYERS = (
    *("num_hidden_layers", "num_layers", "n_layers", "n_layer", "num_encoder_layers", "num_decoder_layers"),
    *("encoder_layers", "decoder_layers", "num_hidden_groups", "inner_group_num"),
)
LABELS = "num_labels"
WIDTHS = (
    *("vocab_size", "hidden_size", "intermediate_size", "embedding_size", "d_model", "d_ff", "d_kv"),
    *("n_embd", "n_inner", "dim", "hidden_dim", "type_vocab_size"),
)
FREE_LAYERS, FREE_LABELS, FREE_WIDTH = 256, 10_000, 1 << 24  # counts up to these are always accepted
A_BYTE = 1024  # weights that a byte of a small file may encode
A_TENSOR = 64  # the least bytes that a tensor takes, with its name
MOST_LAYERS = 1000  # where it is not known which file belongs to a config


def check(folder: Path) -> dict[str, Any]:
    """Refuses a folder that would hang or exhaust its reader; returns the contents of config.json, {} without one.

    Raises:
        InputError: for a pipe, a device or a socket, a config.json that cannot be read, and sizes that the weights
            cannot justify.
    """
    check_files(folder)
    settings = read_settings(folder)
    tensors, size = held(folder)
    check_counts(settings, folder / CONFIG, tensors, size)
    if not tensors:
        check_layers(settings)
    return settings


def held(folder: Path) -> tuple[int, int]:
    """Tensors that a folder's files of weights list, 0 if they cannot be read; and bytes that the files have."""
    found = [[path for path in folder.glob(f"*{ending}") if path.is_file()] for ending in (".safetensors", ".bin")]
    weights = next(filter(None, found), [])  # the others are not read if there are safetensors
    return sum(map(_tensors, weights)), sum(path.stat().st_size for path in weights)


def check_files(folder: Path) -> None:
    """Refuses a folder in which something is neither a file nor a folder."""
    for path in sorted(folder.iterdir()):
        if path.exists() and not path.is_file() and not path.is_dir():
            raise InputError(f"{path} is a pipe, a device or a socket, not a file: remove it, or copy the model again.")


def read_settings(folder: Path) -> dict[str, Any]:
    """The object in config.json; an empty one if there is no such file."""
    return read_object(folder / CONFIG)


def read_object(path: Path, most: int = MOST_CONFIG) -> dict[str, Any]:
    """The object in a file of JSON; an empty one if there is no such file.

    Raises:
        InputError: if it holds something else, is no file, or has more than `most` bytes.
    """
    if not path.exists():
        return {}
    if not path.is_file():
        raise InputError(f"cannot read {path}: it is not a file.")
    try:
        if path.stat().st_size > most:
            raise InputError(f"cannot read {path}: it has more than {most >> 20} MB.")
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"cannot read {path}: {first_line(error)}") from None
    if not isinstance(found, dict):
        raise InputError(f"cannot read {path}: it does not hold an object.")
    return found


def check_counts(settings: dict[str, Any], path: Path, tensors: int, size: int) -> None:
    """Refuses sizes that do not fit into `tensors` tensors and `size` bytes; 0 tensors: their number is unknown."""
    if not tensors:
        return
    most = dict.fromkeys(WIDTHS, FREE_WIDTH + A_BYTE * size) | dict.fromkeys(LAYERS, max(FREE_LAYERS, tensors))
    most[LABELS] = max(FREE_LABELS, size)
    for name, value in _numbers(settings):
        if value > most[name]:
            held = f"{tensors} tensors in {size:,} bytes"
            raise InputError(f"{path} asks for {name} = {value}, but the model has only {held}.")


def check_layers(settings: dict[str, Any]) -> None:
    """Refuses more layers than any model has, for a config without a folder."""
    for name, value in _numbers(settings):
        if name in LAYERS and value > MOST_LAYERS:
            raise InputError(f"{CONFIG} asks for {name} = {value}: no model has more than {MOST_LAYERS} layers.")


def class_of(config: Any, place: str | Path) -> Any:
    """The class of transformers that a config names.

    Raises:
        InputError: if it names none, or something that is no model.
    """
    import transformers

    names = getattr(config, "architectures", None)
    name = names[0] if isinstance(names, list) and names else None
    found = getattr(transformers, name, None) if isinstance(name, str) else None
    base = transformers.PreTrainedModel
    if not (isinstance(found, type) and issubclass(found, base)) or found is base:
        raise InputError(f"{place} says that it is {str(name)[:80]!r}, which is no model class of transformers.")
    return found


def _numbers(settings: Any) -> Iterator[tuple[str, float]]:
    """Every size that is checked, also of the models inside of a model."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _numbers(value)
        elif name in (*LAYERS, *WIDTHS, LABELS) and isinstance(value, int | float):
            yield name, value


def _tensors(path: Path) -> int:
    """How many tensors a file of weights lists; 0 if it cannot be read, which its reader will say.

    torch's files are zip archives with a member for each tensor. Earlier ones are not, and could only be unpickled.
    """
    if path.suffix == ".bin":
        if not zipfile.is_zipfile(path):
            return min(MOST_LAYERS, path.stat().st_size // A_TENSOR)
        try:
            with zipfile.ZipFile(path) as archive:
                return sum("/data/" in name for name in archive.namelist())
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
            return 0
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        return file.read(length).count(b'"data_offsets"') if 0 < length <= min(path.stat().st_size, 10**8) else 0
