"""The README's first table: a model that was really pruned, beside what its user would run instead.

    python benchmarks/heldout.py "$DATA/sst2" heldout
    FILES="--recipe none --task sst2 --train-file heldout/train.jsonl --validation-file heldout/validation.jsonl \\
        --test-file heldout/test.jsonl --epochs 3 --eval-every 188 --bf16"
    HOW="--model runs/dense/model --sparsity 0.8 --learning-rate 3e-4 --temperature 2 --hidden-weight 1 \\
        --objective knowledge-distillation --teacher runs/dense/model"
    pinscher prune $FILES --method dense --learning-rate 1e-4 --output runs/dense
    pinscher prune $FILES $HOW --output runs/pruned
    pinscher prune $FILES $HOW --pattern 1x4 --output runs/blocks
    python benchmarks/headline.py runs/dense runs/pruned runs/blocks --output benchmarks/results/headline.csv

The other engines run the dense model, as their users would; pinscher runs the pruned ones. Each answers all test rows.
Latency is that of one sequence, token ids to logits, engines in turn, each in a process of its own. OpenVINO's INT8 is
NNCF's post-training quantisation, calibrated on training rows; ONNX Runtime's is dynamic, with fused nodes.
"""

from __future__ import annotations

import argparse
import csv
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from pinscher import native
from pinscher.commands import bench as command
from pinscher.commands import export
from pinscher.runfolder import RunFolder
from pinscher.runtime import bench
from pinscher.train import folder as runfolder
from pinscher.train import scoring
from pinscher.train.evaluation import evaluate

DENSE = {
    "torch": "PyTorch fp32",
    "torch-bf16": "PyTorch bf16",
    "onnxruntime-int8": "ONNX Runtime INT8",
    "openvino-int8": "OpenVINO INT8",
}
OURS = "pinscher"
LENGTHS = (16, 128)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dense", help="run of the dense model")
    parser.add_argument("pruned", nargs="+", help="runs of the pruned models")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, default=30.0, help="time for each length")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        source = export.load(args.dense)
        dense = Path(scratch, "dense")
        dense.mkdir()
        batches = export.calibration(source, command.CALIBRATION)
        sizes = bench.prepare(source.model.eval(), source.tokenizer, dense, list(DENSE), print, batches)
        places = {name: (name, dense, args.dense) for name in DENSE}
        for number, run in enumerate(args.pruned):
            place, name = Path(scratch, f"pruned-{number}"), titled(run)
            place.mkdir()
            small = RunFolder(run).export.resolve()
            (place / bench.engines.FILES[OURS]).symlink_to(small)
            sizes[name] = sum(file.stat().st_size for file in small.glob("*.safetensors"))
            places[name] = (OURS, place, run)
        ready = {}
        for name, (engine, place, _) in places.items():
            ready[name] = bench.engines.start(engine, place, args.threads)
            stack.callback(ready[name].close)
            ready[name].run(bench.inputs_of(source.model, 1, 8))
        took = {n: bench.measure(ready, bench.inputs_of(source.model, 1, n), args.seconds) for n in LENGTHS}
        scores = {name: score(places[name][2], worker) for name, worker in ready.items()}
    rows = [row(name, scores, sizes, took) for name in ready]
    for cells in rows:
        print("  ".join(f"{value!s:>20}" for value in cells.values()))
    print(f"{machine()}, kernels {native.isa()}, {args.threads} threads, torch {torch.__version__}")
    if args.output:
        with args.output.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)


def titled(run: str) -> str:
    """What a pruned model is called in the table."""
    settings = runfolder.config_of(Path(run))
    blocks = "" if settings.pattern == "unstructured" else f" in {settings.pattern} blocks"
    return f"{OURS}, {settings.sparsity:.0%}{blocks}"


def score(place: str, worker: Any) -> float:
    asked = scoring.exam(place, {})
    found = evaluate(command.as_model(worker), asked.task, asked.tokenizer, asked.tests, asked.labels, asked.batch_size)
    return found.scores[asked.task.main]


def row(name: str, scores: dict[str, float], sizes: dict[str, int], took: dict[int, Any]) -> dict[str, Any]:
    cells: dict[str, Any] = {"engine": DENSE.get(name, name), "model": "dense" if name in DENSE else "pruned"}
    cells |= {"score": round(scores[name], 2), "MB": round(sizes[name] / 1e6, 1)}
    for length, found in took.items():
        cells[f"ms, {length} tokens"] = round(found[name]["p50_ms"], 2)
        cells[f"times torch, {length} tokens"] = round(bench.times_as_fast(found[name], found["torch"]), 2)
    return cells


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


if __name__ == "__main__":
    main()
