"""pinscher against what a user would take instead on today's processors: OpenVINO INT8 above all; with bounds.

    python benchmarks/leader.py --deepsparse ds-venv --output benchmarks/results/leader.txt

All engines in turn, on models of random weights with random masks: single weights, or 1x4 blocks. The peers need
`pip install 'pinscher[engines]'`; those that are missing are left out, and named. DeepSparse gets an environment of its
own. A ratio is the median over the rounds of what it was in each.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

from latency import DEEPSPARSE, deepsparse, masked, processor, table
from onnx_deepsparse import python_of
from pinscher import native
from pinscher.runtime import bench

ENGINES = (
    "torch",
    "torch-bf16",
    "torch-int8",
    "onnxruntime-int8",
    "openvino-bf16",
    "openvino-int8",
    "pinscher-w8a8",
    "pinscher",
)


class Cell(NamedTuple):
    model: str
    block: int
    sparsity: float
    batch: int
    tokens: int
    bounds: dict[str, float]  # peer: least speed-up over it
    engine: str = "pinscher"


CELLS = (
    Cell("BERT-base", 4, 0.8, 1, 128, {"openvino-int8": 3.0, "deepsparse-int8": 2.5, "torch-bf16": 7.5}),
    Cell("BERT-base", 4, 0.9, 1, 128, {"openvino-int8": 4.0, "deepsparse-int8": 2.8, "torch-bf16": 10.0}),
    Cell("BERT-base", 1, 0.8, 1, 128, {"openvino-int8": 2.1, "deepsparse-int8": 1.8}),
    Cell("BERT-base", 1, 0.9, 1, 128, {"openvino-int8": 3.0, "deepsparse-int8": 2.0}),
    Cell("BERT-base", 1, 0.0, 1, 128, {"openvino-int8": 1.0}, "pinscher-w8a8"),
    Cell("MiniLM-L6", 4, 0.8, 1, 16, {"openvino-int8": 2.0}),
    Cell("MiniLM-L6", 4, 0.8, 1, 128, {"openvino-int8": 2.5}),
    Cell("MiniLM-L6", 4, 0.8, 32, 128, {"openvino-int8": 2.0}),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepsparse", type=Path, help="virtual environment with DeepSparse 1.8, made if needed")
    parser.add_argument("--seconds", type=float, default=40, help="for each cell")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.deepsparse:
        python_of(args.deepsparse)
    lines = [
        f"$ python benchmarks/leader.py{' --deepsparse VENV' if args.deepsparse else ''} --seconds {args.seconds:g}"
    ]
    lines.append(f"{processor()}, kernels {native.isa()}, {args.threads} threads, torch {torch.__version__}")
    lines += [missing] if (missing := bench.left_out()) else []
    lines.append("")
    for (name, block, sparsity), cells in itertools.groupby(CELLS, key=lambda cell: cell[:3]):
        mask = f"1x{block} blocks" if block > 1 else "single weights"
        title = f"{name}, {f'{sparsity:.0%} of {mask} zero' if sparsity else 'dense'}"
        for line in compared(title, masked(name, sparsity, block), list(cells), args):
            print(line, flush=True)
            lines.append(line)
    if args.output:
        args.output.write_text("\n".join(lines) + "\n")


def compared(title: str, model: torch.nn.Module, cells: list[Cell], args: argparse.Namespace) -> list[str]:
    lines = [title, ""]
    names = [name for name in bench.available() if name in ENGINES]
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder)
        bench.prepare(model, None, files, [*names, "onnxruntime"], print)
        (files / "onnx" / "plain.onnx").rename(files / DEEPSPARSE["deepsparse"])  # before ONNX Runtime's fusion
        with bench.workers(names, files, args.threads, bench.inputs_of(model, 1, 8), print) as ready:
            for cell in cells:
                with deepsparse(files, args, cell.batch, cell.tokens) as more:
                    inputs = bench.inputs_of(model, cell.batch, cell.tokens)
                    found = bench.measure({**ready, **more}, inputs, args.seconds)
                lines += table(f"batch {cell.batch}, {cell.tokens} tokens", found)
                lines += [*verdicts(cell, found), ""]
    return lines


def verdicts(cell: Cell, found: dict[str, dict[str, float]]) -> list[str]:
    lines = []
    for peer, least in cell.bounds.items():
        if peer in found:
            ratio = bench.times_as_fast(found[cell.engine], found[peer])
            met = "met" if ratio >= least else "MISSED"
            lines.append(f"    {cell.engine} against {peer}: {ratio:.2f} × (bound {least}: {met})")
    return lines


if __name__ == "__main__":
    main()
