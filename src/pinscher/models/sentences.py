"""What the files of sentence-transformers say of a model: how its tokens become one vector, its prompts, its length.

Beside the model itself such a folder has `modules.json`, which lists what is done one after another, and a folder for
each further step. Only these files are read here; sentence-transformers is not needed. A folder without them is taken
as sentence-transformers takes it: the mean over all tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pinscher.errors import InputError
from pinscher.models.hub import locate

MODULES, LENGTHS, PROMPTS = "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"
POOLING = "1_Pooling/config.json"
WEIGHTS = "model.safetensors"  # in the folder of a dense layer
FOLDER = re.compile(r"(?!\.{1,2}$)[^/\\\0]{1,200}")  # of a step, beside modules.json
OLD_POOLING = {  # the names before sentence-transformers 5.4, which later ones read too
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
STEPS = ("Pooling", "Normalize", "Dense", "Dropout")
POOLINGS = tuple(OLD_POOLING.values())
ROLES = {"query": ("query",), "document": ("document", "passage", "corpus")}  # as encode_query, encode_document look


@dataclass(frozen=True)
class Projection:
    """A dense layer after pooling: its folder, and the name of its activation in torch."""

    folder: str
    activation: str


@dataclass(frozen=True)
class Sentences:
    """How a model makes embeddings.

    Args:
        pooling: ways of pooling, whose vectors are joined.
        projections: dense layers after it.
        normalizes: whether vectors get length 1 at the end.
        max_length: tokens of a text; None if the tokenizer knows.
        lowers: whether texts are put into lower case first.
        prompts: what is put before a text, by name.
        prompt: the name of the prompt of a text that has no role; None for none.
        compares_by_dot: whether likeness is the dot product; else it is the cosine.
        files: all these files, by their path in the folder.
    """

    pooling: tuple[str, ...] = ("mean",)
    projections: tuple[Projection, ...] = ()
    normalizes: bool = False
    max_length: int | None = None
    lowers: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    prompt: str | None = None
    compares_by_dot: bool = False
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)

    def prompt_for(self, role: str) -> str:
        """What is put before a text: for the role query or document the first prompt of such a name, else the
        default one.
        """
        names = [name for name in ROLES.get(role, ()) if name in self.prompts]
        name = names[0] if names else self.prompt
        return "" if name is None else self.prompts.get(name, "")

    def every_prompt(self) -> list[str]:
        """All that texts may begin with, each once."""
        return list(dict.fromkeys([self.prompt_for(""), *self.prompts.values()]))


def read(model: str, width: int = 0) -> Sentences:
    """What a model's files say.

    Args:
        model: its name: a folder, `pypi:PACKAGE` or a hub id.
        width: features of a token, for the files of a model that has none.

    Raises:
        InputError: for a file that is damaged, or a step that cannot be repeated here.
    """
    place = locate(model)
    content = _content(place, MODULES)
    if content is None:
        return Sentences(files=_plain(width))
    modules = _parsed(content, f"{place}/{MODULES}")
    files: dict[str, bytes] = {MODULES: content}

    def load(name: str) -> dict[str, Any] | None:
        if (content := _content(place, name)) is None:
            return None
        files[name] = content
        return _object(content, f"{place}/{name}")

    told: dict[str, Any] = {"projections": ()}
    for kind, path in _steps(modules, f"{place}/{MODULES}"):
        _step(kind, path, load, told, place)
        if path and (weights := _content(place, f"{path}/{WEIGHTS}")) is not None:
            files[f"{path}/{WEIGHTS}"] = weights
    lengths, prompts = load(LENGTHS) or {}, load(PROMPTS) or {}
    named = _prompts(prompts.get("prompts"), f"{place}/{PROMPTS}")
    return Sentences(
        **told,
        max_length=_length(lengths.get("max_seq_length"), f"{place}/{LENGTHS}"),
        lowers=_flag(lengths, "do_lower_case", f"{place}/{LENGTHS}"),
        prompts=named,
        prompt=_default(prompts.get("default_prompt_name"), named, f"{place}/{PROMPTS}"),
        compares_by_dot=prompts.get("similarity_fn_name") in ("dot", "dot_product"),
        files=files,
    )


def files_of(folder: str | Path) -> dict[str, bytes]:
    """The files of sentence-transformers in a model's folder by their path; none if it has none."""
    folder = Path(folder)
    content = _content(str(folder), MODULES)
    if content is None:
        return {}
    modules = _parsed(content, f"{folder}/{MODULES}")
    steps = [folder / path for _, path in _listed(modules, f"{folder}/{MODULES}") if path]
    inside = [path for step in steps for path in sorted(step.rglob("*")) if path.is_file()]
    top = [folder / name for name in (MODULES, LENGTHS, PROMPTS) if (folder / name).is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in [*top, *inside]}


