"""Kill a training process at random steps, one of them in the middle of a save: the resumed run is bit-identical."""

import hashlib
import multiprocessing
import os
import random
import signal
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tiny
from pinscher import Pruner, Teacher, files
from pinscher.prune import CRITERIA
from pinscher.train import checkpoint

STEPS, EVERY = 40, 3


def digest(value: object, place: str = "") -> dict[str, str]:
    """The SHA-256 of every tensor, and of every plain value, of a nested state."""
    if isinstance(value, torch.Tensor):
        return {place: hashlib.sha256(value.detach().contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()}
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in digest(item, f"{place}/{key}").items()}
    return {place: hashlib.sha256(repr(value).encode()).hexdigest()}


def run(method: str, folder: Path, kill_at: int | None = None, kill_in_save: bool = False, options=None) -> None:
    """Trains to the end from wherever the folder's checkpoint is; dies where it is told to."""
    torch.manual_seed(0)
    net = tiny.Net(dropout=0.1)
    config = tiny.config(method, steps=STEPS, interval=5, options=options or {})
    pruner = Pruner(net, config, calibration=tiny.batches())
    optimizer = torch.optim.AdamW(pruner.param_groups(), lr=3e-3, weight_decay=0.01)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
    pruner.attach(optimizer)
    teacher = Teacher(net)
    step = 0
    if checkpoint.exists(folder):
        state = checkpoint.load(folder)
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        decay.load_state_dict(state["decay"])
        pruner.load_state_dict(state["pruner"])
        teacher.load_state_dict(state["teacher"])
        torch.set_rng_state(state["random"])
        step = state["step"]
    x, y = tiny.task()
    while step < STEPS:
        if step % 4 == 0:
            teacher.consider(tiny.accuracy(net))
        rows = torch.randint(0, 64, (16,))
        outputs = net(x[rows])
        batch = {"x": x[rows], "labels": y[rows]}
        loss = F.cross_entropy(outputs["logits"], y[rows]) + teacher.loss(batch, outputs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        decay.step()
        step += 1
        if step == kill_at:
            if kill_in_save:
                files._sync = lambda path: os.kill(os.getpid(), signal.SIGKILL)
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        if step % EVERY == 0 or kill_in_save:
            save(folder, step, net, optimizer, decay, pruner, teacher)
    state = {"pruner": pruner.state_dict(), "teacher": teacher.state_dict(), "changes": teacher.changes}
    assert teacher.changes > 0
    pruner.finish()
    checkpoint.save(folder.with_name(folder.name + "-final"), sha=digest({**state, "model": net.state_dict()}))


def save(folder: Path, step: int, net: nn.Module, optimizer, decay, pruner, teacher) -> None:
    checkpoint.save(
        folder,
        step=step,
        model=net.state_dict(),
        optimizer=optimizer.state_dict(),
        decay=decay.state_dict(),
        pruner=pruner.state_dict(),
        teacher=teacher.state_dict(),
        random=torch.get_rng_state(),
    )


def in_a_process(*args: object, **kwargs: object) -> int | None:
    process = multiprocessing.get_context("fork").Process(target=run, args=args, kwargs=kwargs)
    process.start()
    process.join(120)
    return process.exitcode


CASES = [
    *((method, {}) for method in CRITERIA),
    ("pins", {"smoothing": "ema"}),
    ("pins", {"smoothing": "none", "score": "signed"}),
    ("platon", {"timing": "before"}),
]


@pytest.mark.parametrize(("method", "options"), CASES, ids=[f"{m}-{'-'.join(o.values())}" for m, o in CASES])
def test_killed_and_resumed_is_bit_identical(method, options, tmp_path):
    assert in_a_process(method, tmp_path / "whole", options=options) == 0
    kills = sorted(random.Random(method + str(options)).sample(range(2, STEPS), 5))
    in_save = random.Random(method).randrange(5)
    for i, step in enumerate(kills):
        code = in_a_process(method, tmp_path / "killed", kill_at=step, kill_in_save=i == in_save, options=options)
        assert code == -signal.SIGKILL
    assert in_a_process(method, tmp_path / "killed", options=options) == 0
    whole, killed = (checkpoint.load(tmp_path / f"{name}-final")["sha"] for name in ("whole", "killed"))
    assert {"/pruner", "/teacher", "/model"} <= {"/" + key.split("/")[1] for key in whole}
    assert whole == killed
