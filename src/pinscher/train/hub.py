"""Whether the hub can be reached. Its libraries find out by trying again and again, for half a minute and more."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import datasets
import huggingface_hub
from huggingface_hub import constants

PROBE_SECONDS = 8.0


@contextmanager
def offline_if_unreachable() -> Iterator[None]:
    """Without a network the libraries still have their caches: in this block they look there at once."""
    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    if not any(before) and not _is_reachable():
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


@functools.cache
def _is_reachable() -> bool:
    """Whether the hub answers anything at all, soon. Asked once in a process."""
    answers: list[Any] = []

    def ask() -> None:
        try:
            answers.append(huggingface_hub.get_session().head(constants.ENDPOINT, timeout=PROBE_SECONDS))
        except Exception:  # no answer is the answer
            return

    # In a thread, because looking up a name can hang for longer than any timeout that can be set.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS)
    return bool(answers)
