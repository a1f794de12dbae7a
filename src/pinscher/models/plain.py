"""A model's config and parameters without transformers and without torch: what config.json and the family's row tell.

Knows the families whose layers run in native code, as base models and with the heads of TASKS.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pinscher.errors import InputError
from pinscher.models.families import FAMILIES, Family, check_padding, native_family, type_of

# What classes of transformers are for, by the end of their names.
TASKS = {
    "ForSequenceClassification": "classification",
    "ForTokenClassification": "tokens",
    "ForQuestionAnswering": "answers",
    "Model": "embeddings",
}
MOST_SIZE = 1 << 31
HEADS = {"tokens": (("classifier", "none"),), "answers": (("qa_outputs", "none"),), "embeddings": ()}


@dataclass(frozen=True)
class Parameter:
    """What a model expects under a name."""

    shape: tuple[int, ...]


class PlainConfig:
    """The settings of config.json as attributes, with the family's defaults for those that it leaves out.

    Raises:
        InputError: for a model that native code does not run, or a size that is none.
    """

    vocab_size: int
    max_position_embeddings: int
    type_vocab_size: int  # where there are types
    relative_attention_num_buckets: int  # where distances count

    def __init__(self, settings: Mapping[str, Any], place: Any) -> None:
        self.place = place
        self.family_name = type_of(settings)
        row = FAMILIES.get(self.family_name)
        if row is None or not row.prefix:
            known = ", ".join(name for name, family in FAMILIES.items() if family.prefix)
            raise InputError(
                f"{place}: models of type {self.family_name[:80]!r} need PyTorch: use pinscher.load, after pip install "
                f"'pinscher[train]'. Without it there are {known}."
            )
        self.family = row
        own = {
            name: value for name, value in settings.items() if name not in vars(type(self)) and name not in vars(self)
        }
        self.__dict__.update({**row.defaults, **own})
        self.task, self.kind = self._task()
        for name in self._sizes():
            self._check_size(name)
        check_padding(self, place)
        if self.width % self.heads:
            raise InputError(f"{place}: {self.width} features are no multiple of {self.heads} attention heads.")
        if not isinstance(self.__dict__.get(row.activation), str) or native_family(self) is None:
            raise InputError(
                f"{place}: native code does not run this {self.family_name} model, because of its activation, its "
                "positions, or because it is a decoder: use pinscher.load, after pip install 'pinscher[train]'."
            )

    def _task(self) -> tuple[str, str]:
        names = self.__dict__.get("architectures")
        name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
        for ending, task in TASKS.items():
            if name.endswith(ending) and "For" not in name.removesuffix(ending):
                self._check_class(name.removesuffix(ending))
                return task, ending
        raise InputError(
            f"{self.place} says that it is {name[:80]!r}: without PyTorch there are classifiers of texts or tokens, "
            "models that answer questions, and base models. Use pinscher.load, after pip install 'pinscher[train]'."
        )

    def _check_class(self, start: str) -> None:
        """Refuses another family's class: it would read the weights in another way."""
        if start.lower() != re.sub("[-_]", "", self.family_name):
            raise InputError(
                f"{self.place} says that it is {start[:80]!r} and of type {self.family_name!r}: correct one of them."
            )

    def _sizes(self) -> list[str]:
        row = self.family
        names = [row.width, row.count, "vocab_size", row.inner, row.heads, "max_position_embeddings"]
        if row.has_token_types:
            names.append("type_vocab_size")
        return [*names, *(["relative_attention_num_buckets"] if row.relative_bias else [])]

    def _check_size(self, name: str) -> None:
        value = self.__dict__.get(name)
        if type(value) is not int or not 0 < value < MOST_SIZE:
            raise InputError(f"{self.place} has {name} = {str(value)[:40]}: it must be a whole number above 0.")

    @property
    def width(self) -> int:
        return int(getattr(self, self.family.width))

    @property
    def heads(self) -> int:
        return int(getattr(self, self.family.heads))

    @property
    def embedding_width(self) -> int:
        name = self.family.embedding_width
        if not name or name not in self.__dict__:
            return self.width
        self._check_size(name)
        return int(getattr(self, name))

    @property
    def epsilon(self) -> float:
        told = self.family.epsilon
        value = self.__dict__.get(told) if isinstance(told, str) else told
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1:
            raise InputError(f"{self.place} has {told} = {str(value)[:40]}: it must be a small number.")
        return float(value)

    @property
    def labels(self) -> list[str]:
        """The names of the classes, in the order of the head's outputs."""
        told = self.__dict__.get("id2label")
        if told is None:
            count = self.__dict__.get("num_labels", 2)
            told = {str(number): f"LABEL_{number}" for number in range(count if type(count) is int else 0)}
        names = [told.get(str(number)) for number in range(len(told))] if isinstance(told, dict) else []
        if not names or None in names:
            raise InputError(f"{self.place}: id2label must name the classes from 0 on.")
        return [str(name) for name in names]

    @property
    def head(self) -> tuple[tuple[str, str], ...]:
        """The dense layers of the head, below the model, each with its activation."""
        found: tuple[tuple[str, str], ...] = HEADS.get(self.task, self.family.classifier)
        return found

    @property
    def has_pooler(self) -> bool:
        """Whether the base model has a pooler."""
        of_classifier = self.task == "classification" and self.family.pooling == "pooler"
        return bool(self.family.pooler) and (of_classifier or self.task == "embeddings")


