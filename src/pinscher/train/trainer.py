"""Pruning in the Hugging Face Trainer: PruningCallback for any Trainer, PinsTrainer for everything else.

PinsTrainer adds what a callback cannot reach: the teacher's term in the loss, learned masks in the optimiser, micro-
batches weighted by how many labels they count, and atomic checkpoints without pickle that hold everything a resumed
run needs to end bit-identical.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import Trainer, TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME

from pinscher import settings
from pinscher.errors import InputError, first_line
from pinscher.prune import Pruner, PruningConfig, Site, Teacher, TeacherConfig
from pinscher.prune.averaging import WeightAverage
from pinscher.runfolder import CHECKPOINT
from pinscher.train import checkpoint, fsdp, randomness, rates, storage
from pinscher.train.batches import EpochSampler, EpochTeller, calibration_batches, counted, kind_of
from pinscher.train.config import RunConfig
from pinscher.train.processes import agreed
from pinscher.train.storage import Student, plain

TERMS = {"logits": "loss_sr", "hidden": "loss_hidden", "embeddings": "loss_embeddings"}  # their names in the log


def _calibration(loader: Any, pruner: Pruner | None, args: Any) -> list[Any]:
    """Training rows for methods that need the inputs of layers, batched as by the Trainer's loader."""
    assert pruner is not None
    rows = loader.dataset
    if not hasattr(rows, "__len__"):
        raise InputError(
            f"{pruner.config.method} draws its calibration data from the training rows: they must have a length."
        )
    number = pruner.criterion.calibration_rows(args.train_batch_size)
    return calibration_batches(rows, loader.collate_fn, number, args.train_batch_size, args.seed, args.device)


def _scheduled(config: PruningConfig, steps: int, remedy: str) -> PruningConfig:
    """The configuration for a run of `steps` steps."""
    if config.total_steps not in (None, steps):
        raise InputError(
            f"the schedule is made for {config.total_steps} steps but this run has {steps}: leave total_steps out of "
            f"the PruningConfig{remedy}."
        )
    return dataclasses.replace(config, total_steps=steps)


@contextlib.contextmanager
def _fitting(folder: str) -> Iterator[None]:
    """Turns the many errors of loading another run's states into one sentence."""
    try:
        yield
    except InputError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        said = first_line(error).rstrip(".")
        raise InputError(f"the checkpoint in {folder} does not fit this run: {said}.") from error


class PruningCallback(TrainerCallback):
    """Adds pruning to any Trainer, without a teacher: a callback cannot add a term to the loss (use PinsTrainer).

    Args:
        config: what to prune and how far; `total_steps` may be left out.

    Its state is saved in each checkpoint's folder, and restored when the Trainer resumes.
    """

    def __init__(self, config: PruningConfig) -> None:
        if config.make_criterion().learns_masks:
            raise InputError(
                f"method {config.method!r} learns its masks, so they must be in the optimiser before the Trainer makes "
                "it: use PinsTrainer instead of PruningCallback."
            )
        self.config = config
        self.pruner: Pruner | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if args.load_best_model_at_end:
            raise InputError("load_best_model_at_end would bring back an early, denser model: switch it off.")
        model = getattr(model, "module", model)
        loader = kwargs.get("train_dataloader")
        config = _scheduled(self.config, state.max_steps, "")
        pruner = Pruner(model, config, calibration=lambda: _calibration(loader, self.pruner, args))
        self.pruner = pruner
        if state.global_step > 0:
            folder = self._folder(args, state)
            if not checkpoint.exists(folder):
                raise InputError(f"cannot resume pruning: {folder} is missing. Resume from a checkpoint in output_dir.")
            pruner.load_state_dict(self._storage(pruner, state).load_states(folder, model)["pruner"])
        pruner.attach(kwargs["optimizer"])

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self.pruner is not None and logs is not None and "loss" in logs:
            logs["density"] = self.pruner.stats()["density"]

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.pruner is not None:
            states = {"pruner": self.pruner.state_dict()}
            self._storage(self.pruner, state).save_states(self._folder(args, state), **states)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.pruner is not None and state.global_step >= state.max_steps:
            self.pruner.finish()

    @staticmethod
    def _storage(pruner: Pruner, state: Any) -> storage.Storage:
        return storage.of(pruner.sharded, state.is_world_process_zero)

    @staticmethod
    def _folder(args: Any, state: Any) -> Path:
        return Path(args.output_dir) / f"{CHECKPOINT}{state.global_step}" / "pruner"


