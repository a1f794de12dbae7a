"""Reads and writes what a run records in its folder: settings, data, versions, result.

RunFolder knows the files; this module knows RunConfig, Plan and Result.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import transformers
from rich.console import Console

from pinscher import __version__
from pinscher.errors import InputError
from pinscher.models import hub
from pinscher.prune import Site
from pinscher.runfolder import FINISHED, RunFolder
from pinscher.train import checksums
from pinscher.train.checksums import DamagedError
from pinscher.train.config import DENSE, RunConfig
from pinscher.train.plan import PLACES, Plan
from pinscher.train.processes import agreed, processes

WEIGHTS = (".safetensors", ".bin")  # files of weights
# Settings that may differ when a run is resumed: paths, whose content is checked, and what does not affect training.
MAY_CHANGE = (*PLACES, "output", "overwrite", "export", "recipe", "report_to")


@dataclass(frozen=True)
class Result:
    """The result of a run. Scores are in percent, on the test set.

    `model`, `tokenizer` and `dense_model` are set only in the process that has just made them: result.json does not
    hold them. A sharded model is never set.
    """

    folder: Path
    status: str  # finished or interrupted
    main: str
    scores: dict[str, float]
    dense: dict[str, float] | None
    sparsity: float
    steps: int
    seconds: float  # of training and testing, in total over interruptions
    validation: dict[str, float] = field(default_factory=dict)  # the final model on the validation rows
    asked_to_stop: bool = False  # too late to interrupt this run, but no other should start
    model: Any = field(default=None, repr=False, compare=False)  # the finished model, on the CPU, in evaluation mode
    tokenizer: Any = field(default=None, repr=False, compare=False)
    dense_model: Any = field(default=None, repr=False, compare=False)  # the baseline's

    @property
    def score(self) -> float:
        return self.scores[self.main]

    def without_models(self) -> Result:
        """The same result; the memory of its models can be freed."""
        return dataclasses.replace(self, model=None, tokenizer=None, dense_model=None)


@contextlib.contextmanager
def locked(folder: RunFolder) -> Iterator[None]:
    """Holds a run folder for all processes that train together: the first locks it, and all raise if it cannot."""
    processes()  # joins them
    with contextlib.ExitStack() as stack:
        agreed(lambda: stack.enter_context(folder.locked()))
        yield


# ------------------------------------------------------------ config.yaml


def start(plan: Plan, asked: RunConfig, sites: Sequence[Site], folder: RunFolder) -> None:
    """Makes the run's folder. `asked` are the settings before the plan decided those left open."""
    splits = plan.splits
    sizes = {"train": len(splits.train or ()), "validation": len(splits.validation or ())}
    config = {
        "run": plan.config.to_dict(),
        "asked": asked.to_dict(),
        "data": {
            "fingerprint": splits.fingerprint,
            "rows": sizes | {f"test: {name}": len(rows) for name, rows in splits.tests.items()},
            "labels": list(plan.labels),
            "score": plan.task.main,
            "notes": list(splits.notes),
        },
        "versions": versions(),
        "started": fingerprints(plan.config),
        "weights": weights(plan.config),
        "sites": [_described(site) for site in sites],
    }
    folder.create(config, overwrite=plan.config.overwrite)


def _described(site: Site) -> dict[str, Any]:
    """Describes a prunable matrix for readers that do not have the model's code."""
    return {
        "tensor": f"{site.name}.weight" if site.parameter == "weight" else site.name,
        "block": site.block,
        "kind": site.kind,
        "outputs": site.shape[-1 if site.transposed else 0],
        "inputs": site.shape[0 if site.transposed else -1],
        "transposed": site.transposed,
    }


def versions() -> dict[str, Any]:
    """Versions and numbers that the last bits of a result depend on, besides the settings."""
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


def check_same(plan: Plan, folder: RunFolder, console: Console) -> None:
    """Refuses to resume with other settings, data or models; prints what may change the last bits of the result."""
    known = folder.read_config()
    _check_settings(plan.config, known, folder)
    _check_weights(plan.config, known, folder)
    if not isinstance(known.get("data"), dict) or not isinstance(known.get("versions"), dict):
        raise InputError(f"{folder.config} is damaged: it does not say which data and versions the run had.")
    if known["data"].get("fingerprint") != plan.splits.fingerprint:
        raise InputError(f"the data has changed since {folder} was started: it cannot be resumed, start a new run.")
    for name, now in versions().items():
        before = known["versions"].get(name)
        if before != now:
            console.print(
                f"note: {name} was {before}, now {now}: the result may differ in the last bits", highlight=False
            )


