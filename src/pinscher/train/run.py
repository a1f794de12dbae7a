"""RunConfig -> run() -> a run folder: plan, train, test."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import accelerate
import torch
import transformers
from rich.console import Console
from transformers import PrinterCallback, TrainingArguments

from pinscher.errors import InputError, first_line
from pinscher.models.dropout import set_dropout_
from pinscher.models.inputs import evaluating
from pinscher.prune import Site, Teacher
from pinscher.prune.adapters import are_there
from pinscher.prune.hidden import streams_of
from pinscher.prune.teacher import EMPIRICAL_RISK
from pinscher.runfolder import FINISHED, INTERRUPTED, RunFolder
from pinscher.train import folder as record
from pinscher.train import fsdp, pretrained, storage, untrained
from pinscher.train import plan as planning
from pinscher.train.checksums import DamagedError
from pinscher.train.config import DENSE, RunConfig
from pinscher.train.evaluation import answer, evaluate, mean_loss
from pinscher.train.folder import Result
from pinscher.train.plan import Plan
from pinscher.train.processes import processes
from pinscher.train.runlog import ProgressLine, RunLog
from pinscher.train.stopping import Stopping
from pinscher.train.storage import Student
from pinscher.train.trainer import PinsTrainer

QUIET = Console(quiet=True)
FIRST = 2  # training rows that a model is tried on
C = TypeVar("C")
Validate = Callable[[Any], dict[str, float]]
Start = tuple[Any, list[Site]]  # a model, and its prunable matrices


def run(config: RunConfig, *, resume: bool = False, console: Console = QUIET) -> Result:
    """Fine-tunes and prunes a model on a task and leaves a run folder.

    Args:
        config: the settings.
        resume: continue from the last checkpoint in the run's folder; the result is bit-identical to an unbroken run.
        console: where progress is shown; nowhere by default.

    Raises:
        InputError: for anything the user can correct, before anything is written.
    """
    folder = RunFolder(config.folder)
    with record.locked(folder):
        if not resume:
            folder.check_new(config.overwrite)
        return _run(config, planning.make(config), resume, console)


def _run(config: RunConfig, plan: Plan, resume: bool, console: Console, start: Start | None = None) -> Result:
    folder = RunFolder(config.folder)
    if resume:
        record.check_same(plan, folder, console)
    model, sites = start or _fresh_model(plan)
    if plan.config.teacher is not None:
        pretrained.check_teacher(plan.config.teacher, plan.tokenizer, plan.labels, plan.task.max_length)
    if not resume and start is None:
        _try(plan, model)
    processes().wait_for_everyone()  # all have looked at the folder as it was
    if processes().is_main_process and not resume:
        record.start(plan, config, sites, folder)
    processes().wait_for_everyone()
    plan = planning.with_reference(plan, model)
    dense = None
    if plan.config.needs_dense:
        first = (model, sites) if plan.start is None else None  # what the dense run starts from, too
        del model, sites  # free the memory for the dense run
        dense = _dense_run(plan, resume, console, first)
        if dense.status != FINISHED or dense.asked_to_stop:
            return dataclasses.replace(dense.without_models(), folder=folder.path, status=INTERRUPTED)
        model, sites = _after_dense(plan, dense)
    if "tensorboard" in config.report_to:
        os.environ["TENSORBOARD_LOGGING_DIR"] = str(folder.tensorboard)
    validate = _validator(plan)
    if plan.steps == 0:
        started = time.time()
        untrained.prune(plan, model)
        student = Student(model, tokenizer=plan.tokenizer)
        return _test(student, sites, plan, validate, dense, 0, time.time() - started, console)
    trainer = _trainer(plan, model, sites, folder, dense, validate, console)
    stopping, log = _callback(trainer, Stopping), _callback(trainer, RunLog)
    with stopping.listening():
        trainer.train(trainer.newest_checkpoint(lambda line: _note(line, console)) if resume else None)
    stopping.agree(trainer.args)  # a signal may have come after the last step
    steps = trainer.state.global_step
    if steps < plan.steps:
        result = Result(folder.path, INTERRUPTED, plan.task.main, {}, None, 0.0, steps, log.seconds)
        record.write_result(result, plan, {})
        return result
    student = Student(trainer.student, tokenizer=plan.tokenizer)
    result = _test(student, sites, plan, validate, dense, steps, log.seconds, console)
    return dataclasses.replace(result, asked_to_stop=stopping.asked)


def _dense_run(plan: Plan, resume: bool, console: Console, start: Start | None) -> Result:
    """The same run without pruning, in the folder `dense` of this one; made only once."""
    config = plan.config
    inner = dataclasses.replace(
        config,
        method=DENSE,
        objective=EMPIRICAL_RISK,
        teacher=None,
        baseline=False,
        dense_start=False,
        epochs=None,
        max_steps=config.dense_steps if plan.steps else 0,
        learning_rate=config.dense_learning_rate,
        dropout=None,
        output=str(RunFolder(config.folder).dense),
    )
    folder = RunFolder(inner.folder)
    with record.locked(folder):
        if resume and folder.is_run:
            record.check_unedited(folder)
        if resume and folder.is_finished and _is_whole(folder, config, console):
            if processes().is_main_process:
                folder.remove_checkpoints()  # it was killed after its result was written
            return record.read_result(folder.path)
        if resume and not folder.is_run and (folder.log.exists() or folder.checkpoints.exists()):
            raise InputError(
                f"{folder.config} is missing: put it back from a copy, or remove {folder}; --resume then makes the "
                "dense run again."
            )
        resume = resume and folder.is_run
        if not resume:
            folder.check_new(inner.overwrite)
        return _run(inner, planning.with_settings(plan, inner), resume, console, start)


def _is_whole(dense: RunFolder, config: RunConfig, console: Console) -> bool:
    """Whether the model of a finished dense run is undamaged, if it is needed. The result of a damaged one is dropped:
    the run is made again, and gives the same bytes.
    """
    try:
        if config.uses_dense:
            record.check_model(dense)
        return True
    except DamagedError as damage:
        if processes().is_main_process:
            _note(f"{damage}: making the dense run again", console)
            dense.forget_result()
        processes().wait_for_everyone()
        return False


# ------------------------------------------------------------ before training


def _fresh_model(plan: Plan) -> Start:
    """The model as the run starts it, and its prunable matrices."""
    config = plan.config
    transformers.set_seed(config.seed)
    if plan.start is None:
        model = pretrained.load_model(config.model, plan.task, plan.labels, plan.tokenizer, config.new_head)
    else:
        model = _fine_tuned(plan, plan.start)
    return _prepared(plan, model)


def _after_dense(plan: Plan, dense: Result) -> Start:
    """The model as the run starts it after its dense run: the dense run's model if it starts from that."""
    if not plan.config.dense_start or plan.start is not None:
        return _fresh_model(plan)
    if dense.model is not None and plan.config.lora_rank is None:
        return _prepared(plan, copy.deepcopy(dense.model))  # the dense run's own is the teacher
    return _prepared(plan, _fine_tuned(plan, str(RunFolder(dense.folder).model)))


