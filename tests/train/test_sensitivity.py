"""What a model loses when one layer or kind is pruned alone."""

import json

import pytest
import torch

import tiny_tasks
from pinscher.prune.sites import find_sites
from pinscher.train import data, pretrained, sensitivity
from pinscher.train.config import RunConfig
from pinscher.train.evaluation import answer
from pinscher.train.plan import task_of
from tiny_command import finished_run, outcome


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return finished_run(tmp_path_factory.mktemp("run"))


def test_sensitivity_is_what_pruning_by_hand_gives(run, capsys):
    """Independent of the code under test: topk instead of the threshold, a fresh model for every trial."""
    code, out, _ = outcome(["inspect", run, "--sensitivity", "--levels", "0.9,0.97", "--json", run / "s.json"], capsys)
    assert code == 0
    found = json.loads((run / "s.json").read_text())["sensitivity"]
    config = RunConfig.from_dict(RunConfig.settings_of(run / "config.yaml"))
    task = task_of(config)
    rows = data.load(task, data.Source(config.data), seed=config.seed).validation
    tokenizer = pretrained.load_tokenizer(str(run / "model"))

    def score(chosen, level):
        labels = tuple(pretrained.load_config(str(run / "model")).id2label[i] for i in range(2))
        model = pretrained.load_model(str(run / "model"), task, labels, tokenizer)
        picked = [site.effective for site in find_sites(model) if chosen(site)]
        if picked:
            flat = torch.cat([weight.detach().reshape(-1) for weight in picked]).abs()
            cut = flat.topk(int((1 - level) * len(flat) + 0.5)).values[-1]
            with torch.no_grad():
                for weight in picked:
                    weight[weight.abs() < cut] = 0
        return task.scores(answer(model, task, tokenizer, rows, labels), rows)[task.main]

    whole = score(lambda _: False, 0)
    assert (found["score"], found["rows"], found["measure"]) == (whole, len(rows), "accuracy")
    assert len(found["losses"]) == 2 + 6
    for one in found["losses"]:
        attribute = "block" if one["group"] == "layer" else "kind"
        for level, lost in one["lost"].items():
            by_hand = whole - score(lambda site, a=attribute, u=one["unit"]: getattr(site, a) == u, float(level))
            assert lost == pytest.approx(by_hand)
    worst = [one["lost"]["0.97"] for one in found["losses"]]
    assert worst == sorted(worst, reverse=True)
    assert "when one layer or kind alone" in out


def test_what_was_pruned_for_a_trial_is_put_back(run):
    model = pretrained.transformers.AutoModelForSequenceClassification.from_pretrained(run / "model")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sites = find_sites(model)
    with sensitivity.pruned(sites, 0.95):
        zeros = sum(site.zeros() for site in sites)
        assert zeros == sum(site.numel for site in sites) - int(0.05 * sum(site.numel for site in sites) + 0.5)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_text_is_judged_by_its_loss(tmp_path):
    files = tiny_tasks.write_files("e2e", tmp_path / "data")
    tiny_tasks.tiny_model("e2e", tmp_path / "model")
    settings = {"task": "e2e", "data": str(files.folder)}
    found = sensitivity.measure(str(tmp_path / "model"), settings, [0.5], rows=3)
    assert (found.measure, found.rows) == ("loss", 3)
    assert found.score > 0
    assert len(found.losses) == 2 + 4


def test_a_model_without_a_head_has_nothing_to_lose(run, tmp_path, capsys):
    words = ["--sensitivity", "--data", run.parent / "data"]
    for place, more, expected in (
        (run.parent / "model", ["--task", "sst2"], "is not fine-tuned for sst2: it has no classifier.bias"),
        (run.parent / "model", [], "--sensitivity needs the task"),
        (run, ["--levels", "1.5"], "--levels must lie between 0 and 1, not 1.5"),
        (run, ["--rows", "0"], "--rows must be at least 1, not 0"),
    ):
        code, _, err = outcome(["inspect", place, *words, *more], capsys)
        assert code == 2
        assert expected in err
