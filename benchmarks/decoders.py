"""Wanda, SparseGPT, magnitude and PINS on a language model and real data: perplexity and BLEU at 50 and 80 %.

    DATA=… MODELS=… python benchmarks/decoders.py [NAME …]      # run these (all by default) and collect
    DATA=… MODELS=… python benchmarks/decoders.py --trial       # the same, tiny: to see that it works
    python benchmarks/decoders.py --list                        # print the commands
    python benchmarks/decoders.py --table                       # print the table from what was collected

DATA/e2e_nlg holds the rows, MODELS/stories15m the model (docs/lab/comparison.md). A language model is fine-tuned once
(dense). That model is pruned without training (NAME-0), or the model is pruned while it is fine-tuned. Test loss is the
mean over the reference tokens, perplexity its exponential. Each run is a row of results/decoders.csv. A run that is
there already is not repeated, and an interrupted one is resumed.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import shlex
import subprocess
import sys
from pathlib import Path

from pinscher.runfolder import RunFolder
from pinscher.train import folder as runfolder
from pinscher.train import plan, pretrained
from pinscher.train.evaluation import mean_loss

RESULTS = Path(__file__).parent / "results" / "decoders.csv"
ROWS = {
    "full": "--rows 6000 --validation-rows 60 --test-rows 100 --eval-every 100 --beams 4",
    "trial": "--rows 60 --validation-rows 4 --test-rows 2 --beams 1",
}
STEPS = {"full": 200, "trial": 3}
SPARSITIES = (50, 80)


def commands(size: str) -> dict[str, str]:
    """Every run by its name, as the command's flags. RUNS stands for the folder of the runs."""
    task = f'--recipe none --task e2e --data "$DATA/e2e_nlg" --batch-size 8 --no-export {ROWS[size]}'
    tuned = f'{task} --model "$MODELS/stories15m" --max-steps {STEPS[size]}'
    found = {"dense": f"{tuned} --method dense"}
    for percent in SPARSITIES:
        share = f"--sparsity {percent / 100:g}"
        for method in ("magnitude", "wanda", "sparsegpt"):
            found[f"{method}-{percent}-0"] = (
                f'{task} --model "$RUNS/dense/model" --method {method} {share} --max-steps 0'
            )
        for method in ("magnitude-oneshot", "wanda", "sparsegpt", "pins"):
            found[f"{method}-{percent}"] = f"{tuned} --method {method} {share}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="which to run")
    parser.add_argument("--runs", type=Path, default=Path("runs/decoders"), help="where the run folders are")
    parser.add_argument("--results", type=Path, default=RESULTS, help="CSV file for the results")
    parser.add_argument("--trial", action="store_true", help="few rows and steps")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    known = commands("trial" if args.trial else "full")
    if args.list:
        print("\n".join(f"{name}: pinscher prune {flags}" for name, flags in known.items()))
    elif args.table:
        print("\n".join(table(read(args.results))))
    else:
        os.environ["RUNS"] = str(args.runs)
        for name in args.names or known:
            if name not in read(args.results):
                run(args.runs / name, known[name])
                keep(args.results, list(known), name, args.runs / name)


def run(folder: Path, flags: str) -> None:
    """Runs the command, or goes on with what is there."""
    start = [sys.executable, "-m", "pinscher", "prune"]
    if RunFolder(folder).is_run:
        if not RunFolder(folder).is_finished:
            subprocess.run([*start, "--resume", str(folder)], check=True)
        return
    words = [os.path.expandvars(word) for word in shlex.split(flags)]
    subprocess.run([*start, *words, "--output", str(folder)], check=True)


def keep(results: Path, order: list[str], name: str, folder: Path) -> None:
    done = runfolder.read_result(folder)
    loss = test_loss(folder)
    figures = {"sparsity": done.sparsity, "test_loss": loss, "perplexity": math.exp(loss), **done.scores}
    made = {"name": name, "steps": str(done.steps), "seconds": f"{done.seconds:.1f}"}
    rows = read(results) | {name: made | {key: f"{value:.6f}" for key, value in figures.items()}}
    with results.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[name]), restval="", lineterminator="\n")
        table.writeheader()
        table.writerows(rows[one] for one in order if one in rows)


def test_loss(folder: Path) -> float:
    """The mean loss over the tokens of the test rows' references."""
    made = plan.make(runfolder.config_of(folder))
    model = pretrained.load_model(str(RunFolder(folder).model), made.task, made.labels, made.tokenizer)
    (rows,) = made.splits.tests.values()
    features = made.task.features(rows, made.tokenizer, made.labels, training=True)
    return mean_loss(model, features, made.task, made.tokenizer, 16)


def read(results: Path) -> dict[str, dict[str, str]]:
    if not results.exists():
        return {}
    with results.open(newline="") as file:
        return {row["name"]: row for row in csv.DictReader(file)}


def table(results: dict[str, dict[str, str]]) -> list[str]:
    lines = ["| run | zeros | steps | test loss | perplexity | BLEU |", "|---|---|---|---|---|---|"]
    for name, row in results.items():
        loss, perplexity, bleu = (float(row[key]) for key in ("test_loss", "perplexity", "bleu"))
        zeros = f"{float(row['sparsity']):.1%}"
        lines.append(f"| {name} | {zeros} | {row['steps']} | {loss:.3f} | {perplexity:.2f} | {bleu:.2f} |")
    return lines


if __name__ == "__main__":
    main()
