"""Kills runs at any moment, resumes them, and compares every file with those of an unbroken run, byte by byte.

    python tests/attack/kills.py --kills 200 --seed 1 --seconds 600

Processes are forked from a server that has imported everything, so that a kill hits the run and not the imports.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from pinscher.runfolder import RunFolder

RUN = "out"  # the run's folder, in each attempt's own
SAID = "said.txt"
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
ENDED = (0, 130, *(-number for number in SIGNALS))
FOREVER = 300.0  # seconds: longer than any of these runs takes
PRELOADED = [
    "datasets",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "pinscher.train.run",
    "pinscher.train.scoring",
    "pinscher.commands.app",
    "pinscher.commands.export",
    "pinscher.report.runs",
    "pinscher.store.saving",
    "pinscher.runtime.loading",
    "pinscher._native",
]
FLAGS = ["--max-steps", "12", "--eval-every", "4", "--save-every", "3", "--batch-size", "8", "--output", RUN]

# What a run has written when it reaches each of its stages: the moments at which kills are most likely to hurt.
MOMENTS = (
    "config.yaml",
    "dense/config.yaml",
    "dense/checkpoints/.checkpoint-3.new",
    "dense/checkpoints/checkpoint-6",
    "dense/.model.new",
    "dense/model",
    "dense/result.json",
    "log.jsonl",
    "checkpoints/best",
    "checkpoints/.checkpoint-3.new",
    "checkpoints/checkpoint-3",
    "checkpoints/.checkpoint-12.new",
    "checkpoints/checkpoint-12",
    ".model.new",
    "model",
    "predictions",
    "result.json",
    ".export.new",
    "export",
    "eval-export",
    "eval-export/scores.json",
)


# ------------------------------------------------------------ processes


def start(words: Sequence[Any], folder: Path) -> Any:
    """The command in a process of its own; what it prints is added to a file."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=_perform, args=([*map(str, words)], str(folder)))
    process.start()
    return process


def _perform(words: list[str], folder: str) -> None:
    code: Any = 1
    try:
        os.chdir(folder)
        said = os.open(SAID, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(said, 1)
        os.dup2(said, 2)
        os.environ["COLUMNS"] = "200"
        import torch

        from pinscher.commands import app

        torch.set_num_threads(1)
        gc.freeze()  # what the server imported need not be searched for garbage in every run
        sys.argv = ["pinscher", *words]
        app.main()
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except KeyboardInterrupt:  # before or after the command's own handling of it
        code = 130
    except BaseException:
        import traceback

        os.write(2, traceback.format_exc().encode())
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
        os._exit(code)


def finish(process: Any) -> int:
    """Waits for the end of a process."""
    process.join(FOREVER)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise AssertionError("a run hangs")
    return int(process.exitcode)


def said(folder: Path) -> str:
    path = folder / SAID
    return path.read_text(errors="replace") if path.exists() else ""


# ------------------------------------------------------------ comparing


def differences(run: Path, whole: Path) -> list[str]:
    """What is different between two run folders, apart from how long things took."""
    ours, theirs = (_contents(folder) for folder in (run, whole))
    names = sorted(ours.keys() | theirs.keys())
    lost = [f"{name} is missing" for name in names if name not in ours]
    spare = [f"{name} is too much" for name in names if name not in theirs]
    return [*lost, *spare, *(f"{n} differs" for n in names if n in ours and n in theirs and ours[n] != theirs[n])]


def _contents(folder: Path) -> dict[str, bytes | None]:
    """Every file and folder inside of a folder; files without seconds."""
    found = {}
    for path in sorted(folder.rglob("*")):
        content = path.read_bytes() if path.is_file() else None
        if content is not None and path.name in ("log.jsonl", "result.json"):
            content = _timeless(content, path.name)
        found[path.relative_to(folder).as_posix()] = content
    return found


def _timeless(content: bytes, name: str) -> bytes:
    """What is in a log or result without seconds; what was damaged on purpose stays as it is."""
    try:
        values = [json.loads(line) for line in content.splitlines()] if name == "log.jsonl" else [json.loads(content)]
    except ValueError:
        return content
    return json.dumps([{key: item for key, item in value.items() if key != "seconds"} for value in values]).encode()


# ------------------------------------------------------------ killing


@dataclass(frozen=True)
class Ground:
    """A tiny model and task, and an unbroken run of it."""

    root: Path
    words: list[str]
    whole: Path
    seconds: float  # that the unbroken run took


def prepare(root: Path, more: Sequence[str] = ()) -> Ground:
    """Makes a ground; `more` are flags of the run."""
    import tiny_tasks

    tiny_tasks.write_files("sst2", root / "data")
    tiny_tasks.tiny_model("sst2", root / "model")
    words = ["prune", "--model", str(root / "model"), "--task", "sst2", "--data", str(root / "data"), *FLAGS, *more]
    folder = root / "whole"
    folder.mkdir()
    finish(start(["--version"], folder))  # the server has imported everything before the clock starts
    began = time.monotonic()
    assert finish(start(words, folder)) == 0, said(folder)
    return Ground(root, words, folder / RUN, time.monotonic() - began)


def go_on(ground: Ground, folder: Path) -> list[str]:
    """What a person types after a kill: resume the run, or start it if it had not come so far."""
    return ["prune", "--resume", RUN] if RunFolder(folder / RUN).is_run else ground.words


@dataclass
class Attempt:
    """One run that is killed again and again."""

    ground: Ground
    folder: Path
    ends: list[str] = field(default_factory=list)
    is_done: bool = False
    hits: int = 0  # signals that came before the run had ended

    def kill(self, number: int, wait: Callable[[Any], None], why: str) -> None:
        """Starts or resumes the run, waits, and sends a signal."""
        process = start(go_on(self.ground, self.folder), self.folder)
        wait(process)
        if process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)
                self.hits += 1
        self._judge(finish(process), f"{signal.Signals(number).name} {why}")

    def end(self) -> list[str]:
        """Resumes the run without a kill; gives everything that is wrong with it then."""
        if not self.is_done:
            self._judge(finish(start(go_on(self.ground, self.folder), self.folder)), "at last")
        wrong = [] if self.is_done else [f"it does not end: {self.ends}"]
        return [*wrong, *differences(self.folder / RUN, self.ground.whole)]

    def _judge(self, code: int, what: str) -> None:
        self.ends.append(f"{what}: {code}")
        done = code == 2 and "nothing to resume" in said(self.folder).strip().splitlines()[-1]
        assert done or code in ENDED, f"{self.ends}\n{said(self.folder)}"
        self.is_done = self.is_done or done or code == 0


