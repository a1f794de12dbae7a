"""Scores of rankings, in percent: those by which search and reranking are measured (binary relevance).

A text that is not relevant but scores the same comes first, so that a model that gives all texts the same score finds
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

CHUNK = 256  # queries that are compared with the corpus at once
DEEP = 10  # the k of MRR@k and nDCG@k


def unit(vectors: Any) -> Any:
    """Vectors of length 1, in float64; a zero stays zero."""
    found = np.asarray(vectors, dtype=np.float64)
    lengths = np.linalg.norm(found, axis=-1, keepdims=True)
    return found / np.where(lengths > 0, lengths, 1)


def mean_cosine(said: Any, true: Any) -> float:
    """Mean cosine of two tables of vectors, row by row."""
    return _percent((unit(said) * unit(true)).sum(-1).mean())


def scores(queries: Any, corpus: Any, relevant: Sequence[set[int]]) -> dict[str, float]:
    """Recall@1 and @10, MRR@10, nDCG@10 of a search by dot product.

    Args:
        queries: [queries, features].
        corpus: [texts, features].
        relevant: for each query, the texts that should be found.
    """
    places = []
    for start in range(0, len(queries), CHUNK):
        likeness = queries[start : start + CHUNK] @ corpus.T
        places += [ranks(row, relevant[start + i]) for i, row in enumerate(likeness)]
    return summary(places)


def reranked(queries: Sequence[str], likeness: Any, relevant: Any) -> dict[str, float]:
    """The same scores and the mean average precision, where the texts of each query are ranked among themselves.

    Only queries with texts of both kinds count; without any there are no scores.

    Args:
        queries: the query of each row.
        likeness: the score of each row.
        relevant: whether the text of each row is relevant.
    """
    rows: dict[str, list[int]] = {}
    for i, query in enumerate(queries):
        rows.setdefault(query, []).append(i)
    likeness, relevant = np.asarray(likeness, dtype=np.float64), np.asarray(relevant, dtype=bool)
    mixed = [some for some in rows.values() if relevant[some].any() and not relevant[some].all()]
    if not mixed:
        return {}
    places = [ranks(likeness[some], set(np.flatnonzero(relevant[some]).tolist())) for some in mixed]
    precision = [(np.arange(1, len(p) + 1) / p).mean() for p in places]
    return {"map": _percent(np.mean(precision)), **summary(places)}


def ranks(likeness: Any, relevant: set[int]) -> Any:
    """The places, from 1, of the relevant ones among all, the best first."""
    wanted = np.zeros(len(likeness), dtype=bool)
    wanted[list(relevant)] = True
    found = np.sort(likeness[wanted])[::-1]
    above = (likeness[~wanted][None, :] >= found[:, None]).sum(1)
    return above + np.arange(1, len(found) + 1)


def summary(places: Sequence[Any]) -> dict[str, float]:
    """The mean scores over queries, each with the places of what is relevant to it."""
    ideal = 1 / np.log2(np.arange(2, DEEP + 2))
    table = {
        "mrr@10": [1 / p[0] if p[0] <= DEEP else 0.0 for p in places],
        "ndcg@10": [(1 / np.log2(p[p <= DEEP] + 1)).sum() / ideal[: len(p)].sum() for p in places],
        "recall@1": [(p <= 1).sum() / len(p) for p in places],
        "recall@10": [(p <= DEEP).sum() / len(p) for p in places],
    }
    return {name: _percent(np.mean(values)) for name, values in table.items()}


def _percent(share: Any) -> float:
    return round(100.0 * float(share), 10) + 0.0
