"""One run of a comparison, here or in a process of its own: finished, interrupted or failed, and why.

A process of its own (`python -m pinscher.train.worker`) reads what to do from its standard input, whose end tells it
that whoever started it is gone; it then ends at once, and the run is resumed from its checkpoint later.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from pinscher import checkpoint
from pinscher.errors import InputError
from pinscher.train import experiment, runfolder
from pinscher.train.config import RunConfig
from pinscher.train.plan import PLACES

FINISHED, INTERRUPTED, FAILED = "finished", "interrupted", "failed"
CODES = {FINISHED: 0, FAILED: 1, INTERRUPTED: 3}
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def perform(config: RunConfig, trouble: Path, console: Console = experiment.QUIET) -> str:
    """Starts or resumes a run. A failure does not pass: the file `trouble` says it in one line, then in full.

    A run that was asked to stop counts as interrupted even if it was too late for that: no other is to follow.
    """
    try:
        if (config.folder / "config.yaml").exists():
            known = runfolder.config_of(config.folder)
            places = {name: place for name in PLACES if (place := getattr(config, name)) is not None}  # may have moved
            result = experiment.run(dataclasses.replace(known, **places), resume=True, console=console)
        else:
            result = experiment.run(config, console=console)
    except Exception as error:
        checkpoint.write_text(trouble, f"{_line(error)}\n\n{traceback.format_exc()}")
        return FAILED
    finally:
        gc.collect()  # models are freed before the next one is loaded
    if result.status == FINISHED:
        trouble.unlink(missing_ok=True)
    return INTERRUPTED if result.asked_to_stop else result.status


def _line(error: BaseException) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return text if isinstance(error, InputError) else f"{type(error).__name__}: {text}".removesuffix(": ")


def told(trouble: Path) -> str:
    """The one line of a failure."""
    return trouble.read_text(encoding="utf-8").splitlines()[0] if trouble.exists() else "it ended without a word"


# ------------------------------------------------------------ a process of its own


@dataclass(frozen=True)
class Process:
    """A run that goes on in another process."""

    child: subprocess.Popen[bytes]
    said: Any  # a file with what it printed
    trouble: Path

    def status(self) -> str | None:
        """How it ended; None while it runs."""
        code = self.child.poll()
        if code is None:
            return None
        known = {number: name for name, number in CODES.items()}
        if code in known and (code != CODES[FAILED] or self.trouble.exists()):
            return known[code]
        if code == -signal.SIGTERM:  # before it was ready to stop at a step
            return INTERRUPTED
        self.said.seek(0)
        last = self.said.read().decode(errors="replace").strip()
        why = f"ended by signal {-code}" if code < 0 else f"ended with code {code}"
        checkpoint.write_text(self.trouble, f"{why}; {(last.splitlines() or ['it said nothing'])[-1]}\n\n{last}\n")
        return FAILED

    def stop(self) -> None:
        """Asks it to save and stop."""
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """Ends it now."""
        if self.child.poll() is None:
            self.child.kill()
        self.child.wait()
        if self.child.stdin is not None:
            self.child.stdin.close()
        self.said.close()


def start(config: RunConfig, trouble: Path, threads: int, keep: tuple[int, ...] = ()) -> Process:
    """Starts or resumes a run in a process with so many threads; `keep` are files that stay open in it."""
    trouble.unlink(missing_ok=True)
    said = tempfile.TemporaryFile()  # noqa: SIM115  (it is open as long as the process)
    child = subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=said,
        stderr=said,
        env=os.environ | dict.fromkeys(THREADS, str(threads)),
        start_new_session=True,  # Ctrl-C reaches us alone, and we pass it on
        pass_fds=keep,
    )
    assert child.stdin is not None
    child.stdin.write(json.dumps({"config": config.to_dict(), "trouble": str(trouble)}).encode() + b"\n")
    child.stdin.flush()
    return Process(child, said, trouble)


def main() -> None:
    task = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_starter, daemon=True).start()
    status = perform(RunConfig.from_dict(task["config"]), Path(task["trouble"]))
    sys.stdout.flush()
    os._exit(CODES[status])  # the watching thread holds standard input, which a usual end would wait for


def _end_with_starter() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
