"""RunConfig -> run() -> a run folder: config.yaml, log.jsonl, checkpoints/, model/, predictions, result.json."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate
import datasets
import numpy as np
import torch
import transformers
import yaml
from rich.console import Console
from transformers import PrinterCallback, TrainingArguments

from pinscher import __version__, checkpoint
from pinscher.errors import InputError
from pinscher.prune import sparsity
from pinscher.train import models
from pinscher.train import plan as planning
from pinscher.train.config import DENSE, RunConfig
from pinscher.train.evaluation import answer, evaluate, mean_loss
from pinscher.train.plan import Plan
from pinscher.train.processes import processes
from pinscher.train.runlog import ProgressLine, RunLog
from pinscher.train.stopping import Stopping
from pinscher.train.trainer import PinsTrainer

QUIET = Console(quiet=True)


@dataclass(frozen=True)
class Result:
    """How a run ended. Scores are percent, on the test set."""

    folder: Path
    status: str  # finished or interrupted
    main: str
    scores: dict[str, float]
    dense: dict[str, float] | None
    sparsity: float
    steps: int
    seconds: float

    @property
    def score(self) -> float:
        return self.scores[self.main]


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
        _refuse_existing(folder, config.overwrite)
    dense, teacher = None, None
    if config.baseline or (config.objective == "knowledge-distillation" and config.teacher is None):
        dense = _dense_run(config, resume, console)
        if dense.status != "finished":
            return dataclasses.replace(dense, folder=folder)
        teacher = str(dense.folder / "model")
    plan = planning.make(config)
    if resume:
        _check_same(plan, folder, console)
    transformers.set_seed(config.seed)
    model = models.load_model(config.model, plan.task, plan.labels, plan.tokenizer, config.new_head)
    if plan.pruning is not None:
        planning.prunable_sites(plan, model)  # refuses what cannot be pruned
    processes().wait_for_everyone()  # all have looked at the folder as it was
    if processes().is_main_process:
        _start_folder(plan, folder, resume)
    processes().wait_for_everyone()
    if "tensorboard" in config.report_to:
        os.environ["TENSORBOARD_LOGGING_DIR"] = str(folder / "tensorboard")
    trainer = _trainer(plan, model, folder, config.teacher or teacher, console)
    return _train_and_test(trainer, plan, folder, dense, resume, console)


def _train_and_test(
    trainer: PinsTrainer, plan: Plan, folder: Path, dense: Result | None, resume: bool, console: Console
) -> Result:
    stopping = next(c for c in trainer.callback_handler.callbacks if isinstance(c, Stopping))
    started = time.time()
    with stopping.listening():
        trainer.train(_last_checkpoint(folder) if resume else None)
    task, steps = plan.task, trainer.state.global_step
    if steps < plan.steps:
        result = Result(folder, "interrupted", task.main, {}, None, 0.0, steps, time.time() - started)
        _write_result(result, plan, {})
        return result
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    main = processes().is_main_process
    if main:
        with checkpoint.whole(folder / "model") as fresh:
            model.save_pretrained(fresh)
            plan.tokenizer.save_pretrained(fresh)
        console.print(f"testing on {sum(len(rows) for rows in plan.splits.tests.values()):,} rows", highlight=False)
        found = evaluate(model, task, plan.tokenizer, plan.splits.tests, plan.labels, plan.config.eval_batch_size)
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
        time.time() - started,
    )
    if main:
        _write_result(result, plan, found.splits)
        remove_checkpoints(folder)
    return result


def remove_checkpoints(folder: Path) -> None:
    """Removes what led to model/; a reporter's files stay."""
    for path in [*(folder / "checkpoints").glob("checkpoint-*"), folder / "checkpoints" / "best"]:
        shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        (folder / "checkpoints").rmdir()


# ------------------------------------------------------------ the parts of a run


