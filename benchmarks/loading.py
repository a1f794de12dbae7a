"""From file to first prediction, and the memory on the way: the small file beside the dense safetensors.

    python benchmarks/loading.py --output benchmarks/results/loading.txt

A BERT-base classifier with random weights, 80 % of its blocks pruned by magnitude, is stored densely, small with
plain embeddings, and small throughout. Each is loaded in a process of its own, the three taking turns; the clock
starts when the libraries are imported. Memory is the most that the process had of its own (mapped files excepted)
while loading, less what it had before, beside the bytes of the dense model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

CHILD = """
import json, re, sys, threading, time
import torch, pinscher
import transformers
from transformers import AutoModelForSequenceClassification as Model, BertConfig, BertForSequenceClassification
transformers.utils.logging.disable_progress_bar()
tiny = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=50)
ids = torch.arange(5, 37)[None]
with torch.inference_mode():
    BertForSequenceClassification(tiny)(input_ids=ids)  # what is only done once is done
seen, done = [], threading.Event()
def memory():
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1])
def watch():
    while not done.wait(0.002):
        seen.append(memory())
before = memory()
if sys.argv[2] == "memory":
    threading.Thread(target=watch, daemon=True).start()
start = time.perf_counter()
model = Model.from_pretrained(sys.argv[1])
loaded = time.perf_counter()
done.set()
with torch.inference_mode():
    model(input_ids=ids)
end = time.perf_counter()
print(json.dumps({"load": loaded - start, "first": end - start, "peak": max([*seen, before]) - before}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--turns", type=int, default=7)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        dense, largest = store(Path(root))
        variants = ("dense", "small", "all-int8")
        found: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
        for _ in range(args.turns):
            for name in variants:
                found[name].append(child(Path(root) / name, "time"))
        peaks = {
            name: statistics.median(child(Path(root) / name, "memory")["peak"] for _ in range(3)) for name in variants
        }
        lines = [
            "$ python benchmarks/loading.py",
            "",
            f"dense model {dense / 1e6:.1f} MB, largest matrix {largest / 1e6:.1f} MB",
            "",
        ]
        lines.append(
            f"{'':12}{'on disk':>12}{'load':>12}{'to first prediction':>24}{'peak memory':>16}{'over dense':>14}"
        )
        for name in variants:
            size = sum(path.stat().st_size for path in (Path(root) / name).glob("*.safetensors"))
            load, first = (statistics.median(run[key] for run in found[name]) for key in ("load", "first"))
            lines.append(
                f"{name:12}{size / 1e6:9.1f} MB{load * 1e3:9.0f} ms{first * 1e3:21.0f} ms{peaks[name] / 1e6:13.1f} MB"
                f"{(peaks[name] - dense) / 1e6:+11.1f} MB"
            )
    print("\n".join(lines))
    if args.output:
        args.output.write_text("\n".join(lines) + "\n")


def store(root: Path) -> tuple[int, int]:
    """Writes the three folders; gives the bytes of the dense model and of its largest matrix."""
    from transformers import BertConfig, BertForSequenceClassification

    import pinscher
    from pinscher.store.saving import matrices

    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig())
    state = model.state_dict()
    for name, matrix in matrices(model).items():
        if matrix.role == "matrix":
            weight = state[name]
            weight[weight.abs() < weight.abs().flatten().kthvalue(int(0.8 * weight.numel())).values] = 0
    model.save_pretrained(root / "dense")
    pinscher.save_pretrained(model, root / "small")
    pinscher.save_pretrained(model, root / "all-int8", embeddings="int8", head="int8")
    sizes = [p.numel() * p.element_size() for p in model.parameters()]
    return sum(sizes), max(sizes)


def child(folder: Path, what: str) -> dict[str, float]:
    out = subprocess.run([sys.executable, "-c", CHILD, str(folder), what], check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(out.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
