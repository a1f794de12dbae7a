"""Saves and loads a model in training: whole, or sharded over the processes.

    storage = storage.of(sharded, writes)
    storage.save_checkpoint(folder, student, states, also)
    states = storage.load_checkpoint(folder, student)

Every process calls every method; the storage knows which of them write. Each folder is written completely or not at
all, without pickle. The formats are those of `checkpoint` and `sharded`; a final model is an ordinary Hugging Face
folder.
"""

from __future__ import annotations

import dataclasses
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from pinscher import files
from pinscher.errors import InputError, first_line
from pinscher.prune import Pruner
from pinscher.prune.adapters import plain_name
from pinscher.runfolder import checkpoints
from pinscher.train import checkpoint, checksums, sharded
from pinscher.train.checksums import DamagedError

_GATE = re.compile(r"\.parametrizations\.(\w+)\.(original$|\d+\.)")


@dataclass(frozen=True)
class Student:
    """What is stored: a model, its pruner while it is being pruned, its tokenizer if it has one."""

    model: Any
    pruner: Pruner | None = None
    tokenizer: Any = None


class Storage(ABC):
    """Reads and writes the checkpoints of one run."""

    @property
    @abstractmethod
    def writes(self) -> bool:
        """Whether this process writes what is not sharded."""

    # ------------------------------------------------------------ states alone

    @abstractmethod
    def save_states(self, folder: Path, **states: Any) -> None:
        """Stores nested plain data and tensors."""

    @abstractmethod
    def load_states(self, folder: Path, model: nn.Module) -> dict[str, Any]:
        """Reads what `save_states` stored, for a model of the same sharding or another."""

    # ------------------------------------------------------------ checkpoints

    @abstractmethod
    def save_checkpoint(
        self, folder: Path, student: Student, states: dict[str, Any], also: Callable[[Path], None]
    ) -> None:
        """Stores the weights and the states; `also` adds further files to the folder, on one process."""

    @abstractmethod
    def load_checkpoint(self, folder: Path, student: Student) -> dict[str, Any]:
        """Restores the weights and returns the states. The pruner restores gated weights from its own state.

        The caller has verified the folder with `check`.
        """

    def remove_old(self, run: Path, keep: int, now: int) -> None:
        """Removes all but the newest checkpoints of a run, up to its current step. Later ones are damaged, and will be
        replaced.
        """
        if self.writes:
            found = {step: path for step, path in checkpoints(run).items() if step <= now}
            for step in sorted(found)[:-keep]:
                files.remove(found[step])

    # ------------------------------------------------------------ weights alone

    @abstractmethod
    def save_weights(self, folder: Path, student: Student) -> None:
        """Stores the weights that the model has at test time, for `load_weights`."""

    @abstractmethod
    def load_weights(self, folder: Path, student: Student) -> None:
        """Loads weights that `save_weights` stored."""

    # ------------------------------------------------------------ the model

    @abstractmethod
    def write_model(self, folder: Path, student: Student) -> None:
        """Writes an ordinary model into a folder, which may hold other files."""

    @abstractmethod
    def save_model(self, folder: Path, student: Student) -> None:
        """Writes an ordinary model folder, whole or not at all."""


def check(folder: Path) -> None:
    """Verifies that a checkpoint can be loaded, without loading it. One process does so for all.

    Raises:
        DamagedError: with the file and what is wrong with it.
    """
    checksums.verify(folder)
    _check_trainer_state(folder / TRAINER_STATE_NAME)
    values, wanted = folder / checkpoint.VALUES, checkpoint.FORMAT
    if sharded.is_there(folder):
        values, wanted = folder / sharded.VALUES, sharded.FORMAT
    try:
        checkpoint.read_values(values, wanted)
    except FileNotFoundError:
        raise DamagedError(f"{values} is missing") from None
    if values.name == checkpoint.VALUES and not (folder / checkpoint.TENSORS).exists():
        raise DamagedError(f"{folder / checkpoint.TENSORS} is missing")
    _check_tensors(folder)


