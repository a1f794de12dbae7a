"""Whether a pruner's saved state fits the model and the settings it is to be resumed with."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pinscher.prune.gates import gate_of
from pinscher.prune.patterns import UNSTRUCTURED
from pinscher.prune.sharding import like, local
from pinscher.prune.sites import Site

VERSION = 1


def tensors_of(sites: Sequence[Site], gated: bool) -> dict[str, dict[str, Tensor]]:
    """What is remembered of each site, in the pruner's own memory: of a sharded site as DTensors.

    Args:
        sites: the matrices.
        gated: whether gates stand above them, which are then part of it, with the weights below.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for site in sites:
        found[site.name] = {
            name: like(site.owner, tensor) if tensor.is_floating_point() else tensor
            for name, tensor in site.state.items()
        }
        if gated:
            found[site.name]["weight"] = site.owner.detach()
            gate = gate_of(site).state_dict()
            found[site.name].update({f"gate.{name}": tensor for name, tensor in gate.items()})
    return found


@torch.no_grad()
def restore_(mine: dict[str, dict[str, Tensor]], saved: dict[str, dict[str, Tensor]]) -> None:
    """Writes saved tensors over those that `tensors_of` gave."""
    for name, tensors in mine.items():
        for key, tensor in tensors.items():
            local(tensor).copy_(local(saved[name][key]))


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
            if saved is None or saved.shape != tensor.shape or local(saved).shape != local(tensor).shape:
                raise ValueError(f"the checkpoint's {name} of {place} is missing or of another shape")
    sizes = {site.name: site.numel for site in sites}
    for place, mask in state["ranking"]["pruned"].items():
        if mask.numel() != sizes.get(place):
            raise ValueError(f"the checkpoint's mask of {place} is of another shape")
    changed = [n for n, value in mine["config"].items() if theirs.get(n) != value]
    if changed:
        warnings.warn(f"resuming with other settings than the checkpoint's: {', '.join(changed)}", stacklevel=4)
