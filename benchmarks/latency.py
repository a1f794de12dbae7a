"""How fast a pruned BERT-base runs, against every peer, all in turn; whole model, token ids to logits.

    python benchmarks/latency.py --deepsparse ds-venv --output benchmarks/results/latency.txt
    python benchmarks/latency.py --model RUN/model …                # a model that was pruned, instead of random masks
    python benchmarks/latency.py --avx2 …                           # as on a machine without AVX-512 and VNNI
    python benchmarks/latency.py --before VENV/bin/python           # against the pinscher that is installed there

Each engine is a process of its own and uses as many threads as the machine has cores. A ratio is the median over the
rounds of what it was in each, so that what slows a round down counts on both sides. ONNX Runtime gets what its users
give it: fused nodes, and for INT8 dynamic quantisation per channel. DeepSparse needs a virtual environment of its own,
which is made if it is not there; without `--deepsparse` it is left out. `expected` is what each peer's ratio to torch
was on the machine the bounds were set on (2 cores, AVX2, no AVX-512): where a peer is off by more than 15 %, this is
another kind of machine and the bounds are not its own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

import hide_avx512
from onnx_deepsparse import python_of
from pinscher import native
from pinscher.runtime import bench, engines, kernels
from pinscher.runtime.kernels import Weights

HERE = Path(__file__).resolve().parent
OURS = ["pinscher-fp32", "pinscher"]
NAMES = ["torch", "onnxruntime", "onnxruntime-int8", *OURS]
DEEPSPARSE = {"deepsparse": "onnx/model-plain.onnx", "deepsparse-int8": "onnx/model.int8.onnx"}
EXPECTED = {
    0.8: {"onnxruntime": 1.27, "onnxruntime-int8": 2.31, "deepsparse": 2.8, "deepsparse-int8": 3.9},
    0.9: {"onnxruntime": 1.27, "onnxruntime-int8": 2.31, "deepsparse": 4.3, "deepsparse-int8": 5.4},
}
# sparsity → engine → (peer, minimum speed-up over it)
BOUNDS = {
    0.8: {
        "pinscher": {"torch": 5.5, "onnxruntime": 4.2, "onnxruntime-int8": 2.3, "deepsparse-int8": 1.35},
        "pinscher-fp32": {"torch": 3.6, "deepsparse": 1.3},
    },
    0.9: {
        "pinscher": {"torch": 7.5, "onnxruntime": 5.8, "onnxruntime-int8": 3.3, "deepsparse-int8": 1.4},
        "pinscher-fp32": {"torch": 5.5, "deepsparse": 1.3},
    },
}
SHAPES = ((1, 128), (8, 128), (1, 32), (1, 384))
SIZES: dict[str, dict[str, int]] = {
    "BERT-base": {},
    "MiniLM-L6": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
}
LONGER = 4  # the first shape, which has the bounds, gets this multiple of the others' seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, action="append", default=[])
    parser.add_argument("--deepsparse", type=Path, help="virtual environment with DeepSparse 1.8, made if needed")
    parser.add_argument(
        "--before", help="Python of an environment with another version of pinscher: only it, torch and ours"
    )
    parser.add_argument("--seconds", type=float, default=20, help="for each shape")
    parser.add_argument("--first-only", action="store_true", help="only the shape with bounds: batch 1, 128 tokens")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--avx2", action="store_true", help="hide AVX-512 and VNNI from every engine")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.deepsparse:
        python_of(args.deepsparse)  # made now, if it is not there
    with tempfile.TemporaryDirectory() as scratch:
        if args.avx2:
            os.environ.update(hide_avx512.variables(Path(scratch), args.deepsparse))
        text = "\n".join(report(args))
    print(text)
    if args.output:
        args.output.write_text(text + "\n")


def report(args: argparse.Namespace) -> list[str]:
    if args.before:
        NAMES[:] = ["torch", *OURS]
    told = (" --avx2" if args.avx2 else "") + (" --before VENV/bin/python" if args.before else "")
    told += (" --deepsparse VENV" if args.deepsparse else "") + (" --first-only" if args.first_only else "")
    told += f" --seconds {args.seconds:g}"
    lines = [f"$ python benchmarks/latency.py{told}" + "".join(f" --model {p.parent.name}" for p in args.model), ""]
    lines += [f"{processor()}, kernels {native.isa()}, {args.threads} threads, torch {torch.__version__}", ""]
    lines += ["AVX-512 and VNNI are hidden from every engine.", ""] if args.avx2 else []
    if args.model:
        for path in args.model:
            lines += compare(path.parent.name, pruned(path), None, args)
    else:
        for sparsity in (0.8, 0.9):
            title = f"BERT-base, random masks, {sparsity:.0%}"
            lines += compare(title, masked("BERT-base", sparsity), sparsity, args)
        lines += [] if args.before or args.first_only else break_even()
    return lines


def processor() -> str:
    text = Path("/proc/cpuinfo").read_text()
    return next((line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")), "?")


def masked(name: str, sparsity: float, block: int = 1) -> Any:
    """A classifier of random weights, of which blocks of so many inputs are zeros, at random."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**SIZES[name])).eval()
    for parameter in model.bert.encoder.parameters():
        if parameter.dim() == 2 and sparsity:
            kept = torch.rand(parameter.shape[0], parameter.shape[1] // block) >= sparsity
            parameter.data *= kept.repeat_interleave(block, 1)
    return model


def pruned(path: Path) -> Any:
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(path).eval()


def compare(title: str, model: Any, sparsity: float | None, args: argparse.Namespace) -> list[str]:
    lines = [title, ""]
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder)
        bench.prepare(model, None, files, [*NAMES, "onnxruntime"], print)
        # DeepSparse fuses by itself, and only what it knows: it gets the graph as it was before ONNX Runtime's fusion.
        plain = files / "onnx" / "plain.onnx"
        plain.rename(files / DEEPSPARSE["deepsparse"])
        with bench.workers(NAMES, files, args.threads, bench.inputs_of(model, 1, 8), print) as ready:
            for batch, length in SHAPES[:1] if args.first_only else SHAPES:
                if length > model.config.max_position_embeddings:
                    continue
                inputs = bench.inputs_of(model, batch, length)
                with deepsparse(files, args, batch, length) as more, earlier(files, args) as old:
                    longer = LONGER if (batch, length) == (1, 128) else 1
                    found = bench.measure({**ready, **more, **old}, inputs, args.seconds * longer)
                some = table(f"batch {batch}, {length} tokens", found)
                some += verdict(found, sparsity) if (batch, length) == (1, 128) else []
                some += progress(found) if args.before else []
                print("\n".join(some), flush=True)
                lines += some
        lines += [] if args.before or args.first_only else scaling(files, bench.inputs_of(model, 1, 128), args)
    return lines


