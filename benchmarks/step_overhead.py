"""What pruning adds to a fine-tuning step of BERT-base, in time and memory, and what each part of it costs.

    python benchmarks/step_overhead.py [--output FILE]

Everything is a ratio taken in one run: the sides take turns and medians are compared. A fine-tuning step is forward,
backward, clipping and a fused AdamW step at batch 16 x 128 tokens. Self-regularisation is replayed on the recorded
teacher changes of a real run (benchmarks/traces, made by teacher_trace.py): a step pays for the examples of its batch
that the present teacher has not been asked about yet.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

import pinscher
from pinscher.prune import optimizers
from pinscher.prune.ranking import Ranking
from pinscher.prune.sites import find_sites

BATCH, LENGTH, INTERVAL = 16, 128, 10
TRACES = Path(__file__).parent / "traces"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--peak-memory", choices=["without", "with"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak_memory:
        print(peak_memory(args.peak_memory == "with"))
        return
    lines = [f"BERT-base, {torch.get_num_threads()} threads, torch {torch.__version__}, medians of {args.repeats}", ""]
    optimiser, pins = optimiser_level(args.repeats, lines)
    step, teacher = model_level(args.repeats, lines)
    lines += ["", "Against its bounds"]
    lines += [
        verdict("PINS / one AdamW step (torch's default)", pins / optimiser["AdamW"], 1.0, "x"),
        verdict("the same while zeros are held (cool-down)", optimiser["held"] / optimiser["AdamW"], 1.0, "x"),
        verdict("PINS / one AdamW step (fused)", pins / optimiser["AdamW, fused"], 1.0, "x"),
        verdict("PINS / fine-tuning step", 100 * pins / step, 3, "%"),
    ]
    for trace in sorted(TRACES.glob("*.json")):
        cost, note = replay(json.loads(trace.read_text()), teacher)
        total = 100 * (cost + pins) / step
        lines.append(verdict(f"PINS + self-regularisation / step, {trace.stem}", total, 20, "%") + f"  {note}")
    lines += memory_lines()
    text = "\n".join(lines)
    print(text)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(f"$ python benchmarks/step_overhead.py --repeats {args.repeats}\n{text}\n")


def verdict(what: str, value: float, bound: float, unit: str) -> str:
    return f"  {what:58s} {value:6.2f} {unit}  (bound {bound:g} {unit}: {'met' if value <= bound else 'MISSED'})"


def take_turns(sides: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median seconds of each side, after one round to warm up."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(repeats + 1):
        for name, run in sides.items():
            started = time.perf_counter()
            run()
            if i:
                times[name].append(time.perf_counter() - started)
    return {name: statistics.median(t) for name, t in times.items()}


# ---------------------------------------------------------------- the pruner alone


def bert() -> BertForSequenceClassification:
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(num_labels=2))


def optimiser_level(repeats: int, lines: list[str]) -> tuple[dict[str, float], float]:
    """AdamW over the prunable weights against what PINS does around it."""
    model = bert()
    pruner = pinscher.Pruner(model, pinscher.PruningConfig(total_steps=1000, warmup=0, cooldown=500))
    weights = [site.owner for site in pruner.sites]
    for weight in weights:
        weight.grad = torch.randn_like(weight).mul_(1e-3)
    adamw = {
        "AdamW": torch.optim.AdamW(weights, lr=1e-6),
        "AdamW, fused": torch.optim.AdamW(weights, lr=1e-6, fused=True),
    }
    criterion, ranking = pruner.criterion, pruner.ranking
    optimizers.read_step(adamw["AdamW"], pruner.sites)
    counter = iter(range(1, 10**9))

    def observe(closing: int) -> None:
        t = next(counter)
        for site in pruner.sites:
            criterion.observe(site, t, closing)

    parts: dict[str, Callable[[], Any]] = {
        "look for non-finite gradients": lambda: optimizers.finite([s.grad for s in pruner.sites], pruner.ranks),
        "add a step to the window": lambda: observe(0),
        "end a window": lambda: observe(INTERVAL),
        "find the threshold": lambda: ranking.rank(0.5),
        "set pruned weights to zero": ranking.apply,
    }
    with torch.no_grad():
        seconds = take_turns({**{n: o.step for n, o in adamw.items()}, **parts}, repeats)
    finite, add, end, rank, apply = (seconds[name] for name in parts)
    growing = finite + ((INTERVAL - 1) * add + end + rank + apply) / INTERVAL
    held = growing + apply * (INTERVAL - 1) / INTERVAL
    lines.append(f"Over {pruner.total:,} prunable weights, in ms")
    lines += [f"  {name:34s} {1e3 * seconds[name]:7.1f}" for name in seconds]
    lines.append(f"  {'PINS a step, averaged over ' + str(INTERVAL):34s} {1e3 * growing:7.1f}")
    lines.append(f"  {'the same while zeros are held':34s} {1e3 * held:7.1f}")
    lines.append(f"  state: {pruner.state_bytes() / (4 * pruner.total):.2f} copies of the weights in fp32")
    return {"held": held, **{name: seconds[name] for name in adamw}}, growing


# ---------------------------------------------------------------- the whole step


def batch_of(rows: int = BATCH) -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.randint(1000, 30000, (rows, LENGTH)),
        "attention_mask": torch.ones(rows, LENGTH, dtype=torch.int64),
        "labels": torch.randint(0, 2, (rows,)),
    }


def model_level(repeats: int, lines: list[str]) -> tuple[float, dict[str, float]]:
    """A fine-tuning step, and what the teacher adds to it in each of its states."""
    model = bert().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    dense, sparse = pinscher.Teacher(model), pinscher.Teacher(model)
    dense.consider(1.0)
    kept = [site.owner.detach().clone() for site in find_sites(model)]
    for site in find_sites(model):
        site.owner.data[torch.rand(site.shape) < 0.8] = 0
    sparse.consider(1.0)
    for site, weight in zip(find_sites(model), kept, strict=True):
        site.owner.data.copy_(weight)
    known = batch_of()
    outputs = model(**known)
    dense.loss(known, outputs)

    def train() -> None:
        loss = model(**batch_of()).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def ask(teacher: pinscher.Teacher, batch: dict[str, torch.Tensor]) -> None:
        teacher.loss(batch, outputs)

    seconds = take_turns(
        {
            "fine-tuning step": train,
            "ask a dense teacher": lambda: ask(dense, batch_of()),
            "ask a teacher at 80 %": lambda: ask(sparse, batch_of()),
            "ask about known examples": lambda: ask(dense, known),
            "take a snapshot": dense.snapshot.take,
        },
        repeats,
    )
    lines += ["", f"At batch {BATCH} x {LENGTH}, in ms"]
    lines += [f"  {name:34s} {1e3 * value:7.1f}" for name, value in seconds.items()]
    return seconds.pop("fine-tuning step"), seconds


def replay(trace: dict[str, Any], seconds: dict[str, float]) -> tuple[float, str]:
    """Seconds that self-regularisation adds to a step, on average over a recorded run."""
    changes = {e["step"]: e["density"] for e in trace["evaluations"] if e["teacher"]}
    rows, batch, per_epoch = trace["train_rows"], trace["batch"], trace["steps_per_epoch"]
    generator = torch.Generator().manual_seed(0)
    cost, step, asked, full = 0.0, 0, 0, seconds["ask a dense teacher"]
    unknown = torch.ones(rows, dtype=torch.bool)
    for _ in range(trace["epochs"]):
        order = torch.randperm(rows, generator=generator)
        for i in range(per_epoch):
            if step in changes:
                unknown.fill_(True)
                full = seconds["ask a teacher at 80 %" if changes[step] < 0.9 else "ask a dense teacher"]
                cost += seconds["take a snapshot"]
            here = order[i * batch : (i + 1) * batch]
            new = int(unknown[here].sum())
            unknown[here] = False
            asked += new
            cost += seconds["ask about known examples"] + full * new / batch
            step += 1
    note = f"[{len(changes)} teachers in {step} steps, {asked / (step * batch):.0%} of examples asked]"
    return cost / step, note


# ---------------------------------------------------------------- memory


def peak_memory(with_teacher: bool) -> int:
    """Peak resident bytes of a training process, in a process of its own."""
    model = bert().train()
    pruner = pinscher.Pruner(model, pinscher.PruningConfig(total_steps=100, warmup=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    pruner.attach(optimizer)
    teacher = pinscher.Teacher(model, "self-regularization" if with_teacher else "empirical-risk")
    teacher.consider(1.0)
    for _ in range(3):
        batch = batch_of()
        outputs = model(**batch)
        (outputs.loss + teacher.loss(batch, outputs)).backward()
        optimizer.step()
        optimizer.zero_grad()
    # Not ru_maxrss: after a fork that starts from the parent's peak.
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def memory_lines() -> list[str]:
    peaks = {}
    for side in ("without", "with"):
        command = [sys.executable, __file__, "--peak-memory", side]
        peaks[side] = int(subprocess.check_output(command, text=True).split()[-1])
    teacher = 100 * (peaks["with"] - peaks["without"]) / peaks["without"]
    note = f"  [a dense teacher; process {peaks['without'] / 2**30:.2f} GB]"
    changed = 100 * changed_by_bf16()
    states = {}
    for dtype in ("float32", "bfloat16"):
        pruner = pinscher.Pruner(bert(), pinscher.PruningConfig(total_steps=100, state_dtype=dtype))
        states[dtype] = pruner.state_bytes() / (4 * pruner.total)
    return [
        verdict("teacher's memory / training process", teacher, 10, "%") + note,
        verdict("PINS's state / weights", states["float32"], 3, "x"),
        verdict("PINS's state in bf16 / weights in fp32", states["bfloat16"], 1.5, "x"),
        verdict("mask changed by state in bf16, same gradients", changed, 1, "%"),
    ]


def changed_by_bf16(steps: int = 400) -> float:
    """The largest fraction of the mask that differs over a real training run, both sides fed the same gradients."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    import plain_loop

    torch.manual_seed(0)
    model = plain_loop.Classifier()
    data = plain_loop.brackets(2048, torch.Generator().manual_seed(7))
    pruner = pinscher.Pruner(model, pinscher.PruningConfig(total_steps=steps))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    pruner.attach(optimizer)
    shadow = find_sites(model)  # watches the same weights and gradients with bf16 state, and writes nothing
    for site in shadow:
        pruner.criterion.prepare(site, torch.bfloat16)
    ranking = Ranking(shadow, pruner.criterion, store=False, regrow=True)
    worst = 0.0
    for t in range(1, steps + 1):
        rows = torch.randint(0, 2048, (64,))
        model(data["input_ids"][rows], data["labels"][rows])["loss"].backward()
        optimizers.read_step(optimizer, shadow)
        with torch.no_grad():
            for site in shadow:
                pruner.criterion.observe(site, t, INTERVAL if t % INTERVAL == 0 else 0)
        optimizer.step()
        optimizer.zero_grad()
        if pruner.schedule.due(t):
            ranking.rank(pruner.schedule.density(t))
            differ = sum(int((ranking.mask(i) != pruner.ranking.mask(i)).sum()) for i in range(len(shadow)))
            worst = max(worst, differ / pruner.total)
    return worst


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
