"""Throughput and latency of embedding servers under the load of many clients, one server at a time.

    python benchmarks/serving.py pinscher=RUN/export other=http://localhost:7997/embeddings

A folder is served by `pinscher serve`; anything else is the address of a running server that answers in OpenAI's shape
(infinity-emb and text-embeddings-inference do). Texts have 16 to 256 words, the same for every server.
"""

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

WORDS = "the a film story dog long winding good bad who sat on mat in rome paris by and that is".split()  # noqa: SIM905


def texts(count: int) -> list[str]:
    dice = random.Random(0)
    return [" ".join(dice.choices(WORDS, k=dice.randint(16, 256) - 2)) for _ in range(count)]


def ask(url: str, text: str) -> float:
    """Seconds until the embedding of a text is there."""
    body = json.dumps({"model": "default", "input": text, "truncate": True}).encode()
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    start = time.perf_counter()
    with urllib.request.urlopen(request, timeout=120) as answer:
        found = json.load(answer)
    assert found["data"][0]["embedding"]
    return time.perf_counter() - start


def load(url: str, clients: int, seconds: float, pause: float = 0.0) -> tuple[float, list[float]]:
    """Texts a second and the latency of each, with clients that ask again `pause` seconds after an answer."""
    some, taken, end = texts(2000), [], time.perf_counter() + seconds

    def client(number: int) -> None:
        at = number
        while time.perf_counter() < end:
            taken.append(ask(url, some[at % len(some)]))
            at += clients
            time.sleep(pause)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    start = time.perf_counter()
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return len(taken) / (time.perf_counter() - start), taken


def report(name: str, url: str, clients: int, seconds: float) -> None:
    load(url, clients, min(3.0, seconds))  # warm up
    rate, taken = load(url, clients, seconds)
    cuts = statistics.quantiles(taken, n=100)
    # Half of the load: each client waits as long as an answer takes at full load.
    half, slow = load(url, clients, seconds, pause=statistics.mean(taken))
    print(
        f"{name:20} {rate:8.1f} texts/s   p50 {1e3 * cuts[49]:7.1f} ms   p99 {1e3 * cuts[98]:7.1f} ms   "
        f"at {half:.1f} texts/s: p99 {1e3 * statistics.quantiles(slow, n=100)[98]:.1f} ms",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", metavar="NAME=FOLDER|URL")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=20)
    args = parser.parse_args()
    for server in args.servers:
        name, _, place = server.partition("=")
        if not place.startswith("http") and not Path(place).is_dir():
            parser.error(f"{place!r} is neither a folder nor the address of a server")
        if place.startswith("http"):
            report(name, place, args.clients, args.seconds)
            continue
        command = [sys.executable, "-m", "pinscher", "serve", place, "--port", "0"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            assert process.stderr is not None
            url = next(found[0] for line in process.stderr if (found := re.search(r"http://[\d.]+:\d+", line)))
            threading.Thread(target=process.stderr.read, daemon=True).start()
            report(name, f"{url}/v1/embeddings", args.clients, args.seconds)
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()
