"""Loads models and tokenizers from the hub, a folder or an installed package, with one clear sentence when it fails."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers

from pinscher.errors import InputError
from pinscher.models.families import LEAST_KNOWN, max_positions, type_of
from pinscher.models.folders import class_of
from pinscher.models.hub import NOT_OF_A_CONFIG, load_weights, loading, locate, offline_if_unreachable
from pinscher.prune import find_sites
from pinscher.train.tasks import Task

PROBLEMS = {"regression": "regression", "classes": "single_label_classification"}  # by which a model chooses its loss
WORD_STARTS = "▁Ġ"  # a mark of the start of a word is not a word
SAME_TOKENS = "give one with the same tokenizer"
MOST_UNKNOWN = 0.5  # of the tokens


def load_tokenizer(model: str) -> Any:
    """The model's tokenizer; without a padding token, it pads with the end-of-text token."""
    place = locate(model)
    with loading(model, "tokenizer"), _hub_if_needed(place):
        tokenizer = transformers.AutoTokenizer.from_pretrained(place)
    _check_vocabulary(model, tokenizer)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    return tokenizer


def _check_vocabulary(model: str, tokenizer: Any) -> None:
    """Refuses an empty tokenizer, which AutoTokenizer makes if there are no files, and one of another model."""
    vocabulary, special = tokenizer.get_vocab(), set(tokenizer.all_special_tokens)
    if all(word in special or not word.strip(WORD_STARTS) for word in vocabulary):
        raise InputError(
            f"{model} has no tokenizer: its vocabulary is empty. Put the files of the tokenizer that the model was "
            "trained with beside it, such as tokenizer.json."
        )
    rows = getattr(load_config(model).get_text_config(), "vocab_size", None)
    word, last = max(vocabulary.items(), key=lambda item: int(item[1]))
    if isinstance(rows, int) and last >= rows:
        raise InputError(
            f"the tokenizer in {model} does not fit the model: {word!r} is token {last:,}, but the model has "
            f"{rows:,}. Give the tokenizer that the model was trained with."
        )
    if isinstance(rows, int) and len(vocabulary) < LEAST_KNOWN * rows:
        raise InputError(
            f"the tokenizer in {model} does not fit the model: it knows {len(vocabulary):,} tokens, but the model has "
            f"{rows:,}. Give the tokenizer that the model was trained with."
        )


def check_known(model: str, tokenizer: Any, rows: Sequence[Sequence[int]]) -> None:
    """Refuses a tokenizer that does not know most of the training texts: the model would learn from nothing.

    Args:
        model: its name, for the error.
        tokenizer: that made the rows. A byte-level one has no unknown tokens.
        rows: token ids of some training rows.
    """
    unknown, others = tokenizer.unk_token_id, set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    if unknown is None or unknown in (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id):
        return
    tokens = [token for row in rows for token in row if token not in others]
    if not tokens:
        raise InputError("the training texts are empty: check the text column.")
    share = tokens.count(unknown) / max(1, len(tokens))
    if share > MOST_UNKNOWN:
        raise InputError(
            f"the tokenizer in {model} does not know {share:.0%} of the tokens of the training texts: give a model for "
            "their language and script, or check the text column and the tokenizer's files."
        )


def max_tokens(model: str, tokenizer: Any) -> int:
    """How many tokens the model takes: its tokenizer may not know, or know more than its positions."""
    told = tokenizer.model_max_length
    if not isinstance(told, int | float) or not told >= 1:
        raise InputError(
            f"the tokenizer in {model} says that it takes {told!r} tokens (model_max_length in tokenizer_config.json): "
            "give a positive number there, or leave it out."
        )
    return int(min(told, max_positions(load_config(model))))


def width(model: str) -> int:
    """The model's hidden size; 0 if its configuration does not say."""
    return int(getattr(load_config(model), "hidden_size", 0) or 0)


def load_config(model: str) -> Any:
    """The model's config.json."""
    place = locate(model)
    with loading(model, "model"), _hub_if_needed(place):
        return transformers.AutoConfig.from_pretrained(place)


def load_model(
    model: str, task: Task, labels: Sequence[str], tokenizer: Any, new_head: bool = False, *, trained: bool = False
) -> Any:
    """The model with the head that the task needs, in fp32; with `trained`, a new head is refused."""
    trained = trained or (task.teaches and task.kind == "regression")  # it learns what this head says
    place, config = locate(model), load_config(model)
    settings: dict[str, Any] = {"dtype": torch.float32, "return_dict": True, "output_attentions": False}
    heads = 1 if task.kind == "regression" else len(labels)
    if heads:
        _check_head(model, config, heads, new_head, trained)
        settings |= {"num_labels": heads, "ignore_mismatched_sizes": new_head}
    if labels:
        settings["id2label"] = dict(enumerate(labels))
        settings["label2id"] = {name: i for i, name in enumerate(labels)}
    if task.kind == "regression" or (task.kind == "classes" and heads > 1):
        # Whatever the model was trained for before. Left open, the first batch with labels would write it into the
        # configuration; a run that is resumed after its last step sees no batch any more, and must save the same.
        settings["problem_type"] = PROBLEMS[task.kind]
    with _hub_if_needed(place):
        kind = getattr(transformers, task.architecture)
        if new_head and bool(getattr(config, "quantization_config", None)):
            loaded = _on_new_head(kind, model, settings)
        else:
            loaded, info = load_weights(kind, model, **settings)
            if trained:
                _refuse_random(model, task, loaded, info["missing_keys"])
    if loaded.config.pad_token_id is None:
        loaded.config.pad_token_id = tokenizer.pad_token_id
    return task.adapted(loaded)


