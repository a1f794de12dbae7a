"""What each rank does in the tests of sharded weights: it trains the tiny model under FSDP2, on gloo.

Every rank is fed the same batch, so that the mean of the gradients is the gradient of one process, to the last bit: the
sum of two or four equal numbers, divided by as many, is exact.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from filelock import FileLock
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, _dispatch, _redistribute

import tiny
from pinscher import Pruner, Teacher
from pinscher.prune.calibrated import Calibrated
from pinscher.prune.criteria import CRITERIA
from pinscher.prune.gates import Gated, Pst
from pinscher.prune.once import prune_once
from pinscher.train import checkpoint, sharded

STEPS, SAVED = 8, 5  # saved within an interval, so that half-finished windows are resumed too
WIDTH = 6  # rows of 12 and 6: of four ranks the last holds nothing of the latter
WORLDS = {"1": (1,), "2": (2,), "4": (4,), "2x2": (2, 2)}  # the last is HSDP: replicas by shards

# Every method of the registry that can be used with sharded weights, by itself and in company.
SHARDABLE = [name for name in CRITERIA if not issubclass(CRITERIA[name], Calibrated | Pst)]
RUNS: dict[str, dict[str, Any]] = {name: {"method": name} for name in SHARDABLE}
RUNS["obert"]["options"] = {"block": 6, "gradients": 4}
RUNS["snip"]["options"] = {"batches": 3}
RUNS |= {
    "matrix": {"scope": "matrix"},
    "layer": {"scope": "layer", "hold": "always"},
    "kind": {"method": "movement", "scope": "kind"},
    "1:2": {"pattern": "1:2", "sparsity": 0.5},
    "1x3": {"pattern": "1x3"},
    "rows": {"pattern": "rows", "method": "platon"},
    "movement-1:2": {"method": "movement", "pattern": "1:2", "sparsity": 0.5},
    "no-regrow": {"regrow": False},
    "float32": {},  # native code, where it was built
    "bfloat16": {"method": "platon", "state_dtype": "bfloat16"},
    "counted": {"track_revived": True, "options": {"score": "signed", "smoothing": "none"}},
}
RESUMED = ("pins", "movement", "obert", "magnitude", "smvp", "ties")  # saved on two ranks


def config(name: str) -> Any:
    settings = {"interval": 2, "sparsity": 0.7, **RUNS.get(name, {})}
    return tiny.config(steps=STEPS, **settings)


TAUGHT = (*RESUMED, "rows", "float32")  # with a teacher; a second forward pass in every step takes its time


def dtype(name: str) -> torch.dtype:
    return torch.float32 if name in ("float32", "bfloat16") else torch.float64


def make_net(name: str = "") -> nn.Module:
    torch.manual_seed(0)
    return tiny.Net(width=WIDTH, blocks=2).to(dtype(name))


def shard(net: nn.Module, mesh: Any) -> None:
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)


def start(name: str, mesh: Any = None) -> tuple[nn.Module, Pruner, torch.optim.Optimizer, Teacher]:
    """Model, pruner, optimiser and teacher in the order that the method needs; plain ones without a mesh."""
    net, gated = make_net(name), issubclass(CRITERIA[config(name).method], Gated)
    if gated:
        pruner = Pruner(net, config(name))
    if mesh is not None:
        shard(net, mesh)
    if not gated:
        with nothing_is_gathered():
            pruner = Pruner(net, config(name))
    optimizer = torch.optim.AdamW(pruner.param_groups(), lr=3e-3)
    pruner.attach(optimizer)
    objective = "self-regularization" if name in TAUGHT else "empirical-risk"
    return net, pruner, optimizer, Teacher(net, objective, kind="classes")


def steps(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    teacher: Teacher,
    first: int = 0,
    last: int = STEPS,
    rows: slice = slice(None),
    ties: bool = False,
) -> None:
    x, y = tiny.task(64, dtype=net.head.weight.dtype)
    torch.manual_seed(first)  # l0 draws its gates
    for t in range(first, last):
        if t % 3 == 0 and teacher.snapshot is not None:
            with torch.no_grad():
                net(x)  # an evaluation leaves the root's parameters gathered
            teacher.consider(float(t))
        optimizer.zero_grad()
        outputs = net(x[rows])
        loss = torch.nn.functional.cross_entropy(outputs["logits"], y[rows])
        (loss + teacher.loss({"x": x[rows], "labels": y[rows]}, outputs)).backward()
        if ties:  # many equal scores, so that the threshold alone does not say which stay
            for parameter in net.parameters():
                parameter.grad = None if parameter.grad is None else torch.zeros_like(parameter.grad)
        with nothing_is_gathered():
            optimizer.step()


@contextlib.contextmanager
def nothing_is_gathered() -> Iterator[None]:
    """Makes everything raise by which a whole parameter could come about on a rank."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a sharded tensor is gathered")

    places: list[tuple[Any, str]] = [
        (DTensor, "full_tensor"),
        (DTensor, "redistribute"),
        (_dispatch, "redistribute_local_tensor"),
        (_redistribute, "redistribute_local_tensor"),
        (dist, "all_gather"),
        (dist, "all_gather_into_tensor"),
    ]
    before = [getattr(owner, name) for owner, name in places]
    try:
        for owner, name in places:
            setattr(owner, name, refuse)
        yield
    finally:
        for (owner, name), kept in zip(places, before, strict=True):
            setattr(owner, name, kept)


