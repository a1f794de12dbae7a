"""PinsTrainer in two processes."""

from __future__ import annotations

import socket

import pytest
import torch
import torch.multiprocessing as mp

import tiny_models
import tiny_sharded
from pinscher.train import checkpoint
from tiny_models import DROPOUT, HEADS
from tiny_trainer import contents, logged, pruning, same, trainer_for

LIMIT = 150  # seconds; processes that wait for each other would wait for ever
DDP = {
    "pins": {"head": "bert"},
    "movement": {"head": "bert", "method": "movement"},
    "tokens": {"head": "tokens"},  # an uneven number of labels on each process
    "best": {"head": "bert", "select": "best"},
    "dropout": {"head": "bert", "options": DROPOUT},
}


def ddp_trainer(folder, processes, head, method="pins", select="final", options=None):
    sizes = {"per_device_train_batch_size": 4 // processes, "gradient_accumulation_steps": 2, "max_steps": 10}
    saving = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "eval_on_start": True,
        "save_strategy": "steps",
        "save_steps": 5,
    }
    return trainer_for(
        folder,
        head,
        model=HEADS[head].make(**(options or {})).double(),
        args=saving | sizes | ({"ddp_backend": "gloo"} if processes > 1 else {}),
        pruning=pruning(method),
        select=select,
    )


def rank_main(rank, port, folder):
    """All cases in one go: a process takes longer to import than to train."""
    tiny_models.become_rank(rank, port, LIMIT)
    runs = [(name, None) for name in DDP] + [("dropout", str(folder / "dropout" / "0" / "checkpoint-5"))]
    for name, resume in runs:
        shared = name == "best"  # every process reads what the first one wrote
        place = folder / (f"{name}-resumed" if resume else name) / ("both" if shared else str(rank))
        trainer = ddp_trainer(place, 2, **DDP[name])
        assert trainer.args.world_size == 2
        trainer.train(resume)
        assert type(trainer.model_wrapped).__name__ == "DistributedDataParallel"
        state = {"model": trainer.model.state_dict(), "changes": trainer.teacher.changes, "best": trainer.best}
        losses = {f"{step}": loss for step, loss in logged(trainer, "eval_loss").items()}
        checkpoint.save(folder / "ends" / f"{place.parent.name}-{rank}", losses=losses, **state)
    tiny_sharded.leave()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ddp")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(rank_main, (port, folder), nprocs=2)
    return folder


def ends(folder, name):
    return [checkpoint.load(folder / "ends" / f"{name}-{rank}") for rank in range(2)]


@pytest.mark.parametrize("name", [*DDP, "dropout-resumed"])
def test_both_ranks_end_the_same(two_ranks, name):
    one, other = ends(two_ranks, name)
    assert same(one["model"], other["model"])
    assert {k: v for k, v in one.items() if k != "model"} == {k: v for k, v in other.items() if k != "model"}
    assert sum(int((t == 0).sum()) for t in one["model"].values()) > 3000
    assert one["changes"] > 1


@pytest.mark.parametrize("name", ["pins", "movement", "tokens", "best"])
@pytest.mark.usefixtures("double_losses")
def test_two_ranks_equal_one_process_with_twice_the_batch(two_ranks, name, tmp_path):
    trainer = ddp_trainer(tmp_path, 1, **DDP[name])
    trainer.train()
    found = ends(two_ranks, name)[0]
    for key, tensor in trainer.model.state_dict().items():
        assert torch.equal(found["model"][key] == 0, tensor == 0)
        torch.testing.assert_close(found["model"][key], tensor, rtol=0, atol=1e-9)
    assert found["changes"] == trainer.teacher.changes
    assert found["losses"] == pytest.approx({f"{k}": v for k, v in logged(trainer, "eval_loss").items()}, rel=1e-9)
    assert (trainer.best is None) == (name != "best")
    assert found["best"] == (pytest.approx(trainer.best, rel=1e-9) if name == "best" else None)


def test_only_rank_zero_writes(two_ranks):
    for name in ("pins", "movement", "tokens", "dropout"):
        assert sorted(path.name for path in (two_ranks / name / "0").iterdir()) == ["checkpoint-10", "checkpoint-5"]
        assert not (two_ranks / name / "1").exists()


def test_a_resumed_ddp_run_is_bit_identical(two_ranks):
    whole, resumed = (ends(two_ranks, name)[0] for name in ("dropout", "dropout-resumed"))
    assert same(whole["model"], resumed["model"])
    paths = [two_ranks / name / "0" / "checkpoint-10" for name in ("dropout", "dropout-resumed")]
    assert contents(paths[0]) == contents(paths[1])
