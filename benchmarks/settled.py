"""A steadier look at a comparison than its final test scores: the mean validation score at the final sparsity.

    python benchmarks/settled.py runs/comparison runs/trials [--output FILE.csv]

From one evaluation to the next a small model's score moves by more than methods differ. Once the schedule has settled
the sparsity stays; the mean over the evaluations from there on moves less than the last of them. Logs are all that is
needed.
"""

from __future__ import annotations

import argparse
import csv
import re
import statistics
from pathlib import Path

from pinscher.report import runs

RESULTS = Path(__file__).parent / "results" / "settled.csv"
CELL = re.compile(r"(?P<task>[^-]+)-(?P<variant>.+?)(-(?P<sparsity>\d+))?-seed(?P<seed>\d+)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparisons", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    found: dict[tuple[str, str, str], list[tuple[int, float, float]]] = {}
    for folder in sorted(path for comparison in args.comparisons for path in (comparison / "cells").iterdir()):
        named, run = CELL.fullmatch(folder.name), runs.read(folder)
        if named and run.finished:
            key = named["task"], named["variant"], named["sparsity"] or "0"
            found.setdefault(key, []).append((int(named["seed"]), settled(run), tested(run)))
    rows = [row(key, sorted(some)) for key, some in found.items()]
    rows.sort(key=lambda one: (one["task"], one["sparsity"], -float(one["settled"])))
    with args.output.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    for one in rows:
        print("  ".join(f"{value:>8}" if i > 2 else f"{value:22}" for i, value in enumerate(one.values())))


def settled(run: runs.Run) -> float:
    """The mean validation score, of the task's score, from the step on at which the final sparsity is reached."""
    steps, scores = run.log.scores[run.result["main"]].arrays()
    cooldown = run.settings["cooldown"]
    start = steps[-1] - (cooldown * steps[-1] if cooldown < 1 else cooldown)
    return float(scores[steps >= start].mean())


def tested(run: runs.Run) -> float:
    return float(run.result["metrics"]["pruned"][run.result["main"]])


def row(key: tuple[str, str, str], some: list[tuple[int, float, float]]) -> dict[str, str]:
    seeds, means, tests = zip(*some, strict=True)
    task, variant, sparsity = key
    return {
        "task": task,
        "variant": variant,
        "sparsity": sparsity,
        "settled": f"{statistics.mean(means):.2f}",
        "test": f"{statistics.mean(tests):.2f}",
        "seeds": " ".join(map(str, seeds)),
        "settled_each": " ".join(f"{one:.2f}" for one in means),
        "test_each": " ".join(f"{one:.2f}" for one in tests),
    }


if __name__ == "__main__":
    main()
