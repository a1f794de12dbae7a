"""RunConfig -> run() -> a run folder: config.yaml, log.jsonl, checkpoints/, model/, predictions, result.json."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import accelerate
import torch
import transformers
from rich.console import Console
from transformers import PrinterCallback, TrainingArguments

from pinscher import checkpoint, sharded
from pinscher.errors import InputError
from pinscher.prune import find_sites, sparsity
from pinscher.prune.adapters import are_there
from pinscher.train import fsdp, models, runfolder, untrained
from pinscher.train import plan as planning
from pinscher.train.config import DENSE, RunConfig
from pinscher.train.evaluation import answer, evaluate, mean_loss
from pinscher.train.plan import Plan
from pinscher.train.processes import processes
from pinscher.train.runfolder import Result
from pinscher.train.runlog import ProgressLine, RunLog
from pinscher.train.stopping import Stopping
from pinscher.train.trainer import PinsTrainer

QUIET = Console(quiet=True)
C = TypeVar("C")


def run(config: RunConfig, *, resume: bool = False, console: Console = QUIET) -> Result:
    """Fine-prunes a model on a task and leaves a run folder.

    Args:
        config: what to do.
        resume: go on from the last checkpoint in the run's folder; the result is bit-identical to an unbroken run.
        console: where progress is shown; nowhere by default.

    Raises:
        InputError: for anything the user can mend, before anything is written.
    """
    folder = config.folder
    if not resume:
        runfolder.check_place(folder)
        runfolder.refuse_existing(folder, config.overwrite)
    plan = planning.make(config)
    if resume:
        runfolder.check_same(plan, folder, console)
    model = _fresh_model(plan)
    if config.teacher is not None:
        models.check_order(config.teacher, plan.labels)
    processes().wait_for_everyone()  # all have looked at the folder as it was
    if processes().is_main_process:
        runfolder.start(plan, config, model, folder, resume)
    processes().wait_for_everyone()
    dense, teacher = None, config.teacher
    if config.baseline or (config.objective == "knowledge-distillation" and teacher is None):
        del model  # what it takes belongs to the dense run for now
        dense = _dense_run(config, resume, console)
        if dense.status != "finished" or dense.asked_to_stop:
            return dataclasses.replace(dense, folder=folder, status="interrupted")
        teacher = teacher or str(dense.folder / "model")
        model = _fresh_model(plan)
    if "tensorboard" in config.report_to:
        os.environ["TENSORBOARD_LOGGING_DIR"] = str(folder / "tensorboard")
    if plan.steps == 0:
        started = time.time()
        untrained.prune(plan, model)
        return _test(model, plan, folder, dense, 0, time.time() - started, console)
    trainer = _trainer(plan, model, folder, teacher, console)
    stopping, log = _callback(trainer, Stopping), _callback(trainer, RunLog)
    with stopping.listening():
        trainer.train(runfolder.last_checkpoint(folder) if resume else None)
    stopping.agree(trainer.args)  # a signal may have come after the last step
    steps = trainer.state.global_step
    if steps < plan.steps:
        result = Result(folder, "interrupted", plan.task.main, {}, None, 0.0, steps, log.seconds)
        runfolder.write_result(result, plan, {})
        return result
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    result = _test(model, plan, folder, dense, steps, log.seconds, console)
    return dataclasses.replace(result, asked_to_stop=stopping.asked)


def _fresh_model(plan: Plan) -> Any:
    config = plan.config
    transformers.set_seed(config.seed)
    model = models.load_model(config.model, plan.task, plan.labels, plan.tokenizer, config.new_head)
    _check_prunable(plan, model)
    if config.lora_rank is not None:
        model = models.with_adapters(model, plan.task.kind, config.lora_rank, config.lora_alpha)
        _check_method(plan, model)
    return model


def _test(
    model: Any, plan: Plan, folder: Path, dense: Result | None, steps: int, seconds: float, console: Console
) -> Result:
    """Saves the finished model and scores it on the test set."""
    task, main = plan.task, processes().is_main_process
    together = plan.config.fsdp  # a sharded model answers on all processes or on none
    validation: dict[str, float] = {}
    if main or together:
        validation = _validator(plan)(model)  # the log knows the model of the last evaluation, not the final one
        _save(model, plan, folder / "model")
        console.print(f"testing on {sum(len(rows) for rows in plan.splits.tests.values()):,} rows", highlight=False)
        found = evaluate(model, task, plan.tokenizer, plan.splits.tests, plan.labels, plan.config.eval_batch_size)
    if main:
        for split, answers in found.answers.items():
            task.write(answers, plan.splits.tests[split], folder / "predictions", split)
    scores = [found.scores if main else {}]
    accelerate.utils.broadcast_object_list(scores)
    zeros = 0.0 if plan.pruning is None else sparsity(model, plan.pruning.target_modules, plan.pruning.exclude_modules)
    result = Result(
        folder,
        "finished",
        task.main,
        scores[0],
        None if dense is None else dense.scores,
        zeros,
        steps,
        seconds,
        validation,
    )
    if main:
        runfolder.write_result(result, plan, found.splits)
        runfolder.remove_checkpoints(folder)
    return result


def _save(model: Any, plan: Plan, folder: Path) -> None:
    """Writes an ordinary model's folder; of a sharded model every process must call it."""
    with sharded.whole(folder) if plan.config.fsdp else checkpoint.whole(folder) as fresh:
        if plan.config.fsdp:
            fsdp.write_model(model, fsdp.plain_state(model), fresh)
        else:
            model.save_pretrained(fresh)
        if processes().is_main_process:
            plan.tokenizer.save_pretrained(fresh)