def parameters(config: PlainConfig, sizes: Any = None) -> dict[str, Parameter]:
    """What the model expects in its file, by the names of transformers.

    Args:
        config: of the model.
        sizes: [heads, features] of each layer, where a file says that they are not those of the config.

    Raises:
        InputError: for sizes that do not fit the model, or fewer heads in some layers.
    """
    return dict(_parameters(config, config.family, _inner(config, sizes)))


def _inner(config: PlainConfig, sizes: Any) -> list[int]:
    """The features of each layer's feed-forward part."""
    count, inner = int(getattr(config, config.family.count)), int(getattr(config, config.family.inner))
    if sizes is None:
        return [inner] * count
    good = isinstance(sizes, list) and len(sizes) == count
    for pair in sizes if good else ():
        good = good and isinstance(pair, list) and len(pair) == 2 and all(type(n) is int for n in pair)
        good = good and 1 <= pair[0] <= config.heads and 1 <= pair[1] <= inner
    if not good:
        raise InputError("the sizes of the layers in config.json do not fit the model: the file is damaged.")
    if any(heads != config.heads for heads, _ in sizes):
        raise InputError(
            f"{config.place}: layers with fewer attention heads than others need PyTorch: use pinscher.load, after pip "
            "install 'pinscher[train]'."
        )
    return [features for _, features in sizes]


def _parameters(config: PlainConfig, row: Family, inner: list[int]) -> Iterator[tuple[str, Parameter]]:
    width, narrow = config.width, config.embedding_width
    base = "" if config.task == "embeddings" else f"{row.prefix}."
    for name, rows in zip(row.embeddings, ("vocab_size", "max_position_embeddings", "type_vocab_size"), strict=False):
        yield f"{base}{name}.weight", Parameter((getattr(config, rows), narrow))
    yield from _norm(f"{base}{row.embeddings_norm}", narrow)
    if row.projection and narrow != width:
        yield from _linear(f"{base}{row.projection}", width, narrow)
    if row.relative_bias:
        yield f"{base}{row.relative_bias}.weight", Parameter((config.relative_attention_num_buckets, config.heads))
    for number, features in enumerate(inner):
        layer = f"{base}{row.layers}.{number}."
        for name in (*row.qkv, row.out):
            yield from _linear(layer + name, width, width)
        yield from _norm(layer + row.attention_norm, width)
        yield from _linear(layer + row.up, features, width)
        yield from _linear(layer + row.down, width, features)
        yield from _norm(layer + row.mlp_norm, width)
    if config.has_pooler:
        yield from _linear(base + row.pooler, width, width)
    outputs = 2 if config.task == "answers" else len(config.labels)
    for place, (name, _) in enumerate(config.head):
        yield from _linear(name, outputs if place == len(config.head) - 1 else width, width)


def _linear(name: str, outputs: int, inputs: int) -> Iterator[tuple[str, Parameter]]:
    yield f"{name}.weight", Parameter((outputs, inputs))
    yield f"{name}.bias", Parameter((outputs,))


def _norm(name: str, width: int) -> Iterator[tuple[str, Parameter]]:
    yield f"{name}.weight", Parameter((width,))
    yield f"{name}.bias", Parameter((width,))
