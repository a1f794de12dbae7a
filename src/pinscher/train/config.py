"""RunConfig: one run as a plain value. Every field is a flag of `pinscher prune` and a key of its YAML file.

It is composed of small configs, each of which declares its settings once: their help text, their default and the
values they take. A new setting is one field here, or in `DataConfig`, `PruningSettings` or `TeacherConfig`, and
the code that uses it.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pinscher import settings
from pinscher.errors import InputError
from pinscher.prune import CRITERIA, PruningConfig, TeacherConfig
from pinscher.prune.config import INTERVAL, PruningSettings, make_criterion
from pinscher.prune.once import prunes_once
from pinscher.prune.patterns import UNSTRUCTURED, parse
from pinscher.prune.teacher import DISTILLATION, EMPIRICAL_RISK
from pinscher.registry import did_you_mean
from pinscher.settings import COUNT, FRACTION, MOST, NOT_NEGATIVE, POSITIVE, RATE, SEED, STEPS, Names, setting
from pinscher.train.subject import DataConfig, Subject

DENSE = "dense"
SELECTIONS = ("final", "best")
BUDGETS = ("quick", "standard", "thorough")


@dataclass(frozen=True)
class RunPruning(PruningSettings):
    """How the model is pruned."""

    lora_rank: int | None = setting(
        None, "Train low-rank adapters of this rank (LoRA) instead of the weights.", group="Pruning", takes=COUNT
    )
    lora_alpha: float | None = setting(
        None, "Adapters are scaled by alpha / rank; by default twice the rank.", group="Pruning", takes=POSITIVE
    )
    option: dict[str, Any] = setting({}, "An option of the method, as NAME=VALUE; may be repeated.", group="Pruning")


@dataclass(frozen=True)
class TrainingConfig:
    """How the model is trained."""

    epochs: float | None = setting(
        None,
        "Passes over the training rows; by default 30,000 examples, in 3 to 15 passes.",
        group="Training",
        takes=dataclasses.replace(POSITIVE, most=1e6),
    )
    max_steps: int | None = setting(
        None,
        "Optimiser steps, instead of epochs; 0 prunes without training (wanda, sparsegpt, …).",
        group="Training",
        takes=dataclasses.replace(NOT_NEGATIVE, words="must be positive, or 0 to prune without training;"),
    )
    batch_size: int = setting(32, "Examples in a batch, on each process.", group="Training", takes=COUNT)
    gradient_accumulation: int = setting(1, "Batches in an optimiser step.", group="Training", takes=COUNT)
    eval_batch_size: int = setting(64, "Examples in a batch when evaluating.", group="Training", takes=COUNT)
    learning_rate: float | None = setting(
        None,
        "Peak learning rate of AdamW; by default 5e-5, for text and small models 1e-4; more after a dense start.",
        group="Training",
        takes=RATE,
    )
    lr_warmup: float = setting(
        0.06,
        "Steps in which the learning rate rises; below 1, a fraction of all steps.",
        group="Training",
        takes=STEPS,
    )
    lr_rewinds: int = setting(
        0,
        "Number of times the learning rate returns to its peak while the model is pruned.",
        group="Training",
        takes=dataclasses.replace(NOT_NEGATIVE, most=1e4),
    )
    average: bool = setting(False, "Average the weights over the cool-down.", group="Training")
    dropout: float | None = setting(
        None,
        "Dropout while training, 0 for none; by default the model's own (texts without labels: none).",
        group="Training",
        takes=FRACTION,
    )
    weight_decay: float = setting(
        0.0, "Weight decay of AdamW.", group="Training", takes=dataclasses.replace(NOT_NEGATIVE, most=1e3)
    )
    max_grad_norm: float = setting(
        1.0, "Clip gradients to this norm; 0 does not clip.", group="Training", takes=NOT_NEGATIVE
    )
    label_smoothing: float | None = setting(
        None, "Label smoothing, from 0 to below 1; by default 0 (text: 0.1).", group="Training", takes=FRACTION
    )
    eval_every: int | None = setting(
        None, "Steps between two evaluations; by default a thirtieth of the run.", group="Training", takes=COUNT
    )
    save_every: int | None = setting(
        None, "Steps between two checkpoints; by default a tenth of the run.", group="Training", takes=COUNT
    )
    group_by_length: bool = setting(True, "Batch texts of similar length, for less padding.", group="Training")
    bf16: bool = setting(
        False, "Compute in bfloat16, with weights in fp32: about twice as fast on CPUs with AMX.", group="Training"
    )
    compile: bool = setting(False, "Use torch.compile.", group="Training")
    fsdp: bool = setting(False, "Shard the weights over the processes that torchrun starts (FSDP2).", group="Training")
    fsdp_replicas: int = setting(
        1,
        "With --fsdp: copies of the model, each sharded over its share of the processes (HSDP).",
        group="Training",
        takes=COUNT,
    )
    new_head: bool = setting(False, "Replace a head that has another number of labels.", group="Training")
    report_to: list[str] = setting(
        [], "Also log to tensorboard, wandb, mlflow, … as the Trainer does.", group="Training"
    )


@dataclass(frozen=True)
class RunTeacher(TeacherConfig):
    """The teacher of the model."""

    teacher: str | None = setting(
        None, "Teacher of knowledge distillation; by default a dense run is made first.", group="Training"
    )


@dataclass(frozen=True)
class RunConfig(RunTeacher, TrainingConfig, DataConfig, RunPruning, Subject):
    """What to fine-prune, on what, how far. Fields that are None are chosen when the data is known."""

    output: str | None = setting(None, "Folder of the run; by default runs/TASK-METHOD-SPARSITY.", group="Run")
    overwrite: bool = setting(False, "Replace the run that is in the output folder.", group="Run")
    recipe: str | None = setting(
        None,
        "Named settings: best/…, or a cell of the paper such as paper/rte-80; list shows all, none switches them off.",
        group="Run",
    )
    budget: str | None = setting(
        None,
        "Time for the run: quick, standard or thorough, about 1, 3 and 10 times a dense fine-tuning.",
        group="Run",
        takes=Names(BUDGETS),
    )
    target_size: str | None = setting(
        None, "Choose the sparsity for a file of this size, for example 20MB.", group="Run"
    )
    export: bool = setting(True, "Also store the result in a small file, in RUN/export.", group="Run")
    dense_start: bool = setting(
        False,
        "Fine-tune densely first, then prune that model; with --teacher, prune the teacher.",
        group="Run",
    )
    dense_steps: int | None = setting(
        None,
        "Optimiser steps of the dense run that comes first; by default as many as for pruning, or by the budget.",
        group="Run",
        takes=COUNT,
    )
    dense_learning_rate: float | None = setting(
        None,
        "Peak learning rate of the dense run that comes first; by default as for a dense run alone.",
        group="Run",
        takes=RATE,
    )
    baseline: bool = setting(False, "Also fine-tune densely with the same settings, and compare.", group="Run")
    seed: int = setting(42, "Random seed.", group="Run", takes=SEED)
    select: str = setting(
        "final",
        "Which model is the result: the final one, or the best at the target sparsity.",
        group="Run",
        takes=Names(SELECTIONS),
    )

    def __post_init__(self) -> None:
        settings.check(self, flags=True, also={"method": (DENSE,)})
        for name in ("target_modules", "exclude_modules"):  # a run's settings are plain data
            value = getattr(self, name)
            object.__setattr__(self, name, [value] if isinstance(value, str) else list(value or ()))
        self._check_training()
        if not self.is_dense:
            self._check_pruning()
        if self.fsdp:
            self._check_shards()
        if self.select == "best" and self.method != DENSE and CRITERIA[self.method].learns_masks:
            raise InputError(
                f"method {self.method!r} learns its masks and is exact only at the end: use --select final."
            )
        if self.teacher is not None and not self.distils:
            raise InputError(f"--teacher is for --objective {DISTILLATION}.")

    def _check_training(self) -> None:
        """Refuses settings that do not go together, or not with the method."""
        self.check_mix()
        if self.average and not self.is_dense:
            self._check_average()
        if self.fsdp_replicas > 1 and not self.fsdp:
            raise InputError(f"--fsdp-replicas {self.fsdp_replicas} goes with --fsdp.")
        if self.max_steps == 0 and not self.is_dense and not prunes_once(self.method):
            able = ", ".join(name for name in CRITERIA if prunes_once(name))
            raise InputError(f"method {self.method!r} measures while it trains: --max-steps 0 goes with {able}.")
        if self.lora_alpha is not None and self.lora_rank is None:
            raise InputError(f"--lora-alpha {self.lora_alpha:g} goes with --lora-rank.")
        if self.lora_rank is not None and self.max_steps == 0:
            raise InputError("--lora-rank trains adapters: it needs steps, not --max-steps 0.")

    def _check_average(self) -> None:
        for wrong, what in (
            (CRITERIA[self.method].learns_masks, f"--method {self.method}, whose masks are learned to the end"),
            (self.lora_rank is not None, "--lora-rank: adapters are merged at the end"),
            (self.select == "best", "--select best: choose one of the two"),
        ):
            if wrong:
                raise InputError(f"--average does not go with {what}.")

    def _check_pruning(self) -> None:
        """Checks the method's options, the pattern, and whether the schedule fits any number of steps."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the pruner warns, when there is one
            if self.target_size is None:
                self.pruning(MOST if self.max_steps != 0 else 0)
                return
            try:  # the sparsity is chosen later
                parse(self.pattern)
                make_criterion(self.method, self.option)
            except ValueError as error:
                raise _sentence(error) from None

    def _check_shards(self) -> None:
        """Refuses what cannot be done while no process holds a whole matrix."""
        kind = None if self.method == DENSE else CRITERIA[self.method]
        for wrong, what, instead in (
            (kind is not None and kind.unshardable is not None, f"--method {self.method}", "choose another one"),
            (self.pattern in ("columns", "heads"), f"--pattern {self.pattern}", "use unstructured, N:M, 1xC or rows"),
            (self.lora_rank is not None, "--lora-rank", "adapters are small: train them on one process"),
            (self.max_steps == 0, "--max-steps 0", "nothing is trained: prune on one process"),
            (self.compile, "--compile", "leave it out"),
        ):
            if wrong:
                raise InputError(f"--fsdp does not go with {what}: {instead}, or train without --fsdp (DDP).")

    @property
    def is_dense(self) -> bool:
        return self.method == DENSE or self.sparsity == 0.0

    @property
    def needs_dense(self) -> bool:
        """Whether a dense run comes first: to compare with, to start from or to learn from."""
        return self.uses_dense or (self.baseline and not self.is_dense)

    @property
    def uses_dense(self) -> bool:
        """Whether the model of a dense run is what this one starts from or learns from."""
        return not self.is_dense and self.teacher is None and (self.dense_start or self.distils)

    @property
    def folder(self) -> Path:
        name = DENSE if self.is_dense else f"{self.method}-{self.sparsity * 100:g}"
        if not self.is_dense and self.pattern != UNSTRUCTURED:
            name += "-" + self.pattern.replace(":", "of")
        return Path(self.output or f"runs/{self.task}-{name}")

    def pruning(self, total_steps: int) -> PruningConfig | None:
        """The pruner's settings for a run of `total_steps`; None for a dense run."""
        if self.is_dense:
            return None
        told = settings.values(self, PruningSettings)
        told["interval"] = self.interval or max(1, min(INTERVAL, total_steps // 20))
        told |= {name: told[name] or None for name in ("target_modules", "exclude_modules")}
        try:
            return PruningConfig(
                **told,
                total_steps=total_steps or None,  # without training there is no schedule
                track_revived=True,  # a run's log says how many weights return
                options=self.option,
            )
        except ValueError as error:
            raise _sentence(error) from None

    @property
    def teaching(self) -> TeacherConfig:
        """The teacher's settings; a dense run has no teacher."""
        told = settings.values(self, TeacherConfig)
        return TeacherConfig(**(told | {"objective": EMPIRICAL_RISK} if self.is_dense else told))

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "") -> RunConfig:
        """From plain data, flat or in sections; an unknown key is an error that names the right one.

        Args:
            data: the settings.
            where: the file that they are from, for messages.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        told = flat(data, where)
        for name in told:
            if name not in known:
                raise InputError(
                    f"{where or 'the command'} has an unknown setting {name!r}.{did_you_mean(name, known)}"
                )
        try:
            return cls(**told)
        except InputError as error:
            raise InputError(f"{where}: {error}" if where else str(error)) from None

    @classmethod
    def settings_of(cls, path: str | Path) -> dict[str, Any]:
        """The settings in a YAML file: the whole file, or the part under `run` of a run's config.yaml."""
        try:
            data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror or error}.") from None
        except UnicodeDecodeError:
            raise InputError(f"{path} is not a text file: settings are text, NAME: VALUE in each line.") from None
        except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date that is none, for example
            raise InputError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
        if data is None:
            raise InputError(f"{path} is empty: it must hold settings as NAME: VALUE.")
        if isinstance(data, dict) and isinstance(data.get("run"), dict):
            data = data["run"]
        if not isinstance(data, dict):
            raise InputError(f"{path} must hold settings as NAME: VALUE.")
        return flat(data, str(path))


