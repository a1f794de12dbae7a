"""The paper's tables as comparisons: they hold its cells, restrict to fewer, and run."""

import itertools

import pytest
import yaml

from pinscher.compare import grid, paper, published, results, scoreboard
from pinscher.errors import InputError
from pinscher.train.tasks import TASKS
from tiny_command import outcome
from tiny_comparison import FEW, complaint, table_of

# Runs of a table by hand: tasks x (dense + methods x sparsities) x five seeds x batch sizes.
RUNS = {
    "paper/table1": 8 * (1 + 6 * 2) * 5 * 2,
    "paper/table2": 1 * (1 + 5 * 4) * 5,
    "paper/table3": 1 * (1 + 3 * 2) * 5 * 2,
    "paper/table4": 3 * (1 + 3) * 5,
    "paper/table5": 3 * (1 + 3) * 5 * 2,  # the dense one teaches
    "paper/table6": 3 * (1 + 3 * 2) * 5,
    "paper/table7": 3 * (1 + 3 * 2) * 5,
    "paper/table8": 1 * (1 + 1) * 5 * 2,
    "paper/table9": 8 * (1 + 2) * 5 * 2,
}


def comparison_of(name: str, **flags) -> grid.Comparison:
    return grid.read(None, flags, recipe=name)


def test_the_tables_hold_every_figure_of_the_paper_and_few_cells_without_one(tmp_path):
    shown, missing = set(), set()
    for name in paper.TABLES:
        cells = comparison_of(name).cells(tmp_path)
        for cell in cells:
            model = published.EXACT[cell.config.model]
            objective = cell.config.objective
            key = (model, cell.config.task, results.metric_of(cell), round(100 * cell.sparsity), cell.config.method)
            assert scoreboard._paper([cell], comparison_of(name)) in (model, None)
            (missing if scoreboard._figure(model, cell) is None else shown).add((*key, objective))
    main = {key for key in published.figures() if key[1] != "avg" and key[2] == TASKS[key[1]].main}
    assert shown == main
    assert missing == {("bert-base", "squad", "f1", percent, "smvp", "empirical-risk") for percent in (60, 80)}


@pytest.mark.parametrize("name", paper.TABLES)
def test_how_many_runs_a_table_has(name, tmp_path):
    cells = comparison_of(name).cells(tmp_path)
    assert sum(len(cell.trials) for cell in cells) == RUNS[name]
    assert {cell.seed for cell in cells} == {42, 12, 100, 9, 2}
    names = [trial.name for cell in cells for trial in cell.trials]
    assert len(set(names)) == len(names)


def test_the_search_keeps_the_schedule_for_every_batch_size(tmp_path):
    cells = {cell.name: cell for cell in comparison_of("paper/table1").cells(tmp_path)}
    small, large = (trial.config for trial in cells["rte-platon-90-seed12"].trials)
    assert (small.batch_size, small.warmup, small.cooldown, small.lr_warmup) == (16, 200, 1200, 200)
    assert (large.batch_size, large.warmup, large.cooldown, large.lr_warmup) == (32, 100, 600, 100)
    assert (large.model, large.learning_rate, large.epochs, large.sparsity) == (
        "google-bert/bert-base-uncased",
        3e-5,
        20,
        0.9,
    )
    dense = [trial.config for trial in cells["rte-dense-seed42"].trials]
    assert [(one.batch_size, one.lr_warmup) for one in dense] == [(16, 200), (32, 100)]
    mrpc = [trial.config for trial in cells["mrpc-pins-80-seed2"].trials]
    assert [(one.warmup, one.cooldown) for one in mrpc] == [(150, 450), (75, 225)]  # the script's 300 / 900 are for 8


def test_the_batch_sizes_of_the_other_tables(tmp_path):
    sizes = {
        name: {t.config.batch_size for cell in comparison_of(name).cells(tmp_path) for t in cell.trials}
        for name in paper.TABLES
    }
    searched = {name for name, table in paper.TABLES.items() if table.searches}
    assert {name for name in sizes if sizes[name] == {16, 32}} == searched
    assert sizes["paper/table2"] == {16}
    assert sizes["paper/table4"] == {8}
    assert sizes["paper/table6"] == sizes["paper/table7"] == {32}


def test_flags_restrict_a_table(tmp_path):
    flags = {"tasks": "rte,cola", "methods": "pins,platon", "sparsity": "0.8", "seeds": "1", "model": "./e5-small"}
    cells = comparison_of("paper/table1", **flags).cells(tmp_path)
    assert [cell.name for cell in cells] == [
        f"{task}-{method}-80-seed42" for task, method in itertools.product(("rte", "cola"), ("pins", "platon"))
    ]
    assert {trial.config.model for cell in cells for trial in cell.trials} == {"./e5-small"}
    assert {len(cell.trials) for cell in cells} == {2}
    one = comparison_of("paper/table1", tasks="rte", methods="pins", seeds="1", sparsity="0.8", batch_size=8)
    (trial,) = one.cells(tmp_path)[0].trials  # a flag ends the search
    assert (trial.config.batch_size, trial.config.warmup, trial.config.cooldown) == (8, 400, 2400)
    with pytest.raises(InputError, match="paper/table6 has no task sst2: it has rte, cola, qnli"):
        comparison_of("paper/table6", tasks="rte,sst2")
    with pytest.raises(InputError, match=r"Did you mean 'paper/table1'\?"):
        comparison_of("paper/tabel1")
    with pytest.raises(InputError, match="either --recipe or --config"):
        grid.read("some.yaml", {}, recipe="paper/table1")


