"""Run folders as plain values: config.yaml, log.jsonl, result.json, model/, export/, bench.json; whatever is there."""

from __future__ import annotations

import array
import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from pinscher.errors import InputError
from pinscher.report.analysis import Array, short_blocks, short_names

WEIGHTS = "*.safetensors"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass
class Series:
    """Figures of one name over the steps."""

    steps: array.array[float] = field(default_factory=lambda: array.array("d"))
    values: array.array[float] = field(default_factory=lambda: array.array("d"))

    def arrays(self) -> tuple[Array, Array]:
        return np.array(self.steps), np.array(self.values)


@dataclass
class Log:
    """A run's log: figures of training and of evaluations by name, and the steps at which the teacher changed."""

    train: dict[str, Series] = field(default_factory=dict)
    scores: dict[str, Series] = field(default_factory=dict)
    teachers: Series = field(default_factory=Series)
    step: float = 0.0
    unread: int = 0  # lines that are not what a run writes


@dataclass(frozen=True)
class Site:
    """One prunable matrix, as the run recorded it."""

    tensor: str
    layer: str
    kind: str
    transposed: bool
    size: int


@dataclass(frozen=True)
class Run:
    """A run folder, without its weights."""

    folder: Path
    name: str
    settings: dict[str, Any]
    versions: dict[str, Any]
    data: dict[str, Any]
    result: dict[str, Any]
    sites: list[Site]
    log: Log

    @property
    def finished(self) -> bool:
        return self.result.get("status") == "finished"

    @property
    def status(self) -> str:
        said = str(self.result.get("status") or "running")
        log, result = self.folder / "log.jsonl", self.folder / "result.json"
        if said == "interrupted" and log.exists() and log.stat().st_mtime > result.stat().st_mtime:
            return "running"  # again
        return said

    @property
    def dense(self) -> Run | None:
        """The dense twin of --baseline, if it has begun."""
        inner = self.folder / "dense"
        return read(inner) if (inner / "config.yaml").exists() else None


def read(folder: str | Path) -> Run:
    """Reads a run folder.

    Raises:
        InputError: if it is none, or a file in it is damaged.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"{folder} does not exist: give the folder of a run, as pinscher prune left it.")
    if (folder / "comparison.yaml").exists():
        raise InputError(f"{folder} is a comparison: give some of its runs, {folder / 'cells'}/….")
    if not (folder / "config.yaml").exists():
        raise InputError(f"{folder} is not a run: it has no config.yaml.")
    try:
        known = yaml.load((folder / "config.yaml").read_text(encoding="utf-8"), Loader=LOADER)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{folder / 'config.yaml'} is damaged: {' '.join(str(error).split())}") from None
    if not isinstance(known, dict) or not isinstance(known.get("run"), dict):
        raise InputError(f"{folder / 'config.yaml'} is not a run's: it has no settings under `run`.")
    try:
        sites = _sites(known.get("sites") or [])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{folder / 'config.yaml'} is damaged: its sites lack {error}.") from None
    return Run(
        folder,
        folder.resolve().name,
        known["run"],
        known.get("versions") or {},
        known.get("data") or {},
        json_of(folder / "result.json"),
        sites,
        read_log(folder / "log.jsonl"),
    )


def named(runs: Sequence[Run]) -> list[Run]:
    """The same runs with names that tell them apart: as much of each path as that takes."""
    found = []
    paths = [run.folder.resolve().parts for run in runs]
    for place, run in enumerate(runs):
        for length in range(1, len(paths[place]) + 1):
            ending = paths[place][-length:]
            if sum(path[-length:] == ending for path in paths) == 1:
                break
        found.append(dataclasses.replace(run, name="/".join(ending)))
    return found


def json_of(path: Path) -> dict[str, Any]:
    """What a JSON file holds; nothing if it is not there."""
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is damaged: {error}") from None
    if not isinstance(found, dict):
        raise InputError(f"{path} is damaged: it does not hold an object.")
    return found


def _sites(records: list[dict[str, Any]]) -> list[Site]:
    blocks = list(dict.fromkeys(str(record["block"]) for record in records))
    kinds = list(dict.fromkeys(str(record["kind"]) for record in records))
    layer = dict(zip(blocks, short_blocks(blocks), strict=True))
    kind = dict(zip(kinds, short_names(kinds), strict=True))
    return [
        Site(
            str(record["tensor"]),
            layer[str(record["block"])],
            kind[str(record["kind"])],
            bool(record["transposed"]),
            int(record["outputs"]) * int(record["inputs"]),
        )
        for record in records
    ]


# ------------------------------------------------------------ log.jsonl


def read_log(path: Path) -> Log:
    """Reads a log line by line; what a kill or a run under way cut off is passed over."""
    log = Log()
    if not path.exists():
        return log
    with open(path, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                told = json.loads(line)
                _take(log, told, float(told["step"]))
            except (ValueError, KeyError, TypeError):
                log.unread += bool(line.strip())
    return log


def _take(log: Log, told: dict[str, Any], step: float) -> None:
    event = told["event"]
    if event == "teacher":
        _add(log.teachers, step, told.get("teacher_score"))
    elif event in ("train", "eval"):
        group = log.train if event == "train" else log.scores
        for name, value in told.items():
            if name not in ("event", "step", "epoch", "seconds") and isinstance(value, int | float):
                _add(group.setdefault(name.removeprefix("eval_"), Series()), step, value)
    log.step = max(log.step, step)


def _add(series: Series, step: float, value: Any) -> None:
    series.steps.append(step)
    series.values.append(float("nan") if value is None else float(value))


# ------------------------------------------------------------ model/ and what came of it


def has_model(run: Run) -> bool:
    return any((run.folder / "model").glob(WEIGHTS))


def matrices(run: Run) -> Iterator[tuple[Site, Array]]:
    """The prunable matrices of a run's model, [outputs, inputs], one at a time; those it lacks are passed over."""
    from safetensors import SafetensorError, safe_open

    for path in sorted((run.folder / "model").glob(WEIGHTS)):
        try:
            # torch, not numpy: it knows bfloat16.
            with safe_open(path, framework="pt") as file:
                names = set(file.keys())
                for site in run.sites:
                    name = _stored(site.tensor, names)
                    if name is not None:
                        weight = file.get_tensor(name).float().numpy()
                        yield site, weight.T if site.transposed else weight
        except SafetensorError as error:
            raise InputError(f"{path} is damaged: {error}") from None


def _stored(tensor: str, names: set[str]) -> str | None:
    """A tensor's name in the file: some models' files leave the prefix of their base model out, or add one."""
    if tensor in names:
        return tensor
    tail = tensor.partition(".")[2]
    found = [name for name in names if name == tail or name.endswith(f".{tensor}")]
    return found[0] if len(found) == 1 else None


def size(folder: Path) -> int | None:
    """The bytes of a model folder's weights."""
    return sum(path.stat().st_size for path in folder.glob(WEIGHTS)) or None
