"""DDP on two gloo ranks: the same masks on both, and the same as one process fed the same gradients."""

import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

import tiny
import tiny_sharded
from pinscher import Pruner, Teacher
from pinscher.train import checkpoint

STEPS = 30


def train(net, model, pruner, x, y):
    optimizer = torch.optim.AdamW(pruner.param_groups(), lr=3e-3)
    pruner.attach(optimizer)
    teacher = Teacher(model, kind="classes")
    for t in range(STEPS):
        if t % 10 == 0:
            teacher.consider(float(t))
        optimizer.zero_grad()
        outputs = model(x)
        loss = torch.nn.functional.cross_entropy(outputs["logits"], y)
        (loss + teacher.loss({"x": x, "labels": y}, outputs)).backward()
        optimizer.step()
    pruner.finish()
    return {"masks": {s.name: pruner.mask(s.name) for s in pruner.sites}, "model": net.state_dict()}


def rank_main(rank, port, method, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    net = tiny.Net().double()
    pruner = Pruner(net, tiny.config(method, steps=STEPS, interval=5))
    torch.manual_seed(rank if method == "l0" else 0)
    model = DistributedDataParallel(net)
    x, y = tiny.task(dtype=torch.float64)
    half = slice(rank * 128, (rank + 1) * 128)
    checkpoint.save(f"{folder}/rank{rank}", **train(net, model, pruner, x[half], y[half]))
    tiny_sharded.leave()


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("method", ["pins", "platon", "sensitivity", "magnitude", "movement", "smvp", "l0", "pst"])
def test_two_ranks_make_the_masks_of_one_process(method, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(rank_main, (port, method, str(tmp_path)), nprocs=2)
    ranks = [checkpoint.load(tmp_path / f"rank{i}") for i in range(2)]
    assert same(ranks[0]["masks"], ranks[1]["masks"])
    assert same(ranks[0]["model"], ranks[1]["model"])

    if method == "l0":  # each rank draws its own random gates, so one process is another run
        return
    torch.manual_seed(0)
    net = tiny.Net().double()
    pruner = Pruner(net, tiny.config(method, steps=STEPS, interval=5))
    alone = train(net, net, pruner, *tiny.task(dtype=torch.float64))
    assert same(ranks[0]["masks"], alone["masks"])
    for name, tensor in alone["model"].items():
        torch.testing.assert_close(ranks[0]["model"][name], tensor, rtol=1e-6, atol=1e-9)