def _on_new_head(kind: Any, model: str, settings: dict[str, Any]) -> Any:
    """A stored model's body with a new head; from a quantized file, transformers loads only the original head."""
    stored, _ = load_weights(class_of(load_config(model), model), model, dtype=settings["dtype"])
    own = {name: value for name, value in settings.items() if name not in NOT_OF_A_CONFIG}
    config = transformers.AutoConfig.from_pretrained(locate(model), **own)
    del config.quantization_config
    fresh = kind.from_config(config, dtype=settings["dtype"])
    fresh.base_model.load_state_dict(stored.base_model.state_dict(), strict=False)  # one may lack a pooler
    return fresh


def with_adapters(model: Any, kind: str, rank: int, alpha: float | None) -> Any:
    """A peft model with an adapter on every prunable matrix; any head but a language model's is trained in full."""
    try:
        import peft
    except ImportError:
        raise InputError("--lora-rank needs peft. Install it with: pip install 'pinscher[lora]'") from None
    try:
        sites = find_sites(model)
    except ValueError as error:
        raise InputError(f"there is nothing to prune in {type(model).__name__}: {error}") from None
    smallest = min(sites, key=lambda site: min(site.shape))
    if rank > min(smallest.shape):  # a larger adapter would have more weights than the matrix
        raise InputError(
            f"--lora-rank {rank} is more than the rank of {smallest.name}, which is {smallest.shape[0]} × "
            f"{smallest.shape[1]}: give at most {min(smallest.shape)}."
        )
    heads = [n for n, m in model.named_children() if n != model.base_model_prefix and any(True for _ in m.parameters())]
    if model.base_model is model:  # a bare encoder has no head
        heads = []
    settings = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank if alpha is None else alpha,  # type: ignore[arg-type, unused-ignore]
        lora_dropout=0.0,
        target_modules=[site.name for site in sites],
        modules_to_save=None if kind.endswith("-lm") else heads or None,
        fan_in_fan_out=any(site.transposed for site in sites),
    )
    with warnings.catch_warnings():  # peft uses an old name of transformers
        warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
        return peft.get_peft_model(model, settings)


def _hub_if_needed(place: str) -> AbstractContextManager[None]:
    return nullcontext() if Path(place).is_dir() else offline_if_unreachable()


def _refuse_random(model: str, task: Task, loaded: Any, missing: Sequence[str]) -> None:
    """Refuses a model whose head is not in the file: a random one would be scored. A bare encoder has none."""
    if loaded.base_model is loaded:
        return
    absent = [name for name in missing if not name.startswith(f"{loaded.base_model_prefix}.")]
    if absent:
        raise InputError(
            f"{model} is not fine-tuned for {task.name}: it has no {sorted(absent)[0]}. Fine-tune it first: "
            "pinscher prune --method dense"
        )


def label_names(model: str) -> list[str]:
    """The names of a checkpoint's classes; empty if it only numbers them."""
    config = load_config(model)
    named = [config.id2label[i] for i in range(config.num_labels)]
    return [] if all(name.startswith("LABEL_") for name in named) else named


def plain(label: str) -> str:
    """A label without case and separators: NOT_ENTAILMENT and not-entailment are the same."""
    return re.sub(r"[\W_]", "", label.lower())


def check_teacher(teacher: str, tokenizer: Any, labels: Sequence[str], length: int) -> None:
    """Refuses a teacher that would misunderstand what the student reads or says.

    Args:
        teacher: its name.
        tokenizer: the student's, which makes the teacher's inputs too.
        labels: the task's classes in the student's order.
        length: tokens of the longest example.
    """
    named = label_names(teacher) if labels else []
    if named and [plain(name) for name in named] != [plain(label) for label in labels]:
        raise InputError(
            f"the teacher {teacher} has the labels {', '.join(named)}, the task {', '.join(labels)}: give a teacher of "
            "the same task, with its labels in the same order."
        )
    config = load_config(teacher)
    rows = getattr(config.get_text_config(), "vocab_size", None)
    if isinstance(rows, int) and rows <= max(tokenizer.get_vocab().values()):
        raise InputError(f"the teacher {teacher} knows {rows:,} tokens, fewer than the model: {SAME_TOKENS}.")
    try:
        own = load_tokenizer(teacher).get_vocab()
    except InputError:  # a teacher can do without
        own = tokenizer.get_vocab()
    if own != tokenizer.get_vocab():
        raise InputError(f"the teacher {teacher} has other tokens than the model: {SAME_TOKENS}.")
    if length > (most := max_positions(config)):
        raise InputError(
            f"the teacher {teacher} takes {most} tokens, an example has up to {length}: give --max-length {most}."
        )


def check_same_shape(start: str, model: str) -> None:
    """Refuses to start from a fine-tuned model of another architecture than the one that was asked for."""
    tuned, asked = load_config(start), load_config(model)
    for name in ("family", "hidden_size", "num_hidden_layers", "intermediate_size"):
        before, now = (type_of(c) if name == "family" else getattr(c, name, None) for c in (asked, tuned))
        if before != now:
            raise InputError(
                f"--dense-start would start from {start}, but its {name} is {now}, and that of {model} is {before}: "
                "give a teacher of the same architecture, or leave --dense-start out."
            )


def _check_head(model: str, config: Any, wanted: int, new_head: bool, trained: bool) -> None:
    """Refuses a fine-tuned head for another number of labels, unless it is to be replaced."""
    architecture = str((config.architectures or [""])[0])
    if "For" not in architecture or new_head:
        return  # a bare encoder
    tuned = architecture.endswith(("ForSequenceClassification", "ForTokenClassification"))
    if tuned and config.num_labels != wanted:
        raise InputError(
            f"{model} was fine-tuned for {config.num_labels} labels, the task has {wanted}. "
            + ("" if trained else "Give --new-head to start with a fresh head, or another model.")
        )
