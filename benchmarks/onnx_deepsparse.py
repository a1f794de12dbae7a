"""Runs what `pinscher export --format onnx` wrote in DeepSparse 1.8, the paper's engine, beside a dense twin.

    python benchmarks/onnx_deepsparse.py EXPORTED --venv ds-venv --rows dev.npz --output FILE

The engine is discontinued, needs Python < 3.12 and old packages: it gets a virtual environment of its own, made
if it is not there. The twin is the same graph with small numbers in place of the zeros, for the clock only. `--rows` is
an npz file with input_ids, attention_mask, token_type_ids (if the model takes them) and label. Timings: medians, the
engines taking turns.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

KINDS = {"fp32": "model.onnx", "int8": "model.int8.onnx"}
PRODUCTS = {"MatMul": 1, "QLinearMatMul": 3}  # which input is the matrix
WARM = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with model.onnx and model.int8.onnx")
    parser.add_argument("--venv", type=Path, help="where DeepSparse is, or is to be installed")
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.venv:
        again = [word for word in sys.argv[1:] if word not in ("--venv", str(args.venv))]
        sys.exit(subprocess.run([python_of(args.venv), __file__, *again], check=False).returncode)
    text = "\n".join([f"$ python benchmarks/onnx_deepsparse.py {args.folder.name}", "", *report(args)])
    print(text)
    if args.output:
        args.output.write_text(text + "\n")


def python_of(venv: Path) -> str:
    """The Python of an environment with DeepSparse, made if it is not there."""
    python = venv / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "deepsparse==1.8.0"], check=True)
    return str(python)


def report(args: argparse.Namespace) -> list[str]:
    os.environ["NM_DISABLE_ANALYTICS"] = "1"  # before the import: it would ask the network
    import numpy as np
    from deepsparse import Engine, cpu

    lines = [f"DeepSparse 1.8, {cpu.cpu_architecture()['isa']}, batch 1, {args.length} tokens, {args.cores} cores", ""]
    rows, labels = rows_of(args, inputs_of(args.folder / KINDS["fp32"]))
    first = [value[:1] for value in rows.values()]
    with tempfile.TemporaryDirectory() as scratch:
        engines: dict[str, Any] = {}
        for kind, name in KINDS.items():
            twin = dense_twin(args.folder / name, Path(scratch, f"dense.{name}"))
            for state, path in (("pruned", args.folder / name), ("dense", twin)):
                own = Path(scratch, f"{state}.own.{name}")  # DeepSparse writes the shape into the file it is given
                shutil.copy(path, own)
                shapes = [[1, args.length]] * len(rows)
                engines[f"{kind} {state}"] = Engine(str(own), batch_size=1, num_cores=args.cores, input_shapes=shapes)
        for kind, name in KINDS.items():
            engine, peer = engines[f"{kind} pruned"], session(args.folder / name)
            found, wanted = [], []
            for i in range(len(rows["input_ids"])):
                found.append(engine.run([np.ascontiguousarray(v[i : i + 1]) for v in rows.values()])[0])
                wanted.append(peer.run(None, {n: v[i : i + 1] for n, v in rows.items()})[0])
            got, want = np.concatenate(found), np.concatenate(wanted)
            zeros = share_of_zeros(args.folder / name)
            lines.append(
                f"{kind}: {zeros:.1%} zeros; {engine.fraction_of_supported_ops:.0%} of the operators are the engine's; "
                f"same answer as ONNX Runtime for {np.mean(got.argmax(-1) == want.argmax(-1)):.2%} of {len(got)} rows, "
                f"largest difference {np.abs(got - want).max():.2g}"
            )
            if labels is not None:
                lines[-1] += f"; accuracy {np.mean(got.argmax(-1) == labels):.2%}"
        took: dict[str, list[float]] = {name: [] for name in engines}
        for turn in range(args.rounds + WARM):
            for name, engine in engines.items():
                started = time.perf_counter()
                engine.run(first)
                if turn >= WARM:
                    took[name].append(1e3 * (time.perf_counter() - started))
    middle = {name: statistics.median(times) for name, times in took.items()}
    for kind in KINDS:
        pruned, dense = middle[f"{kind} pruned"], middle[f"{kind} dense"]
        lines.append(f"{kind}: {pruned:.2f} ms, without zeros {dense:.2f} ms: {dense / pruned:.2f} times as fast")
    return lines


def inputs_of(path: Path) -> list[str]:
    import onnx

    return [value.name for value in onnx.load(str(path)).graph.input]


def rows_of(args: argparse.Namespace, names: list[str]) -> tuple[dict[str, Any], Any]:
    import numpy as np

    if args.rows:
        held = np.load(args.rows)
        labels = held.get("label", None)
        return {name: np.ascontiguousarray(held[name][:, : args.length]) for name in names}, labels
    ids = np.random.default_rng(0).integers(5, 5000, (64, args.length))
    return {n: {"input_ids": ids, "attention_mask": np.ones_like(ids)}.get(n, np.zeros_like(ids)) for n in names}, None


def matrices_of(proto: Any) -> dict[str, Any]:
    from onnx import numpy_helper

    known = {tensor.name: tensor for tensor in proto.graph.initializer}
    names = [node.input[PRODUCTS[node.op_type]] for node in proto.graph.node if node.op_type in PRODUCTS]
    return {name: numpy_helper.to_array(known[name]) for name in names if name in known}


def share_of_zeros(path: Path) -> float:
    import onnx

    held = matrices_of(onnx.load(str(path))).values()
    return float(sum((m == 0).sum() for m in held) / sum(m.size for m in held))


def dense_twin(path: Path, target: Path) -> Path:
    """The same graph without zeros in its products."""
    import numpy as np
    import onnx
    from onnx import numpy_helper

    proto, random = onnx.load(str(path)), np.random.default_rng(0)
    matrices = matrices_of(proto)
    for tensor in proto.graph.initializer:
        if tensor.name in matrices:
            value = matrices[tensor.name]
            noise = random.choice([-3, -2, -1, 1, 2, 3], size=value.shape) * (1 if value.dtype == np.int8 else 1e-3)
            filled = np.where(value == 0, noise.astype(value.dtype), value)
            tensor.CopyFrom(numpy_helper.from_array(filled, tensor.name))
    onnx.save(proto, str(target))
    return target


def session(path: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


if __name__ == "__main__":
    main()
