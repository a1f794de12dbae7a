"""Analyses of matrices and curves against values worked out by hand or by numpy."""

import numpy as np
import pytest

from pinscher.models.names import short_blocks, short_names
from pinscher.report import analysis


def test_gini_by_hand():
    assert analysis.gini(np.array([0.2, 0.2, 0.2])) == pytest.approx(0)
    assert analysis.gini(np.array([0, 0, 0, 1.0])) == pytest.approx(0.75)
    assert analysis.gini(np.array([3.0, 1.0])) == pytest.approx(0.25)
    assert analysis.gini(np.zeros(3)) == 0


def test_measures_by_hand():
    found = analysis.measures(np.array([[1, 0, 2, 0], [0, 0, 0, 0], [3, 0, 6, 0], [0, 0, 5, 0]], np.float32))
    assert found["density"] == 5 / 16
    assert found["rank"] == 2 / 4
    assert (found["dead_rows"], found["dead_columns"]) == (0.25, 0.5)
    assert found["gini_rows"] == pytest.approx(analysis.gini(np.array([0.5, 0, 0.5, 0.25])))
    assert found["gini_columns"] == pytest.approx(analysis.gini(np.array([0.5, 0, 0.75, 0])))


def test_the_histogram_counts_survivors_only():
    weights = [np.array([[0.0, 0.5, -0.5], [0.0, 0.25, 9.0]]), np.array([[0.5, 0.0]])]
    found = analysis.histogram(weights, 1.0)
    edges = np.linspace(-1, 1, analysis.BINS + 1)
    assert found["outside"] == pytest.approx(1 / 5)
    assert found["shares"][int(np.searchsorted(edges, 0.5, "right")) - 1] == pytest.approx(2 / 5)
    assert sum(found["shares"]) == pytest.approx(4 / 5)
    assert found["shares"][analysis.BINS // 2] == 0  # no zeros


def test_a_thinned_curve_keeps_ends_and_spikes():
    x = np.arange(100_000.0)
    y = np.sin(x / 9000)
    y[43_210] = 50
    thin_x, thin_y = analysis.thin(x, y)
    assert len(thin_x) == analysis.POINTS
    assert (thin_x[0], thin_x[-1], thin_y.max()) == (0, 99_999, 50)
    assert (np.diff(thin_x) > 0).all()
    assert (
        np.abs(np.interp(x[::97], thin_x, thin_y) - np.sin(x[::97] / 9000))[np.abs(x[::97] - 43_210) > 200].max() < 0.01
    )
    few = analysis.thin(np.array([1, 2, 3.0]), np.array([1, np.nan, 3]))
    assert [list(part) for part in few] == [[1, 3], [1, 3]]
    assert len(analysis.thin(x[:1001], y[:1001])[0]) == analysis.POINTS


def test_series_are_joined_where_both_have_a_value():
    first = np.array([5, 10, 15, 20.0]), np.array([1, 2, np.nan, 4.0])
    second = np.array([5, 15, 20, 25.0]), np.array([10, 30, 40, 50.0])
    assert [part.tolist() for part in analysis.joined(first, second)] == [[5, 20], [1, 4], [10, 40]]
    assert [len(part) for part in analysis.joined((first[0][:0], first[1][:0]), second)] == [0, 0, 0]


def test_churn_is_by_masking():
    steps, back = analysis.churn(np.array([5, 10, 15, 20.0]), np.array([0, 6, 6, 36.0]), np.array([0, 2, 2, 5.0]))
    assert list(steps) == [10, 20]
    assert list(back) == [3, 10]


def test_names_are_as_short_as_they_can_be():
    names = ["attention.self.query", "attention.output.dense", "intermediate.dense", "output.dense"]
    assert short_names(names) == ["query", "attention.output.dense", "intermediate.dense", "output.dense"]
    assert short_blocks(["bert.layer.0", "bert.layer.11"]) == ["0", "11"]
    assert short_blocks(["encoder.block.0", "decoder.block.0"]) == ["encoder.block.0", "decoder.block.0"]
    assert short_blocks(["h.3"]) == ["3"]
