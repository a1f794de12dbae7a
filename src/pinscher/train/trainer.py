"""PinsTrainer, a Trainer that prunes.

It adds what a callback cannot reach: the teacher's term in the loss, learned masks in the optimiser, micro-
batches weighed by what they count, checkpoints that are whole or not there, without pickle and with everything that a
resumed run needs to end bit-identical.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME

from pinscher import checkpoint
from pinscher.errors import InputError
from pinscher.prune import Pruner, PruningConfig, Teacher
from pinscher.prune.adapters import plain_name
from pinscher.prune.gates import Gated
from pinscher.train import callback, fsdp, randomness, states
from pinscher.train.batches import EpochSampler, EpochTeller, counted, kind_of

SELECTIONS = ("final", "best")


class PinsTrainer(Trainer):
    """A Trainer whose model is pruned while it trains and regularised by its own best checkpoint.

    Args:
        pruning: what to prune and how far; None trains densely. `total_steps` may be left out.
        objective: "self-regularization", "knowledge-distillation" (with `teacher`) or "empirical-risk".
        teacher: the densely fine-tuned model of knowledge distillation.
        kind: what the outputs are, where the model's class does not say it (see `Teacher`).
        mix: how the teacher's term joins the loss (see `Teacher`).
        temperature: softens student and teacher (see `Teacher`).
        teacher_start: steps before the student may become its own teacher; below 1 a fraction of all.
        teacher_lag: how many times the student's weights its own teacher may have (see `Teacher`).
        validate: gives the validation scores of a model, instead of the Trainer's loop over `eval_dataset`.
        select: "final" ends with the last weights (paper), "best" with those that scored best on the validation set
            among those at the target sparsity; never with earlier, denser ones.
        fsdp: spread the weights over the processes (FSDP2); a mesh of two dimensions, replicas by shards, is HSDP.

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
        objective: str = "self-regularization",
        teacher: nn.Module | None = None,
        kind: str | None = None,
        mix: str = "sum",
        temperature: float | None = None,
        teacher_start: float = 0.0,
        teacher_lag: float | None = None,
        validate: Callable[[nn.Module], dict[str, float]] | None = None,
        select: str = "final",
        fsdp: bool | DeviceMesh = False,
        **kwargs: Any,
    ) -> None:
        if validate is not None:  # the Trainer insists on a data set if it is to evaluate
            kwargs.setdefault("eval_dataset", kwargs.get("train_dataset"))
        self.fsdp = fsdp
        super().__init__(*args, **kwargs)
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise InputError(
                "PinsTrainer works on one process, with DDP, or with PinsTrainer(fsdp=True): not under DeepSpeed, and "
                "not with the Trainer's own fsdp, which shards behind the pruner's back."
            )
        if fsdp:  # Accelerate must neither wrap the model nor shard it, nor the Trainer collect whole gradients
            self.is_distributed_loading_by_transformers = True
            self._defer_fsdp_gradient_reduction = contextlib.nullcontext  # type: ignore[method-assign, assignment]
        if self.args.load_best_model_at_end:
            raise InputError(
                'load_best_model_at_end would bring back an early, denser model. Use PinsTrainer(select="best"), which '
                "picks among the models at the target sparsity."
            )
        if not teacher_start >= 0:
            raise InputError(f"teacher_start is a number of steps, or a fraction below 1; not {teacher_start}.")
        if teacher_lag is not None and not teacher_lag >= 1:
            raise InputError(f"teacher_lag must be at least 1, not {teacher_lag}: a teacher was the student.")
        if select not in SELECTIONS:
            raise InputError(f"select must be one of {', '.join(SELECTIONS)}, not {select!r}.")
        assert isinstance(self.model, nn.Module)
        self.student: nn.Module = self.model
        self.pruning, self.select, self.validate = pruning, select, validate
        self.kind = kind or kind_of(plain(self.model))
        self._fixed = teacher
        self._make_teacher: Callable[[], Teacher] = lambda: Teacher(
            self.student,
            objective,
            fixed=teacher if teacher is None or self.fsdp else teacher.to(self.args.device),
            kind=self.kind,
            mix=mix,
            temperature=temperature,
            greater_is_better=bool(self.args.greater_is_better),
            lag=teacher_lag,
        )
        self.teacher_start = teacher_start
        self.pruner: Pruner | None = None
        self.teacher: Teacher | None = None
        self.best: float | None = None  # the best validation score at the target sparsity
        self._terms: dict[str, list[float]] = {"loss_er": [], "loss_sr": []}
        self._sampler: EpochSampler | None = None
        self._rng: list[dict[str, Any]] = []  # of a sharded checkpoint that is resumed
        self.add_callback(EpochTeller(lambda: self._sampler))

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
        loss, outputs = super().compute_loss(model, dict(inputs), return_outputs=True)
        if model.training:
            count = counted(inputs, self.kind or "")
            if count == 0:
                loss = loss.nan_to_num()  # the mean over nothing
            self._terms["loss_er"].append(float(loss.detach()))
            if self.teacher is not None and self.teacher.ready:
                term = self.teacher.loss(inputs, outputs)
                self._terms["loss_sr"].append(float(term.detach()))
                loss = loss + term
            if num_items_in_batch is not None:  # the Trainer's count; not in an evaluation, whose batches stand alone
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
            steps = self.state.max_steps
            if self.pruning.total_steps not in (None, steps):
                raise InputError(
                    f"the schedule is made for {self.pruning.total_steps} steps but this run has {steps}: leave "
                    "total_steps out of the PruningConfig, or set max_steps."
                )
            self.pruning = dataclasses.replace(self.pruning, total_steps=steps)
            if not self.fsdp:
                self.pruner = Pruner(self.student, self.pruning, calibration=self._calibration)
        if self.teacher is None:
            if self.fsdp:
                self._shard()
            self.teacher = self._make_teacher()
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

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        if not self.fsdp:  # where each part is moved by itself, when it is cut
            super()._move_model_to_device(model, device)

    def _shard(self) -> None:
        mesh = self.fsdp if isinstance(self.fsdp, DeviceMesh) else fsdp.mesh_over(self.args.device)
        self.pruner = fsdp.shard_and_prune(self.student, mesh, self.pruning)
        if self._fixed is not None:
            fsdp.shard(self._fixed, mesh)

    def _calibration(self) -> list[Any]:
        """Training rows for methods that look at a layer's inputs, as the loader would batch them."""
        loader: Any = self.callback_handler.train_dataloader
        return callback.calibration(loader, self.pruner, self.args)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Trains; ends with an ordinary model with exact zeros unless the run was interrupted."""
        if self.pruner is not None and self.pruner.finished:
            raise InputError("this model is pruned to the end: make a new PinsTrainer to prune it further.")
        starting = self.args.eval_on_start
        self.args.eval_on_start = starting and not resume_from_checkpoint  # a resumed run knows its teacher
        try:
            output = super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self.args.eval_on_start = starting
        if self.state.global_step >= self.state.max_steps:
            if self.pruner is not None:
                finished = self.pruner.finish()
                if finished is not self.student:  # adapters are merged
                    self.model = self.model_wrapped = self.student = finished
            if self.select == "best" and self.best is not None:
                self.accelerator.wait_for_everyone()
                self._load_weights(self._best_folder)
        return output

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        # A run that was killed between its last step and its end is resumed there: the Trainer would train on.
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)  # type: ignore[no-untyped-call]

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        other = bool(args) or "eval_dataset" in kwargs  # somebody wants to know about other rows
        if self.validate is None or other:
            metrics = super().evaluate(*args, **kwargs)
        else:
            metrics = self._validated(self.validate)
        if self.is_in_train:
            self._consider(metrics)
        return metrics

    def _validated(self, validate: Callable[[nn.Module], dict[str, float]]) -> dict[str, float]:
        scores = [{f"eval_{name}": value for name, value in validate(self.student).items()}]
        if self.args.world_size > 1:  # one opinion, or processes would choose different teachers
            broadcast_object_list(scores)
        self.log(scores[0])
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, scores[0])
        return scores[0]

    def _consider(self, metrics: dict[str, float]) -> None:
        """Shows the student's validation score to the teacher and to the selection of the best model."""
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
            if self.fsdp:
                fsdp.save_weights(self, self._best_folder)
            elif self.args.should_save:
                with checkpoint.whole(self._best_folder) as fresh:
                    self._save(str(fresh), original=False)  # _load_weights goes by name

    def _may_teach(self) -> bool:
        start = round(self.teacher_start * self.state.max_steps) if self.teacher_start < 1 else self.teacher_start
        return self.state.global_step >= start

    def _density(self) -> float:
        return 1.0 if self.pruner is None else self.pruner.kept / self.pruner.total

    def _at_target(self) -> bool:
        """Whether the weights have the zeros that were asked for, now."""
        if self.pruner is None:
            return True
        zeros = sum(site.zeros() for site in self.pruner.sites)
        more = zeros - (self.pruner.total - self.pruner.target)
        # Steered gates may overshoot between two maskings; elsewhere a kept weight may be zero by chance.
        return more == 0 if isinstance(self.pruner.criterion, Gated) else more >= 0

    @property
    def _best_folder(self) -> Path:
        return Path(str(self.args.output_dir)) / "best"

    # ------------------------------------------------------------ checkpoints

    def _save(self, output_dir: str | None = None, state_dict: Any = None, original: bool = True) -> None:
        """An ordinary model folder, whatever the method, and nothing pickled.

        Unless `original`, weights are stored under the names that the parameters have: some models' files use others.
        """
        folder = output_dir or str(self.args.output_dir)
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        if state_dict is None:
            state_dict = model.state_dict() if self.pruner is None else self.pruner.model_state_dict()
        plain(model).save_pretrained(folder, state_dict=state_dict, save_original_format=original)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The Trainer's; of a sharded model every process must call it, when pruning has ended."""
        if self.fsdp:
            fsdp.save_model(self, Path(output_dir or str(self.args.output_dir)))
        else:
            super().save_model(output_dir, _internal_call)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        run = Path(self._get_output_dir(trial=trial))
        folder = run / f"checkpoint-{self.state.global_step}"
        self.store_flos()  # this and the next ask all processes
        if self.fsdp:
            fsdp.save_checkpoint(self, folder)
            if self.args.should_save:
                self._rotate(run)
            return
        rng = randomness.gathered(self.accelerator)
        if self.args.should_save:
            with checkpoint.whole(folder) as fresh:
                self._save(str(fresh), original=False)  # _load_weights goes by name
                self.state.save_to_json(str(fresh / TRAINER_STATE_NAME))
                checkpoint.write(fresh, rng=rng, **states.states_of(self))
            self._rotate(run)

    def _rotate(self, run: Path) -> None:
        steps = sorted(int(folder.name.removeprefix("checkpoint-")) for folder in run.glob("checkpoint-[0-9]*"))
        for step in steps[: -self.args.save_total_limit] if self.args.save_total_limit else []:
            shutil.rmtree(run / f"checkpoint-{step}", ignore_errors=True)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Nothing yet: weights are restored once pruner and optimiser stand on the model as it was at the start."""

    def _load_optimizer_and_scheduler(self, checkpoint_folder: str | None) -> None:
        if checkpoint_folder is None:
            return
        if self.fsdp:
            self._rng = fsdp.load_checkpoint(self, Path(checkpoint_folder))
            return
        self._load_weights(Path(checkpoint_folder))
        states.restore_(self, checkpoint.load(checkpoint_folder))

    def _load_weights(self, folder: Path) -> None:
        """Loads an ordinary model's weights into the model as it stands; gated ones are the pruner's to restore."""
        if self.fsdp:
            fsdp.load_weights(self.student, folder)
            return
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        saved: dict[str, torch.Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            if file.name != checkpoint.TENSORS:
                saved |= load_file(file)
        here = model.state_dict(keep_vars=True)
        if self.pruner is not None and self.pruner.adapted and not self.pruner.finished:
            here = {name: t for long, t in here.items() if (name := plain_name(long)) is not None}
        with torch.no_grad():
            for name, tensor in saved.items():
                if name in here:
                    here[name].copy_(tensor)
        loaded = {id(here[name]) for name in saved if name in here}  # tied weights are saved once
        missing = [n for n, t in here.items() if id(t) not in loaded and ".parametrizations." not in n]
        if missing:
            raise InputError(f"the checkpoint in {folder} has no {missing[0]}: it is another model's.")

    def _load_rng_state(self, checkpoint_folder: str | None) -> None:
        if checkpoint_folder is not None:
            rng = self._rng if self.fsdp else checkpoint.load(checkpoint_folder)["rng"]
            randomness.restore(rng, self.args.process_index)

    def _load_scaler(self, checkpoint_folder: str | None) -> None:
        """bf16 needs no scaler, and fp16 is not offered."""


def plain(model: Any) -> Any:
    """The transformers model inside a peft model; any other as it is."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
