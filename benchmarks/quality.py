"""What storing and running fast cost in quality: scores and predictions of pruned models on their test sets.

    python benchmarks/quality.py stored RUN … --output benchmarks/results/storage_quality.txt
    python benchmarks/quality.py run RUN … --output benchmarks/results/runtime_quality.txt

RUN is the folder of a run; runs of one task are seeds, and the last lines are their means. "unchanged" is the fraction
of test rows that get the same answer as from the pruned model in fp32.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pinscher import accelerate
from pinscher.commands import export
from pinscher.train import folder as runfolder
from pinscher.train import plan
from pinscher.train.evaluation import outputs_of

VARIANTS: dict[str, dict[str, Any]] = {
    "int8 blocks": {},
    "int8 blocks, calibrated": {"calibrate": 256},
    "int8 all": {"embeddings": "int8", "head": "int8"},
    "int6 blocks": {"values": "int6"},
    "int4 blocks": {"values": "int4"},
    "int4 blocks, calibrated": {"values": "int4", "calibrate": 256},
}
MODES = ("fp32", "int8", "auto", "w8a8")
Variant = tuple[str, Any, float]  # name, model, and the last of these:
Found = tuple[float, float, float]  # score, unchanged, megabytes on disk or, running, the share of matrices in int8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("stored", "run"))
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    lines = [f"$ python benchmarks/quality.py {args.what} {' '.join(run.name for run in args.runs)}", ""]
    last = "MB" if args.what == "stored" else "int8"
    lines.append(f"{'run':28}{args.what + ' as':28}{'score':>8}{'lost':>8}{'unchanged':>12}{last:>8}")
    seen: dict[tuple[str, str], list[tuple[float, Found]]] = defaultdict(list)
    for run in args.runs:
        task, before, found = measure(run, stored if args.what == "stored" else fast)
        lines.append(f"{run.name:28}{'fp32':28}{before:8.2f}")
        for variant, (score, same, size) in found.items():
            lines.append(f"{run.name:28}{variant:28}{score:8.2f}{before - score:+8.2f}{same:12.2%}{size:8.2f}")
            seen[task, variant].append((before, (score, same, size)))
    lines += [
        "",
        "means over the runs of a task",
        f"{'task':28}{args.what + ' as':28}{'score':>8}{'lost':>8}{'unchanged':>12}",
    ]
    for (task, variant), some in seen.items():
        score, same = (statistics.mean(found[place] for _, found in some) for place in (0, 1))
        lost = statistics.mean(before - found[0] for before, found in some)
        lines.append(f"{task:28}{variant:28}{score:8.2f}{lost:+8.2f}{same:12.2%}   {len(some)} runs")
    text = "\n".join(lines)
    print(text)
    if args.output:
        args.output.write_text(text + "\n")


def measure(
    run: Path, variants: Callable[[Any], Iterator[tuple[str, Any, float]]]
) -> tuple[str, float, dict[str, Found]]:
    """The run's task, its score in fp32, and what every variant makes of it."""
    made = plan.make(runfolder.config_of(run))
    source = export.load(str(run))
    (rows,) = made.splits.tests.values()
    features = made.task.features(rows, made.tokenizer, made.labels, training=False)

    def answers(model: Any) -> tuple[list[Any], float]:
        outputs = outputs_of(model.eval(), features, made.task.collator(made.tokenizer), 64, made.task.kind)
        said = made.task.answers(outputs, features, rows, made.labels)
        return said, made.task.scores(said, rows)[made.task.main]

    reference, before = answers(source.model)
    found: dict[str, Found] = {}
    for name, model, figure in variants(source):
        said, score = answers(model)
        found[name] = score, float(np.mean([a == b for a, b in zip(reference, said, strict=True)])), figure
    return made.config.task, before, found


def stored(source: Any) -> Iterator[Variant]:
    """The model as every kind of small file gives it back, with the file's megabytes."""
    for name, how in VARIANTS.items():
        with tempfile.TemporaryDirectory() as folder:
            export.small(source, Path(folder) / "small", **how)
            size = sum(path.stat().st_size for path in (Path(folder) / "small").glob("*.safetensors"))
            yield name, type(source.model).from_pretrained(Path(folder) / "small"), size / 1e6


def fast(source: Any) -> Iterator[Variant]:
    """The model in every mode of the runtime, with the share of its matrices that are multiplied in int8."""
    for mode in MODES:
        model = accelerate(source.model, mode=mode)
        kinds = [matrix.kind for layer in model.base_model.fast_layers.packed for matrix in layer]
        yield mode, model, kinds.count("i8") / len(kinds)


if __name__ == "__main__":
    main()
