"""Gradient accumulation gives the gradients of the big batch."""

from __future__ import annotations

import math

import pytest
import torch
from datasets import Dataset
from transformers import Trainer

import tiny_models
from pinscher.train.trainer import PinsTrainer
from tiny_models import HEADS
from tiny_trainer import EVALUATING, EXTRA, Spy, logged, pruning, trainer_for


def gradients(head, batch, steps, *, cls=PinsTrainer, folder="unused", data=None, args=None, **more):
    """The gradients of every optimiser step of an epoch, the model staying as it is, and the logged losses."""
    seen = []

    def look(state, found):
        parameters = found["model"].named_parameters()
        seen.append({name: p.grad.clone() for name, p in parameters if p.grad is not None})

    still = {"max_steps": None, "num_train_epochs": 1, "learning_rate": 0.0, "weight_decay": 0.0, "max_grad_norm": 0.0}
    sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": steps}
    trainer = trainer_for(
        folder,
        head,
        cls=cls,
        model=(HEADS | EXTRA)[head].make().double(),
        data=tiny_models.rows((HEADS | EXTRA)[head].kind, 11) if data is None else data,  # 11 rows: a ragged last step
        args=still | sizes | (args or {}),
        callbacks=[Spy(on_pre_optimizer_step=look)],
        **more,
    )
    trainer.train()
    return seen, trainer


def distance(one, other):
    """The largest difference between gradients, relative to the largest gradient, over all steps."""
    assert len(one) == len(other) > 0
    found = 0.0
    for a, b in zip(one, other, strict=True):
        assert a.keys() == b.keys()
        size = max(float(g.abs().max()) for g in a.values())
        assert size > 1e-4
        found = max(found, *(float((a[name] - b[name]).abs().max()) / size for name in a))
    return found


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.usefixtures("double_losses")
def test_accumulation_gives_the_gradient_of_the_big_batch(head, tmp_path):
    big, small = (gradients(head, *sizes, folder=tmp_path, objective="empirical-risk")[0] for sizes in ((8, 1), (2, 4)))
    assert len(big) == 2  # 8 rows, and 3
    assert distance(big, small) < 1e-10


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.usefixtures("double_losses")
def test_accumulation_with_a_teacher_and_label_smoothing(head, tmp_path):
    kind = HEADS[head].kind
    smoothing = 0.0 if kind in ("regression", "spans") else 0.1  # the Trainer smooths `labels` that are classes
    found = []
    for sizes in ((8, 1), (2, 4)):
        more = {"objective": "knowledge-distillation", "teacher": HEADS[head].make(seed=7).double()}
        args = {"label_smoothing_factor": smoothing}
        seen, trainer = gradients(head, *sizes, folder=tmp_path, args=args, **more)
        assert min(logged(trainer, "loss_sr").values()) > 1e-4
        found.append(seen)
    # LabelSmoother adds up in float32, whatever it is given.
    assert distance(*found) < (1e-6 if smoothing else 1e-10)


def test_accumulation_in_the_stock_trainer_is_wrong(tmp_path):
    """Otherwise the tests above would test nothing."""
    big, small = (gradients("bert", *sizes, cls=Trainer, folder=tmp_path)[0] for sizes in ((8, 1), (2, 4)))
    for a, b in zip(big[0].values(), small[0].values(), strict=True):
        torch.testing.assert_close(4 * a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("double_losses")
def test_accumulation_through_a_whole_run(tmp_path):
    """Pruned, self-regularised, with ragged groups: the same masks, and the same weights but for rounding."""
    states = []
    for batch, steps in ((8, 1), (2, 4)):
        args = EVALUATING | {"per_device_train_batch_size": batch, "gradient_accumulation_steps": steps}
        data = tiny_models.rows("classes", 21)
        model = HEADS["bert"].make().double()
        trainer = trainer_for(tmp_path, args=args, model=model, data=data, pruning=pruning())
        trainer.train()
        assert trainer.teacher.changes > 1
        states.append(trainer.model.state_dict())
    for name in states[0]:
        assert torch.equal(states[0][name] == 0, states[1][name] == 0)
        torch.testing.assert_close(states[0][name], states[1][name], rtol=0, atol=1e-9)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("head", ["tokens", "gpt2-lm"])
@pytest.mark.usefixtures("double_losses")
def test_micro_batches_in_which_nothing_counts(head, smoothing, tmp_path):
    rows = tiny_models.rows(HEADS[head].kind, 8).to_list()
    rows = [row | {"labels": [-100] * len(row["labels"])} if i % 2 else row for i, row in enumerate(rows)]
    found = []
    for sizes in ((8, 1), (1, 8)):
        args = {"label_smoothing_factor": smoothing}
        more = {"objective": "knowledge-distillation", "teacher": HEADS[head].make(seed=7).double()}
        found.append(gradients(head, *sizes, folder=tmp_path, data=Dataset.from_list(rows), args=args, **more))
    (big, first), (small, second) = found
    assert distance(big, small) < (1e-6 if smoothing else 1e-10)
    assert logged(second, "loss")[1] == pytest.approx(logged(first, "loss")[1], rel=1e-5)
    assert math.isfinite(logged(second, "loss_er")[1])


def test_a_step_in_which_nothing_counts_changes_nothing(tmp_path):
    rows = [row | {"labels": [-100] * len(row["labels"])} for row in tiny_models.rows("tokens", 8).to_list()]
    seen, trainer = gradients("tokens", 2, 2, folder=tmp_path, data=Dataset.from_list(rows), objective="empirical-risk")
    assert all(not g.any() for step in seen for g in step.values())
    assert all(math.isfinite(value) for value in logged(trainer, "loss").values())


def collate_multi_label(features):
    rows = [{name: value for name, value in row.items() if name != "labels"} for row in features]
    return tiny_models.collate(rows) | {"labels": torch.tensor([row["labels"] for row in features])}


@pytest.mark.parametrize("head", [*HEADS, "masked-lm", "multi-label"])
def test_the_validation_loss_is_the_models_own(head, tmp_path):
    """The mean over batches by their rows, as the Trainer's loop takes it."""
    more = {}
    if head == "multi-label":
        rows = tiny_models.rows("regression", 8).to_list()
        rows = [row | {"labels": [1.0, 0.0, float(round(row["labels"]))]} for row in rows]
        head, more = "bert", {"eval_dataset": rows, "data_collator": collate_multi_label}
        more["options"] = {"problem_type": "multi_label_classification"}
    trainer = trainer_for(tmp_path, head, args={"per_device_eval_batch_size": 3}, **more)
    rows = [trainer.eval_dataset[i] for i in range(8)]
    expected = 0.0
    with torch.no_grad():
        for some in (rows[:3], rows[3:6], rows[6:]):
            expected += float(trainer.model.eval()(**trainer.data_collator(some)).loss) * len(some) / 8
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)
