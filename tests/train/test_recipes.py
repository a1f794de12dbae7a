"""The paper's cells: the scripts' numbers at the scripts' batch sizes, and as many examples at any other; our own."""

import math

import pytest

import tiny_tasks
from pinscher.errors import InputError
from pinscher.train import plan as planning
from pinscher.train import recipes
from pinscher.train.config import RunConfig
from pinscher.train.tasks import TASKS

# Training rows as the sets' own publications count them: the GLUE benchmark's task table, SQuAD 1.1 (questions), CoNLL
# 2003 (sentences, without the document lines), E2E NLG (references), DART 1.1.1 (texts), WebNLG 2017 (texts).
ROWS = {"rte": 2490, "mrpc": 3668, "stsb": 5749, "cola": 8551, "sst2": 67349, "qnli": 104743, "mnli": 392702}
ROWS |= {"qqp": 363846, "squad": 87599, "conll2003": 14041, "e2e": 42061, "dart": 62659, "webnlg": 18025}

# The scripts, written down a second time: batch, warm-up, cool-down; those of the reference (RTE) and of PLATON.
SCRIPTS = {
    "rte": (16, 200, 1200),
    "mrpc": (8, 300, 900),
    "stsb": (16, 500, 2500),
    "cola": (32, 500, 1500),
    "sst2": (32, 1000, 5000),
    "qnli": (32, 2000, 12000),
    "mnli": (32, 5400, 27000),
    "qqp": (32, 5400, 27000),
    "squad": (16, 5400, 27000),
}
EVERY = [*recipes.RECIPES, *recipes.OPEN]


def config_of(name: str, **told) -> RunConfig:
    return RunConfig.from_dict(recipes.applied(name, told))


def phases(config: RunConfig) -> tuple[int, int, int]:
    """Steps of the run, of its warm-up, and of its cool-down."""
    rows = ROWS[config.task]
    if any("validation" in split for split in TASKS[config.task].test_splits):  # then it is split off the training rows
        rows -= round(rows * config.validation_fraction)
    steps = planning.total_steps(config, rows)
    schedule = config.pruning(steps).make_schedule()
    return steps, schedule.warmup, schedule.cooldown


@pytest.mark.parametrize("batch", [None, 16, 32])
@pytest.mark.parametrize("name", EVERY)
def test_pruning_takes_a_good_part_of_every_run(name, batch):
    config = config_of(name, **({} if batch is None else {"batch_size": batch}))
    steps, warmup, cooldown = phases(config)
    assert 0.3 < (steps - warmup - cooldown) / steps < 0.75
    assert warmup >= 0.01 * steps
    assert cooldown >= 0.15 * steps


@pytest.mark.parametrize("name", EVERY)
def test_the_scripts_numbers_at_the_scripts_batch_size(name):
    task = recipes.settings(name)["task"]
    if task in SCRIPTS:
        batch, warmup, cooldown = SCRIPTS[task]
        config = config_of(name, batch_size=batch)
        assert (config.warmup, config.cooldown) == (warmup, cooldown)
    elif task in recipes.TEXT:  # PST's script
        config = config_of(name, batch_size=8)
        assert (config.lr_warmup, config.learning_rate, config.label_smoothing, config.epochs) == (500, 1e-4, 0.1, 5)
    assert config_of(name).lr_warmup == config_of(name).warmup  # the reference's rule for every task


@pytest.mark.parametrize("name", EVERY)
def test_another_batch_size_prunes_after_as_many_examples(name):
    first = config_of(name)
    for told in ({"batch_size": 64}, {"batch_size": 4}, {"gradient_accumulation": 2}, {"batch_size": "32"}):
        other = config_of(name, **told)
        for steps in ("warmup", "cooldown", "lr_warmup"):
            examples = [
                value if (value := getattr(one, steps)) < 1 else value * one.batch_size * one.gradient_accumulation
                for one in (first, other)
            ]
            assert math.isclose(*examples, rel_tol=0.02)
            assert getattr(other, steps) < 1 or getattr(other, steps) == int(getattr(other, steps))


