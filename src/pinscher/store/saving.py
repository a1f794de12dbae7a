"""Stores a model small: packs its matrices, and writes a folder that plain `from_pretrained` loads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from pinscher import files
from pinscher.errors import InputError, first_line
from pinscher.models import blocks, folders
from pinscher.models.blocks import Matrix
from pinscher.models.names import Place
from pinscher.models.sizes import uneven
from pinscher.registry import unknown
from pinscher.store import card, file, payload
from pinscher.store.calibration import importances
from pinscher.store.codecs import CODECS

KEEP = "keep"
Progress = Callable[[int, int], None]


def matrices(model: nn.Module) -> dict[str, Matrix]:
    """The matrices that the file can pack, by the name of their parameter; tied ones once.

    transformers only lets parameters called `weight` be unpacked, so the projections of `nn.MultiheadAttention` with
    other names are stored unchanged.
    """
    return {f"{matrix.path}.weight": matrix for matrix in blocks.matrices(model) if _can_pack(matrix)}


def _can_pack(matrix: Matrix) -> bool:
    return matrix.parameter == "weight" and matrix.owner.dim() == 2 and matrix.owner.is_floating_point()


def save_pretrained(
    model: Any,
    folder: str | Path,
    *,
    values: str = "int8",
    embeddings: str = KEEP,
    head: str = KEEP,
    codecs: tuple[str, ...] = tuple(CODECS),
    calibration: Iterable[Mapping[str, Any]] | None = None,
    tokenizer: Any = None,
    beside: Mapping[str, bytes] | None = None,
    max_shard_size: int | str = file.SHARD,
    facts: Mapping[str, Any] | None = None,
    push_to_hub: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Writes a model as a small folder, whole or not at all; `from_pretrained` loads it after `import pinscher`.

    The model is not changed.

    Args:
        model: a transformers model.
        folder: a new folder, an empty one, or an earlier one of ours, which is replaced.
        values: of the blocks' matrices: int8, int7, int6, int4, fp16, bf16, fp32, or keep.
        embeddings: the same for the embeddings.
        head: the same for linear layers outside the blocks (pooler, classifier, projections).
        codecs: the candidate codecs; the smallest result is chosen for each matrix.
        calibration: batches for the model; INT8 scales then weigh each input by its mean square.
        tokenizer: stored beside the model.
        beside: further files of the folder by their path, such as those of sentence-transformers.
        max_shard_size: maximum size of one file.
        facts: contents of the model card: base_model, task, scores, …
        push_to_hub: a repository on the hub to which the folder is uploaded.
        progress: called with the numbers of matrices done and in total.

    Raises:
        InputError: for weights that are not finite, gates that are not yet baked in, an unknown name, a folder that
            holds something else.
    """
    folder = Path(folder)
    wanted = {"matrix": values, "embedding": embeddings, "head": head}
    _check(model, folder, wanted)
    tensors = packed(model, wanted, codecs, calibration, progress)
    settings: dict[str, Any] = {"version": file.VERSION, "values": values, "embeddings": embeddings, "head": head}
    if (sizes := uneven(model)) is not None:
        settings["shrunk"] = sizes
    with files.whole(folder) as fresh:
        written = file.write(fresh, tensors, max_shard_size)
        _write_config(model, fresh, settings)
        if tokenizer is not None:
            tokenizer.save_pretrained(fresh)
        files.fill(fresh, beside or {})
        size = sum(path.stat().st_size for path in written)
        card.write(fresh, model, size, facts or {}, settings, densities(model))
    if push_to_hub is not None:
        push(folder, push_to_hub)
    return folder


