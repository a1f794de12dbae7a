"""The table of a comparison: methods by sparsity, tasks side by side, mean ± standard deviation, best in bold.

The paper's own figures are shown beside each task, if it has any. The runner-up is the second-best mean of the same
sparsity; significance.py says whether the best is better.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from pinscher.compare import published, results, significance
from pinscher.compare.grid import FIELDS, TEACHING, Cell, Comparison
from pinscher.compare.results import Row
from pinscher.compare.tables import MARK, MISSING, Column, Table
from pinscher.compare.tables import Cell as Place
from pinscher.train.config import DENSE, RunConfig

Scores = dict[int, float]  # seed -> score
Key = tuple[str, float, str]  # variant, sparsity, task
MEAN = "mean"
# A run with other values of these is not comparable with the paper's; the second line is about pins only.
AS_PUBLISHED = ("pattern", "scope", "lora_rank", "target_modules", "exclude_modules", "schedule")
PINS_AS_PUBLISHED = ("hold", "regrow", *sorted(TEACHING - {"teacher"}))
DEFAULT_OPTIONS = {"smoothing": "window", "score": "abs"}
USUAL = RunConfig()
UNSEEN = ("method", "sparsity", "seed", "output", "task", "teacher")  # differences that need no note


def make(comparison: Comparison, cells: Sequence[Cell], found: Sequence[Row]) -> Table:
    """The table of all finished runs."""
    scores = _scores(found, list(comparison.tasks))
    columns = [*comparison.tasks, *([MEAN] if len(comparison.tasks) > 1 else [])]
    first = {(cell.variant, cell.sparsity, cell.task): cell for cell in reversed(cells)}
    papers = {
        task: _paper([cell for key, cell in first.items() if key[2] == task], comparison) for task in comparison.tasks
    }
    groups = _groups(comparison, cells)
    blocks = []
    for sparsity, variants in groups:
        best = {column: _best(scores, variants, sparsity, column) for column in columns} if sparsity else {}
        rows = []
        for variant in variants:
            row = [Place(f"{100 * sparsity:g} %"), Place(displayed(variant))]
            for column in columns:
                row.append(_place(scores.get((variant, sparsity, column), {}), len(comparison.seeds)))
                if pair := best.get(column):
                    row[-1] = _judged(row[-1], scores, variant, pair, sparsity, column)
                if papers.get(column):
                    row.append(_theirs(str(papers[column]), first[variant, sparsity, column]))
            rows.append(row)
        blocks.append(tuple(tuple(row) for row in rows))
    models = dict.fromkeys(cell.config.model.rsplit("/", 1)[-1] for cell in cells)
    return Table(
        f"{', '.join(models)}: {', '.join(comparison.tasks)}",
        tuple(_columns(comparison, first, columns, papers)),
        tuple(blocks),
        tuple(_notes(comparison, cells, found, scores, columns, groups, papers)),
    )


def displayed(variant: str) -> str:
    return "magnitude (IMP)" if variant == "magnitude" else variant


def _scores(found: Sequence[Row], tasks: Sequence[str]) -> dict[Key, Scores]:
    """Scores by seed; the mean over tasks only for seeds that have every task."""
    scores: dict[Key, Scores] = {}
    for row in found:
        if row.score is not None:
            scores.setdefault((row.variant, row.sparsity_asked, row.task), {})[row.seed] = row.score
    for variant, sparsity in {(variant, sparsity) for variant, sparsity, _ in scores}:
        every = [scores.get((variant, sparsity, task), {}) for task in tasks]
        seeds = [seed for seed in every[0] if all(seed in some for some in every)]
        if seeds:
            scores[variant, sparsity, MEAN] = {s: sum(some[s] for some in every) / len(every) for s in seeds}
    return scores


def _groups(comparison: Comparison, cells: Sequence[Cell]) -> list[tuple[float, list[str]]]:
    """The sparsities, dense first, each with its variants in the given order."""
    there = {(cell.sparsity, cell.variant) for cell in cells}
    names = list(dict.fromkeys([*comparison.variants, *(cell.variant for cell in cells)]))
    found = [(s, [name for name in names if (s, name) in there]) for s in (0.0, *comparison.sparsities)]
    return [(sparsity, variants) for sparsity, variants in found if variants]


def _columns(
    comparison: Comparison,
    first: Mapping[Key, Cell],
    columns: Sequence[str],
    papers: Mapping[str, str | None],
) -> list[Column]:
    made = [Column("sparsity"), Column("method", is_number=False)]
    for column in columns:
        cell = next((cell for (_, _, task), cell in first.items() if task == column), None)
        made.append(Column(column if cell is None else f"{column}, {results.metric_of(cell)}"))
        if paper := papers.get(column):
            made.append(Column(f"paper: {published.models()[paper]}", is_aside=True))
    return made


# ------------------------------------------------------------ one place


def _place(scores: Scores, seeds: int) -> Place:
    if not scores:
        return Place(MISSING)
    mean, deviation = significance.mean_and_deviation(scores)
    spread = "" if deviation is None else f" ± {deviation:.2f}"
    few = f" ({len(scores)} of {seeds})" if len(scores) < seeds else ""
    return Place(f"{mean:.2f}{spread}{few}")


def _best(
    scores: Mapping[Key, Scores], variants: Sequence[str], sparsity: float, column: str
) -> tuple[str, str] | None:
    """The best and the second best of a sparsity among those with the most seeds; None if there are not two."""
    known = {v: scores[v, sparsity, column] for v in variants if (v, sparsity, column) in scores}
    most = max((len(some) for some in known.values()), default=0)
    means = {v: significance.mean_and_deviation(some)[0] for v, some in known.items() if len(some) == most}
    order = sorted(means, key=lambda variant: -means[variant])
    return (order[0], order[1]) if len(order) > 1 else None


def _judged(
    place: Place, scores: Mapping[Key, Scores], variant: str, best: tuple[str, str], sparsity: float, column: str
) -> Place:
    """Marks the best and its equals bold, and the best with a dagger if the runner-up is significantly below."""
    ahead, behind = (scores[name, sparsity, column] for name in best)
    mine = scores.get((variant, sparsity, column), {})
    if variant != best[0]:
        means = [significance.mean_and_deviation(some)[0] for some in (ahead, mine) if some]
        return Place(place.text, bold=len(mine) == len(ahead) and abs(means[0] - means[1]) < 1e-9)
    gap = significance.paired(ahead, behind)
    return Place(place.text, bold=True, mark=gap is not None and gap.significant)


def _paper(cells: Sequence[Cell], comparison: Comparison) -> str | None:
    """The paper's model with the most cells of a task, from the first tier that has any."""
    for tier in published.nearest(cells[0].config.model, comparison.paper):
        best = max(tier, key=lambda paper: sum(_figure(paper, cell) is not None for cell in cells))
        if any(_figure(best, cell) is not None for cell in cells):
            return best
    return None


