"""All attacks, as many side by side as there are cores, each for a bounded time.

    python tests/attack/everything.py --seconds 200

Ends with 1 if any of them found something; the last lines say how far each came. What each does meanwhile is written
to build/attack.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TESTS = Path(__file__).parents[1]
LOGS = TESTS.parent / "build" / "attack"
# The long ones first. Those with a bound on their time get it; the last checks every flag and every field.
BOUNDED = (
    "mutants.py --count 5000 --seed 0",
    "mutants.py --count 5000 --seed 1",
    "attack/kills.py --kills 100 --ground default",
    "attack/kills.py --kills 100 --ground best",
    "attack/damage.py --part 1/2",
    "attack/damage.py --part 2/2",
)
FLAGS = [
    *("-m", "pytest", "-n", "0"),
    *("tests/train/test_config.py", "tests/commands/test_prune_settings.py", "tests/commands/test_flags_values.py"),
]


def attacked(words: list[str]) -> tuple[int, str]:
    """Runs one attack; gives its exit status and what it printed, with its own count as the last line."""
    alone = os.environ | {"OMP_NUM_THREADS": "1"}
    log = LOGS / f"{'-'.join(re.findall(r'[a-z]+|[0-9]+', named(words)))[:99]}.log"
    with log.open("w") as lines:
        done = subprocess.run([sys.executable, *words], cwd=TESTS.parent, env=alone, stdout=lines, stderr=lines)
    return done.returncode, log.read_text(errors="replace")


def named(words: list[str]) -> str:
    return " ".join(words).removeprefix(f"{TESTS}/")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=200.0, help="time for each attack")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="attacks side by side")
    asked = parser.parse_args()
    LOGS.mkdir(parents=True, exist_ok=True)
    parts = [[str(TESTS / path), *words, "--seconds", str(asked.seconds)] for path, *words in map(str.split, BOUNDED)]
    failed = 0
    with ThreadPoolExecutor(asked.jobs) as pool:
        for words, (code, said) in zip([*parts, FLAGS], pool.map(attacked, [*parts, FLAGS]), strict=True):
            failed += code != 0
            lines = said.strip().splitlines()
            found = f"{named(words)}: {'found something' if code else 'nothing'}"
            print(found, *(lines if code else lines[-1:]), sep="\n  ", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