def _callback(trainer: PinsTrainer, kind: type[C]) -> C:
    return next(callback for callback in trainer.callback_handler.callbacks if isinstance(callback, kind))


# ------------------------------------------------------------ the parts of a run


def _trainer(plan: Plan, model: Any, folder: Path, teacher: str | None, console: Console) -> PinsTrainer:
    config, task = plan.config, plan.task
    fixed = None
    if config.objective == "knowledge-distillation" and not config.is_dense:
        assert teacher is not None
        fixed = models.load_model(teacher, task, plan.labels, plan.tokenizer)
    args = _arguments(plan, folder)
    mesh = fsdp.mesh_over(args.device, config.fsdp_replicas) if config.fsdp_replicas > 1 else None
    trainer = PinsTrainer(
        model=model,
        args=args,
        train_dataset=plan.train,
        data_collator=task.collator(plan.tokenizer),
        processing_class=plan.tokenizer,
        pruning=plan.pruning,
        objective="empirical-risk" if config.is_dense else config.objective,
        teacher=fixed,
        kind=task.kind,
        mix=config.mix,
        temperature=config.temperature,
        teacher_start=config.teacher_start,
        teacher_lag=config.teacher_lag,
        select=config.select,
        fsdp=mesh or config.fsdp,
        validate=_validator(plan),
        callbacks=[Stopping(), RunLog(folder / "log.jsonl"), ProgressLine(console, _title(config))],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _validator(plan: Plan) -> Callable[[Any], dict[str, float]]:
    """A model's scores on the validation rows; of texts the loss, since generating them takes too long."""
    task, size, validation = plan.task, plan.config.eval_batch_size, plan.splits.validation
    features = task.features(validation, plan.tokenizer, plan.labels, training=task.judged_by_loss)

    def validate(model: Any) -> dict[str, float]:
        if task.judged_by_loss:
            return {"loss": mean_loss(model, features, task, plan.tokenizer, size)}
        said = answer(model, task, plan.tokenizer, validation, plan.labels, size, features)
        return task.scores(said, validation)

    return validate


def _arguments(plan: Plan, folder: Path) -> TrainingArguments:
    config, task = plan.config, plan.task
    assert config.learning_rate is not None
    assert config.label_smoothing is not None
    assert config.save_every is not None
    return TrainingArguments(
        output_dir=str(folder / "checkpoints"),
        max_steps=plan.steps,
        per_device_train_batch_size=config.batch_size,
        per_device_eval_batch_size=config.eval_batch_size,
        gradient_accumulation_steps=config.gradient_accumulation,
        learning_rate=config.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=config.lr_warmup,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        label_smoothing_factor=config.label_smoothing,
        eval_strategy="steps",
        eval_steps=config.eval_every,
        eval_on_start=config.objective == "self-regularization" and not config.is_dense,
        metric_for_best_model="loss" if task.judged_by_loss else task.main,
        greater_is_better=not task.judged_by_loss,
        save_strategy="steps",
        save_steps=config.save_every,
        save_total_limit=1,
        logging_steps=max(1, min(50, plan.steps // 50)),
        seed=config.seed,
        bf16=config.bf16,
        torch_compile=config.compile,
        train_sampling_strategy="group_by_length" if config.group_by_length else "random",
        report_to=config.report_to or "none",
        remove_unused_columns=False,
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
    )


def _title(config: RunConfig) -> str:
    return "dense" if config.is_dense else f"{config.method} {100 * config.sparsity:g} %"


def _dense_run(config: RunConfig, resume: bool, console: Console) -> Result:
    """The same run without pruning, in the folder `dense` of this one; done only once."""
    inner = dataclasses.replace(
        config,
        method=DENSE,
        objective="empirical-risk",
        baseline=False,
        output=str(config.folder / DENSE),
    )
    if resume and runfolder.is_finished(inner.folder):
        return runfolder.read_result(inner.folder)
    return run(inner, resume=resume and (inner.folder / "config.yaml").exists(), console=console)


def _check_prunable(plan: Plan, model: Any) -> None:
    if plan.pruning is None:
        return
    sites = planning.prunable_sites(plan, model)
    total, zeros = sum(site.numel for site in sites), sum(site.zeros() for site in sites)
    if zeros > math.ceil(plan.pruning.sparsity * total):  # the final count is rounded
        raise InputError(
            f"{plan.config.model} is already {zeros / total:.2%} sparse, more than was asked for: ask for at "
            "least as much, or start from a denser model."
        )


def _check_method(plan: Plan, model: Any) -> None:
    """Refuses a method that cannot be used with adapters before anything is written."""
    if plan.pruning is None:
        return
    try:
        are_there(find_sites(model), plan.pruning.make_criterion())
    except ValueError as error:
        raise InputError(str(error)) from None