def fingerprints(config: RunConfig) -> dict[str, str]:
    """A short hash of every setting that must not change when a run is resumed, to detect edits.

    A dense run ignores the settings of pruning.
    """
    ignored = {f.name for f in dataclasses.fields(config) if config.is_dense and f.metadata["group"] == "Pruning"}
    told = {name: value for name, value in config.to_dict().items() if name not in {*MAY_CHANGE, *ignored}}
    return {name: _fingerprint(value) for name, value in told.items()}


def weights(config: RunConfig) -> dict[str, str]:
    """The identity of a run's model and teacher: a hash of the files in a folder, or the id on the hub."""
    places = {name: getattr(config, name) for name in ("model", "teacher")}
    return {name: _identity(place) for name, place in places.items() if place is not None}


def _identity(model: str) -> str:
    folder = Path(hub.locate(model))
    if not folder.is_dir():
        return model
    files = [path for path in sorted(folder.iterdir()) if path.suffix in WEIGHTS or path.name == "config.json"]
    return _fingerprint({path.name: checksums.hash_of(path) for path in files if path.is_file()}, 16)


def _check_weights(config: RunConfig, known: Mapping[str, Any], folder: RunFolder) -> None:
    """Refuses to resume with another model or teacher than the run was started with. A folder may have moved.

    Runs of earlier versions did not record them and are resumed without this check.
    """
    started = known.get("weights") or {}
    now = weights(config) if started else {}
    for name in sorted(started.keys() | now.keys()):
        if started.get(name) != now.get(name):
            place = getattr(config, name)
            raise InputError(
                f"{folder} cannot be resumed with another {name}: {place} is not the one that the run was started "
                "with. Put that one back, or start a new run with another --output."
            )


def _fingerprint(value: Any, size: int = 4) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=size).hexdigest()


def _check_settings(config: RunConfig, known: Mapping[str, Any], folder: RunFolder) -> None:
    """Refuses to resume with other settings: the optimiser's state would restore some of the old ones, but not all.

    Runs of earlier versions have no fingerprints and are resumed without this check.
    """
    started = known.get("started") or {}
    for name, now in fingerprints(config).items():
        if started.get(name, now) != now:
            before = known["run"].get(name)
            was = f"; the run was started with {before}" if _fingerprint(before) == started[name] else ""
            raise InputError(
                f"{folder} cannot be resumed with another {name}: it is {getattr(config, name)} now{was}. Undo that "
                f"change in {folder.config}, or start a new run with another --output."
            )


def check_unedited(folder: RunFolder) -> None:
    """Refuses a run whose config.yaml was edited. A dense run's settings are derived from those of the run around it,
    so edits would be ignored.
    """
    _check_settings(config_of(folder.path), folder.read_config(), folder)


def config_of(folder: str | Path) -> RunConfig:
    """The configuration of a run that exists."""
    run = RunFolder(folder)
    run.read_config()  # says what is wrong with a damaged one
    settings = RunConfig.settings_of(run.config)
    return RunConfig.from_dict(settings | {"output": str(folder)}, str(run.config))


# ------------------------------------------------------------ result.json


def write_result(result: Result, plan: Plan, splits: dict[str, dict[str, float]]) -> None:
    """Writes result.json, on the first process."""
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
    folder = RunFolder(result.folder)
    if result.status == FINISHED:
        data["checksums"] = checksums.manifest(folder.model)
    folder.write_result(data)


def check_model(folder: RunFolder) -> None:
    """Compares the model of a finished run with its checksums, which earlier versions did not write.

    The first process looks, and all raise.

    Raises:
        DamagedError: with the file and what is wrong with it.
    """

    def look() -> None:
        try:
            if (manifest := folder.read_result().get("checksums")) is not None:
                checksums.compare(folder.model, manifest, folder.result)
        except InputError as error:
            raise DamagedError(str(error)) from None

    processes()  # joins them
    agreed(look)


def read_result(folder: str | Path) -> Result:
    """The result of a run that has ended."""
    run = RunFolder(folder)
    data = run.read_result()
    if not run.result.exists():
        raise InputError(f"{folder} has no result yet: continue it with: pinscher prune --resume {folder}")
    try:
        metrics = data["metrics"]
        result = Result(
            run.path,
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
        result = None
    if result is None or not _is_sound(result):
        raise InputError(f"{run.result} is damaged: remove {run}, and make the run again.")
    return result


def _is_sound(result: Result) -> bool:
    """Whether the contents of a result.json have the right types."""
    tables = [result.scores, result.validation, *([] if result.dense is None else [result.dense])]
    numbers = [result.sparsity, result.steps, result.seconds]
    if not all(isinstance(table, dict) for table in tables):
        return False
    numbers += [value for table in tables for value in table.values()]
    names = [result.main, result.status]
    return all(isinstance(n, int | float) for n in numbers) and all(isinstance(name, str) for name in names)