@contextmanager
def deepsparse(files: Path, args: argparse.Namespace, batch: int, length: int) -> Iterator[dict[str, engines.Worker]]:
    """DeepSparse compiles for one shape, so it is started anew for each."""
    ready: dict[str, engines.Worker] = {}
    with ExitStack() as stack:
        for name, path in DEEPSPARSE.items() if args.deepsparse else ():
            command = [python_of(args.deepsparse), str(HERE / "deepsparse_worker.py"), str(files / path)]
            command = ["env", f"PYTHONPATH={HERE.parent / 'src'}", *command]
            ready[name] = engines.Worker(name, [*command, str(args.threads), str(batch), str(length)])
            stack.callback(ready[name].close)
        yield ready


@contextmanager
def earlier(files: Path, args: argparse.Namespace) -> Iterator[dict[str, engines.Worker]]:
    """The same engines of another version, in its own environment."""
    with ExitStack() as stack:
        ready = {}
        for name in OURS if args.before else ():
            path = str(files / engines.FILES[name])
            command = ["env", "-u", "PYTHONPATH", args.before, "-P", "-W", "ignore", "-m", "pinscher.runtime.engines"]
            command += [name, path, str(args.threads)]
            ready[f"{name} before"] = engines.Worker(name, command)
            stack.callback(ready[f"{name} before"].close)
        yield ready


def table(title: str, found: dict[str, dict[str, Any]]) -> list[str]:
    lines = [f"  {title:24}{'p50':>10}{'p95':>10}{'× torch':>10}   median of {len(found['torch']['turns_ms'])} rounds"]
    for name, one in found.items():
        gain = bench.times_as_fast(one, found["torch"])
        lines.append(f"    {name:22}{one['p50_ms']:8.2f}ms{one['p95_ms']:8.2f}ms{gain:10.2f}")
    return [*lines, ""]