def after(seconds: float) -> Callable[[Any], None]:
    return lambda process: process.join(seconds)


def when(path: Path) -> Callable[[Any], None]:
    """Waits until something is there."""

    def wait(process: Any) -> None:
        while process.is_alive() and not path.exists():
            time.sleep(0.0005)

    return wait


def at_moment(ground: Ground, moment: str, number: int, folder: Path) -> list[str]:
    """Kills a run when it has written something, and resumes it; gives what is wrong then."""
    folder.mkdir()
    attempt = Attempt(ground, folder)
    attempt.kill(number, when(folder / RUN / moment), f"at {moment}")
    return attempt.end()


def at_random(ground: Ground, kills: int, seed: int) -> Iterator[tuple[int, list[str], list[str]]]:
    """Kills runs at random moments; gives, run by run, the kills so far, how they ended, and what is wrong."""
    chance, done = random.Random(seed), 0
    while done < kills:
        folder = Path(tempfile.mkdtemp(dir=ground.root, prefix="killed-"))
        attempt = Attempt(ground, folder)
        for _ in range(min(chance.randint(1, 4), kills - done)):
            seconds = chance.uniform(0, ground.seconds)
            attempt.kill(chance.choice(SIGNALS), after(seconds), f"after {seconds:.2f} s")
            if attempt.is_done:
                break
        done += attempt.hits
        yield done, attempt.ends, attempt.end()
        shutil.rmtree(folder)


def at_all_moments(ground: Ground, seed: int) -> Iterator[tuple[str, list[str]]]:
    """Kills runs at every moment by every signal, in any order; gives which it was and what is wrong then."""
    every = [(number, moment) for number in SIGNALS for moment in MOMENTS]
    for i, (number, moment) in enumerate(random.Random(seed).sample(every, len(every))):
        folder = ground.root / f"moment-{i}"
        yield f"{signal.Signals(number).name} at {moment}", at_moment(ground, moment, number, folder)
        shutil.rmtree(folder)


GROUNDS = {"default": [], "best": ["--baseline", "--select", "best", "--recipe", "none"]}  # flags of the run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200, help="at random moments; those at named ones come on top")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no further run after this")
    parser.add_argument("--ground", choices=GROUNDS, default="default")
    asked = parser.parse_args()
    until, failures, done, moments = time.monotonic() + asked.seconds, 0, 0, 0
    with tempfile.TemporaryDirectory() as root:
        ground = prepare(Path(root), GROUNDS[asked.ground])
        at_once = at_random(ground, asked.kills, asked.seed)
        at_stage = at_all_moments(ground, asked.seed)
        for one, other in itertools.zip_longest(at_once, at_stage):  # a short attack has some of both
            if one is not None:
                done, ends, wrong = one
                failures += bool(wrong)
                print(f"{done} kills: {', '.join(ends)}: {wrong or 'the same'}", flush=True)
            if other is not None:
                moments, (what, wrong) = moments + 1, other
                failures += bool(wrong)
                print(f"{what}: {wrong or 'the same'}", flush=True)
            if time.monotonic() > until:
                break
    print(f"{done} kills at random moments, {moments} at named ones ({asked.ground}): {failures} ended differently")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