def _listed(modules: Any, where: str) -> list[tuple[str, str]]:
    """The kind of each module, and its folder inside of the model's.

    Raises:
        InputError: if they are something else; a folder elsewhere would be read, and be written with the result.
    """
    if not isinstance(modules, list) or not modules:
        raise InputError(f"{where} is damaged: it does not list the steps with their types.")
    found = []
    for module in modules:
        kind, path = (module.get("type"), module.get("path")) if isinstance(module, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(path, str):
            raise InputError(f"{where} is damaged: it does not list the steps with their types.")
        if path and not FOLDER.fullmatch(path):
            raise InputError(f"{where} names {path[:80]!r}, which is not a folder beside it.")
        found.append((kind.rpartition(".")[2], path))
    return found


def _steps(modules: Any, where: str) -> list[tuple[str, str]]:
    """What follows the transformer."""
    (_, place), *steps = _listed(modules, where)
    if place:
        raise InputError(f"{where}: the model keeps its transformer in {place!r}: name that folder instead.")
    return steps


def _step(kind: str, path: str, load: Callable[[str], dict[str, Any] | None], told: dict[str, Any], place: str) -> None:
    """Notes what one step after the transformer does."""
    if told.get("normalizes"):
        raise InputError(f"{place} has a step after the normalisation, {kind}: such models cannot be pruned yet.")
    if kind not in STEPS or (kind == "Pooling" and "pooling" in told):
        raise InputError(
            f"{place} has a step {kind}: models of a Transformer, Pooling, Dense layers and Normalize can be pruned."
        )
    settings = load(f"{path}/config.json") if path else None
    if settings is None and kind in ("Pooling", "Dense"):  # sentence-transformers refuses it too: no guess is safe
        raise InputError(f"{place} lacks the config.json of its {kind}, in {path or 'no folder'}: copy it again.")
    settings = settings or {}
    if kind == "Pooling":
        told["pooling"] = _pooling(settings, f"{place}/{path}")
        if not settings.get("include_prompt", True):
            raise InputError(f"{place} does not pool the tokens of its prompts: such models cannot be pruned yet.")
    elif kind == "Normalize":
        told["normalizes"] = True
    elif kind == "Dense":
        told["projections"] = (*told["projections"], Projection(path, str(settings.get("activation_function", ""))))


def _pooling(settings: Mapping[str, Any], where: str) -> tuple[str, ...]:
    said = settings.get("pooling_mode")
    found: list[Any] = list(said) if isinstance(said, list) else [said]
    if said is None:
        found = [name for key, name in OLD_POOLING.items() if _flag(settings, key, where)]
        if not settings.keys() & OLD_POOLING.keys():
            found = ["mean"]
    if not found:
        raise InputError(f"{where} switches every way of pooling off: there are {', '.join(POOLINGS)}.")
    if unknown := [name for name in found if name not in POOLINGS]:
        raise InputError(f"{where} pools by {unknown[0]!r}: there are {', '.join(POOLINGS)}.")
    return tuple(found)


def _length(told: Any, where: str) -> int | None:
    if told is not None and (type(told) is not int or told < 1):
        raise InputError(f"{where} says max_seq_length {told!r}: give a positive number, or leave it out.")
    return told


def _prompts(told: Any, where: str) -> dict[str, str]:
    if told is None:
        return {}
    if not isinstance(told, dict) or not all(isinstance(text, str | None) for text in told.values()):
        raise InputError(f"{where} is damaged: its prompts are not texts by name.")
    return {str(name): text or "" for name, text in told.items()}


def _flag(settings: Mapping[str, Any], name: str, where: str) -> bool:
    told = settings.get(name) or False
    if not isinstance(told, bool):
        raise InputError(f"{where} says {name} {told!r}: give true or false.")
    return told


def _default(told: Any, prompts: Mapping[str, str], where: str) -> str | None:
    if told is not None and (not isinstance(told, str) or told not in prompts):
        raise InputError(f"{where} has the default prompt {told!r}; its prompts: {', '.join(prompts) or 'none'}.")
    return told


def _plain(width: int) -> dict[str, bytes]:
    """The files of a model that pools by the mean, in the form that all versions of sentence-transformers read."""
    kinds = ("Transformer", ""), ("Pooling", "1_Pooling")
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(kinds)
    ]
    pooling = {"word_embedding_dimension": width} | {key: name == "mean" for key, name in OLD_POOLING.items()}
    return {name: json.dumps(told, indent=2).encode() for name, told in ((MODULES, modules), (POOLING, pooling))}


def _parsed(content: bytes, where: str) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is damaged: {error}.") from None


def _object(content: bytes, where: str) -> dict[str, Any]:
    found = _parsed(content, where)
    if not isinstance(found, dict):
        raise InputError(f"{where} is damaged: it does not hold an object.")
    return found


def _content(place: str, name: str) -> bytes | None:
    """A file of a folder or of a model on the hub; None if there is none."""
    if Path(place).is_dir():
        path = Path(place) / name
        if path.exists() and not path.is_file():
            raise InputError(f"{path} is not a file: copy the model again.")
        return path.read_bytes() if path.exists() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

    try:
        return Path(hf_hub_download(place, name)).read_bytes()
    except (EntryNotFoundError, HfHubHTTPError, OSError):  # LocalEntryNotFoundError: not in the cache, no network
        return None
