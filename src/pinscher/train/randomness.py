"""The states of all random number generators of all processes, as plain data."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object


def gathered(accelerator: Any) -> list[dict[str, Any]]:
    """One state for each process; every process must call it."""
    kind, keys, *rest = np.random.get_state()
    mine = {
        "python": random.getstate(),
        "numpy": (str(kind), [int(key) for key in keys], *rest),
        "torch": torch.random.get_rng_state().tolist(),
        "cuda": [state.tolist() for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
    }
    every: list[dict[str, Any]] = gather_object([mine]) if accelerator.num_processes > 1 else [mine]
    return every


def restore(states: list[dict[str, Any]], process: int) -> None:
    """Puts the generators of this process back. A process that had none when it was saved keeps its own."""
    if not isinstance(states, list) or not states:
        raise ValueError("it has no random state")
    if process >= len(states):
        return
    state = states[process]
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    kind, words, *rest = state["numpy"]
    np.random.set_state((kind, np.array(words, dtype=np.uint32), *rest))
    torch.random.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([torch.tensor(s, dtype=torch.uint8) for s in state["cuda"]])
