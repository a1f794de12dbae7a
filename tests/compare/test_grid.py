"""A file and flags become cells, in the order in which they are run."""

from pathlib import Path

import pytest

from pinscher.compare import grid
from pinscher.errors import InputError


def test_a_value_to_tune_by_counts_once():
    assert grid._distinct("16,8,16,8.0") == ["16", "8"]
    assert grid._distinct([1e-4, "0.0001", "cubic", "cubic"]) == [1e-4, "cubic"]


def test_what_a_dense_run_cannot_use_is_not_tuned(tmp_path):
    flags = {"methods": "pins,dense", "tasks": "sst2", "tune": {"interval": [1, 5], "batch_size": [16, 32]}}
    cells = {cell.variant: cell for cell in grid.read(None, flags).cells(tmp_path)}
    assert len(cells["pins"].trials) == 4
    assert [trial.tuned for trial in cells["dense"].trials] == [{"batch_size": 16}, {"batch_size": 32}]


def test_a_file_with_settings_for_all_for_a_task_and_for_a_method(tmp_path, monkeypatch):
    monkeypatch.setenv("DATA", str(tmp_path))
    (tmp_path / "c.yaml").write_text(
        """
model: ./m
learning-rate: 1e-4
epochs: 2
option: {beta1: 0.5}
seeds: [3, 7]
sparsity: [0.9, 0.5]
tasks:
  sst2: {data: $DATA/sst2, rows: 6000, epochs: 3}
  film: {task: classification, train-file: "${DATA}/film.csv"}
methods:
  pins: {}
  slow: {method: pins, interval: 50, option: {smoothing: ema}, epochs: 9}
  dense:
"""
    )
    made = grid.read(tmp_path / "c.yaml", {})
    cells = made.cells(tmp_path / "cells")
    assert [cell.name for cell in cells[:6]] == [
        "sst2-dense-seed3",
        "sst2-pins-90-seed3",
        "sst2-slow-90-seed3",
        "sst2-pins-50-seed3",
        "sst2-slow-50-seed3",
        "film-dense-seed3",
    ]
    assert [cell.seed for cell in cells] == [3] * 10 + [7] * 10
    config = {cell.name: cell.config for cell in cells}
    assert config["sst2-pins-90-seed3"].epochs == 3
    assert config["film-pins-90-seed3"].epochs == 2
    assert config["film-slow-90-seed3"].epochs == 9
    assert config["film-slow-90-seed7"].option == {"beta1": 0.5, "smoothing": "ema"}
    assert config["film-slow-90-seed7"].train_file == f"{tmp_path}/film.csv"
    assert config["film-slow-90-seed7"].task == "classification"
    assert config["sst2-dense-seed3"].option == {}
    assert config["sst2-pins-50-seed7"].learning_rate == 1e-4
    flagged = {cell.name: cell.config for cell in grid.read(tmp_path / "c.yaml", {"epochs": 1.0}).cells(tmp_path)}
    assert {one.epochs for one in flagged.values()} == {1.0}  # a flag wins everywhere
    chosen = grid.read(tmp_path / "c.yaml", {"methods": "slow", "tasks": "film", "seeds": "3,", "sparsity": 0.9})
    assert chosen.cells(tmp_path / "cells") == [cell for cell in cells if cell.name == "film-slow-90-seed3"]
    # What is written down is read again as the same.
    (tmp_path / "again.yaml").write_text(grid.dump(made))
    assert grid.read(tmp_path / "again.yaml", {}).cells(tmp_path / "cells") == cells
    monkeypatch.delenv("DATA")
    with pytest.raises(Exception, match="DATA is not set"):
        grid.read(tmp_path / "c.yaml", {})


@pytest.mark.parametrize(("seeds", "are"), [(1, (42,)), ("3", (42, 1, 2)), ("7,", (7,)), ([5, 6, 5], (5, 6))])
def test_seeds_are_counted_or_named(seeds, are):
    assert grid.read(None, {"methods": "pins", "tasks": "sst2", "seeds": seeds}).seeds == are


def test_the_committed_comparisons(tmp_path, monkeypatch):
    monkeypatch.setenv("DATA", str(tmp_path))
    folder = Path(__file__).parents[2] / "benchmarks"
    cells = grid.read(folder / "comparison.yaml", {}).cells(tmp_path)
    assert len(cells) == 2 * 8 * 3
    assert {cell.seed for cell in cells[:16]} == {42}
    assert {(cell.task, cell.config.rows, cell.config.epochs) for cell in cells} == {
        ("sst2", 6000, 3),
        ("cola", None, 6),
    }
    assert {cell.config.learning_rate for cell in cells} == {1e-4}
    assert {cell.config.objective for cell in cells if cell.variant == "pins"} == {"self-regularization"}
    assert {cell.config.objective for cell in cells if cell.variant != "pins"} == {"empirical-risk"}
    more = grid.read(folder / "comparison_sparsities.yaml", {}).cells(tmp_path)
    assert len(more) == 2 * (3 + 1) * 3
    shared = {cell.name: cell for cell in cells}
    assert [cell == shared[cell.name] for cell in more if cell.variant == "dense"] == [True] * 6


def test_the_search_gives_every_method_two_values_of_its_main_setting(tmp_path):
    asked = {"methods": "dense,pins,smvp,l0", "tasks": "sst2", "search": True, "learning_rate": 1e-4}
    trials = {cell.variant: cell.trials for cell in grid.read(None, asked).cells(tmp_path)}
    said = {variant: [trial.tuned for trial in some] for variant, some in trials.items()}
    assert said["pins"] == said["dense"] == [{"learning_rate": 1e-4}, {"learning_rate": 3e-4}]
    assert said["smvp"] == [{"penalty": 100.0}, {"penalty": 400.0}]
    assert [trial.config.option for trial in trials["l0"]] == [{"penalty": 40.0}, {"penalty": 125.0}]
    assert {trial.config.learning_rate for trial in trials["l0"]} == {1e-4}
    assert len({trial.name for some in trials.values() for trial in some}) == 8


def test_the_search_leaves_alone_what_a_method_sets_itself(tmp_path):
    methods = {"soft": {"method": "smvp", "option": {"penalty": 7}}}
    comparison = grid.Comparison(methods, {"sst2": {}}, (0.9,), (42,), search=True)
    (cell,) = comparison.cells(tmp_path)
    assert [trial.config.option for trial in cell.trials] == [{"penalty": 7}]
    assert grid.Comparison(**{**vars(comparison), "search": False}).to_dict() != comparison.to_dict()


def test_the_search_and_tuning_of_one_setting_contradict():
    asked = {"methods": "pins", "tasks": "sst2", "search": True, "tune": {"learning_rate": [1e-4, 2e-4]}}
    with pytest.raises(InputError, match="--search tries values of learning_rate for pins, --tune others"):
        grid.read(None, asked | {"learning_rate": 1e-4}).cells(Path("out"))


def test_the_search_of_a_learning_rate_needs_one():
    with pytest.raises(InputError, match="give the one to start from"):
        grid.read(None, {"methods": "pins", "tasks": "sst2", "search": True}).cells(Path("out"))
