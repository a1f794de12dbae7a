"""Damages every file of a run folder and then uses the folder: only one-sentence errors or right results may follow.

python tests/attack/damage.py --samples 100 --seed 1
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from attack import kills
from attack.kills import RUN, Ground


def flip(path: Path, chance: random.Random) -> None:
    """Turns over one bit."""
    content = bytearray(path.read_bytes())
    if content:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "truncate": lambda path, chance: os.truncate(path, chance.randrange(max(1, path.stat().st_size))),
    "empty": lambda path, chance: os.truncate(path, 0),
    "flip": flip,
    "remove": lambda path, chance: path.unlink(),
    "garbage": lambda path, chance: path.write_bytes(chance.randbytes(999)) and None,
}
USES = {
    "resume": ["prune", "--resume", RUN],
    "eval": ["eval", RUN, "--output", "scores"],
    "export": ["export", RUN, "--output", "small"],
    "report": ["report", RUN, "--output", "page.html"],
}


def interrupt(ground: Ground, folder: Path) -> Path:
    """A run that was killed in the middle, with two checkpoints."""
    folder.mkdir()
    attempt = kills.Attempt(ground, folder)
    attempt.kill(kills.SIGNALS[0], kills.when(folder / RUN / "checkpoints" / "checkpoint-9"), "at checkpoint-9")
    assert not attempt.is_done
    return folder / RUN


def files_of(run: Path) -> list[str]:
    return sorted(path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file())


def trouble(ground: Ground, run: Path, name: str, damage: str, use: str, seed: int) -> list[str]:
    """Damages one file of a copy of a run and uses it; gives everything that is wrong with what follows."""
    folder = Path(tempfile.mkdtemp(dir=ground.root, prefix="damaged-"))
    shutil.copytree(run, folder / RUN)
    DAMAGES[damage](folder / RUN / name, random.Random(f"{name}-{damage}-{seed}"))
    code = kills.finish(kills.start(USES[use], folder))
    said = kills.said(folder).strip()
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    wrong = []
    if code not in (0, 2) or "Traceback" in said or (code == 2 and len(errors) != 1):
        wrong = [f"ended with {code}: {said[-3000:]}"]
    elif code == 0 and use == "resume":  # settings and old lines of the log are taken as they are
        told = [line for line in kills.differences(folder / RUN, ground.whole) if not line.startswith(name)]
        wrong = [] if name == "config.yaml" else told
    shutil.rmtree(folder)
    return wrong


def cases(ground: Ground) -> list[tuple[Path, str, str, str]]:
    """All of them: a run, one of its files, a damage and a use."""
    cut = interrupt(ground, ground.root / "interrupted")
    runs = {ground.whole: USES, cut: {"resume": USES["resume"], "report": USES["report"]}}
    return [
        (run, name, damage, use)
        for run, uses in runs.items()
        for name in files_of(run)
        for damage in DAMAGES
        for use in uses
    ]


def sampled(ground: Ground, samples: int, seed: int) -> Iterator[tuple[str, list[str]]]:
    """Some of the cases; gives what was done and what is wrong then."""
    every = cases(ground)
    for run, name, damage, use in random.Random(seed).sample(every, min(samples, len(every))):
        what = f"{damage} {name} of {'the finished' if run == ground.whole else 'an interrupted'} run, {use}"
        yield what, trouble(ground, run, name, damage, use, seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=100_000, help="Number of cases; by default all.")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    failures = 0
    with tempfile.TemporaryDirectory() as root:
        ground = kills.prepare(Path(root))
        for what, wrong in sampled(ground, asked.samples, asked.seed):
            failures += bool(wrong)
            print(f"{what}: {wrong or 'fine'}", flush=True)
    sys.exit(f"{failures} cases failed" if failures else 0)


if __name__ == "__main__":
    main()
