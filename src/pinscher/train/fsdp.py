"""Weights spread over the processes (FSDP2): how a Trainer's model is sharded, saved and restored.

Neither Accelerate nor the Trainer shards on a CPU (they run DDP there without a word), so `fully_shard` is called here,
on every block and on the whole, and the Trainer is told that the model looks after itself. Nothing else of its loop
changes: every process trains on its own batches, and FSDP2 averages the gradients.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers.trainer import TRAINER_STATE_NAME

from pinscher import sharded
from pinscher.errors import InputError
from pinscher.prune import Pruner, PruningConfig, find_sites
from pinscher.prune.gates import Gated
from pinscher.prune.sites import clean_name
from pinscher.train import randomness, states

if TYPE_CHECKING:
    from pinscher.train.trainer import PinsTrainer

_GATE = re.compile(r"\.parametrizations\.(\w+)\.(original$|\d+\.)")


def mesh_over(device: torch.device, replicas: int = 1) -> DeviceMesh:
    """All processes in a row, or replicas by shards. One that was started by itself becomes a group of one."""
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    world = dist.get_world_size()
    if replicas == 1:
        return init_device_mesh(device.type, (world,))
    if world % replicas:
        raise InputError(f"{world} processes do not hold {replicas} copies of the model: start a multiple of that.")
    return init_device_mesh(device.type, (replicas, world // replicas), mesh_dim_names=("replicas", "shards"))


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shards every transformer block by itself, so that one at a time is gathered, and the rest with the whole."""
    modules = {clean_name(name): module for name, module in model.named_modules()}
    for block in dict.fromkeys(site.block for site in find_sites(model)):
        if block:
            fully_shard(modules[block], mesh=mesh)
    fully_shard(model, mesh=mesh)
    plain = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    assert not plain, f"{plain[0]} is not sharded"


def shard_and_prune(model: nn.Module, mesh: DeviceMesh, config: PruningConfig | None) -> Pruner | None:
    """Shards a model and makes its pruner: learned masks first, for they are sharded too; anything else afterwards."""
    try:
        if config is not None and isinstance(config.make_criterion(), Gated):
            pruner = Pruner(model, config)
            shard(model, mesh)
            return pruner
        shard(model, mesh)
        return None if config is None else Pruner(model, config)
    except ValueError as error:  # a pattern that the shards would cut
        raise InputError(str(error)) from None


def plain_state(model: nn.Module) -> dict[str, Tensor]:
    """A finished model's tensors under an ordinary model's names: the gates stay in a sharded one, and are open."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    found = {}
    for name, tensor in model.state_dict().items():
        gate = _GATE.search(name)
        if gate is not None and gate[2] != "original":
            continue
        name = _GATE.sub(r".\1", name)
        if name not in tied:  # tied again when it is loaded
            found[name] = tensor
    return found


def write_model(model: Any, state: dict[str, Tensor], folder: Path) -> None:
    """Writes an ordinary model folder into one that `sharded.whole` gave; every process must call it."""
    sharded.write_weights(state, folder)
    if dist.get_rank() == 0:
        model.config.architectures = [_plain_name(model)]
        model.config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)


def save_model(trainer: PinsTrainer, folder: Path) -> None:
    """An ordinary model of a run that has ended, with its tokenizer, beside what else is in the folder.

    Every process must call it.
    """
    if trainer.args.should_save:
        folder.mkdir(parents=True, exist_ok=True)
    write_model(trainer.student, plain_state(trainer.student), folder)
    if trainer.processing_class is not None and trainer.args.should_save:
        trainer.processing_class.save_pretrained(str(folder))


def save_weights(trainer: PinsTrainer, folder: Path) -> None:
    """The weights as they are now, under an ordinary model's names, for `load_weights`."""
    pruner = trainer.pruner
    sharded.save(folder, model=plain_state(trainer.student) if pruner is None else pruner.model_state_dict())


def save_checkpoint(trainer: PinsTrainer, folder: Path) -> None:
    """Everything that a resumed run needs, on any number of processes; every process must call it."""
    rng = randomness.gathered(trainer.accelerator)
    weights = trainer.student.state_dict()
    with sharded.whole(folder) as fresh:
        sharded.write(fresh, model=weights, rng=rng, **states.states_of(trainer))
        if dist.get_rank() == 0:
            trainer.state.save_to_json(str(fresh / TRAINER_STATE_NAME))


def load_checkpoint(trainer: PinsTrainer, folder: Path) -> list[dict[str, Any]]:
    """Restores it, and returns the states of the random number generators."""
    state = sharded.load(folder, trainer.student)
    trainer.student.load_state_dict(state["model"])
    states.restore_(trainer, state)
    rng: list[dict[str, Any]] = state["rng"]
    return rng


@torch.no_grad()
def load_weights(model: nn.Module, folder: Path) -> None:
    """Loads the weights that were the best into a finished model."""
    saved = sharded.load(folder, model)["model"]
    for name, tensor in plain_state(model).items():
        tensor.copy_(saved[name])


def _plain_name(model: Any) -> str:
    """The class of a model before fully_shard made a subclass of it."""
    return type(model).__name__.removeprefix("FSDP")
