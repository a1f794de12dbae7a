"""Whether a pruner's saved state fits the model and the settings it is to be resumed with."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from pinscher.prune.patterns import UNSTRUCTURED
from pinscher.prune.sites import Site

VERSION = 1


def check(state: dict[str, Any], mine: dict[str, Any], sites: Sequence[Site], finished: bool) -> None:
    """Refuses a pruner's saved state that is of another version, method or model than `mine`, the state as it is."""
    if state.get("version") != VERSION:
        raise ValueError(f"pruner state of version {state.get('version')}; this pinscher reads version {VERSION}")
    if state["finished"] or finished:
        raise ValueError("a finished pruner has nothing to resume: its model is an ordinary one, load that instead")
    theirs = {"pattern": UNSTRUCTURED, "scope": None} | state["config"]  # older ones do not say
    for name in ("method", "options", "regrow", "state_dtype", "pattern", "scope"):
        if theirs[name] != mine["config"][name]:
            raise ValueError(
                f"the checkpoint was made with {name}={theirs[name]!r}, this run has "
                f"{mine['config'][name]!r}: resume with the same"
            )
    if set(state["sites"]) != set(mine["sites"]):
        odd = min(set(state["sites"]) ^ set(mine["sites"]))
        raise ValueError(f"the checkpoint prunes other matrices than this model has, for one {odd}")
    for place, tensors in mine["sites"].items():
        for name, tensor in tensors.items():
            saved = state["sites"][place].get(name)
            if saved is None or saved.shape != tensor.shape:
                raise ValueError(f"the checkpoint's {name} of {place} is missing or of another shape")
    sizes = {site.name: site.weight.numel() for site in sites}
    for place, mask in state["ranking"]["pruned"].items():
        if mask.numel() != sizes.get(place):
            raise ValueError(f"the checkpoint's mask of {place} is of another shape")
    changed = [n for n, value in mine["config"].items() if theirs.get(n) != value]
    if changed:
        warnings.warn(f"resuming with other settings than the checkpoint's: {', '.join(changed)}", stacklevel=4)
