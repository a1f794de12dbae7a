"""Checks that a stored file fits the model to be loaded: done by every reader, before memory is allocated.

The model is empty, on the meta device. What it takes from the file must be there, with its shape and type, and what it
adds by itself must be in proportion to the file.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

from torch import Tensor

from pinscher.models.blocks import is_conv1d
from pinscher.models.wholeness import lacking
from pinscher.store import payload
from pinscher.store.checks import check_fits
from pinscher.store.file import EXPANSION, Stored, size_of
from pinscher.store.streams import DamagedError


def fit(model: Any, stored: Stored) -> dict[str, str]:
    """The stored name of every parameter and buffer that an empty model takes from a file.

    Raises:
        InputError: for a weight that is missing or has another shape or type, and for a model that is larger than the
            file can justify; it names file and tensor.
    """
    state = model.state_dict()
    homes = _homes(model, stored, state)
    for key, name in homes.items():
        wanted, transposed = state[key], is_conv1d(model.get_submodule(key.rpartition(".")[0]))
        check_fits(stored, name, tuple(wanted.shape), is_float=wanted.is_floating_point(), transposed=transposed)
    _check_complete(model, stored, homes)
    _check_room(model, stored, homes)
    return homes


def _homes(model: Any, stored: Stored, state: dict[str, Tensor]) -> dict[str, str]:
    """The parameter of each stored tensor, by transformers' rules for old names and for missing or added heads."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    renamings = [rule for rule in get_model_conversion_mapping(model) if isinstance(rule, WeightRenaming)]
    homes: dict[str, str] = {}
    for name in stored.names():
        for rules in (renamings, []):
            key, _ = rename_source_key(name, rules, [], model.base_model_prefix, state)
            if key in state:
                if key in homes:  # every reader would take one of them, not all the same one
                    raise DamagedError(f"{stored.place} holds {key} twice, as {homes[key]} and as {name}")
                homes[key] = name
                break
    return homes


def _check_complete(model: Any, stored: Stored, homes: dict[str, str]) -> None:
    """Refuses a file that lacks a weight: transformers would initialise it at random."""
    ties = getattr(model, "all_tied_weights_keys", None) or {}
    held = {ties.get(key, key) for key in homes}
    ignored = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    groups = defaultdict(list)
    for key, parameter in model.named_parameters(remove_duplicate=False):
        groups[id(parameter)].append(key)
    missing = [
        keys[0]
        for keys in groups.values()
        if held.isdisjoint(ties.get(key, key) for key in keys) and not any(re.search(each, keys[0]) for each in ignored)
    ]
    if absent := lacking(model, missing):
        raise DamagedError(f"{stored.place} lacks {absent[0]}: it is not the whole model")


def _check_room(model: Any, stored: Stored, homes: dict[str, str]) -> None:
    """Refuses a config.json that makes the model allocate much more than the file holds."""
    own = {id(p): p for name, p in model.named_parameters() if name not in homes}
    own |= {id(buffer): buffer for name, buffer in model.named_buffers() if name not in homes}
    wanted, held = size_of(own.values()), stored.size
    if wanted > payload.FREE + EXPANSION * held:
        raise DamagedError(
            f"{stored.place} has {held:,} bytes, its config.json asks for {wanted:,} bytes that are not in it"
        )