# Sections of a YAML file: each holds settings of its own.
SECTIONS: dict[str, tuple[type[Any], ...]] = {
    "data": (DataConfig,),
    "training": (TrainingConfig, RunTeacher),
    "teacher": (RunTeacher,),
    "pruning": (RunPruning,),
}


def flat(data: Mapping[Any, Any], where: str = "") -> dict[str, Any]:
    """Settings without sections. `data` and `teacher` are settings too: a mapping there is the section."""
    told: dict[str, Any] = {}
    for key, value in data.items():
        name = _key(key)
        inner = {name: value}
        if name in SECTIONS and isinstance(value, Mapping):
            inner = _section(name, value, where)
        if twice := next(iter(told.keys() & inner.keys()), None):
            raise InputError(f"{where or 'the command'} gives {twice} twice: leave one of them out.")
        told |= inner
    return told


def _section(section: str, data: Mapping[Any, Any], where: str) -> dict[str, Any]:
    known = [field.name for kind in SECTIONS[section] for field in dataclasses.fields(kind)]
    told = {_key(key): value for key, value in data.items()}
    for name in told:
        if name not in known:
            meant = did_you_mean(name, known)
            raise InputError(f"{where or 'the command'}: {section} has an unknown setting {name!r}.{meant}")
    return told


def _key(name: Any) -> str:
    return str(name).replace("-", "_")


def _sentence(error: ValueError) -> InputError:
    text = str(error)
    return InputError(text if text.endswith((".", "?")) else f"{text}.")
