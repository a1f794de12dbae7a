"""Finds and loads models: from a folder, an installed package or the hub, which may be out of reach."""

from __future__ import annotations

import functools
import importlib.util
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pinscher.errors import InputError, first_line
from pinscher.models import folders

PROBE_SECONDS = 8.0
PACKAGE = "pypi:"
NOT_OF_A_CONFIG = ("dtype", "ignore_mismatched_sizes")  # arguments of from_pretrained
# A model may have more weights than its files: a new head, tied ones, buffers, several made of one, wider numbers.
MERGED, MOST_OWN = 4, 1000
A_BYTE, FREE_NUMBERS = 4, 1 << 24


@contextmanager
def offline_if_unreachable() -> Iterator[None]:
    """Without a network, makes the libraries use their caches at once inside this block.

    On their own they retry for half a minute or more.
    """
    import datasets
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    if not any(before) and not _is_reachable():
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


@functools.cache
def _is_reachable() -> bool:
    """Whether the hub answers within seconds; asked once in a process."""
    import huggingface_hub
    from huggingface_hub import constants

    answers: list[Any] = []

    def ask() -> None:
        try:
            answers.append(huggingface_hub.get_session().head(constants.ENDPOINT, timeout=PROBE_SECONDS))
        except Exception:  # no answer is the answer
            return

    # In a thread, because looking up a name can hang for longer than any timeout that can be set.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS)
    return bool(answers)


def locate(model: str) -> str:
    """What to pass to from_pretrained: a hub id or a folder; `pypi:NAME` is the folder `model` of a package."""
    if not model.startswith(PACKAGE):
        path = Path(model)
        looks_local = model.startswith((".", "/", "~")) or model.count("/") > 1
        if looks_local and not path.expanduser().exists():
            raise InputError(f"there is no model folder {model}.")
        if path.is_dir() and not (path / "config.json").exists():
            inside = path / "model"
            hint = f" Did you mean {inside}?" if (inside / "config.json").exists() else ""
            raise InputError(f"{model} is not a model folder: it has no config.json.{hint}")
        if path.expanduser().is_dir():
            folders.check(path.expanduser())
        return str(path.expanduser()) if path.expanduser().is_dir() else model
    name = model.removeprefix(PACKAGE)
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise InputError(f"the package {name} is not installed. Install it with: pip install 'pinscher[demo]'")
    return str(Path(found.origin).parent / "model")


@contextmanager
def loading(model: str, what: str) -> Iterator[None]:
    """Turns any error of this block into one sentence: transformers, safetensors and tokenizers each raise errors of
    their own for damaged files, down to a bare Exception.
    """
    try:
        yield
    except Exception as error:
        raise unreachable(model, what, error) from None


def load_weights(kind: Any, model: str, **settings: Any) -> tuple[Any, dict[str, Any]]:
    """Loads a model of a class; also returns transformers' loading info.

    Raises:
        InputError: with the file and the cause, if the model cannot be loaded, lacks a weight (a new head is none), or
            has one that is not finite.
    """
    from pinscher.models.wholeness import lacking  # needs torch, which knowing a place does not

    place = locate(model)
    if Path(place).is_dir():
        _check_room(kind, Path(place), settings)
    try:
        loaded, told = kind.from_pretrained(place, **settings, output_loading_info=True)
    except Exception as error:  # transformers, torch and safetensors have many names for what can be wrong
        raise unreachable(model, "model", _mismatch(kind, place, settings, error)) from None
    if absent := lacking(loaded, told["missing_keys"]):
        raise InputError(f"{model} lacks {absent[0]}: it is not the whole model. Copy it again, or save it again.")
    _check_finite(loaded, Path(place))
    return loaded, told


def _check_room(kind: Any, folder: Path, settings: dict[str, Any]) -> None:
    """Refuses a config that asks for much more than the files of weights hold: transformers makes room for all of it,
    and compares the sizes later. What is wrong with a config otherwise, it says itself.
    """
    from transformers import AutoConfig

    from pinscher.models.outline import TooLargeError, outline

    tensors, size = folders.held(folder)
    if not tensors or folders.read_settings(folder).get("quantization_config"):  # which has a reader of its own
        return
    own = {name: value for name, value in settings.items() if name not in NOT_OF_A_CONFIG}

    def make() -> Any:
        config = AutoConfig.from_pretrained(folder, **own)
        return kind.from_config(config) if hasattr(kind, "from_config") else kind(config)

    try:
        outline(make, MERGED * tensors + MOST_OWN, A_BYTE * size + FREE_NUMBERS)
    except TooLargeError as error:
        raise InputError(
            f"{folder / folders.CONFIG} does not fit the weights: {error}, and the files hold {tensors} tensors in "
            f"{size:,} bytes. Copy it again."
        ) from None
    except Exception:
        return


def _check_finite(model: Any, place: Path) -> None:
    """Refuses NaN and infinity: outputs would be meaningless, and no score would show it."""
    for name, weight in model.named_parameters():
        if not weight.is_floating_point() or not weight.numel():
            continue
        if not all(end.isfinite() for end in weight.detach().aminmax()):  # aminmax propagates NaN and makes no copy
            raise InputError(
                f"{_file_with(name, place)} holds values that are not finite (NaN or infinity) in {name}: give a model "
                "whose training went well, or copy it again."
            )


def _file_with(name: str, folder: Path) -> Path:
    """The file of a model's folder that holds a weight; the folder if there is no telling."""
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            if any(name.endswith(key) or key.endswith(name) for key in file.keys()):  # noqa: SIM118
                return path
    return folder


def _mismatch(kind: Any, place: str, settings: dict[str, Any], error: Exception) -> Exception:
    """An error that names the weight of another shape; that of transformers only points at its log."""
    if "ignore_mismatched_sizes" not in str(error) or not Path(place).is_dir():
        return error
    asked = settings | {"ignore_mismatched_sizes": True, "output_loading_info": True}
    try:
        name, found, wanted = sorted(kind.from_pretrained(place, **asked)[1]["mismatched_keys"])[0]
    except (RuntimeError, ValueError, IndexError):
        return error
    return InputError(f"{name} is stored as {list(found)}, the model has {list(wanted)}")


def _damage(folder: Path) -> str | None:
    """Which file of weights cannot be opened, and why."""
    from safetensors import SafetensorError, safe_open

    for path in sorted(folder.glob("*.safetensors")):
        try:
            if path.is_dir():
                return f"{path} is a folder, not a file"
            with safe_open(path, framework="pt") as file:
                file.keys()
        except (SafetensorError, OSError, ValueError) as error:
            return f"{path} is damaged ({first_line(error)})"
    return None


def unreachable(model: str, what: str, error: BaseException) -> InputError:
    """One sentence for the many ways in which loading fails."""
    place = Path(locate(model))
    if place.is_dir():
        cause = _damage(place) if what == "model" and not isinstance(error, InputError) else None
        return InputError(f"cannot load the {what} in {model}: {cause or first_line(error)}")
    return InputError(
        f"cannot get the {what} {model!r} from the hub: there is no such model, or no network. Give the folder of a "
        "model instead."
    )


def stored_folder(model: str | Path) -> Path:
    """A stored model's folder: the one that is named, or a copy of that which the hub has.

    Raises:
        InputError: if there is neither.
    """
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