def outcome(pruner: Pruner, teacher: Teacher | None = None) -> dict[str, Any]:
    """What a run came to, whole; None's on other ranks than the first."""
    whole: Callable[[Tensor], Any] = sharded.gather if dist.is_initialized() else lambda tensor: tensor
    with nothing_is_gathered():
        pruner.finish()
        masks = {site.name: pruner.mask(site.name) for site in pruner.sites}
        model = pruner.model_state_dict()
    found = {
        "masks": {name: whole(mask) for name, mask in masks.items()},
        "model": {name: whole(tensor) for name, tensor in model.items()},
        "stats": pruner.stats() | {"projection": pruner.projection and pruner.projection.changed},
        "zeros": [site.zeros() for site in pruner.sites],
        "teacher": {},
    }
    if teacher is not None and teacher.snapshot is not None:
        state = teacher.snapshot.state_dict()
        plain = state["plain"] | {n: teacher.snapshot.packed[n].expand() for n in state["packed"]}
        found["teacher"] |= {name: whole(plain[name]) for name in sorted(plain)}
    return found


def check_parts(net: nn.Module, pruner: Pruner, shards: int) -> None:
    """Parameters are DTensors, and what this rank holds of them, and of the scores, is its share."""
    assert all(isinstance(parameter, DTensor) for parameter in net.parameters())
    assert pruner.sharded
    for site in pruner.sites:
        rows = -(-site.shape[0] // shards)
        assert site.part[0] <= rows
        assert site.weight.numel() == site.part.numel() <= rows * site.shape[1]
        for values in [*site.state.values(), *pruner.ranking.pruned.values()]:
            assert not isinstance(values, DTensor)
        for values in site.state.values():
            assert not values.is_floating_point() or values.shape[-1] == site.weight.numel()


# ------------------------------------------------------------ the ranks


def compare(mesh: Any, folder: Path) -> None:
    """Every run to its end."""
    for name in RUNS:
        net, pruner, optimizer, teacher = start(name, mesh)
        check_parts(net, pruner, mesh.size(mesh.ndim - 1))
        steps(net, optimizer, teacher)
        found = outcome(pruner, teacher)
        if dist.get_rank() == 0:
            checkpoint.save(folder / name.replace(":", "of"), **found)


def states(net: nn.Module, pruner: Pruner, optimizer: torch.optim.Optimizer, teacher: Teacher) -> dict[str, Any]:
    return {
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "pruner": pruner.state_dict(),
        "teacher": teacher.state_dict(),
    }


def save(mesh: Any, folder: Path) -> None:
    for name in RESUMED:
        net, pruner, optimizer, teacher = start(name, mesh)
        steps(net, optimizer, teacher, 0, SAVED, ties=name == "ties")
        sharded.save(folder / "saved" / name, **states(net, pruner, optimizer, teacher))


def resume(mesh: Any, folder: Path) -> None:
    for name in RESUMED:
        net, pruner, optimizer, teacher = start(name, mesh)
        state = sharded.load(folder.parent / "saved" / name, net)
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        pruner.load_state_dict(state["pruner"])
        teacher.load_state_dict(state["teacher"])
        steps(net, optimizer, teacher, SAVED, ties=name == "ties")
        found = outcome(pruner, teacher)
        if dist.get_rank() == 0:
            checkpoint.save(folder / "resumed" / name, **found)


def refuse(mesh: Any, folder: Path) -> None:
    """What cannot be done, and what is said to it."""
    said = {}
    for name, mistake in MISTAKES.items():
        try:
            mistake(mesh)
        except ValueError as error:
            said[name] = str(error)
    if dist.get_rank() == 0:
        (folder / "said.json").write_text(json.dumps(said))


def _prune_sharded(mesh: Any, **settings: Any) -> Pruner:
    net = make_net()
    shard(net, mesh)
    return Pruner(net, tiny.config(**settings))


def _shard_too_late(mesh: Any, method: str = "pins") -> None:
    net = make_net()
    pruner = Pruner(net, tiny.config(method))
    shard(net, mesh)
    pruner.attach(torch.optim.AdamW(pruner.param_groups(), lr=1e-3))


def _shard_columns(mesh: Any) -> None:
    net = make_net()
    fully_shard(net, mesh=mesh, shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else Shard(0))
    Pruner(net, tiny.config())


def _shard_one_block(mesh: Any) -> None:
    net = make_net()
    fully_shard(net.blocks[0], mesh=mesh)
    Pruner(net, tiny.config())


def _load_whole(mesh: Any) -> None:
    sharded.load("nowhere", make_net())


def _once(mesh: Any) -> None:
    net = make_net()
    shard(net, mesh)
    prune_once(net, "obert", batches=tiny.batches(torch.float64), loss=lambda outputs: outputs["logits"].sum(), block=6)


MISTAKES: dict[str, Callable[[Any], Any]] = {
    "wanda": partial(_prune_sharded, method="wanda"),
    "sparsegpt": partial(_prune_sharded, method="sparsegpt"),
    "pst": partial(_prune_sharded, method="pst"),
    "pst, late": partial(_shard_too_late, method="pst"),
    "movement": partial(_prune_sharded, method="movement"),
    "late": _shard_too_late,
    "columns": partial(_prune_sharded, pattern="columns"),
    "2x1": partial(_prune_sharded, pattern="2x1"),
    "obert": partial(_prune_sharded, method="obert"),
    "Shard(1)": _shard_columns,
    "in part": _shard_one_block,
    "load": _load_whole,
    "once": _once,
}


def first(mesh: Any, folder: Path) -> None:
    """What two ranks do: one start of the processes for all of it, for that takes longer than the training."""
    compare(mesh, folder / "2")
    save(mesh, folder)
    refuse(mesh, folder)


def others(mesh: Any, folder: Path) -> None:
    """What other numbers of ranks do."""
    compare(mesh, folder)
    resume(mesh, folder)


def leave() -> None:
    """Ends this rank, when all have come so far.

    Not by the interpreter's own end: if a thread of Gloo still holds a tensor then, the process is aborted
    (pytorch/pytorch#179291).
    """
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


def main(rank: int, shape: tuple[int, ...], port: int, folder: str, job: Callable[[Any, Path], None]) -> None:
    torch.set_num_threads(1)
    size = torch.Size(shape).numel()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    job(mesh, Path(folder))
    leave()


def launch(shape: tuple[int, ...], folder: Path, job: Callable[[Any, Path], None]) -> None:
    """Runs job(mesh, folder) on as many gloo ranks as the mesh has places."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder.mkdir(parents=True, exist_ok=True)
    mp.spawn(main, (shape, port, str(folder), job), nprocs=torch.Size(shape).numel())


def once(tmp_path_factory: Any, name: str, make: Callable[[Path], Any]) -> Path:
    """A folder that make(folder) fills, once for all of pytest's workers: starting processes takes long."""
    root = tmp_path_factory.getbasetemp()
    folder: Path = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / name
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not (folder / "made").exists():
            make(folder)
            (folder / "made").touch()
    return folder
