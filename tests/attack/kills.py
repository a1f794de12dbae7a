"""Kills runs at any moment, resumes them, and compares every file with those of an unbroken run, byte by byte.

    python tests/attack/kills.py --kills 200 --seed 1

Processes are forked from a server that has imported everything, so that a kill hits the run and not the imports.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
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
    "pinscher.train.run",
    "pinscher.commands.app",
    "pinscher.store.saving",
    "pinscher.runtime.loading",
]
FLAGS = ["--max-steps", "12", "--eval-every", "4", "--save-every", "3", "--batch-size", "8", "--output", RUN]

# What a run has written when it reaches each of its stages: the moments at which kills are most likely to hurt.
MOMENTS = (
    "config.yaml",
    "log.jsonl",
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
    values = [json.loads(line) for line in content.splitlines()] if name == "log.jsonl" else [json.loads(content)]
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

    def kill(self, number: int, wait: Callable[[Any], None], why: str) -> None:
        """Starts or resumes the run, waits, and sends a signal."""
        process = start(go_on(self.ground, self.folder), self.folder)
        wait(process)
        if process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)
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
            done += 1
            if attempt.is_done:
                break
        yield done, attempt.ends, attempt.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    failures = 0
    with tempfile.TemporaryDirectory() as root:
        for more in ([], ["--baseline", "--select", "best"]):
            place = Path(root) / f"ground-{len(more)}"
            place.mkdir()
            ground = prepare(place, more)
            for number in SIGNALS:
                for i, moment in enumerate(MOMENTS):
                    wrong = at_moment(ground, moment, number, place / f"moment-{number}-{i}")
                    failures += bool(wrong)
                    print(f"{signal.Signals(number).name} at {moment}: {wrong or 'the same'}", flush=True)
            for done, ends, wrong in at_random(ground, asked.kills // 2, asked.seed):
                failures += bool(wrong)
                print(f"{done} kills: {', '.join(ends)}: {wrong or 'the same'}", flush=True)
    sys.exit(f"{failures} runs ended differently" if failures else 0)


if __name__ == "__main__":
    main()
