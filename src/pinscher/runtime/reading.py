"""A stored folder as a core, without torch: every check that `pinscher.load` makes, by names and shapes alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from pinscher.errors import InputError
from pinscher.models import folders
from pinscher.models.plain import PlainConfig, parameters
from pinscher.runtime import choice
from pinscher.runtime.core import Core, Norms, Tail, build
from pinscher.runtime.kernels import Array, Weights, stacked
from pinscher.store.archive import Archive, files_of
from pinscher.store.checks import check_finite, check_fits, check_format
from pinscher.store.integers import Coded
from pinscher.store.streams import DamagedError


class Model(NamedTuple):
    """What runs."""

    config: PlainConfig
    core: Core
    pooler: Tail | None  # of a base model: from first tokens
    head: Tail | None  # of any other: from hidden states, its pooler included


def read(folder: Path, mode: str, threads: int) -> Model:
    """The model in a folder.

    Raises:
        InputError: for a folder that is not one of ours, is damaged, or holds a model that needs torch.
    """
    settings = folders.check(folder)
    told = check_format(settings.get("quantization_config"), folder)
    config = PlainConfig(settings, folder / folders.CONFIG)
    with Archive(files_of(folder)) as archive:
        homes = _homes(config, archive, told.get("shrunk"))
        base = "" if config.task == "embeddings" else f"{config.family.prefix}."

        def get(name: str) -> Array | None:
            if name not in homes:
                return None
            found = archive.floats(homes[name]).copy()
            check_finite(archive, homes[name], found)
            return found

        def weights(name: str) -> Weights:
            found = archive.coded(homes[name]) if archive.stored(homes[name]).is_packed else archive.floats(homes[name])
            if isinstance(found, Coded):
                return Weights(codes=found)
            check_finite(archive, homes[name], found)
            return Weights(dense=found)

        core = _core(config, base, get, weights, mode, threads)
        pooler, head = _tails(config, base, get, threads)
        return Model(config, core, pooler, head)


def _homes(config: PlainConfig, archive: Archive, sizes: Any) -> dict[str, str]:
    """The stored name of every parameter. A base model may be stored under its name in models with heads."""
    prefix, held = f"{config.family.prefix}.", set(archive.names())
    homes = {}
    for name, wanted in parameters(config, sizes).items():
        found, *others = [*held.intersection((name, prefix + name, name.removeprefix(prefix))), None]
        if found is None:
            raise DamagedError(f"{archive.place} lacks {name}: it is not the whole model")
        if others[0] is not None:
            raise DamagedError(f"{archive.place} holds {name} twice, as {found} and as {others[0]}")
        check_fits(archive, found, wanted.shape)
        homes[name] = found
    return homes


def _core(
    config: PlainConfig,
    base: str,
    get: Callable[[str], Array | None],
    weights: Callable[[str], Weights],
    mode: str,
    threads: int,
) -> Core:
    family = config.family

    def lazily(names: list[str]) -> tuple[str, choice.Lazy]:
        return " + ".join(names), lambda: stacked([weights(f"{name}.weight") for name in names])

    layers = [
        [lazily([f"{base}{family.layers}.{number}.{name}" for name in names]) for names in family.products]
        for number in range(getattr(config, family.count))
    ]
    kept: dict[str, Array | None] = {}  # embeddings are large: all trials of `choice` share them

    def below(name: str) -> Array | None:
        if name not in kept:
            kept[name] = get(base + name)
        return kept[name]

    norms = Norms(config.epsilon, config.epsilon)
    return choice.chosen_layers(
        config, layers, mode, lambda packed: build(config, family, packed, below, norms, threads)
    )


def _tails(
    config: PlainConfig, base: str, get: Callable[[str], Array | None], threads: int
) -> tuple[Tail | None, Tail | None]:
    """The pooler of a base model, or the whole head of any other."""

    def step(name: str, activation: str) -> tuple[Array, Array | None, str]:
        weight = get(f"{name}.weight")
        if weight is None:
            raise InputError(f"{config.place}: the model has no {name}.")
        return weight, get(f"{name}.bias"), activation

    pooler = [step(base + config.family.pooler, "tanh")] if config.has_pooler else []
    if config.task == "embeddings":
        return (Tail(config.width, "first", pooler, threads) if pooler else None), None
    pooling = "first" if config.task == "classification" else "none"
    return None, Tail(config.width, pooling, [*pooler, *(step(*one) for one in config.head)], threads)
