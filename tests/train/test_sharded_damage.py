"""A damaged checkpoint of sharded weights: all processes agree on the one before, or raise the same sentence."""

import json
import socket
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import PrinterCallback

import tiny_models
import tiny_sharded as ranks
from pinscher import PinsTrainer, PruningConfig
from pinscher.errors import InputError
from pinscher.train import checkpoint, sharded, storage

LIMIT = 300  # seconds; processes that wait for each other would wait for ever


def make_trainer(folder):
    head = tiny_models.HEADS["bert"]
    often = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "eval_on_start": True,
        "save_strategy": "steps",
        "save_steps": 3,
    }
    trainer = PinsTrainer(
        model=head.make(hidden_dropout_prob=0.1),
        args=tiny_models.arguments(
            folder, per_device_train_batch_size=2, max_steps=6, ddp_backend="gloo", save_total_limit=2, **often
        ),
        train_dataset=tiny_models.rows(head.kind),
        eval_dataset=tiny_models.rows(head.kind, 8, seed=2),
        data_collator=tiny_models.collator(head.kind),
        pruning=PruningConfig(method="pins", sparsity=0.8, interval=2),
        fsdp=True,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)


def rank_main(rank, port, folder):
    tiny_models.become_rank(rank, port, LIMIT)
    told = {}
    for name in ("whole", "resumed"):
        trainer = make_trainer(folder / "run")
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always", UserWarning)
            trainer.train(True if name == "resumed" else None)
        told[name] = [str(line.message) for line in seen if "checkpoint" in str(line.message)]
        state = {n: sharded.gather(t) for n, t in storage.plain_state(trainer.model).items()}
        if rank == 0:
            checkpoint.save(folder / "ends" / name, model=state)
            flip(sorted((folder / "run" / "checkpoint-6").glob("*.safetensors"))[1])  # the other's part
        dist.barrier()
    if rank == 0:
        flip(sorted((folder / "run" / "checkpoint-3").glob("*.safetensors"))[0])
    dist.barrier()
    with pytest.raises(InputError) as error:
        make_trainer(folder / "run").train(True)
    told["none"] = str(error.value)
    (folder / f"told-{rank}.json").write_text(json.dumps(told))
    ranks.leave()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return ranks.once(tmp_path_factory, "sharded-damage", lambda folder: mp.spawn(rank_main, (port, folder), nprocs=2))


def test_both_go_on_from_the_one_before_and_end_the_same(two_ranks):
    whole, resumed = (checkpoint.load(two_ranks / "ends" / name)["model"] for name in ("whole", "resumed"))
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    first, second = (json.loads((two_ranks / f"told-{rank}.json").read_text()) for rank in (0, 1))
    assert "continuing from checkpoint-3" in " ".join(first["resumed"])
    assert second["resumed"] == []  # one of them says it


def test_both_raise_if_none_is_whole(two_ranks):
    first, second = (json.loads((two_ranks / f"told-{rank}.json").read_text())["none"] for rank in (0, 1))
    assert first == second
    assert "checkpoint-6" in first
