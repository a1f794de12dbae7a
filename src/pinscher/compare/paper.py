"""The paper's tables as comparisons: `pinscher compare --recipe paper/table1`.

Tables are numbered in the order of its record in paper_results.json, low sparsities last. A task's settings are those
of its recipe (train/recipes.py), whose steps follow the batch size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pinscher.compare import ablations, published
from pinscher.errors import InputError
from pinscher.registry import did_you_mean
from pinscher.train.recipes import GLUE, OPEN, TEXT

SEEDS = (42, 12, 100, 9, 2)  # of the reference script
BATCH_SIZES = (16, 32)  # searched by validation score for GLUE and CoNLL with BERT-base
CONLL_VALIDATION = 3250  # the whole development set, for comparison with the paper's figures


@dataclass(frozen=True)
class Table:
    """One table of the paper.

    Args:
        title: what it shows.
        tasks: the rows of its recipes.
        methods: names of methods, or names with settings.
        sparsities: in percent.
        model: the model's name in recipes; empty for BERT-base and GPT-2.
        searches: whether the paper searched the batch size.
        settings: of all cells.
    """

    title: str
    tasks: Sequence[str]
    methods: Sequence[str] | dict[str, dict[str, Any]]
    sparsities: Sequence[int]
    model: str = ""
    searches: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


def _small_glue(title: str, model: str) -> Table:
    return Table(title, ("rte", "cola", "qnli"), ("dense", "magnitude", "platon", "pins"), (80, 90), model)


TABLES: dict[str, Table] = {
    "paper/table1": Table(
        "BERT-base on GLUE",
        GLUE,
        ("dense", "magnitude", "l0", "smvp", "pst", "platon", "pins"),
        (80, 90),
        searches=True,
    ),
    "paper/table2": Table(
        "BERT-base on SQuAD", ("squad",), ("dense", "magnitude", "l0", "smvp", "platon", "pins"), (80, 70, 60, 50)
    ),
    "paper/table3": Table(
        "BERT-base on CoNLL 2003",
        ("conll2003",),
        ("dense", "magnitude", "smvp", "pins"),
        (70, 80),
        searches=True,
        settings={"validation_rows": CONLL_VALIDATION},
    ),
    "paper/table4": Table("GPT-2 on data-to-text", TEXT, ("dense", "magnitude", "pst", "pins"), (80,)),
    "paper/table5": Table(
        "BERT-base, objectives of pins", ("rte", "cola", "mrpc"), ablations.variants("objective"), (80,), searches=True
    ),
    "paper/table6": _small_glue("MiniLM-12L-384H on GLUE", "minilm/"),
    "paper/table7": _small_glue("ELECTRA-base on GLUE", "electra/"),
    "paper/table8": Table("BERT-base on RTE, to export and time", ("rte",), ("dense", "pins"), (80,), searches=True),
    "paper/table9": Table("BERT-base on GLUE, low sparsities", GLUE, ("dense", "pins"), (30, 50), searches=True),
}


def settings(name: str) -> dict[str, Any]:
    """The settings of a table, as in the file of a comparison."""
    if name not in TABLES:
        meant = did_you_mean(name, TABLES)
        raise InputError(f"unknown recipe {name!r}.{meant} Show all with: pinscher compare --recipe list")
    table = TABLES[name]
    recipes = {task: f"paper/{table.model}{task}" for task in table.tasks}
    models = {published.EXACT[OPEN[recipe]["model"]] for recipe in recipes.values()}
    methods = table.methods if isinstance(table.methods, dict) else dict.fromkeys(table.methods)
    return {
        "methods": {label: dict(told or {}) for label, told in methods.items()},
        "tasks": {task: {"recipe": recipe} for task, recipe in recipes.items()},
        "sparsity": [percent / 100 for percent in table.sparsities],
        "seeds": list(SEEDS),
        "tune": {"batch_size": list(BATCH_SIZES)} if table.searches else {},
        "paper": models.pop(),  # a table has one
        **table.settings,
    }