def _fine_tuned(plan: Plan, start: str) -> Any:
    pretrained.check_same_shape(start, plan.config.model)
    return pretrained.load_model(start, plan.task, plan.labels, plan.tokenizer, trained=True)


def _prepared(plan: Plan, model: Any) -> Start:
    """A model with its adapters, and its prunable matrices, checked against the run's settings."""
    config = plan.config
    if config.lora_rank is None:
        return model, _sites(plan, model)
    model = pretrained.with_adapters(model, plan.task.kind, config.lora_rank, config.lora_alpha)
    sites = _sites(plan, model)
    _check_method(plan, sites)
    return model, sites


def _sites(plan: Plan, model: Any) -> list[Site]:
    """The prunable matrices, checked against the run's settings. A dense run takes any model."""
    if plan.pruning is None:
        try:
            return planning.sites_of(plan.config, model)
        except InputError:
            return []
    sites = planning.sites_of(plan.config, model)
    pruned = planning.pruned_by(plan, model, sites)
    total, zeros = sum(site.numel for site in pruned), sum(site.zeros() for site in pruned)
    if zeros > math.ceil(plan.pruning.sparsity * total):  # the final count is rounded
        raise InputError(
            f"{plan.config.model} is already {zeros / total:.2%} sparse, more than was asked for: ask for at "
            "least as much, or start from a denser model."
        )
    return sites


