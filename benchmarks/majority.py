"""What answering with the commonest class scores on each test set: the floor that retention is measured from.

    python benchmarks/majority.py "$DATA" --heldout heldout --output benchmarks/results/majority.csv

DATA holds one folder a task with the rows of the `datasets` library; heldout is the folder that heldout.py made.
For a correlation (Matthews, Pearson, Spearman) a constant answer scores 0 by definition, so those are not listed.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

TESTS = {"sst2": "sst2/validation.jsonl.gz", "cola": "cola/validation.jsonl.gz", "rte": "rte/validation.jsonl.gz"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--heldout", type=Path)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "majority.csv")
    args = parser.parse_args()
    files = {name: args.data / path for name, path in TESTS.items()}
    if args.heldout:
        files["sst2-heldout"] = args.heldout / "test.jsonl"
    rows = [{"test_set": name, **majority(labels(path))} for name, path in files.items()]
    with args.output.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    print(args.output.read_text(), end="")


def labels(path: Path) -> list[Any]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        return [json.loads(line)["label"] for line in file]


def majority(found: list[Any]) -> dict[str, Any]:
    ((_, most),) = Counter(found).most_common(1)
    return {"rows": len(found), "metric": "accuracy", "majority": f"{100 * most / len(found):.4f}"}


if __name__ == "__main__":
    main()
