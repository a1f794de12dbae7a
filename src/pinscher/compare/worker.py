"""Makes one run of a comparison, in this process or in its own, and records how it ended and why.

A run's own process (`python -m pinscher.compare.worker`) reads its task from standard input. When standard input ends,
the parent process is gone: the worker then exits at once, and the run is resumed from its checkpoint later.
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

from pinscher import files
from pinscher.errors import InputError, first_line
from pinscher.runfolder import RunFolder
from pinscher.train import folder as runfolder
from pinscher.train import run as experiment
from pinscher.train.config import RunConfig
from pinscher.train.plan import PLACES

FINISHED, INTERRUPTED, FAILED = "finished", "interrupted", "failed"
CODES = {FINISHED: 0, FAILED: 1, INTERRUPTED: 3}
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def perform(config: RunConfig, trouble: Path, console: Console = experiment.QUIET) -> str:
    """Starts or resumes a run. Errors are not raised but written to the file `trouble`: one line, then the traceback.

    A run that was asked to stop counts as interrupted even if it finished, so that no further run is started.
    """
    try:
        if RunFolder(config.folder).is_run:
            known = runfolder.config_of(config.folder)
            places = {name: place for name in PLACES if (place := getattr(config, name)) is not None}  # may have moved
            again = dataclasses.replace(known, **places)
            result = experiment.run(again, resume=True, console=console).without_models()
        else:
            result = experiment.run(config, console=console).without_models()
    except Exception as error:
        files.write_text(trouble, f"{_line(error)}\n\n{traceback.format_exc()}")
        return FAILED
    finally:
        gc.collect()  # models are freed before the next one is loaded
    if result.status == FINISHED:
        trouble.unlink(missing_ok=True)
    return INTERRUPTED if result.asked_to_stop else result.status


def _line(error: BaseException) -> str:
    text, name = first_line(error), type(error).__name__
    return text if isinstance(error, InputError) or text == name else f"{name}: {text}"


def told(trouble: Path) -> str:
    """The first line of a run's error file."""
    return trouble.read_text(encoding="utf-8").splitlines()[0] if trouble.exists() else "it ended without a word"


# ------------------------------------------------------------ a process of its own


@dataclass(frozen=True)
class Process:
    """A run in another process."""

    child: subprocess.Popen[bytes]
    said: Any  # a file with its output
    trouble: Path

    def status(self) -> str | None:
        """How the run ended; None while it runs."""
        code = self.child.poll()
        if code is None:
            return None
        known = {number: name for name, number in CODES.items()}
        if code in known and (code != CODES[FAILED] or self.trouble.exists()):
            return known[code]
        if code == -signal.SIGTERM:  # before it could handle the signal
            return INTERRUPTED
        self.said.seek(0)
        last = self.said.read().decode(errors="replace").strip()
        why = f"ended by signal {-code}" if code < 0 else f"ended with code {code}"
        files.write_text(self.trouble, f"{why}; {(last.splitlines() or ['it said nothing'])[-1]}\n\n{last}\n")
        return FAILED

    def stop(self) -> None:
        """Asks the run to save and stop."""
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """Ends the run now."""
        if self.child.poll() is None:
            self.child.kill()
        self.child.wait()
        if self.child.stdin is not None:
            self.child.stdin.close()
        self.said.close()


def start(config: RunConfig, trouble: Path, threads: int, keep: tuple[int, ...] = ()) -> Process:
    """Starts or resumes a run in a process with its own number of threads; `keep` are files that stay open in it."""
    trouble.unlink(missing_ok=True)
    said = tempfile.TemporaryFile()  # noqa: SIM115  (it is open as long as the process)
    child = subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=said,
        stderr=said,
        env=os.environ | dict.fromkeys(THREADS, str(threads)),
        start_new_session=True,  # Ctrl-C reaches only this process, which passes it on
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
    os._exit(CODES[status])  # a normal exit would wait for the thread that reads standard input


def _end_with_starter() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