def _try(plan: Plan, model: Any) -> None:
    """Refuses a model that cannot compute the loss of the first rows, or a teacher that has nothing to say of them:
    their settings may not go together.
    """
    config, teaching = plan.config, plan.config.teaching
    batch = plan.task.collator(plan.tokenizer)([plan.train[i] for i in range(min(FIRST, len(plan.train)))])
    shown = {"output_hidden_states": True} if teaching.hidden_weight or teaching.embeddings_weight else {}
    with evaluating(model), torch.no_grad():  # without dropout, which would take random numbers
        with _failing(f"{config.model} cannot be trained"):
            outputs = model(**batch, **shown)
            if outputs.loss is None:
                raise ValueError(f"{type(model).__name__} computes no loss")
            _ = streams_of(outputs, batch) if shown else None
        if config.teacher is not None and not config.is_dense:
            fixed = _teacher(plan, None)
            with _failing(f"{config.teacher} cannot teach {config.model}"):
                Teacher(model, teaching, fixed=fixed, kind=plan.task.kind).terms(batch, outputs)


@contextlib.contextmanager
def _failing(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # every setting of a model can be wrong in a way of its own
        raise InputError(f"{what}: {first_line(error).rstrip('.')}.") from None


def _check_method(plan: Plan, sites: Sequence[Site]) -> None:
    """Refuses a method that cannot be used with adapters before anything is written."""
    if plan.pruning is None:
        return
    try:
        are_there(sites, plan.pruning.make_criterion())
    except ValueError as error:
        raise InputError(str(error)) from None


def _validator(plan: Plan) -> Validate:
    """A function that scores a model on the validation rows; by its loss where answers take too long to generate."""
    task, size, validation = plan.task, plan.config.eval_batch_size, plan.splits.validation
    features = task.features(validation, plan.tokenizer, plan.labels, training=task.judged_by_loss)

    def validate(model: Any) -> dict[str, float]:
        if task.judged_by_loss:
            return {"loss": mean_loss(model, features, task, plan.tokenizer, size)}
        answers = answer(model, task, plan.tokenizer, validation, plan.labels, size, features)
        return task.scores(answers, validation)

    return validate


# ------------------------------------------------------------ training


def _trainer(
    plan: Plan,
    model: Any,
    sites: Sequence[Site],
    folder: RunFolder,
    dense: Result | None,
    validate: Validate,
    console: Console,
) -> PinsTrainer:
    config, task = plan.config, plan.task
    if config.dropout is not None:
        set_dropout_(model, config.dropout)
    teacher = _teacher(plan, dense)
    args = _arguments(plan, folder)
    if config.bf16 and args.device.type == "cpu":
        model.set_attn_implementation("eager")  # the fused attention's backward pass is slower there in bfloat16
    mesh = fsdp.mesh_over(args.device, config.fsdp_replicas) if config.fsdp_replicas > 1 else None
    trainer = PinsTrainer(
        model=model,
        args=args,
        train_dataset=plan.train,
        data_collator=task.collator(plan.tokenizer),
        processing_class=plan.tokenizer,
        pruning=plan.pruning,
        teaching=config.teaching,
        teacher=teacher,
        kind=task.kind,
        select=config.select,
        lr_rewinds=config.lr_rewinds,
        average=config.average,
        sites=sites or None,
        fsdp=mesh or config.fsdp,
        validate=validate,
        callbacks=[Stopping(), RunLog(folder), ProgressLine(console, _title(config))],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _teacher(plan: Plan, dense: Result | None) -> Any:
    """The teacher of knowledge distillation: the given one, or the dense run's model; None for other objectives."""
    config = plan.config
    if not config.teaching.distils:
        return None
    if config.teacher is not None:
        return pretrained.load_model(config.teacher, plan.task, plan.labels, plan.tokenizer, trained=True)
    assert dense is not None
    if dense.model is not None:
        return dense.model
    return pretrained.load_model(str(RunFolder(dense.folder).model), plan.task, plan.labels, plan.tokenizer)


def _arguments(plan: Plan, folder: RunFolder) -> TrainingArguments:
    config, task = plan.config, plan.task
    assert config.learning_rate is not None
    assert config.label_smoothing is not None
    assert config.save_every is not None
    return TrainingArguments(
        output_dir=str(folder.checkpoints),
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
        eval_on_start=config.teaching.teaches_itself,
        metric_for_best_model="loss" if task.judged_by_loss else task.main,
        greater_is_better=not task.judged_by_loss,
        save_strategy="steps",
        save_steps=config.save_every,
        save_total_limit=2,  # the one before is there if the newest is damaged
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


def _note(line: str, console: Console) -> None:
    console.print(f"note: {line}", highlight=False, markup=False, soft_wrap=True)


def _title(config: RunConfig) -> str:
    return "dense" if config.is_dense else f"{config.method} {100 * config.sparsity:g} %"


def _callback(trainer: PinsTrainer, kind: type[C]) -> C:
    return next(callback for callback in trainer.callback_handler.callbacks if isinstance(callback, kind))


# ------------------------------------------------------------ after training


def _test(
    student: Student,
    sites: Sequence[Site],
    plan: Plan,
    validate: Validate,
    dense: Result | None,
    steps: int,
    seconds: float,
    console: Console,
) -> Result:
    """Saves the finished model and scores it on the test set."""
    config, task, model, main = plan.config, plan.task, student.model, processes().is_main_process
    folder = RunFolder(config.folder)
    answers = main or config.fsdp  # a sharded model answers on all processes or on none
    validation = validate(model) if answers else {}  # the log has the last evaluation's model, not the final one
    storage.of(config.fsdp, main).save_model(folder.model, student)
    if answers:
        console.print(f"testing on {sum(len(rows) for rows in plan.splits.tests.values()):,} rows", highlight=False)
        found = evaluate(model, task, plan.tokenizer, plan.splits.tests, plan.labels, config.eval_batch_size)
    if main:
        for split, said in found.answers.items():
            task.write(said, plan.splits.tests[split], folder.predictions, split)
    scores = [found.scores if main else {}]
    accelerate.utils.broadcast_object_list(scores)
    result = Result(
        folder.path,
        FINISHED,
        task.main,
        scores[0],
        None if dense is None else dense.scores,
        0.0 if plan.pruning is None else _sparsity(sites),
        steps,
        seconds,
        validation,
        model=_at_rest(model, config),
        tokenizer=plan.tokenizer,
        dense_model=None if dense is None or dense.model is None else _at_rest(dense.model, config),
    )
    if main:
        record.write_result(result, plan, found.splits)
        folder.remove_checkpoints()
    return result


def _sparsity(sites: Sequence[Site]) -> float:
    return sum(site.zeros() for site in sites) / sum(site.numel for site in sites)


def _at_rest(model: Any, config: RunConfig) -> Any:
    """A finished model for further use: on the CPU, without gradients and autocast. None if it is sharded."""
    if config.fsdp:
        return None
    model = accelerate.utils.extract_model_from_parallel(model, keep_fp32_wrapper=False, keep_torch_compile=False)
    model.zero_grad(set_to_none=True)
    return model.to("cpu").eval()