def _trainer(plan: Plan, model: Any, folder: Path, teacher: str | None, console: Console) -> PinsTrainer:
    config, task = plan.config, plan.task
    fixed = None
    if config.objective == "knowledge-distillation" and not config.is_dense:
        assert teacher is not None
        fixed = models.load_model(teacher, task, plan.labels, plan.tokenizer)
    validation = plan.splits.validation

    def validate(model: Any) -> dict[str, float]:
        if task.judged_by_loss:
            return {"loss": mean_loss(model, features, task, plan.tokenizer, config.eval_batch_size)}
        said = answer(model, task, plan.tokenizer, validation, plan.labels, config.eval_batch_size, features)
        return task.scores(said, validation)

    features = task.features(validation, plan.tokenizer, plan.labels, training=task.judged_by_loss)
    trainer = PinsTrainer(
        model=model,
        args=_arguments(plan, folder),
        train_dataset=plan.train,
        data_collator=task.collator(plan.tokenizer),
        processing_class=plan.tokenizer,
        pruning=plan.pruning,
        objective="empirical-risk" if config.is_dense else config.objective,
        teacher=fixed,
        kind=task.kind,
        mix=config.mix,
        temperature=config.temperature,
        select=config.select,
        validate=validate,
        callbacks=[Stopping(), RunLog(folder / "log.jsonl"), ProgressLine(console, _title(config))],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


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
    if resume and is_finished(inner.folder):
        return read_result(inner.folder)
    return run(inner, resume=resume and (inner.folder / "config.yaml").exists(), console=console)


# ------------------------------------------------------------ the folder


def _refuse_existing(folder: Path, overwrite: bool) -> None:
    if not (folder / "config.yaml").exists():
        left = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        if any(name != DENSE and not name.endswith(".new") for name in left):  # a kill may leave a temporary file
            raise InputError(f"{folder} is not empty and not a run: choose another --output.")
        return
    if overwrite:
        if processes().is_main_process:
            shutil.rmtree(folder)
        return
    status = read_result(folder).status if (folder / "result.json").exists() else "interrupted"
    resume = f"continue it with: pinscher prune --resume {folder}, or " if status != "finished" else ""
    raise InputError(f"{folder} holds a run already ({status}): {resume}replace it with --overwrite.")


def _start_folder(plan: Plan, folder: Path, resume: bool) -> None:
    if resume:
        return
    splits = plan.splits
    sizes = {"train": len(plan.splits.train or ()), "validation": len(splits.validation or ())}
    text = yaml.safe_dump(
        {
            "run": plan.config.to_dict(),
            "data": {
                "fingerprint": splits.fingerprint,
                "rows": sizes | {f"test: {name}": len(rows) for name, rows in splits.tests.items()},
                "labels": list(plan.labels),
                "notes": list(splits.notes),
            },
            "versions": _versions(),
        },
        sort_keys=False,
        allow_unicode=True,
    )
    checkpoint.write_text(folder / "config.yaml", text)


def _check_same(plan: Plan, folder: Path, console: Console) -> None:
    """Refuses to resume on other data; says when the result may differ in the last bits."""
    known = yaml.safe_load((folder / "config.yaml").read_text())
    if known["data"]["fingerprint"] != plan.splits.fingerprint:
        raise InputError(f"the data is not what it was when {folder} was started: it cannot be resumed, start anew.")
    for name, now in _versions().items():
        before = known["versions"].get(name)
        if before != now:
            console.print(
                f"note: {name} was {before}, now {now}: the result may differ in the last bits", highlight=False
            )


def _versions() -> dict[str, Any]:
    """What the last bits of a result depend on, besides the settings."""
    return {
        "pinscher": __version__,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "datasets": datasets.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "processes": processes().num_processes,
    }


def _last_checkpoint(folder: Path) -> str | None:
    """The newest whole checkpoint; none if the run was killed before the first."""
    found = {int(path.name.removeprefix("checkpoint-")): path for path in (folder / "checkpoints").glob("checkpoint-*")}
    return str(found[max(found)]) if found else None


def config_of(folder: str | Path) -> RunConfig:
    """The configuration of a run that exists."""
    path = Path(folder) / "config.yaml"
    if not path.exists():
        raise InputError(f"{folder} is not a run: it has no config.yaml.")
    settings = RunConfig.settings_of(path)
    return RunConfig.from_dict(settings | {"output": str(folder)}, str(path))


def _write_result(result: Result, plan: Plan, splits: dict[str, dict[str, float]]) -> None:
    if not processes().is_main_process:
        return
    data = {
        "status": result.status,
        "task": plan.config.task,
        "model": plan.config.model,
        "method": DENSE if plan.config.is_dense else plan.config.method,
        "main": result.main,
        "metrics": {"pruned": result.scores, "dense": result.dense, "splits": splits},
        "sparsity": result.sparsity,
        "target_sparsity": 0.0 if plan.config.is_dense else plan.config.sparsity,
        "steps": result.steps,
        "total_steps": plan.steps,
        "seconds": round(result.seconds, 1),
    }
    checkpoint.write_text(result.folder / "result.json", json.dumps(data, indent=1) + "\n")


def is_finished(folder: str | Path) -> bool:
    return (Path(folder) / "result.json").exists() and read_result(folder).status == "finished"


def read_result(folder: str | Path) -> Result:
    """The result of a run that exists."""
    folder = Path(folder)
    try:
        data = json.loads((folder / "result.json").read_text())
    except FileNotFoundError:
        raise InputError(f"{folder} has no result yet: continue it with: pinscher prune --resume {folder}") from None
    metrics = data["metrics"]
    return Result(
        folder,
        data["status"],
        data["main"],
        metrics["pruned"],
        metrics["dense"],
        data["sparsity"],
        data["steps"],
        data["seconds"],
    )
