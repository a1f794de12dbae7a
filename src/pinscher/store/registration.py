"""Lets `from_pretrained` read the small file after `import pinscher`, without importing transformers.

transformers looks up readers in its module `quantizers.auto`. If that module is loaded, we register at once; otherwise
an import hook registers right after its import. So `import pinscher` stays light, and the order of imports does not
matter.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

WATCHED = "transformers.quantizers.auto"
OURS = "pinscher.store.loading"
WHEN_LOADED: list[Callable[[Any, Path], None]] = []  # called with each model that was loaded, and its folder


def register() -> None:
    """Registers now, or as soon as transformers is imported; a second call changes nothing."""
    if WATCHED in sys.modules:
        _load_ours()
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


class _Watch(importlib.abc.MetaPathFinder):
    """An import hook that registers after the import of one module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != WATCHED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader)
        return spec


class _Then(importlib.abc.Loader):
    """A module's own loader, followed by our registration."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        _load_ours()


def _load_ours() -> None:
    """Registers, or warns why it cannot: an import of transformers must not fail because of us."""
    try:
        importlib.import_module(OURS)
    except ImportError as error:
        warnings.warn(
            f"this transformers cannot read pinscher's small files ({error}): pinscher needs 5.22 or later.",
            stacklevel=2,
        )
