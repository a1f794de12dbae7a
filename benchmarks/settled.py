"""A steadier look at a comparison than its final test scores: the mean validation score at the final sparsity.

    python benchmarks/settled.py runs/comparison runs/trials [--output FILE.csv]

From one evaluation to the next a small model's score moves by more than methods differ. Once the schedule has settled
the sparsity stays; the mean over the evaluations from there on moves less than the last of them. No models are needed.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from pathlib import Path

from pinscher.report import runs

RESULTS = Path(__file__).parent / "results" / "settled.csv"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparisons", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    found: dict[tuple[str, str, str], list[tuple[int, float, float]]] = {}
    for folder in sorted(path for comparison in args.comparisons for path in (comparison / "cells").iterdir()):
        run = runs.read(folder)
        if run.finished and run.result["main"] in run.log.scores:  # texts are validated by their loss
            task, sparsity = run.settings["task"], f"{100 * run.result['target_sparsity']:g}"
            variant = folder.name.removeprefix(f"{task}-").rpartition("-seed")[0].removesuffix(f"-{sparsity}")
            found.setdefault((task, variant, sparsity), []).append((run.settings["seed"], settled(run), tested(run)))
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
    cooldown, total = run.settings["cooldown"], run.result["total_steps"]
    settled_at = total - (round(cooldown * total) if cooldown < 1 else cooldown)
    return float(scores[steps >= settled_at].mean())


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
