"""Measures what the paper says about surviving weights, in the models of a comparison.

    python benchmarks/claims.py runs/comparison [--task sst2] [--output FILE.csv]
    python benchmarks/tables.py claims        # the table of docs/claims.md, from the CSV

One row for each method and sparsity, the mean over the seeds whose models are there: the Gini coefficient of the
densities of rows and columns (0 is even), the share of full rank, the size of surviving weights, the loss on the labels
over the last tenth of the steps, and the share of each layer that survives.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from pinscher.models.names import short_blocks
from pinscher.report import analysis, runs

RESULTS = Path(__file__).parent / "results" / "claims.csv"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparison", type=Path)
    parser.add_argument("--task", default="sst2")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    found: dict[tuple[str, float], list[dict[str, Any]]] = {}
    seeds: dict[tuple[str, float], list[int]] = {}
    for folder in sorted((args.comparison / "cells").glob(f"{args.task}-*")):
        run = runs.read(folder)
        if run.finished and runs.has_model(run):
            key = run.settings["method"], run.settings["sparsity"]
            seeds.setdefault(key, []).append(run.settings["seed"])
            found.setdefault(key, []).append(described(run))
    rows = [
        {"method": key[0], "sparsity": key[1], "seeds": " ".join(map(str, sorted(seeds[key])))} | mean(some)
        for key, some in found.items()
    ]
    rows.sort(key=lambda row: (row["sparsity"], -row["gini_rows"]))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with args.output.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))


def described(run: runs.Run) -> dict[str, float]:
    """The figures of one run."""
    matrices = list(runs.matrices(run))
    each = [analysis.measures(weight) for _, weight in matrices]
    values = np.concatenate([np.abs(weight[weight != 0]) for _, weight in matrices])
    figures = {name: statistics.mean(one[name] for one in each) for name in ("gini_rows", "gini_columns", "rank")}
    figures |= {"value_median": float(np.median(values)), "value_top_percent": float(np.quantile(values, 0.99))}
    steps, loss = run.log.train["loss_er"].arrays()
    figures["task_loss"] = float(loss[steps > 0.9 * steps[-1]].mean())
    layers = list(dict.fromkeys(site.layer for site, _ in matrices))
    for name, layer in zip(short_blocks(layers), layers, strict=True):
        some = [weight for site, weight in matrices if site.layer == layer]
        figures[f"layer_{name}"] = sum(int(np.count_nonzero(w)) for w in some) / sum(w.size for w in some)
    return figures


def mean(some: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.mean(one[name] for one in some), 4) for name in some[0]}


if __name__ == "__main__":
    main()
