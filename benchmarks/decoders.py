"""Wanda, SparseGPT, magnitude and PINS on a language model and real data: perplexity and BLEU at 50 and 80 %.

    DATA=… MODELS=… python benchmarks/decoders.py [NAME …]      # run these (all by default) and collect
    DATA=… MODELS=… python benchmarks/decoders.py --trial       # the same, tiny: to see that it works
    python benchmarks/decoders.py --list                        # print the commands
    python benchmarks/decoders.py --table                       # print the table from what was collected

DATA/e2e_nlg holds the rows, MODELS/stories15m the model (docs/results.md). A language model is fine-tuned once (dense);
that model is then pruned without training (NAME-0), or fine-pruned from the start with recovery. Test loss is the mean
over the reference tokens, perplexity its exponential. One result is one line of results/decoders.jsonl; what is there
already is not run again, and a run that was broken off is resumed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from pinscher.train import models, plan, runfolder
from pinscher.train.evaluation import mean_loss

RESULTS = Path(__file__).parent / "results" / "decoders.jsonl"
ROWS = {
    "full": "--rows 6000 --validation-rows 60 --test-rows 100 --eval-every 100 --beams 4",
    "trial": "--rows 60 --validation-rows 4 --test-rows 2 --beams 1",
}
STEPS = {"full": 200, "trial": 3}
SPARSITIES = (50, 80)


def commands(size: str) -> dict[str, str]:
    """Every run by its name, as the command's flags. RUNS stands for the folder of the runs."""
    task = f'--task e2e --data "$DATA/e2e_nlg" --batch-size 8 --no-export {ROWS[size]}'
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
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the lines go")
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
                keep(args.results, known, {"name": name, "command": f"pinscher prune {known[name]}"}, args.runs / name)


def run(folder: Path, flags: str) -> None:
    """Runs the command, or goes on with what is there."""
    start = [sys.executable, "-m", "pinscher", "prune"]
    if (folder / "config.yaml").exists():
        if not runfolder.is_finished(folder):
            subprocess.run([*start, "--resume", str(folder)], check=True)
        return
    words = [os.path.expandvars(word) for word in shlex.split(flags)]
    subprocess.run([*start, *words, "--output", str(folder)], check=True)


def keep(results: Path, known: dict[str, str], line: dict[str, Any], folder: Path) -> None:
    done = runfolder.read_result(folder)
    loss = test_loss(folder)
    figures = {"sparsity": done.sparsity, "steps": done.steps, "seconds": round(done.seconds, 1), "scores": done.scores}
    line |= figures | {"test_loss": loss, "perplexity": math.exp(loss)}
    lines = read(results) | {line["name"]: line}
    results.write_text("".join(json.dumps(lines[name]) + "\n" for name in known if name in lines))


def test_loss(folder: Path) -> float:
    """The mean loss over the tokens of the test rows' references."""
    made = plan.make(runfolder.config_of(folder))
    model = models.load_model(str(folder / "model"), made.task, made.labels, made.tokenizer)
    (rows,) = made.splits.tests.values()
    features = made.task.features(rows, made.tokenizer, made.labels, training=True)
    return mean_loss(model, features, made.task, made.tokenizer, 16)


def read(results: Path) -> dict[str, dict[str, Any]]:
    lines = results.read_text().splitlines() if results.exists() else []
    return {line["name"]: line for line in map(json.loads, lines)}


def table(results: dict[str, dict[str, Any]]) -> list[str]:
    lines = ["| run | zeros | steps | test loss | perplexity | BLEU |", "|---|---|---|---|---|---|"]
    for name, line in results.items():
        figures = f"{line['test_loss']:.3f} | {line['perplexity']:.2f} | {line['scores']['bleu']:.2f}"
        lines.append(f"| {name} | {line['sparsity']:.1%} | {line['steps']} | {figures} |")
    return lines


if __name__ == "__main__":
    main()
