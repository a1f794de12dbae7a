"""Fine-tune a transformer while pruning it with PINS, then store it small and run it fast on a CPU."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pinscher.extras import naming_extras
from pinscher.integrations import sentence_transformers as _sentence_transformers
from pinscher.store import registration

if TYPE_CHECKING:
    from pinscher.integrations.sentence_transformers import accelerate, save_pretrained
    from pinscher.prune import Pruner, PruningConfig, Teacher, sparsity
    from pinscher.runtime.engine import Engine
    from pinscher.runtime.loading import load
    from pinscher.train import checkpoint
    from pinscher.train.config import RunConfig
    from pinscher.train.recipes import recipe
    from pinscher.train.run import run
    from pinscher.train.trainer import PinsTrainer, PruningCallback

__version__ = "0.2.0"
__all__ = [
    "Engine",
    "PinsTrainer",
    "Pruner",
    "PruningCallback",
    "PruningConfig",
    "RunConfig",
    "Teacher",
    "__version__",
    "accelerate",
    "checkpoint",
    "load",
    "recipe",
    "run",
    "save_pretrained",
    "sparsity",
]

# Names load when they are first used, so that `import pinscher` is quick.
_HOMES = {
    "Engine": "runtime.engine",
    "PinsTrainer": "train.trainer",
    "Pruner": "prune",
    "PruningCallback": "train.trainer",
    "PruningConfig": "prune",
    "RunConfig": "train.config",
    "Teacher": "prune",
    "accelerate": "integrations.sentence_transformers",
    "load": "runtime.loading",
    "recipe": "train.recipes",
    "run": "train.run",
    "save_pretrained": "integrations.sentence_transformers",
    "sparsity": "prune",
}
_MODULES = {"checkpoint": "train.checkpoint", "prune": "prune", "sharded": "train.sharded"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES and name not in _HOMES:
        raise AttributeError(f"module 'pinscher' has no attribute {name!r}")
    with naming_extras(f"pinscher.{name}"):
        if name in _MODULES:
            return importlib.import_module(f"pinscher.{_MODULES[name]}")
        return getattr(importlib.import_module(f"pinscher.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__


_sentence_transformers.register()
registration.register()  # from now on plain from_pretrained reads our files
