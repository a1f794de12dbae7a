"""The exact global threshold against torch.kthvalue and numpy.partition, over BERT-base's 84,934,656 scores.

    python benchmarks/threshold.py [--output FILE]

The scores are where a pruner has them: in 72 matrices. `kthvalue` and `partition` need them in one array, so they are
given both ways: with the copy they need, and without it. The sides take turns; medians are reported.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import torch

from pinscher.prune.masking import Scores, threshold

SHAPES = [(768, 768)] * 48 + [(3072, 768)] * 24
DRAWS: dict[str, Callable[[tuple[int, int]], torch.Tensor]] = {
    "normal weights, |θ|": lambda shape: torch.randn(shape).abs_(),
    "smoothed scores, I U": lambda shape: torch.randn(shape).abs_().mul_(torch.randn(shape).exp_()).mul_(1e-9),
    "signed": torch.randn,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    lines = [
        f"{sum(a * b for a, b in SHAPES):,} scores in {len(SHAPES)} matrices, fp32, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, numpy {np.__version__}, median of {args.repeats}",
        "",
        f"{'scores':22s} {'kept':>5s} {'pinscher':>9s} {'kthvalue':>9s} {'ratio':>6s} {'+ copy':>7s} "
        f"{'partition':>9s} {'ratio':>6s} {'+ copy':>7s}",
    ]
    memory = extra_memory()  # first, while nothing freed lies about to be used again
    for name, draw in DRAWS.items():
        for density in (0.2, 0.1):
            lines.append(row(name, draw, density, args.repeats))
            print(lines[-1], flush=True)
    lines += [
        "",
        "bound: 15x against kthvalue, in 64 MB; ratios are without and with the copy that the peers need",
        memory,
    ]
    text = "\n".join(lines)
    print("\n" + text)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(f"$ python benchmarks/threshold.py --repeats {args.repeats}\n{text}\n")


def row(name: str, draw: Callable[[tuple[int, int]], torch.Tensor], density: float, repeats: int) -> str:
    torch.manual_seed(0)
    matrices = [draw(shape) for shape in SHAPES]
    scores = [Scores(m) for m in matrices]
    flat = torch.cat([m.view(-1) for m in matrices])
    keep = int(density * flat.numel() + 0.5)
    place = flat.numel() - keep
    sides: dict[str, Callable[[], float]] = {
        "ours": lambda: threshold(scores, keep).value,
        "copy": lambda: float(torch.cat([m.view(-1) for m in matrices])[0]),
        "partition": lambda: float(np.partition(flat.numpy(), place)[place]),
        "kthvalue": lambda: float(torch.kthvalue(flat, place + 1).values),
    }
    times: dict[str, list[float]] = {side: [] for side in sides}
    found: dict[str, float] = {}
    for i in range(repeats):
        for side, run in sides.items():
            if side == "kthvalue" and i >= 3:  # it is slow and steady: three are enough
                continue
            started = time.perf_counter()
            found[side] = run()
            times[side].append(time.perf_counter() - started)
    assert found["ours"] == found["partition"] == found["kthvalue"], found
    ms = {side: 1e3 * statistics.median(t) for side, t in times.items()}
    cells = [f"{name:22s} {density:5.0%} {ms['ours']:6.0f} ms"]
    for peer in ("kthvalue", "partition"):
        with_copy = (ms[peer] + ms["copy"]) / ms["ours"]
        cells.append(f"{ms[peer]:6.0f} ms {ms[peer] / ms['ours']:5.1f}x {with_copy:6.1f}x")
    return " ".join(cells)


def extra_memory() -> str:
    """The most that the process grew by while a threshold was looked for."""
    scores = [Scores(torch.randn(shape).abs_()) for shape in SHAPES]
    keep = sum(a * b for a, b in SHAPES) // 5
    process = psutil.Process()
    gc.collect()
    before, peak, done = process.memory_info().rss, 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, process.memory_info().rss)
            time.sleep(0.0005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(3):
        threshold(scores, keep)
    done.set()
    watcher.join()
    return f"extra memory of a threshold: {(peak - before) / 2**20:.0f} MB at most (bound: 64 MB)"


if __name__ == "__main__":
    main()
