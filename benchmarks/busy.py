"""What busy neighbours cost: the latency of engines beside processes that take cores, against that of an idle machine.

    python benchmarks/busy.py --output benchmarks/results/busy.txt

Every round has a turn of each engine on the idle machine, then one beside the busy processes, which are stopped in
between. A factor is the median over the rounds of busy / idle. Needs an idle machine, and for its peer
`pip install 'pinscher[engines]'`.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from latency import masked, processor
from pinscher import native
from pinscher.runtime import bench, engines

PEER = "openvino-int8"
CELLS = (("MiniLM-L6", 16), ("MiniLM-L6", 128), ("BERT-base", 128))  # with random 1x4 masks at 80 %
BOUND = 2.2  # busy / idle of pinscher, which must not be more than the peer's either
SETTLE = 0.3  # seconds in which the system gives every process its core


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="busy processes")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a turn")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    lines = [f"$ python benchmarks/busy.py --rounds {args.rounds} --seconds {args.seconds:g}", ""]
    lines.append(f"{processor()}, {os.cpu_count()} cores, kernels {native.isa()}, {args.threads} threads")
    lines += [f"busy processes: {args.busy}", ""]
    lines.append(f"{'':34}{'idle p50':>12}{'p95':>9}{'busy p50':>12}{'p95':>9}{'busy / idle':>13}")
    with neighbours(args.busy) as switch:
        for name, tokens in CELLS:
            lines += cell(name, tokens, args, switch)
            print("\n".join(lines[-4:]), flush=True)
    text = "\n".join(lines)
    if args.output:
        args.output.write_text(text + "\n")


class Switch:
    """Processes that take a core each, while they are on."""

    def __init__(self, processes: list[subprocess.Popen[bytes]]) -> None:
        self.processes = processes

    def turn(self, on: bool) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGCONT if on else signal.SIGSTOP)
        time.sleep(SETTLE)


@contextmanager
def neighbours(count: int) -> Iterator[Switch]:
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    switch = Switch(processes)
    switch.turn(on=False)
    try:
        yield switch
    finally:
        for process in processes:
            process.kill()
            process.wait()


def cell(name: str, tokens: int, args: argparse.Namespace, switch: Switch) -> list[str]:
    model = masked(name, 0.8, block=4)
    inputs = bench.inputs_of(model, 1, tokens)
    names = [one for one in bench.available() if one in ("torch", PEER, "pinscher")]
    took: dict[tuple[str, bool], list[list[float]]] = {(one, busy): [] for one in names for busy in (False, True)}
    with tempfile.TemporaryDirectory() as folder:
        bench.prepare(model, None, Path(folder), names, print)
        with bench.workers(names, Path(folder), args.threads, inputs, print) as ready:
            for _ in range(args.rounds):
                for busy in (False, True):
                    switch.turn(busy)
                    for one, worker in ready.items():
                        took[one, busy].append(turn(worker, inputs, args.seconds))
                switch.turn(on=False)
    return table(f"{name}, {tokens} tokens", names, took)


def turn(worker: engines.Worker, inputs: engines.Arrays, seconds: float) -> list[float]:
    time.sleep(bench.PAUSE)
    calls: list[float] = []
    while sum(calls) < seconds or len(calls) < 5:
        calls.append(worker.run(inputs)[0])
    return calls[len(calls) // 5 :]  # the first ones warm up


def table(title: str, names: list[str], took: dict[tuple[str, bool], list[list[float]]]) -> list[str]:
    lines, factors = [], {}
    for name in names:
        shown = [sorted(call for calls in took[name, busy] for call in calls) for busy in (False, True)]
        middles = ([statistics.median(calls) for calls in took[name, busy]] for busy in (False, True))
        factors[name] = statistics.median(b / a for a, b in zip(*middles, strict=True))
        cells = "".join(
            f"{1e3 * statistics.median(calls):10.2f}ms{1e3 * calls[int(0.95 * len(calls))]:7.2f}ms" for calls in shown
        )
        lines.append(f"  {f'{title}: {name}':32}{cells}{factors[name]:12.2f}×")
    limit = min(BOUND, factors.get(PEER, BOUND))
    met = "met" if factors["pinscher"] <= limit else "MISSED"
    return [*lines, f"  pinscher: {factors['pinscher']:.2f} (bound {limit:.2f}: {met})", ""]


if __name__ == "__main__":
    main()
