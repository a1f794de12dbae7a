"""Scores of rankings against plain counting, and against scikit-learn."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, ndcg_score

from pinscher.train import retrieval


def by_hand(likeness, relevant):
    """The places of the relevant ones where equal ones that are not relevant come first."""
    order = sorted(range(len(likeness)), key=lambda i: (-likeness[i], i in relevant))
    return [place for place, i in enumerate(order, 1) if i in relevant]


@given(data=st.data(), texts=st.integers(1, 30))
def test_places_equal_those_of_a_sorted_list(data, texts):
    likeness = np.array(data.draw(st.lists(st.integers(0, 5), min_size=texts, max_size=texts)), float)
    relevant = data.draw(st.sets(st.integers(0, texts - 1), min_size=1))
    assert retrieval.ranks(likeness, relevant).tolist() == by_hand(likeness, relevant)


@pytest.mark.parametrize("seed", range(5))
def test_scores_equal_plain_counting_and_scikit_learn(seed):
    chance = np.random.default_rng(seed)
    queries, corpus = chance.normal(size=(7, 4)), chance.normal(size=(40, 4))
    relevant = [set(chance.choice(40, size=chance.integers(1, 14), replace=False).tolist()) for _ in queries]
    found = retrieval.scores(queries, corpus, relevant)
    likeness = queries @ corpus.T
    places = [by_hand(row, some) for row, some in zip(likeness, relevant, strict=True)]
    assert found["mrr@10"] == pytest.approx(100 * np.mean([1 / p[0] if p[0] <= 10 else 0 for p in places]))
    for depth in (1, 10):
        share = [sum(place <= depth for place in p) / len(p) for p in places]
        assert found[f"recall@{depth}"] == pytest.approx(100 * np.mean(share))
    true = np.array([[float(i in some) for i in range(40)] for some in relevant])
    assert found["ndcg@10"] == pytest.approx(100 * ndcg_score(true, likeness, k=10))


def test_right_answers_score_100_and_one_score_for_all_finds_nothing():
    vectors = np.eye(12)
    assert set(retrieval.scores(vectors, vectors, [{i} for i in range(12)]).values()) == {100.0}
    assert set(retrieval.scores(np.ones((12, 12)), np.ones((12, 12)), [{i} for i in range(12)]).values()) == {0.0}


def test_cosines_do_not_depend_on_lengths():
    vectors = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    assert retrieval.mean_cosine(vectors, 3 * vectors) == 100.0
    assert retrieval.mean_cosine(vectors, -vectors) == -100.0
    assert retrieval.unit(np.zeros((1, 3))).tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize("seed", range(5))
def test_reranking_ranks_the_texts_of_each_query_among_themselves(seed):
    chance = np.random.default_rng(seed)
    queries = [f"query {i}" for i in chance.integers(0, 6, 60)]
    likeness, relevant = chance.normal(size=60), chance.random(60) < 0.3
    found = retrieval.reranked(queries, likeness, relevant)
    wanted = []
    for query in set(queries):
        rows = [i for i, other in enumerate(queries) if other == query]
        if relevant[rows].any() and not relevant[rows].all():
            true, said = relevant[rows].astype(float), likeness[rows]
            wanted.append((average_precision_score(true, said), ndcg_score([true], [said], k=10)))
    assert (found["map"], found["ndcg@10"]) == pytest.approx(tuple(100 * np.mean(wanted, axis=0)))


def test_queries_whose_texts_are_all_alike_do_not_count():
    assert retrieval.reranked(["a", "a", "b"], [1, 2, 3], [True, True, False]) == {}
    found = retrieval.reranked(["a", "a", "b", "b"], [1, 2, 3, 4], [True, True, False, True])
    assert set(found.values()) == {100.0}