def _theirs(paper: str, cell: Cell) -> Place:
    found = _figure(paper, cell)
    return Place(MISSING if found is None else f"{found:.1f}")


def _figure(paper: str, cell: Cell) -> float | None:
    """The paper's figure of this cell."""
    config = cell.config
    if not _is_published(config):
        return None
    metric, objective = results.metric_of(cell), config.teaching.objective
    return published.figure(paper, config.task, metric, cell.sparsity, config.method, objective)


def _is_published(config: RunConfig) -> bool:
    names = (*AS_PUBLISHED, *(PINS_AS_PUBLISHED if config.method == "pins" else ()))
    usual = config.is_dense or all(getattr(config, name) == getattr(USUAL, name) for name in names)
    if config.method != "pins":
        return usual and not config.option
    options = all(DEFAULT_OPTIONS.get(name) == value for name, value in config.option.items())
    return usual and options and config.interval in (None, 10)


# ------------------------------------------------------------ notes


def _notes(
    comparison: Comparison,
    cells: Sequence[Cell],
    found: Sequence[Row],
    scores: Mapping[Key, Scores],
    columns: Sequence[str],
    groups: Sequence[tuple[float, list[str]]],
    papers: Mapping[str, str | None],
) -> list[str]:
    seeds = ", ".join(map(str, comparison.seeds))
    if len(comparison.seeds) > 1:
        notes = [
            f"Test scores, mean ± standard deviation over the seeds {seeds}. Bold: the best of its sparsity; {MARK}: "
            f"better than the runner-up by a paired t-test over seeds, p < {significance.LEVEL}."
        ]
    else:
        notes = [f"Test scores of one seed ({seeds}). Bold: the best of its sparsity. One seed has no significance."]
    notes += [
        text
        for (sparsity, variants), column in itertools.product(groups, columns)
        if sparsity and (text := _verdict(scores, variants, sparsity, column))
    ]
    notes += _fairness(comparison, cells)
    named = sorted({published.models()[paper] for paper in papers.values() if paper})
    if named:
        notes.append(
            f"paper: figures of {' and '.join(named)} in {published.source()}; other models and longer training than "
            "here unless the model says the same."
        )
    of_tasks = dict.fromkeys(cell.config.task for cell in cells if papers.get(cell.task))
    notes += [published.CAUTIONS[task] for task in of_tasks if task in published.CAUTIONS]
    missing = len(cells) - sum(row.picked for row in found)
    if missing:
        notes.append(f"{missing} of {len(cells)} cells are not finished.")
    return notes


