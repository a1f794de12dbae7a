"""What PINS costs as models grow: seconds and bytes a weight, on one process and sharded over several (FSDP2).

    python benchmarks/scaling.py [--weights 1e7,1e8,1e9] [--ranks 1,2,4] [--output FILE.csv]
    python benchmarks/scaling.py --plot [--output FILE.csv] [--picture FILE.png]

A stack of square matrices stands for the model; gradients are random and stay. Each process has one thread, so that
processes are compared with processes; more of them than the machine has cores share those. What is there already
is not measured again. All parts take turns, medians are kept, and of all ranks the slowest counts.
"""

from __future__ import annotations

import argparse
import csv
import os
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import pinscher
from pinscher.prune import optimizers
from pinscher.prune.masking import Ranks

WIDTH, INTERVAL, DENSITY = 1024, 10, 0.2
PARTS = ["sgd", "finite", "add", "close", "rank", "zero"]
COLUMNS = ["weights", "ranks", "cores", "state", *PARTS, "step", "state_bytes", "resident_bytes", "exchanged", "sums"]
RESULTS = Path(__file__).parent / "results" / "scaling.csv"
PICTURE = Path(__file__).parents[1] / "docs" / "images" / "scaling.png"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)


class Stack(nn.Module):
    def __init__(self, weights: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(max(1, round(weights / WIDTH**2))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", default="1e7,1e8,1e9")
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--state", default="bfloat16", choices=["float32", "bfloat16"], help="precision of the scores")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    parser.add_argument("--plot", action="store_true", help="only draw what was measured")
    args = parser.parse_args()
    if not args.plot:
        for weights in args.weights.split(","):
            for ranks in args.ranks.split(","):
                measure(round(float(weights)), int(ranks), args.state, args.repeats, args.output)
    plot(read(args.output), args.picture)


def measure(weights: int, ranks: int, state: str, repeats: int, output: Path) -> None:
    """Starts the processes, unless this was measured before; the first of them writes the row."""
    size = size_of(weights)
    if any((row["weights"], row["ranks"], row["state"]) == (size, ranks, state) for row in read(output)):
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(work, (ranks, port, weights, state, repeats, output), nprocs=ranks)


def size_of(weights: int) -> int:
    return max(1, round(weights / WIDTH**2)) * WIDTH**2


def work(rank: int, ranks: int, port: int, weights: int, state: str, repeats: int, output: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    empty = resident()
    model = sharded(weights, mesh)
    config = pinscher.PruningConfig(total_steps=1000, warmup=0, cooldown=500, interval=INTERVAL, state_dtype=state)
    pruner = pinscher.Pruner(model, config)
    found = timed(parts(pruner, model), repeats)
    exchanged, sums = exchange(pruner)
    row: dict[str, Any] = {"weights": pruner.total, "ranks": ranks, "cores": os.cpu_count(), "state": state} | found
    row["step"] = (
        found["finite"] + ((INTERVAL - 1) * found["add"] + found["close"] + found["rank"] + found["zero"]) / INTERVAL
    )
    row |= {"state_bytes": pruner.state_bytes(), "resident_bytes": resident() - empty}
    row |= {"exchanged": exchanged, "sums": sums}
    if rank == 0:
        write(output, [*read(output), row])
        print(
            "  ".join(
                f"{name} {row[name]:.4g}" if isinstance(row[name], float) else f"{name} {row[name]}" for name in row
            )
        )
    dist.destroy_process_group()


def sharded(weights: int, mesh: Any) -> nn.Module:
    """A model of which this process only ever holds its part, with weights and gradients."""
    with torch.device("meta"):
        model = Stack(weights)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    torch.manual_seed(mesh.get_local_rank())
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        local = parameter.detach().to_local()
        local.normal_(std=0.02)
        parameter.grad = DTensor.from_local(
            torch.randn_like(local).mul_(1e-3),
            mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    return model


def parts(pruner: pinscher.Pruner, model: nn.Module) -> dict[str, Callable[[], Any]]:
    """What a step consists of, each part by itself."""
    sgd = torch.optim.SGD(model.parameters(), lr=1e-9)
    optimizers.read_step(sgd, pruner.sites)
    counter = iter(range(1, 10**9))

    def observe(closing: int) -> None:
        t = next(counter)
        for site in pruner.sites:
            pruner.criterion.observe(site, t, closing)

    return {
        "sgd": sgd.step,
        "finite": lambda: optimizers.finite([site.grad for site in pruner.sites], pruner.ranks),
        "add": lambda: observe(0),
        "close": lambda: observe(INTERVAL),
        "rank": lambda: pruner.ranking.rank(DENSITY),
        "zero": pruner.ranking.apply,
    }


def timed(sides: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median seconds of each part on the slowest rank, after one round to warm up."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    with torch.no_grad():
        for i in range(repeats + 1):
            for name, run in sides.items():
                dist.barrier()
                started = time.perf_counter()
                run()
                dist.barrier()
                if i:
                    times[name].append(time.perf_counter() - started)
    slowest = torch.tensor([statistics.median(times[name]) for name in sides], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return dict(zip(sides, slowest.tolist(), strict=True))


def exchange(pruner: pinscher.Pruner) -> tuple[int, int]:
    """Bytes that a rank contributes to one ranking, and in how many sums."""
    sent: list[int] = []
    ranks = pruner.ranks

    def add(counts: torch.Tensor) -> torch.Tensor:
        sent.append(counts.numel() * counts.element_size())
        return ranks.add(counts)

    pruner.ranking.ranks = Ranks(ranks.index, ranks.size, add)
    pruner.ranking.rank(DENSITY)
    return sum(sent), len(sent)


def resident() -> int:
    """Bytes of memory that this process has in use now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def read(output: Path) -> list[dict[str, Any]]:
    if not output.exists():
        return []
    with output.open() as file:
        return [{name: _number(value) for name, value in row.items()} for row in csv.DictReader(file)]


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def write(output: Path, rows: list[dict[str, Any]]) -> None:
    fresh = output.with_suffix(".part")
    with fresh.open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        ordered = sorted(rows, key=lambda row: (row["state"], row["weights"], row["ranks"]))
        table.writerows({n: f"{v:.5g}" if isinstance(v, float) else v for n, v in row.items()} for row in ordered)
    fresh.replace(output)


def plot(rows: list[dict[str, Any]], picture: Path) -> None:
    """A step's cost against the size of the model, and the ranking's against the number of ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows if row["state"] == "bfloat16"]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    colours = ["#0072B2", "#D55E00", "#009E73", "#CC79A7"]
    for ranks, colour in zip(sorted({row["ranks"] for row in rows}), colours, strict=False):
        some = [row for row in rows if row["ranks"] == ranks]
        name = f"{ranks} process" + "es" * (ranks > 1)
        left.plot([r["weights"] for r in some], [r["step"] for r in some], "o-", color=colour, label=name)
    left.set(xscale="log", yscale="log", xlabel="prunable weights", ylabel="seconds that PINS adds to a step")
    left.legend(frameon=False)
    for weights, colour in zip(sorted({row["weights"] for row in rows}), colours, strict=False):
        some = [row for row in rows if row["weights"] == weights]
        alone = next(row["rank"] for row in some if row["ranks"] == 1)
        right.plot(
            [r["ranks"] for r in some],
            [r["rank"] / alone for r in some],
            "o-",
            color=colour,
            label=f"{weights / 1e6:,.0f} M",
        )
    right.axhline(1, color="0.8", zorder=0)
    right.set(
        xlabel="processes",
        ylabel="time of a ranking against one process",
        xticks=sorted({row["ranks"] for row in rows}),
    )
    right.set_ylim(0)
    right.legend(title="prunable weights", frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=150)


if __name__ == "__main__":
    main()
