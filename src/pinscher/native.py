"""The compiled part, where it was built; everything it does has a slower twin in Python.

`PINSCHER_NATIVE=0` leaves it unused, `PINSCHER_REQUIRE_NATIVE=1` makes its absence an error.
"""

from __future__ import annotations

import functools
import os
import warnings
from types import ModuleType


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
