"""Reports of a run: log.jsonl for programs, a progress bar or plain lines for people."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback

from pinscher.runfolder import RunFolder

LINES = 20  # of progress, if there is no terminal
UNSEEN = ("total_flos", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "epoch")


class RunLog(TrainerCallback):
    """Writes log.jsonl: training figures, evaluations, new teachers. A resumed run continues the log where it left off.

    Args:
        folder: the run's.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.started = time.time()  # moved back by the time before interruptions

    @property
    def seconds(self) -> float:
        return time.time() - self.started

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            last = self.folder.cut_log(state.global_step or -1)  # a run that starts from the beginning has an empty log
            seconds = (last or {}).get("seconds", 0.0)
            self.started -= seconds if isinstance(seconds, int | float) else 0.0  # a damaged log must not end the run

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs or "train_runtime" in logs:
            return
        kind = "train"
        if "teacher_score" in logs:
            kind = "teacher"
        elif any(name.startswith("eval_") for name in logs):
            kind = "eval"
        figures = {("lr" if name == "learning_rate" else name): v for name, v in logs.items() if name not in UNSEEN}
        event = {"event": kind, "step": state.global_step, "epoch": logs.get("epoch"), **figures}
        self.folder.append_event(event | {"seconds": round(self.seconds, 2)})


class ProgressLine(TrainerCallback):
    """Steps, loss, density and its target, the teacher's score, time left; plain lines if there is no terminal."""

    def __init__(self, console: Console, title: str) -> None:
        self.console, self.title = console, title
        self.bar: Progress | None = None
        self.figures: dict[str, float] = {}
        self.began = (0.0, 0)
        self.next_line = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began = (time.monotonic(), state.global_step)
        if not state.is_world_process_zero or not self.console.is_terminal:
            return
        columns = (
            "{task.description}",
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[says]}"),
        )
        self.bar = Progress(*columns, TimeRemainingColumn(), console=self.console, transient=True)
        self.bar.start()
        self.bar.add_task(self.title, total=state.max_steps, completed=state.global_step, says="")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=state.global_step, says=self._text())

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs or "train_runtime" in logs:
            return
        self.figures |= {n: v for n, v in logs.items() if isinstance(v, int | float)}
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], says=self._text())
        elif "loss" in logs and state.global_step >= self.next_line:
            self.next_line = state.global_step + state.max_steps / LINES
            past = time.monotonic() - self.began[0]
            left = past / max(1, state.global_step - self.began[1]) * (state.max_steps - state.global_step)
            self.console.print(
                f"{self.title}: step {state.global_step}/{state.max_steps}, {self._text()}, {_clock(left)} left",
                highlight=False,
                soft_wrap=True,
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def _text(self) -> str:
        words = []
        if "loss" in self.figures:
            words.append(f"loss {self.figures['loss']:.3f}")
        if "density" in self.figures:
            words.append(f"kept {self.figures['density']:.1%} of {self.figures['density_target']:.1%} wanted")
        if "teacher_score" in self.figures:
            words.append(f"teacher {self.figures['teacher_score']:.2f}")
        return ", ".join(words)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes}:{seconds:02d}"
