"""A run's folder: what is written there, when, and how it is read again."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import transformers
import yaml
from rich.console import Console

from pinscher import __version__, checkpoint
from pinscher.errors import InputError
from pinscher.prune import find_sites
from pinscher.train.config import DENSE, RunConfig
from pinscher.train.plan import Plan
from pinscher.train.processes import processes


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
    seconds: float  # of training and testing, over all sittings
    validation: dict[str, float] = field(default_factory=dict)  # the final model on the validation rows
    asked_to_stop: bool = False  # too late for this run, which finished: what would come after it is not to start

    @property
    def score(self) -> float:
        return self.scores[self.main]


def remove_checkpoints(folder: Path) -> None:
    """Removes what led to model/; a reporter's files stay."""
    for path in [*(folder / "checkpoints").glob("checkpoint-*"), folder / "checkpoints" / "best"]:
        shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        (folder / "checkpoints").rmdir()


def check_place(folder: Path) -> None:
    """Refuses a folder that could not be written, before any work is done for it."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"cannot write {folder}: it is a file. Choose another --output.")
    above = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not above.is_dir():
        raise InputError(f"cannot write {folder}: {above} is a file. Choose another --output.")
    if not os.access(above, os.W_OK):
        raise InputError(f"cannot write {folder}: you may not write in {above}. Choose another --output.")


def refuse_existing(folder: Path, overwrite: bool) -> None:
    if not (folder / "config.yaml").exists():
        left = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        if any(name != DENSE and not name.endswith(".new") for name in left):  # a kill may leave a temporary file
            raise InputError(f"{folder} is not empty and not a run: choose another --output.")
        return
    if overwrite:
        return  # it is removed when nothing is left that could go wrong
    status = read_result(folder).status if (folder / "result.json").exists() else "interrupted"
    resume = f"continue it with: pinscher prune --resume {folder}, or " if status != "finished" else ""
    raise InputError(f"{folder} holds a run already ({status}): {resume}replace it with --overwrite.")


def start(plan: Plan, asked: RunConfig, model: Any, folder: Path, resume: bool) -> None:
    if resume:
        return
    if plan.config.overwrite:
        shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write {folder}: {error.strerror}. Choose another --output.") from None
    splits = plan.splits
    sizes = {"train": len(plan.splits.train or ()), "validation": len(splits.validation or ())}
    text = yaml.safe_dump(
        {
            "run": plan.config.to_dict(),
            "asked": asked.to_dict(),  # before the open questions were decided
            "data": {
                "fingerprint": splits.fingerprint,
                "rows": sizes | {f"test: {name}": len(rows) for name, rows in splits.tests.items()},
                "labels": list(plan.labels),
                "score": plan.task.main,
                "notes": list(splits.notes),
            },
            "versions": versions(),
            "sites": _sites(plan, model),
        },
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=None,  # a line for each site
        width=1000,
    )
    checkpoint.write_text(folder / "config.yaml", text)


def _sites(plan: Plan, model: Any) -> list[dict[str, Any]]:
    """Which matrices are prunable, for who reads the folder without the model's code; a dense run has them too."""
    patterns = tuple(plan.config.target_modules) or None, tuple(plan.config.exclude_modules) or None
    try:
        sites = find_sites(model, *patterns)
    except ValueError:
        return []  # a dense run may be of any model
    return [
        {
            "tensor": f"{site.name}.weight" if site.parameter == "weight" else site.name,
            "block": site.block,
            "kind": site.kind,
            "outputs": site.shape[-1 if site.transposed else 0],
            "inputs": site.shape[0 if site.transposed else -1],
            "transposed": site.transposed,
        }
        for site in sites
    ]


def check_same(plan: Plan, folder: Path, console: Console) -> None:
    """Refuses to resume on other data; says when the result may differ in the last bits."""
    known = yaml.safe_load((folder / "config.yaml").read_text())
    if known["data"]["fingerprint"] != plan.splits.fingerprint:
        raise InputError(f"the data is not what it was when {folder} was started: it cannot be resumed, start anew.")
    for name, now in versions().items():
        before = known["versions"].get(name)
        if before != now:
            console.print(
                f"note: {name} was {before}, now {now}: the result may differ in the last bits", highlight=False
            )


def versions() -> dict[str, Any]:
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


def last_checkpoint(folder: Path) -> str | None:
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


def write_result(result: Result, plan: Plan, splits: dict[str, dict[str, float]]) -> None:
    if not processes().is_main_process:
        return
    data = {
        "status": result.status,
        "task": plan.config.task,
        "model": plan.config.model,
        "method": DENSE if plan.config.is_dense else plan.config.method,
        "main": result.main,
        "metrics": {
            "pruned": result.scores,
            "dense": result.dense,
            "splits": splits,
            "validation": result.validation,
        },
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
    except ValueError:
        raise _damaged(folder) from None
    try:
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
            metrics.get("validation", {}),
        )
    except (KeyError, TypeError, AttributeError):
        raise _damaged(folder) from None


def _damaged(folder: Path) -> InputError:
    return InputError(f"{folder / 'result.json'} is damaged: remove {folder}, and make the run again.")
