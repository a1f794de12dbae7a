"""Condenses the runs of a comparison to one CSV, one row a run. The run folders themselves are not kept in git.

    python benchmarks/condense.py runs/comparison --output benchmarks/results/comparison.csv

It reads run folders only (config.yaml, result.json, log.jsonl), no models. Unfinished runs are left out. The columns:

    task, method, variant    variant is the method's name in the comparison, such as pins-ema
    sparsity, seed           as asked for
    objective                what the run learnt from
    metric                   the task's main score, in percent
    test, test_rows          the final model's score on the test set, and the number of rows there
    validation               the final model's score on the validation rows
    settled                  mean validation score over all evaluations at the final sparsity
    teacher_selected         1 if the run chose a teacher by those validation rows: then the two scores above flatter it
    teachers, last_teacher   how many teachers there were, and the step of the last one
    task_loss                mean loss on the labels over the last tenth of the steps
    returned                 weights that came back after they had been pruned, over all maskings
    steps, seconds           optimiser steps, wall-clock time on one thread
    learning_rate, batch_size, data    data is a fingerprint of the rows
"""

from __future__ import annotations

import argparse
import csv
import statistics
from pathlib import Path
from typing import Any

from pinscher.runfolder import RunFolder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparison", type=Path, help="output folder of pinscher compare")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    cells = sorted((args.comparison / "cells").glob("*/"))
    rows = [row(cell) for cell in cells if RunFolder(cell).is_finished]
    rows.sort(key=lambda one: (one["task"], float(one["sparsity"]), one["variant"], int(one["seed"])))
    with args.output.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    print(f"{len(rows)} runs in {args.output}")


def row(cell: Path) -> dict[str, Any]:
    """One run as a row, rounded to what the docs need."""
    told, result = RunFolder(cell).read_config(), RunFolder(cell).read_result()
    log = [line for line in RunFolder(cell).events() if line is not None]
    settings, main, total = told["run"], result["main"], result["total_steps"]
    evals = [(line["step"], line[f"eval_{main}"]) for line in log if f"eval_{main}" in line]
    train = [line for line in log if line["event"] == "train"]
    teachers = [line["step"] for line in log if line["event"] == "teacher"]
    settled = [score for step, score in evals if step >= settled_at(settings["cooldown"], total)]
    losses = [line["loss_er"] for line in train if line["step"] > 0.9 * train[-1]["step"]]
    own_teacher = settings["objective"] == "self-regularization" and settings["method"] != "dense"
    sparsity = f"{100 * result['target_sparsity']:g}"
    return {
        "task": settings["task"],
        "method": settings["method"],
        "variant": variant(cell.name, settings["task"], sparsity),
        "sparsity": sparsity,
        "seed": settings["seed"],
        "objective": settings["objective"],
        "metric": main,
        "test": f"{result['metrics']['pruned'][main]:.6f}",
        "test_rows": sum(count for name, count in told["data"]["rows"].items() if name.startswith("test")),
        "validation": f"{result['metrics']['validation'][main]:.6f}" if main in result["metrics"]["validation"] else "",
        "settled": f"{statistics.mean(settled):.6f}" if settled else "",  # texts are validated by their loss
        "teacher_selected": int(own_teacher),
        "teachers": len(teachers) if own_teacher else "",
        "last_teacher": teachers[-1] if own_teacher and teachers else "",
        "task_loss": f"{statistics.mean(losses):.4f}",
        "returned": train[-1].get("returned", ""),
        "steps": result["steps"],
        "seconds": result["seconds"],
        "learning_rate": settings["learning_rate"],
        "batch_size": settings["batch_size"],
        "data": told["data"]["fingerprint"][:12],
    }


def settled_at(cooldown: float, total: int) -> float:
    """The step from which the sparsity is the final one."""
    return total - (round(cooldown * total) if cooldown < 1 else cooldown)


def variant(name: str, task: str, sparsity: str) -> str:
    """sst2-pins-ema-90-seed1 is pins-ema."""
    return name.removeprefix(f"{task}-").rpartition("-seed")[0].removesuffix(f"-{sparsity}")


if __name__ == "__main__":
    main()
