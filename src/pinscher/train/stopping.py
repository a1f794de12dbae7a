"""Ctrl-C and SIGTERM end a run at the next step, with a checkpoint; a second Ctrl-C ends it at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

import torch
from transformers import TrainerCallback

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopping(TrainerCallback):
    """Saves and stops when a signal has come."""

    def __init__(self) -> None:
        self.asked = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.agree(args)
        if self.asked and state.global_step < state.max_steps:
            control.should_save = control.should_training_stop = True

    def agree(self, args: Any) -> None:
        """Shares a request that one process received with all: they must stop at the same step."""
        if args.world_size > 1:
            asked = torch.tensor(float(self.asked), device=args.device)
            torch.distributed.all_reduce(asked)
            self.asked = bool(asked)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Catches the signals while the block runs; only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in SIGNALS}

        def ask(number: int, frame: Any) -> None:
            if self.asked and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.asked = True

        for number in SIGNALS:
            signal.signal(number, ask)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