class AverageTeller(TrainerCallback):
    """Updates the average of the weights after each step."""

    def __init__(self, average: Callable[[], WeightAverage | None]) -> None:
        self._average = average

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (average := self._average()) is not None:
            average.update(state.global_step)


class PinsTrainer(Trainer):
    """A Trainer whose model is pruned while it trains and regularised by its own best checkpoint.

    Args:
        pruning: what to prune and how far; None trains densely. `total_steps` may be left out.
        teaching: the objective and all that concerns the teacher; by default self-regularization, as in the paper. Its
            fields may also be given by name: objective, mix, temperature, teacher_start, teacher_lag.
        teacher: the densely fine-tuned teacher of knowledge distillation.
        kind: the kind of the model's outputs, if its class does not tell (see `Teacher`).
        validate: returns the validation scores of a model; replaces the Trainer's loop over `eval_dataset`.
        select: "final" keeps the last weights (paper); "best" those with the best validation score among the models at
            the target sparsity, never earlier, denser ones.
        lr_rewinds: how often the learning rate returns to its peak while the model is pruned.
        average: give the final model the mean of its weights over the cool-down.
        sites: the model's prunable matrices, if `find_sites` has found them already.
        fsdp: shard the weights over the processes (FSDP2); a mesh of two dimensions, replicas by shards, is HSDP.

    All other arguments are the Trainer's. The validation score that chooses teacher and best model is
    `args.metric_for_best_model`, by default the loss.
    """

    # compute_loss weighs every micro-batch by what it counts; the stock Trainer's gradient is too large by the number
    # of accumulation steps for most heads.
    loss_is_scaled_for_ga = True

    def __init__(
        self,
        *args: Any,
        pruning: PruningConfig | None = None,
        teaching: TeacherConfig | None = None,
        teacher: nn.Module | None = None,
        kind: str | None = None,
        validate: Callable[[nn.Module], dict[str, float]] | None = None,
        select: str = "final",
        lr_rewinds: int = 0,
        average: bool = False,
        sites: Sequence[Site] | None = None,
        fsdp: bool | DeviceMesh = False,
        **kwargs: Any,
    ) -> None:
        names = [field.name for field in dataclasses.fields(TeacherConfig)]
        self.teaching = TeacherConfig.of(teaching, {name: kwargs.pop(name) for name in names if name in kwargs})
        if validate is not None:  # the Trainer insists on a data set if it is to evaluate
            kwargs.setdefault("eval_dataset", kwargs.get("train_dataset"))
        self.fsdp = fsdp
        super().__init__(*args, **kwargs)
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise InputError(
                "PinsTrainer works on one process, with DDP, or with PinsTrainer(fsdp=True): not under DeepSpeed, and "
                "not with the Trainer's own fsdp, which shards without telling the pruner."
            )
        if fsdp:  # Accelerate must neither wrap the model nor shard it, nor the Trainer collect whole gradients
            self.is_distributed_loading_by_transformers = True
            self._defer_fsdp_gradient_reduction = contextlib.nullcontext  # type: ignore[method-assign, assignment]
        if self.args.load_best_model_at_end:
            raise InputError(
                'load_best_model_at_end would bring back an early, denser model. Use PinsTrainer(select="best"), which '
                "picks among the models at the target sparsity."
            )
        settings.checked(RunConfig.__dataclass_fields__["select"], select)
        assert isinstance(self.model, nn.Module)
        self.student: nn.Module = self.model
        self.pruning, self.select, self.validate = pruning, select, validate
        self.lr_rewinds, self._averages = lr_rewinds, average
        self.average: WeightAverage | None = None
        self._sites = sites
        self.storage = storage.of(bool(fsdp), self.args.should_save)
        self.kind = kind or kind_of(plain(self.model))
        self._fixed = teacher
        self._make_teacher: Callable[[], Teacher] = lambda: Teacher(
            self.student,
            self.teaching,
            fixed=teacher if teacher is None or self.fsdp else teacher.to(self.args.device),
            kind=self.kind,
            greater_is_better=bool(self.args.greater_is_better),
        )
        self.pruner: Pruner | None = None
        self.teacher: Teacher | None = None
        self.best: float | None = None  # the best validation score at the target sparsity
        self._terms: dict[str, list[float]] = {name: [] for name in ("loss_er", *TERMS.values())}
        self._sampler: EpochSampler | None = None
        self._rng: list[dict[str, Any]] = []  # of the checkpoint that is resumed
        self._checked: Path | None = None  # the checkpoint whose checksums were compared
        self.add_callback(EpochTeller(lambda: self._sampler))
        self.add_callback(AverageTeller(lambda: self.average))

    # ------------------------------------------------------------ data order

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        rows: Any = self.train_dataset if train_dataset is None else train_dataset
        ours = self.args.train_sampling_strategy in ("random", "group_by_length")
        if rows is None or not hasattr(rows, "__len__") or not ours:
            return super()._get_train_sampler(train_dataset)
        lengths = None
        if self.args.train_sampling_strategy == "group_by_length":
            table = rows["input_ids"][:] if hasattr(rows, "column_names") else [row["input_ids"] for row in rows]
            lengths = [len(ids) for ids in table]
        group = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        self._sampler = EpochSampler(len(rows), seed, lengths, group)
        return self._sampler

    # ------------------------------------------------------------ loss

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        total = torch.tensor(sum(counted(batch, self.kind or "") for batch in batches), device=device)
        if self.args.world_size > 1:  # DDP takes the mean over processes, whose batches need not count the same
            total = self.accelerator.reduce(total, "sum") / self.args.world_size
        return batches, total

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        # A copy: label smoothing takes the labels out. Without num_items the loss is the micro-batch's mean.
        given = dict(inputs)
        if model.training and self.teacher is not None and self.teacher.reads_hidden:
            given["output_hidden_states"] = True
        loss, outputs = super().compute_loss(model, given, return_outputs=True)
        if model.training:
            count = counted(inputs, self.kind or "")
            if count == 0:
                loss = loss.nan_to_num()  # the mean over nothing
            self._terms["loss_er"].append(float(loss.detach()))
            if self.teacher is not None:
                terms = self.teacher.terms(inputs, outputs)
                for name, term in terms.items():
                    self._terms[TERMS[name]].append(float(term.detach()))
                loss = self.teacher.joined(loss, terms)
            if num_items_in_batch is not None:  # not in an evaluation, whose batches stand alone
                loss = loss * (count / max(1.0, float(num_items_in_batch)))
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            for name, values in self._terms.items():
                if values:
                    logs[name] = sum(values) / len(values)
                values.clear()
            if self.pruner is not None:
                logs |= {
                    name: value for name, value in self.pruner.stats().items() if name != "step" and value is not None
                }
        super().log(logs, *args, **kwargs)

    # ------------------------------------------------------------ the run

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """The Trainer's optimiser, with the learned masks in a group of their own, and the pruner attached."""
        if self.pruner is None and self.pruning is not None:
            self.pruning = _scheduled(self.pruning, self.state.max_steps, ", or set max_steps")
            if not self.fsdp:
                self.pruner = Pruner(self.student, self.pruning, calibration=self._calibration, sites=self._sites)
        if self.teacher is None:
            if self.fsdp:
                self._shard()
            self.teacher = self._make_teacher()
        if self._averages and self.average is None and self.pruner is not None:
            self.average = WeightAverage(self.student, self.pruner.schedule.settled_at)
        mine = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if self.pruner is not None and not self.pruner.finished:
            if mine:
                gates = self.pruner.param_groups(gates_only=True)
                known = {id(p) for group in gates for p in group["params"]}
                for group in optimizer.param_groups:
                    group["params"] = [p for p in group["params"] if id(p) not in known]
                for group in gates:
                    optimizer.add_param_group(group)
            self.pruner.detach()
            self.pruner.attach(optimizer)
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LRScheduler:
        """The Trainer's schedule of the learning rate, or one that returns to the peak."""
        if self.lr_rewinds and self.pruner is not None and self.lr_scheduler is None:
            schedule, warmup = self.pruner.schedule, self.args.get_warmup_steps(num_training_steps)
            starts = rates.rewinds(self.lr_rewinds, schedule.warmup, schedule.settled_at)
            target: Any = optimizer or self.optimizer
            self.lr_scheduler = LambdaLR(target, rates.rewound(num_training_steps, warmup, starts))
            self._created_lr_scheduler = True
        return super().create_scheduler(num_training_steps, optimizer)

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        if not self.fsdp:  # sharding moves each part by itself
            super()._move_model_to_device(model, device)

    def _shard(self) -> None:
        mesh = self.fsdp if isinstance(self.fsdp, DeviceMesh) else fsdp.mesh_over(self.args.device)
        self.pruner = fsdp.shard_and_prune(self.student, mesh, self.pruning)
        if self._fixed is not None:
            fsdp.shard(self._fixed, mesh)

    def _calibration(self) -> list[Any]:
        loader: Any = self.callback_handler.train_dataloader
        return _calibration(loader, self.pruner, self.args)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Trains. Unless interrupted, it leaves an ordinary model with exact zeros."""
        if self.pruner is not None and self.pruner.finished:
            raise InputError("this model is already pruned to its target: make a new PinsTrainer to prune it further.")
        if resume_from_checkpoint is True:
            resume_from_checkpoint = self.newest_checkpoint() or True  # the Trainer says that there is none
        elif resume_from_checkpoint and Path(resume_from_checkpoint) != self._checked:
            agreed(lambda: storage.check(Path(resume_from_checkpoint)))
        starting = self.args.eval_on_start
        self.args.eval_on_start = starting and not resume_from_checkpoint  # a resumed run has its teacher
        try:
            output = super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self.args.eval_on_start = starting
        if self.state.global_step >= self.state.max_steps:
            if self.pruner is not None:
                finished = self.pruner.finish()
                if finished is not self.student:  # adapters are merged
                    self.model = self.model_wrapped = self.student = finished
            if self.average is not None:
                self.average.apply_()
            if self.select == "best" and self.best is not None:
                self.accelerator.wait_for_everyone()
                self.storage.load_weights(self._best_folder, self._stored)
        return output

    def newest_checkpoint(self, say: Callable[[str], None] = warnings.warn) -> str | None:
        """The newest checkpoint in `output_dir` that is whole, the same on all processes; None if there is none yet.

        Args:
            say: called on the first process with what is wrong with newer ones.

        Raises:
            InputError: if all checkpoints are damaged.
        """
        found, damages = agreed(lambda: storage.newest_whole(Path(str(self.args.output_dir))))
        if found is not None and damages and self.args.process_index == 0:
            say(f"{'; '.join(damages)}: continuing from {found.name}, the checkpoint before")
        self._checked = found
        return None if found is None else str(found)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        # A run killed after its last step is resumed with nothing left to train, but the Trainer would go on.
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)  # type: ignore[no-untyped-call]

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        other = bool(args) or "eval_dataset" in kwargs  # rows other than the validation set
        if self.validate is None or other:
            metrics = super().evaluate(*args, **kwargs)
        else:
            metrics = self._validated(self.validate)
        if self.is_in_train:
            self._consider(metrics)
        return metrics

    def _validated(self, validate: Callable[[nn.Module], dict[str, float]]) -> dict[str, float]:
        scores = [{f"eval_{name}": value for name, value in validate(self.student).items()}]
        if self.args.world_size > 1:  # the same scores everywhere, or processes would choose different teachers
            broadcast_object_list(scores)
        self.log(scores[0])
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, scores[0])
        return scores[0]

    def _consider(self, metrics: dict[str, float]) -> None:
        """Offers the student to the teacher and to the selection of the best model, with its validation score."""
        name = (self.args.metric_for_best_model or "loss").removeprefix("eval_")
        score = metrics.get(f"eval_{name}")
        if score is None:
            return
        if self.teacher is not None and self._may_teach() and self.teacher.consider(score, self._density()):
            self.log({"teacher_score": score, "teacher_changes": self.teacher.changes})
        if (
            self.select == "best"
            and self._at_target()
            and (self.best is None or (score > self.best if self.args.greater_is_better else score < self.best))
        ):
            self.best = score
            self.storage.save_weights(self._best_folder, self._stored)

    def _may_teach(self) -> bool:
        start = self.teaching.teacher_start
        start = round(start * self.state.max_steps) if start < 1 else start
        return self.state.global_step >= start

    def _density(self) -> float:
        return 1.0 if self.pruner is None else self.pruner.kept / self.pruner.total

    def _at_target(self) -> bool:
        """Whether the weights have the target sparsity now."""
        if self.pruner is None:
            return True
        zeros = sum(site.zeros() for site in self.pruner.sites)
        more = zeros - (self.pruner.total - self.pruner.target)
        # Steered gates may overshoot between two maskings; elsewhere a kept weight may be zero by chance.
        return more == 0 if self.pruner.criterion.learns_masks else more >= 0

    @property
    def _best_folder(self) -> Path:
        return Path(str(self.args.output_dir)) / "best"

    # ------------------------------------------------------------ checkpoints

    @property
    def _stored(self) -> Student:
        return Student(self.student, self.pruner, self.processing_class)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes an ordinary model folder, without pickle. Of a sharded model every process must call it, after
        pruning has ended.
        """
        self.storage.write_model(Path(output_dir or str(self.args.output_dir)), self._stored)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        run = Path(self._get_output_dir(trial=trial))
        self.store_flos()  # this and the states ask all processes
        self.storage.save_checkpoint(
            run / f"{CHECKPOINT}{self.state.global_step}",
            self._stored,
            self._states(),
            lambda folder: self.state.save_to_json(str(folder / TRAINER_STATE_NAME)),
        )
        if self.args.save_total_limit:
            self.storage.remove_old(run, self.args.save_total_limit, self.state.global_step)

    def _states(self) -> dict[str, Any]:
        """The contents of a checkpoint beside the weights; every process must call it."""
        assert self.optimizer is not None
        assert self.lr_scheduler is not None
        return {
            "rng": randomness.gathered(self.accelerator),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.lr_scheduler.state_dict(),
            "pruner": None if self.pruner is None else self.pruner.state_dict(),
            "teacher": None if self.teacher is None else self.teacher.state_dict(),
            "best": self.best,
            "average": None if self.average is None else self.average.state_dict(),
        }

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Nothing yet: weights are restored with the optimiser, when the pruner has seen the model as it started."""

    def _load_optimizer_and_scheduler(self, checkpoint_folder: str | None) -> None:
        if checkpoint_folder is None:
            return
        assert self.optimizer is not None
        assert self.lr_scheduler is not None
        with _fitting(checkpoint_folder):
            states = self.storage.load_checkpoint(Path(checkpoint_folder), self._stored)
            self.optimizer.load_state_dict(states["optimizer"])
            self.lr_scheduler.load_state_dict(states["scheduler"])
            if self.pruner is not None:
                self.pruner.load_state_dict(states["pruner"])
            if self.teacher is not None:
                self.teacher.load_state_dict(states["teacher"])
            if self.average is not None:
                self.average.load_state_dict(states["average"])
            self.best, self._rng = states["best"], states["rng"]
        if self.select == "best" and self.best is not None:  # better now than after hours of training
            agreed(lambda: storage.check_weights(self._best_folder, Path(checkpoint_folder)))

    def _load_rng_state(self, checkpoint_folder: str | None) -> None:
        if checkpoint_folder is not None:
            with _fitting(checkpoint_folder):
                randomness.restore(self._rng, self.args.process_index)

    def _load_scaler(self, checkpoint_folder: str | None) -> None:
        """bf16 needs no scaler, and fp16 is not offered."""
