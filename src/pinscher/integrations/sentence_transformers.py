"""sentence-transformers: its models run in the sparse runtime, and are stored small.

After `import pinscher`, plain `SentenceTransformer(folder)` and `CrossEncoder(folder)` of a small file give the sparse
runtime. sentence-transformers has no place for backends of others, but it loads models by `from_pretrained`, which
reads the small file by our quantizer; that asks here, when it is done, who called. The model becomes the fast one in
place, since the caller holds it already. It stays an ordinary dense one

    where torch has an accelerator, which sentence-transformers would move it to,
    where another type than float32 is asked for (model_kwargs={"dtype": …}), and
    where pinscher has no native code.

`accelerate` and `save_pretrained` here take models of transformers and of sentence-transformers alike. Nothing of
sentence-transformers is imported: its objects are known by their classes' module.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from pathlib import Path
from typing import Any

from pinscher import native
from pinscher.errors import InputError
from pinscher.extras import naming_extras
from pinscher.store import registration

LIBRARY = "sentence_transformers"


def register() -> None:
    """Makes the small file fast wherever sentence-transformers loads it; a second call changes nothing."""
    if make_fast_ not in registration.WHEN_LOADED:
        registration.WHEN_LOADED.append(make_fast_)


def make_fast_(model: Any, folder: Path) -> None:
    """Turns a dense model that was just loaded into the sparse runtime, if sentence-transformers is who loads it."""
    import torch

    if not _is_called_by(LIBRARY) or torch.accelerator.is_available():
        return
    if model.dtype != torch.float32 or native.core() is None:
        return
    _become_(model, _loaded(folder, type(model)))


def _is_called_by(library: str) -> bool:
    frame: Any = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] == library:
            return True
        frame = frame.f_back
    return False


def _loaded(folder: Path, kind: type) -> Any:
    """The fast model of a folder, which another process that it is sent to loads anew."""
    from pinscher.models import surgery
    from pinscher.runtime.loading import load

    fast = load(folder, task=kind)
    surgery.become_(fast, surgery.subclass(type(fast), Sendable))
    fast.loaded_from = (str(folder), kind.__name__)
    return fast


def _become_(model: Any, fast: Any) -> None:
    from pinscher.models import surgery

    config = model.config
    model.__dict__ = fast.__dict__
    surgery.become_(model, type(fast))
    model.config = config  # with what the caller has set


class Sendable:
    """Mixed into a fast model that was loaded from a folder: pickled, it is the name of that folder."""

    loaded_from: tuple[str, str]

    def __reduce_ex__(self, _: Any) -> Any:
        return load_again, self.loaded_from


def load_again(folder: str, kind: str) -> Any:
    """The fast model of a folder, in another process."""
    import transformers

    return _loaded(Path(folder), getattr(transformers, kind))


# ------------------------------------------------------------ models inside of others


def accelerate(model: Any, *, mode: str = "auto", threads: int | None = None) -> Any:
    """A copy of a pruned model that runs fast on a CPU; the same call, the same outputs, for inference only.

    The model is not changed; the copy shares the memory of its embeddings and head. Without pinscher's native code, or
    if there are too few zeros to gain, the copy is a plain one.

    Args:
        model: a transformers model with zeros in the matrices of its blocks, or a SentenceTransformer or CrossEncoder
            with such a model inside.
        mode: "fp32"; "int8" (weights of 8 bits, activations of 16); "w8a8": activations of 8 bits too, where that is
            faster, as for matrices in 1x4 blocks or without zeros; or "auto": the same, with activations of 16 bits or
            fp32 for every matrix that would suffer. A matrix that is faster dense stays dense.
        threads: how many to use; as many as torch does if not given.

    Raises:
        InputError: for an unknown mode, or a model without matrices in blocks.
    """
    with naming_extras("pinscher.accelerate"):
        from pinscher.runtime import sparse

    if not _is_wrapper(model):
        return sparse.accelerate(model, mode=mode, threads=threads)
    made = _shallow(model)
    for path in _transformers_in(model):
        parent, _, child = path.rpartition(".")
        fast = sparse.accelerate(model.get_submodule(path), mode=mode, threads=threads)
        _parent(made, parent)._modules[child] = fast
    return made


def save_pretrained(model: Any, folder: str | Path, **settings: Any) -> Path:
    """Writes a model as a small folder; see `pinscher.store.saving.save_pretrained` for the settings.

    Args:
        model: a transformers model, or a SentenceTransformer or CrossEncoder, which also loads the folder.
        folder: a new folder, an empty one, or an earlier one of ours, which is replaced.
        settings: of how it is stored.
    """
    with naming_extras("pinscher.save_pretrained"):
        from pinscher.models import sentences
        from pinscher.store import saving

    if not _is_wrapper(model):
        return saving.save_pretrained(model, folder, **settings)
    inside = _transformers_in(model)
    if len(inside) > 1:
        raise InputError(f"{type(model).__name__} holds {len(inside)} transformers: store them one by one.")
    with tempfile.TemporaryDirectory() as place:
        model.save_pretrained(place)
        beside = sentences.files_of(place)
    facts = {"loads_as": type(model).__name__, **(settings.pop("facts", None) or {})}
    told = {"tokenizer": model.tokenizer, "beside": beside, **settings, "facts": facts}
    return saving.save_pretrained(model.get_submodule(inside[0]), folder, **told)


def _is_wrapper(model: Any) -> bool:
    return any(kind.__module__.partition(".")[0] == LIBRARY for kind in type(model).__mro__)


def _transformers_in(model: Any) -> list[str]:
    """Where the transformers models in a model of sentence-transformers are; not the parts of which those are made."""
    from transformers import PreTrainedModel

    found: list[str] = []
    for path, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and not any(path.startswith(f"{above}.") for above in found):
            found.append(path)
    if not found:
        raise InputError(f"{type(model).__name__} has no transformer inside: there is nothing to make fast or small.")
    return found


def _parent(made: Any, path: str) -> Any:
    """A module of a copy, copied itself, so that a child of it can be replaced."""
    for name in path.split(".") if path else ():
        made._modules[name] = _shallow(made._modules[name])
        made = made._modules[name]
    return made


def _shallow(module: Any) -> Any:
    made = copy.copy(module)
    made._modules = dict(module._modules)
    return made