def check_weights(folder: Path, beside: Path) -> None:
    """The same for weights alone; they have checksums if the checkpoint `beside` them has."""
    folder = files.last_whole(folder)
    if not folder.is_dir():
        raise DamagedError(f"{folder} is missing")
    if (beside / checksums.NAME).exists() and not (folder / checksums.NAME).exists():
        raise DamagedError(f"{folder / checksums.NAME} is missing")
    checksums.verify(folder)
    _check_tensors(folder)


def _check_tensors(folder: Path) -> None:
    """Reads the headers, which say how long the files must be."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt"):
                pass
        except SafetensorError as error:
            raise DamagedError(f"{path} is damaged: {first_line(error)}") from None


def _check_trainer_state(path: Path) -> None:
    """The Trainer reads this file by itself, and would take anything that is JSON."""
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise DamagedError(f"{path} is missing") from None
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path} is damaged: {first_line(error)}") from None
    kinds = {field.name: getattr(TrainerState(), field.name) for field in dataclasses.fields(TrainerState)}
    if not isinstance(found, dict) or not isinstance(found.get("global_step"), int):
        raise DamagedError(f"{path} is damaged: it does not say at which step it was written")
    for name, value in found.items():
        usual = kinds.get(name)
        kind = (int, float) if type(usual) in (int, float) else type(usual)
        if name not in kinds or (usual is not None and not isinstance(value, kind)):
            raise DamagedError(f"{path} is damaged: {name} cannot be {value!r:.40}")


def newest_whole(run: Path) -> tuple[Path | None, list[str]]:
    """The newest loadable checkpoint of a run, and what is wrong with the newer ones; None if there is no checkpoint
    yet.

    Raises:
        InputError: if it has some, but none that can be loaded.
    """
    damages: list[str] = []
    for _, path in sorted(checkpoints(run).items(), reverse=True):
        try:
            check(path)
            return path, damages
        except ValueError as damage:  # of another format, too
            damages.append(str(damage))
    if damages:
        others = f", nor do the {len(damages) - 1} before it" * (len(damages) > 1)
        raise InputError(
            f"the newest checkpoint does not load{others}: {damages[0].rstrip('.')}. Put the files back from a copy, "
            "or start again with --overwrite."
        )
    return None, []


def of(is_sharded: bool, writes: bool) -> Storage:
    """The storage for a model; `writes` is for a whole one: whether this process writes."""
    return Sharded() if is_sharded else Whole(writes)


class Whole(Storage):
    """Every process holds the whole model, and one writes it. A checkpoint is a model folder with further files."""

    def __init__(self, writes: bool) -> None:
        self._writes = writes

    @property
    def writes(self) -> bool:
        return self._writes

    def save_states(self, folder: Path, **states: Any) -> None:
        if self.writes:
            checkpoint.save(folder, **states)

    def load_states(self, folder: Path, model: nn.Module) -> dict[str, Any]:
        return checkpoint.load(folder)

    def save_checkpoint(
        self, folder: Path, student: Student, states: dict[str, Any], also: Callable[[Path], None]
    ) -> None:
        if self.writes:
            with files.whole(folder) as fresh:
                _write(student, fresh, original_names=False)
                also(fresh)
                checkpoint.write(fresh, **states)
                checksums.write(fresh)

    def load_checkpoint(self, folder: Path, student: Student) -> dict[str, Any]:
        self._load_weights(folder, student)
        return checkpoint.load(folder, verified=True)

    def save_weights(self, folder: Path, student: Student) -> None:
        if self.writes:
            with files.whole(folder) as fresh:
                _write(student, fresh, original_names=False)
                checksums.write(fresh)

    def load_weights(self, folder: Path, student: Student) -> None:
        folder = files.last_whole(folder)
        checksums.verify(folder)
        self._load_weights(folder, student)

    @torch.no_grad()
    def _load_weights(self, folder: Path, student: Student) -> None:
        saved: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            if file.name != checkpoint.TENSORS:
                saved |= checkpoint.read_tensors(file)
        here = student.model.state_dict(keep_vars=True)
        if student.pruner is not None and student.pruner.adapted and not student.pruner.finished:
            here = {name: t for long, t in here.items() if (name := plain_name(long)) is not None}
        for name, tensor in saved.items():
            if name in here:
                if here[name].shape != tensor.shape:
                    raise InputError(
                        f"the checkpoint in {folder} has a {name} of {tuple(tensor.shape)} instead of "
                        f"{tuple(here[name].shape)}: it is another model's."
                    )
                here[name].copy_(tensor)
        loaded = {id(here[name]) for name in saved if name in here}  # tied weights are saved once
        missing = [n for n, t in here.items() if id(t) not in loaded and ".parametrizations." not in n]
        if missing:
            raise InputError(f"the checkpoint in {folder} has no {missing[0]}: it is another model's.")

    def write_model(self, folder: Path, student: Student) -> None:
        if self.writes:
            _write(student, folder)

    def save_model(self, folder: Path, student: Student) -> None:
        if self.writes:
            with files.whole(folder) as fresh:
                _write(student, fresh)


def _write(student: Student, folder: Path, original_names: bool = True) -> None:
    """Writes an ordinary model folder, whatever the method. The files of some models name weights differently from
    their modules; without `original_names`, the names are those of the modules, which `load_weights` needs.
    """
    model, pruner = student.model, student.pruner
    state = model.state_dict() if pruner is None else pruner.model_state_dict()
    plain(model).save_pretrained(str(folder), state_dict=state, save_original_format=original_names)
    if student.tokenizer is not None:
        student.tokenizer.save_pretrained(str(folder))


class Sharded(Storage):
    """Every process holds a part of each weight (FSDP2), writes it to its own file, and reads the part it needs."""

    @property
    def writes(self) -> bool:
        return dist.get_rank() == 0

    def save_states(self, folder: Path, **states: Any) -> None:
        sharded.save(folder, **states)

    def load_states(self, folder: Path, model: nn.Module) -> dict[str, Any]:
        return sharded.load(folder, model)

    def save_checkpoint(
        self, folder: Path, student: Student, states: dict[str, Any], also: Callable[[Path], None]
    ) -> None:
        weights = student.model.state_dict()
        with sharded.whole(folder, checked=True) as fresh:
            sharded.write(fresh, model=weights, **states)
            if self.writes:
                also(fresh)

    def load_checkpoint(self, folder: Path, student: Student) -> dict[str, Any]:
        states = sharded.load(folder, student.model, verified=True)
        student.model.load_state_dict(states.pop("model"))
        return states

    def save_weights(self, folder: Path, student: Student) -> None:
        pruner = student.pruner
        sharded.save(folder, model=plain_state(student.model) if pruner is None else pruner.model_state_dict())

    @torch.no_grad()
    def load_weights(self, folder: Path, student: Student) -> None:
        saved = sharded.load(folder, student.model)["model"]
        for name, tensor in plain_state(student.model).items():
            tensor.copy_(saved[name])

    def write_model(self, folder: Path, student: Student) -> None:
        """The model must be finished: its gates are open."""
        if self.writes:
            folder.mkdir(parents=True, exist_ok=True)
        model = student.model
        sharded.write_weights(plain_state(model), folder)
        if not self.writes:
            return
        model.config.architectures = [type(model).__name__.removeprefix("FSDP")]  # fully_shard makes a subclass
        model.config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        if hasattr(model, "write_beside"):  # the files of sentence-transformers
            model.write_beside(folder)
        if student.tokenizer is not None:
            student.tokenizer.save_pretrained(str(folder))

    def save_model(self, folder: Path, student: Student) -> None:
        with sharded.whole(folder) as fresh:
            self.write_model(fresh, student)


def plain(model: Any) -> Any:
    """The transformers model inside a peft model; any other as it is."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def plain_state(model: nn.Module) -> dict[str, Tensor]:
    """A finished model's tensors under ordinary names; a sharded model keeps its gates, which are open."""
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
