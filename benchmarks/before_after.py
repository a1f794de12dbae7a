"""This version against another one, in one run: latency, training step time and file size.

    python benchmarks/before_after.py --before VENV/bin/python --output benchmarks/results/before_after.txt

Both versions run in processes of their own and take turns. Only public names are used, so that any two versions can be
compared. The model is a BERT-base with random weights, pruned by magnitude to 80 %; the training step is one of
MiniLM's size under PINS, at batch 16 x 128.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SPARSITY, TOKENS = 0.8, 128
WARM, CALLS, STEPS = 3, 20, 3  # calls that do not count, calls and steps of a turn
TOLERANCE = 0.03


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", help="Python of an environment with the other version")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work()
        return
    now, before = Version(sys.executable), Version(args.before)
    taken: dict[str, list[tuple[float, float]]] = {"latency": [], "step": []}
    for _ in range(args.rounds):
        for name, turns in taken.items():
            turns.append((now.ask(name), before.ask(name)))
    lines = [f"{'':24}{'before':>12}{'now':>12}{'now / before':>14}"]
    for name, title in (("latency", "latency, int8"), ("step", "training step")):
        ratio = statistics.median(mine / other for mine, other in taken[name])
        mine, other = (1e3 * statistics.median(side) for side in zip(*taken[name], strict=True))
        lines.append(f"{title:24}{other:9.2f} ms{mine:9.2f} ms{ratio:14.3f}{verdict(ratio)}")
    sizes = before.ask("size"), now.ask("size")
    ratio = sizes[1] / sizes[0]
    lines.append(f"{'file size':24}{sizes[0] / 1e6:9.2f} MB{sizes[1] / 1e6:9.2f} MB{ratio:14.3f}{verdict(ratio)}")
    text = "\n".join(
        [f"$ python benchmarks/before_after.py --before VENV/bin/python --rounds {args.rounds}", "", *lines]
    )
    print(text)
    if args.output:
        args.output.write_text(text + "\n")


def verdict(ratio: float) -> str:
    return "   unchanged" if abs(ratio - 1) <= TOLERANCE else "   CHANGED"


class Version:
    """A version of pinscher in a process of its own."""

    def __init__(self, python: str) -> None:
        command = ["env", "-u", "PYTHONPATH", python, "-P", "-W", "ignore", __file__, "--worker"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, name: str) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(name + "\n")
        self.process.stdin.flush()
        return float(json.loads(self.process.stdout.readline()))


def work() -> None:
    """Answers questions on standard input with a number each."""
    import torch

    torch.manual_seed(0)
    model = pruned(bert(768, 12))
    tasks = {"latency": latency(model), "step": step(bert(384, 6)), "size": lambda: size(model)}
    for line in sys.stdin:
        print(json.dumps(tasks[line.strip()]()), flush=True)


def bert(width: int, layers: int) -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
    return BertForSequenceClassification(BertConfig(num_attention_heads=12, **sizes)).eval()


def pruned(model: Any) -> Any:
    import pinscher

    config = pinscher.PruningConfig(method="magnitude", sparsity=SPARSITY, total_steps=1, interval=1, cooldown=0)
    return pinscher.Pruner(model, config).finish(early=True)


def latency(model: Any) -> Any:
    import torch

    import pinscher

    fast = pinscher.accelerate(model)
    ids = torch.randint(5, 30000, (1, TOKENS), generator=torch.Generator().manual_seed(0))

    def measure() -> float:
        took = []
        with torch.inference_mode():
            for _ in range(WARM + CALLS):
                started = time.perf_counter()
                fast(input_ids=ids, attention_mask=torch.ones_like(ids))
                took.append(time.perf_counter() - started)
        return statistics.median(took[WARM:])

    return measure


def step(model: Any) -> Any:
    import torch

    import pinscher

    model.train()
    pruner = pinscher.Pruner(model, pinscher.PruningConfig(method="pins", sparsity=SPARSITY, total_steps=1000))
    optimizer = torch.optim.AdamW(pruner.param_groups(), lr=1e-4)
    pruner.attach(optimizer)
    random = torch.Generator().manual_seed(0)

    def measure() -> float:
        took = []
        for _ in range(1 + STEPS):
            ids = torch.randint(5, 30000, (16, TOKENS), generator=random)
            started = time.perf_counter()
            model(input_ids=ids, labels=ids[:, 0] % 2).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            took.append(time.perf_counter() - started)
        return statistics.median(took[1:])

    return measure


def size(model: Any) -> float:
    import pinscher

    with tempfile.TemporaryDirectory() as folder:
        pinscher.save_pretrained(model, f"{folder}/small")
        return float(sum(path.stat().st_size for path in Path(folder).rglob("*.safetensors")))


if __name__ == "__main__":
    main()
