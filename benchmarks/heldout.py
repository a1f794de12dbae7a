"""Splits SST-2's training rows by sentence: 6,000 phrases to train on, others to choose settings by and to test on.

    python benchmarks/heldout.py "$DATA/sst2" heldout
    HELDOUT=heldout pinscher compare --config benchmarks/comparison_heldout.yaml --output runs/heldout

The development set's 872 rows cannot tell methods apart that differ by a point (a standard error of 1.3). The training
set has 67,349 rows, of which a comparison uses 6,000; but most are phrases of the same sentences. Here a phrase goes
with the longest phrase that contains it, and sentences are shared out whole: each is either trained on or tested.
What settings are chosen by (choice.jsonl) are other phrases of the tested sentences. What a run watches itself by
(validation.jsonl) is from sentences of which no phrase is trained on or tested, so that it costs no training rows.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from pathlib import Path
from typing import Any

TRAIN, TEST, CHOICE, VALIDATION = 6000, 15000, 10000, 1000
SHARE = 0.5  # of the sentences, to train on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with SST-2's train.jsonl.gz")
    parser.add_argument("output", type=Path)
    args = parser.parse_args()
    with gzip.open(args.data / "train.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file]
    groups: dict[tuple[str, ...], list[Any]] = {}
    for row, whole in zip(rows, sentences([tuple(row["sentence"].split()) for row in rows]), strict=True):
        groups.setdefault(whole, []).append(row)
    shares = [groups[whole] for whole in sorted(groups)]
    draw = random.Random(0)
    draw.shuffle(shares)
    cut = int(SHARE * len(shares))
    args.output.mkdir(parents=True, exist_ok=True)
    taken: set[int] = set()

    def write(name: str, some: list[list[Any]], count: int) -> None:
        chosen = draw.sample([row for group in some for row in group if row["idx"] not in taken], count)
        taken.update(row["idx"] for row in chosen)
        (args.output / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen))
        print(f"{name}: {count} of {sum(map(len, some))} phrases of {len(some)} sentences")

    write("train", shares[:cut], TRAIN)
    write("test", shares[cut:], TEST)
    write("choice", shares[cut:], CHOICE)
    write("validation", [group for group in shares if not any(row["idx"] in taken for row in group)], VALIDATION)


def sentences(phrases: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """For each phrase the longest one that contains it, itself if there is none."""
    whole: dict[tuple[str, ...], tuple[str, ...]] = {}
    for phrase in sorted(set(phrases), key=lambda words: (-len(words), words)):
        if phrase in whole:  # part of a longer one
            continue
        for start in range(len(phrase)):
            for end in range(start + 1, len(phrase) + 1):
                whole.setdefault(phrase[start:end], phrase)
    return [whole[phrase] for phrase in phrases]


if __name__ == "__main__":
    main()