def verdict(found: dict[str, dict[str, Any]], sparsity: float | None) -> list[str]:
    if sparsity is None:
        return []
    lines = []
    for peer, expected in EXPECTED[sparsity].items():
        if peer in found:
            ratio = bench.times_as_fast(found[peer], found["torch"])
            fits = abs(ratio / expected - 1) <= 0.15
            lines.append(
                f"    {peer}: {ratio:.2f} × torch, expected {expected} ({'as' if fits else 'NOT as'} expected)"
            )
    for name, bounds in BOUNDS[sparsity].items():
        for peer, least in bounds.items():
            if peer in found:
                ratio = bench.times_as_fast(found[name], found[peer])
                met = "met" if ratio >= least else "MISSED"
                lines.append(f"    {name} against {peer}: {ratio:.2f} × (bound {least}: {met})")
    return [*lines, ""]


def progress(found: dict[str, dict[str, Any]]) -> list[str]:
    ratios = [(name, bench.times_as_fast(found[name], found[f"{name} before"])) for name in OURS]
    return [*(f"    {name}: {ratio:.2f} × as fast as before" for name, ratio in ratios), ""]


def scaling(files: Path, inputs: Any, args: argparse.Namespace) -> list[str]:
    """One thread against all, the two taking turns."""
    lines = []
    for name in ("torch", "pinscher-fp32", "pinscher"):
        with ExitStack() as stack:
            ready = {}
            for threads in (1, args.threads):
                ready[str(threads)] = engines.start(name, files, threads)
                stack.callback(ready[str(threads)].close)
            found = bench.measure(ready, inputs, args.seconds / 2)
        one, all_ = found["1"]["p50_ms"], found[str(args.threads)]["p50_ms"]
        lines.append(f"    {name}: 1 thread {one:.2f} ms, {args.threads} threads {all_:.2f} ms, {one / all_:.2f} ×")
    return [*lines, ""]


def break_even() -> list[str]:
    """The sparsity from which on a sparse product is faster than torch's dense one, by shape; one thread.

    For every instruction set of the machine, or the one that is forced: what a row of native/isas.inc is made of.
    """
    torch.set_num_threads(1)
    forced = os.environ.get("PINSCHER_ISA")
    lines = ["break-even sparsity of one product against torch's dense one, one thread", ""]
    for isa in [forced] if forced else kernels.core().isas():
        os.environ["PINSCHER_ISA"] = isa
        lines += crossings(isa)
    if not forced:
        del os.environ["PINSCHER_ISA"]
    return lines


def crossings(isa: str) -> list[str]:
    costs = kernels.core().costs(isa)
    listed = ", ".join(f"{kind} {1 - min(1.0, 1 / costs[kind]):.0%}" for kind in ("f32", "i8"))
    lines = [f"{isa} (in native/isas.inc: {listed})", ""]
    lines.append(f"  {'outputs × inputs':20}{'tokens':>8}{'f32':>10}{'i8':>10}")
    for rows, columns in ((768, 768), (3072, 768), (768, 3072), (384, 384)):
        for tokens in (1, 16, 64, 128):
            shares = [crossing(rows, columns, tokens, kind) for kind in ("f32", "i8")]
            cells = "".join(f"{share:10.0%}" for share in shares)
            lines.append(f"  {f'{rows} × {columns}':20}{tokens:8}{cells}")
    return [*lines, ""]


def crossing(rows: int, columns: int, tokens: int, kind: str) -> float:
    """Where the two lines cross: time is linear in the density."""
    weight, x = torch.randn(rows, columns), torch.randn(tokens, columns)
    packed = {
        density: Weights(dense=weight * (torch.rand(rows, columns) < density)).pack(kind) for density in (0.1, 0.5)
    }
    took: dict[Any, list[float]] = {**{density: [] for density in packed}, "dense": []}
    for _ in range(15):
        for density, matrix in packed.items():
            started = time.perf_counter()
            kernels.multiply(matrix, x, None, 1)
            took[density].append(time.perf_counter() - started)
        started = time.perf_counter()
        torch.nn.functional.linear(x, weight)
        took["dense"].append(time.perf_counter() - started)
    low, high, dense = (statistics.median(took[name]) for name in (0.1, 0.5, "dense"))
    slope = max((high - low) / 0.4, 1e-12)
    return 1 - min(1.0, max(0.0, 0.1 + (dense - low) / slope))


if __name__ == "__main__":
    main()