def test_several_models_in_one_comparison(tmp_path):
    """An entry of a task has its own name and its own recipe, which gives model and task."""
    told = {"tasks": {"bert-rte": {"recipe": "paper/rte"}, "minilm-rte": {"recipe": "paper/minilm/rte"}}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({**told, "methods": ["pins"]}))
    (tmp_path / "data" / "rte").mkdir(parents=True)
    made = grid.read(tmp_path / "c.yaml", {"tasks": "rte", "data": str(tmp_path / "data")})
    configs = {cell.name: cell.config for cell in made.cells(tmp_path)}
    assert list(configs) == ["bert-rte-pins-80-seed42", "minilm-rte-pins-80-seed42"]
    bert, minilm = configs.values()
    assert (bert.task, bert.batch_size, bert.cooldown) == ("rte", 16, 1200)
    assert (minilm.task, minilm.batch_size, minilm.cooldown) == ("rte", 32, 600)
    assert bert.model != minilm.model
    assert {one.data for one in configs.values()} == {str(tmp_path / "data" / "rte")}
    titles = [column.title for column in scoreboard.make(made, made.cells(tmp_path), []).columns]
    assert titles[2:6] == [
        "bert-rte, accuracy",
        "paper: BERT-base",
        "minilm-rte, accuracy",
        "paper: MiniLM-12L-384H",
    ]


def test_what_is_written_down_is_read_again_as_the_same(tmp_path):
    for name in paper.TABLES:
        made = comparison_of(name)
        (tmp_path / "again.yaml").write_text(grid.dump(made))
        assert grid.read(tmp_path / "again.yaml", {}).cells(tmp_path) == made.cells(tmp_path)


def test_the_table_of_conll_says_which_set_is_which(tmp_path):
    made = comparison_of("paper/table3")
    notes = scoreboard.make(made, made.cells(tmp_path), []).notes
    assert any("development set" in note and "94.0" in note for note in notes)
    made = comparison_of("paper/table2")
    assert not any("development set" in note for note in scoreboard.make(made, made.cells(tmp_path), []).notes)


# ------------------------------------------------------------ the command


def test_the_list_names_every_table(capsys):
    capsys.readouterr()
    code, said, _ = outcome(["compare", "--recipe", "list"], capsys)
    assert code == 0
    assert [line.split()[0] for line in said.splitlines()] == list(paper.TABLES)


@pytest.fixture
def few(root):
    told = ["compare", "--recipe", "paper/table6", "--tasks", "cola", "--sparsity", "0.8", "--seeds", "1"]
    return [*told, "--model", root / "model", "--data", root / "data", *FEW, "--interval", "2", "--lr-warmup", "2"]


def test_a_dry_run_prints_the_plan(few, tmp_path, capsys):
    capsys.readouterr()
    code, said, _ = outcome([*few, "--dry-run", "--output", tmp_path / "out"], capsys)
    assert code == 0
    assert "4 cells, 0 done, 4 to do" in said
    assert not (tmp_path / "out").exists()


def test_a_part_of_a_table_runs_and_goes_on_from_its_folder(few, tmp_path, capsys):
    out = tmp_path / "out"
    told = [*few, "--methods", "platon", "--output", out]
    capsys.readouterr()
    code, said, _ = outcome(told, capsys)
    assert code == 0
    assert "54.1" in said  # the paper's, in the column beside ours
    (row,) = table_of(out)
    assert (row["task"], row["method"], row["learning_rate"], row["batch_size"]) == ("cola", "platon", "3e-05", "8")
    settings = yaml.safe_load((out / "cells" / row["folder"].split("/")[-1] / "config.yaml").read_text())["run"]
    assert settings["recipe"] == "paper/minilm/cola"
    code, again, _ = outcome(["compare", "--output", out], capsys)
    assert code == 0
    assert "54.1" in again


def test_mistakes(few, tmp_path, capsys):
    told = [*few, "--output", tmp_path / "out"]
    assert "has no task sst2" in complaint([*told, "--tasks", "sst2"], capsys)
    assert "unknown recipe" in complaint([*told, "--recipe", "paper/table10"], capsys)
    assert "either --recipe or --config" in complaint([*told, "--config", "some.yaml"], capsys)
    assert not (tmp_path / "out").exists()