def _verdict(scores: Mapping[Key, Scores], variants: Sequence[str], sparsity: float, column: str) -> str:
    """One sentence that compares the best with the runner-up and with dense."""
    best = _best(scores, variants, sparsity, column)
    known = {name: scores[name, sparsity, column] for name in variants if (name, sparsity, column) in scores}
    if not known:
        return ""
    # If no two methods have the same number of seeds: the best of those with the most.
    most = max(known, key=lambda name: (len(known[name]), significance.mean_and_deviation(known[name])[0]))
    first = best[0] if best else most
    others = [(best[1], sparsity)] if best else []
    others += [(DENSE, 0.0)] if (DENSE, 0.0, column) in scores else []
    said = []
    for other, at in others:
        gap = significance.paired(scores[first, sparsity, column], scores[other, at, column])
        if gap is not None:
            far = f"{abs(gap.mean):.2f} {'above' if gap.mean > 0 else 'below'}" if round(gap.mean, 2) else "level with"
            p = "" if gap.p is None else f" (p {'< 0.001' if gap.p < 0.0005 else f'= {gap.p:.3f}'}, {gap.seeds} seeds)"
            said.append(f"{far} {displayed(other)}{p}")
    return f"{column}, {100 * sparsity:g} %: {displayed(first)} is {', '.join(said)}." if said else ""


def _fairness(comparison: Comparison, cells: Sequence[Cell]) -> list[str]:
    """Notes on which settings were the same for all methods, and which were not."""
    tuned = [f"{name} in {', '.join(map(str, values))}" for name, values in comparison.tune.items()]
    tuned += ["two values of the method's main setting"] if comparison.search else []
    budget = (
        f"each cell picked by validation score from {' × '.join(tuned)}"
        if tuned
        else "no setting was searched in this comparison"
    )
    notes = [
        f"All methods: same rows in the same order for a seed, same schedule and settings but for those named as "
        f"different; {budget}."
    ]
    pruned = [cell for cell in cells if not cell.config.is_dense]
    for name in FIELDS:
        if name in UNSEEN or name in comparison.tune:
            continue
        values: dict[str, list[str]] = {}
        for cell in pruned:
            owners = values.setdefault(_shown(getattr(cell.config, name)), [])
            if cell.variant not in owners:
                owners.append(cell.variant)
        shared = set.intersection(*(set(owners) for owners in values.values())) if values else set()
        if len(values) > 1 and not shared:
            told = "; ".join(f"{value} for {', '.join(map(displayed, owners))}" for value, owners in values.items())
            notes.append(f"Different by method: {name} {told}.")
    return notes


def _shown(value: object) -> str:
    """A setting's value as written after its flag."""
    if isinstance(value, dict):
        value = [f"{name}={_shown(one)}" for name, one in value.items()]
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value)) or "default"
    if isinstance(value, bool):
        return "on" if value else "off"
    return "default" if value is None else str(value)