def packed(
    model: nn.Module,
    wanted: Mapping[str, str],
    codecs: tuple[str, ...] = tuple(CODECS),
    calibration: Iterable[Mapping[str, Any]] | None = None,
    progress: Progress | None = None,
) -> dict[str, Tensor]:
    """The tensors of the file: packed if their role is to be packed, else unchanged; tied ones once."""
    known = matrices(model)
    state = untied(model)
    jobs = {name: m for name, m in known.items() if name in state and wanted[m.role] != KEEP}
    layers = [matrix.path for matrix in jobs.values() if matrix.role != "embedding"]
    weights = {} if calibration is None else importances(model, calibration, layers)

    def job(name: str) -> Tensor:
        matrix, how = jobs[name], wanted[jobs[name].role]
        if matrix.role == "embedding" and how in payload.KEPT:
            kept = state[name].detach().to(payload.KEPT[how])
            if not torch.isfinite(kept).all():
                raise InputError(f"cannot store {name}: a number is too large for {how}")
            return kept  # plain, so that it can be read in place
        importance = weights.get(matrix.path)
        try:
            made = payload.pack(state[name], how, transposed=matrix.transposed, codecs=codecs, importance=importance)
        except InputError as error:
            raise InputError(f"cannot store {name}: {error}") from None
        return torch.frombuffer(bytearray(made), dtype=torch.uint8)

    done = dict(state)
    with payload.workers(2) as pool:
        for number, (name, tensor) in enumerate(zip(jobs, pool.map(job, jobs), strict=True), 1):
            done[name] = tensor
            if progress is not None:
                progress(number, len(jobs))
    return done


def untied(model: nn.Module) -> dict[str, Tensor]:
    """The state dict, every tensor once: under the name of the embedding if it is one, else the first name."""
    preferred, seen = matrices(model), {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        key = (tensor.data_ptr(), tensor.shape) if tensor.numel() else name
        if key not in seen or name in preferred:
            seen[key] = name
    names = set(seen.values())
    return {name: tensor.detach() for name, tensor in model.state_dict(keep_vars=True).items() if name in names}


def densities(model: nn.Module) -> dict[Place, float]:
    """The fraction of weights that are not zero, for each matrix of the blocks."""
    state = model.state_dict()
    return {
        matrix.place: float((state[name] != 0).float().mean())
        for name, matrix in matrices(model).items()
        if matrix.role == "matrix" and state[name].numel()
    }


def rewrite_card(folder: Path, model: Any, facts: Mapping[str, Any]) -> None:
    """Writes the card of a stored model again, with more facts."""
    settings = folders.read_settings(folder)["quantization_config"]
    size = sum(path.stat().st_size for path in file.files_of(folder))
    files.write_text(folder / "README.md", card.text(model, size, facts, settings, densities(model)))


def push(folder: Path, repository: str) -> str:
    """Uploads a stored folder to the hub; returns the commit's address."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        name = api.create_repo(repository, exist_ok=True).repo_id
        return str(api.upload_folder(repo_id=name, folder_path=folder, commit_message="Store the pruned model small"))
    except Exception as error:  # no network, no login, no permission: the hub's client raises many kinds of errors
        reason = first_line(error).rstrip(".")
        raise InputError(
            f"could not push to {repository}: {reason}. The folder {folder} is complete: log in with `hf auth login` "
            "or check the network, and push it again."
        ) from None


def _write_config(model: Any, folder: Path, settings: dict[str, Any]) -> None:
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    config["dtype"] = str(model.dtype).removeprefix("torch.")
    config["quantization_config"] = {"quant_method": "pinscher", **settings}
    type(model.config).from_dict(config).save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def _check(model: Any, folder: Path, wanted: Mapping[str, str]) -> None:
    check_values(*wanted.values())
    if name := next((name for name, module in model.named_modules() if parametrize.is_parametrized(module)), None):
        raise InputError(
            f"the weights of {name} are computed from others (a parametrization): call pruner.finish() if they have "
            "pinscher's gates, else torch.nn.utils.parametrize.remove_parametrizations, before the model is stored."
        )
    if not hasattr(model, "config"):
        raise InputError("only a transformers model can be stored: this one has no config.")
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise InputError(f"cannot store {name}: it holds values that are not finite (NaN or infinity)")
        if file.is_packed(tensor):
            raise InputError(f"cannot store {name}: a vector of bytes would be taken for a packed matrix.")
    files.check_elsewhere(folder)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file: give a folder.")
    if folder.is_dir() and any(folder.iterdir()) and not is_ours(folder):
        raise InputError(f"{folder} holds something else: give a new folder, or empty this one.")


def check_values(*names: str) -> None:
    """Refuses unknown types of values."""
    for how in names:
        if how not in (KEEP, *payload.VALUES):
            raise InputError(unknown("values", how, (*payload.VALUES, KEEP)) + ".")


def is_ours(folder: Path) -> bool:
    """Whether a folder is one that `save_pretrained` wrote."""
    try:
        told = folders.read_settings(folder).get("quantization_config")
    except InputError:
        return False
    return isinstance(told, dict) and told.get("quant_method") == "pinscher"