def test_rte_of_the_models_that_the_paper_trains_with_batch_32():
    for name in ("paper/minilm/rte-80", "paper/electra/rte-90"):
        told = recipes.settings(name)
        assert (told["batch_size"], told["warmup"], told["cooldown"], told["lr_warmup"]) == (32, 100, 600, 100)


def test_processes_count_as_well_and_what_is_told_wins():
    assert recipes.applied("paper/rte-80", {}, processes=4)["cooldown"] == 300
    told = recipes.applied("paper/rte-80", {"batch_size": 32, "warmup": 7, "sparsity": 0.7})
    assert (told["warmup"], told["cooldown"], told["sparsity"]) == (7, 600, 0.7)
    assert recipes.applied("paper/rte-80", {"batch_size": 10**6})["warmup"] == 1  # never a fraction by accident
    assert "sparsity" not in recipes.settings("paper/rte")


@pytest.mark.parametrize("size", ["many", [16], 0, -16])
def test_a_batch_size_that_is_none_is_left_to_whoever_takes_it(size):
    told = recipes.applied("paper/rte-80", {"batch_size": size})
    assert told["batch_size"] == size
    with pytest.raises(InputError, match=r"batch.size"):
        RunConfig.from_dict(told)


def test_an_unknown_recipe_names_the_nearest():
    with pytest.raises(InputError, match=r"Did you mean 'paper/rte-80'\?"):
        recipes.settings("paper/rte-8O")


# ------------------------------------------------------------ best/


def plan_of(tmp_path, **told):
    """The plan of a run on the tiny task, by a recipe."""
    tiny_tasks.write_files("sst2", tmp_path / "data")
    tiny_tasks.tiny_model("sst2", tmp_path / "model")
    name = told.pop("recipe", "best/standard")
    where = {"model": str(tmp_path / "model"), "task": "sst2", "data": str(tmp_path / "data")}
    return planning.make(recipes.recipe(name, **where, **told))


@pytest.mark.parametrize(
    ("budget", "dense", "pruning"), [("quick", 1 / 3, 1 / 2), ("standard", 1, 1), ("thorough", 1, 6)]
)
def test_a_budget_chooses_the_epochs_of_both_runs(tmp_path, budget, dense, pruning):
    alone = plan_of(tmp_path, recipe="none", method="dense").steps
    plan = plan_of(tmp_path, recipe=f"best/{budget}")
    assert plan.steps == pytest.approx(pruning * alone, abs=1)
    assert plan.config.dense_steps == pytest.approx(dense * alone, abs=1)


def test_what_is_told_wins_over_the_best_recipe(tmp_path):
    plan = plan_of(tmp_path, max_steps=40, temperature=4.0, dense_steps=7)
    assert (plan.steps, plan.config.dense_steps, plan.config.temperature) == (40, 7, 4.0)
    assert (plan.config.learning_rate, plan.config.dense_learning_rate) == (3e-4, 1e-4)
    plan = plan_of(tmp_path, learning_rate=2e-5)
    assert (plan.config.learning_rate, plan.config.dense_learning_rate) == (2e-5, 2e-5)


@pytest.mark.parametrize("objective", ["empirical-risk", "self-regularization"])
def test_another_objective_leaves_the_dense_teacher_out(objective):
    config = recipes.recipe("best/quick", objective=objective)
    assert not config.needs_dense
    assert (config.hidden_weight, config.temperature, config.budget) == (0.0, None, "quick")


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ({}, "best/standard"),
        ({"budget": "thorough"}, "best/thorough"),
        ({"method": "magnitude"}, "best/standard"),
        ({"max_steps": 0}, "none"),
        ({"method": "dense"}, "none"),
        ({"sparsity": 0.0}, "none"),
        ({"lora_rank": 4}, "none"),
        ({"fsdp": True}, "none"),
    ],
)
def test_the_recipe_of_a_run_that_names_none(told, name):
    assert recipes.default(told) == name


def test_the_papers_recipes_have_the_papers_teacher():
    for name in EVERY:
        config = config_of(name)
        assert config.objective == "self-regularization"
        assert not config.needs_dense
