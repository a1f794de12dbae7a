"""The compiled extension, where it was built; everything it does has a slower twin in Python.

`PINSCHER_NATIVE=0` leaves it unused, `PINSCHER_REQUIRE_NATIVE=1` makes its absence an error. `PINSCHER_ISA` forces an
instruction set; without it the widest one of the machine is taken.
"""

from __future__ import annotations

import functools
import os
import warnings
from types import ModuleType
from typing import Any

from pinscher.errors import InputError


@functools.cache
def core() -> ModuleType | None:
    """The extension module, or None; says once if it is missing."""
    if os.environ.get("PINSCHER_NATIVE") == "0":
        return None
    try:
        from pinscher import _native
    except ImportError as error:
        if os.environ.get("PINSCHER_REQUIRE_NATIVE") == "1":
            raise ImportError(
                f"PINSCHER_REQUIRE_NATIVE is set, but pinscher was installed without its native code ({error}). "
                "Install a C++ compiler and reinstall."
            ) from error
        warnings.warn(
            "pinscher was installed without its native code (no C++ compiler?): all works, more slowly.", stacklevel=2
        )
        return None
    return _native


def isa() -> str:
    """The name of the instruction set that the kernels use.

    Raises:
        InputError: if `PINSCHER_ISA` names one that this machine does not have.
    """
    there = _there()
    wanted = os.environ.get("PINSCHER_ISA") or there[0]
    if wanted not in there:
        raise InputError(f"PINSCHER_ISA is {wanted!r}; this machine has {', '.join(there)}.")
    return wanted


@functools.cache
def _there() -> list[str]:
    found = core()
    return [] if found is None else list(found.isas())


@functools.cache
def pool(threads: int) -> Any:
    """Threads that everyone shares; a request that finds them busy works alone."""
    found = core()
    assert found is not None
    return found.Pool(threads)
