"""Prints the tables of docs/results.md and docs/lab/comparison.md from the CSV files in results/.

    python benchmarks/tables.py [NAME …]        # methods, heldout, sparsities, objectives, trials, real, claims

Test scores only. A run that chose its teacher by the validation rows is flattered by them, so methods are not ranked by
validation scores here (`teacher_selected` in the CSV marks those runs). "Above majority" is the share of the dense
model's gain over the commonest class that is kept: (score - majority) / (dense - majority).
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
SEEDS = ("42", "1", "2")
# Their settings are known to differ from their authors' (docs/lab/comparison.md), so the scores are not theirs.
NOT_REPRODUCED = {"l0": "not reproduced", "pst": "not reproduced", "smvp": "settings differ"}
Row = dict[str, str]


def read(name: str) -> list[Row]:
    with (RESULTS / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def scores(rows: Iterable[Row], task: str, variant: str, sparsity: str) -> dict[str, float]:
    """Test scores by seed."""
    wanted = (task, variant, sparsity)
    return {r["seed"]: float(r["test"]) for r in rows if (r["task"], r["variant"], r["sparsity"]) == wanted}


def floors() -> dict[tuple[str, str], float]:
    """What the commonest class scores, by test set and metric; 0 for correlations, which a constant answer has not."""
    found = {(row["test_set"], row["metric"]): float(row["majority"]) for row in read("majority")}
    return found | {("cola", "matthews"): 0.0, ("stsb", "pearson"): 0.0, ("stsb", "spearman"): 0.0}


def kept(score: float, dense: float, floor: float = 0.0) -> str:
    return f"{100 * (score - floor) / (dense - floor):.1f} %"


def each(found: dict[str, float]) -> str:
    return ", ".join(f"{found[seed]:.2f}" for seed in SEEDS if seed in found)


def methods() -> list[str]:
    """All methods at 90 %, three seeds."""
    rows, floor = read("comparison"), floors()["sst2", "accuracy"]
    lines = [
        "| method | SST-2, accuracy | of dense | above majority | CoLA, Matthews | of dense | |",
        "|---|---|---|---|---|---|---|",
    ]
    dense = {task: statistics.mean(scores(rows, task, "dense", "0").values()) for task in ("sst2", "cola")}
    names = ["dense", "pins", "platon", "smvp", "sensitivity", "magnitude", "l0", "pst"]
    for name in names:
        found = {task: scores(rows, task, name, "0" if name == "dense" else "90") for task in dense}
        mean = {task: statistics.mean(some.values()) for task, some in found.items()}
        cells = [
            name,
            f"{mean['sst2']:.2f} ({each(found['sst2'])})",
            kept(mean["sst2"], dense["sst2"]),
            kept(mean["sst2"], dense["sst2"], floor),
            f"{mean['cola']:.2f} ({each(found['cola'])})",
            kept(mean["cola"], dense["cola"]),
            NOT_REPRODUCED.get(name, ""),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def heldout() -> list[str]:
    """Four methods at 90 % on 15,000 test rows."""
    rows = read("heldout")
    names = {"pins": "pins", "pins-empirical-risk": "pins without a teacher", "platon": "platon", "smvp": "smvp"}
    lines = ["| method | three seeds | mean | |", "|---|---|---|---|"]
    for variant, name in names.items():
        found = scores(rows, "sst2", variant, "90")
        note = NOT_REPRODUCED.get(variant, "")
        lines.append(f"| {name} | {each(found)} | {statistics.mean(found.values()):.2f} | {note} |")
    return lines


def sparsities() -> list[str]:
    """PINS against dense at 30, 50 and 80 %."""
    rows, floor = read("comparison"), floors()["sst2", "accuracy"]
    dense = {task: statistics.mean(scores(rows, task, "dense", "0").values()) for task in ("sst2", "cola")}
    lines = [
        "| zeros | SST-2, accuracy | of dense | above majority | CoLA, Matthews | of dense |",
        "|---|---|---|---|---|---|",
        f"| none (dense) | {dense['sst2']:.2f} | | | {dense['cola']:.2f} | |",
    ]
    for percent in ("30", "50", "80", "90"):
        mean = {task: statistics.mean(scores(rows, task, "pins", percent).values()) for task in dense}
        lines.append(
            f"| {percent} % | {mean['sst2']:.2f} ({mean['sst2'] - dense['sst2']:+.2f}) "
            f"| {kept(mean['sst2'], dense['sst2'])} | {kept(mean['sst2'], dense['sst2'], floor)} "
            f"| {mean['cola']:.2f} ({mean['cola'] - dense['cola']:+.2f}) | {kept(mean['cola'], dense['cola'])} |"
        )
    return lines


def objectives() -> list[str]:
    """PINS on CoLA at 80 % by what it learns from."""
    rows = read("ablation_objective")
    published = {"empirical-risk": "55.4", "knowledge-distillation": "56.0", "self-regularization": "57.1"}
    lines = ["| objective | CoLA, Matthews | the paper, BERT-base |", "|---|---|---|"]
    for name, paper in published.items():
        found = scores(rows, "cola", f"pins-{name}", "80")
        lines.append(f"| {name} | {statistics.mean(found.values()):.2f} ({each(found)}) | {paper} |")
    return lines


def trials() -> list[str]:
    """Variants of PINS on CoLA at 90 %, beside PINS itself with the same seeds."""
    rows, usual = read("trials"), scores(read("comparison"), "cola", "pins", "90")
    lines = ["| variant | seeds | CoLA, Matthews | pins, same seeds |", "|---|---|---|---|"]
    for name in ("pins-empirical-risk", "pins-late", "pins-lag", "pins-entropy", "pins-ema", "pins-beta2"):
        found = scores(rows, "cola", name, "90")
        same = statistics.mean(usual[seed] for seed in found)
        lines.append(f"| {name} | {len(found)} | {statistics.mean(found.values()):.2f} | {same:.2f} |")
    return lines


def real() -> list[str]:
    """Dense against PINS with the same settings, one run each."""
    lines = [
        "| run | score | dense | pruned | of dense | above majority | sparsity | steps |",
        "|---|---|---|---|---|---|---|---|",
    ]
    known = floors()
    for row in read("real_tasks"):
        if row["name"].startswith("trial-"):
            continue
        score, dense, floor = float(row["pruned"]), row["dense"], known.get((row["task"], row["metric"]))
        plain = kept(score, float(dense)) if dense else ""
        above = kept(score, float(dense), floor) if dense and floor is not None else ""
        before = f"{float(dense):.2f}" if dense else ""
        lines.append(
            f"| {row['name']} | {row['metric']} | {before} | {score:.2f} | {plain} | {above} "
            f"| {100 * float(row['sparsity']):.0f} % | {row['steps']} |"
        )
    return lines


def claims() -> list[str]:
    """What survives at 90 % on SST-2, means over the seeds of both rows of a method."""
    figures = ["gini_rows", "rank", "task_loss", "value_median", *(f"layer_{i}" for i in range(6))]
    titles = "| method | Gini of rows | share of full rank | task loss | median size | kept in layers 0 to 5, % |"
    lines = [titles, "|---|---|---|---|---|---|"]
    rows = [row for row in read("claims") if row["sparsity"] == "0.9"]
    for name in ("pins", "platon", "smvp", "sensitivity", "magnitude", "l0", "pst"):
        some = [(row, len(row["seeds"].split())) for row in rows if row["method"] == name]
        seeds = sum(count for _, count in some)
        mean = {one: sum(float(row[one]) * count for row, count in some) / seeds for one in figures}
        layers = ", ".join(f"{100 * mean[f'layer_{i}']:.0f}" for i in range(6))
        values = f"{mean['gini_rows']:.2f} | {mean['rank']:.3f} | {mean['task_loss']:.3f} | {mean['value_median']:.3f}"
        lines.append(f"| {name} | {values} | {layers} |")
    return lines


TABLES: dict[str, Callable[[], list[str]]] = {
    made.__name__: made for made in (methods, heldout, sparsities, objectives, trials, real, claims)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(TABLES))
    for name in parser.parse_args().names or TABLES:
        print(f"{name}\n", *TABLES[name](), "", sep="\n")


if __name__ == "__main__":
    main()
