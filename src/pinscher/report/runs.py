"""Runs as plain values, read from the files that exist so far."""

from __future__ import annotations

import array
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pinscher.errors import InputError
from pinscher.models.names import short_blocks, short_names
from pinscher.report.analysis import Array
from pinscher.runfolder import RunFolder, require_file

WEIGHTS = "*.safetensors"


@dataclass
class Series:
    """Figures of one name over the steps."""

    steps: array.array[float] = field(default_factory=lambda: array.array("d"))
    values: array.array[float] = field(default_factory=lambda: array.array("d"))

    def arrays(self) -> tuple[Array, Array]:
        return np.array(self.steps), np.array(self.values)


@dataclass
class Log:
    """A run's log: figures of training and of evaluations by name, and when the teacher changed."""

    train: dict[str, Series] = field(default_factory=dict)
    scores: dict[str, Series] = field(default_factory=dict)
    teachers: Series = field(default_factory=Series)
    step: float = 0.0
    unread: int = 0  # lines that could not be read


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
        return self.files.status

    @property
    def files(self) -> RunFolder:
        return RunFolder(self.folder)

    @property
    def dense(self) -> Run | None:
        """The dense run of --baseline, if it has started."""
        twin = self.files.dense
        return read(twin.path) if twin.is_run else None


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
    run = RunFolder(folder)
    known = run.read_config()
    try:
        sites = _sites(known.get("sites") or [])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{run.config} is damaged: its sites lack {error}.") from None
    return Run(
        folder,
        folder.resolve().name,
        known["run"],
        known.get("versions") or {},
        known.get("data") or {},
        run.read_result(),
        sites,
        read_log(run),
    )


def named(runs: Sequence[Run]) -> list[Run]:
    """The same runs with unique names: the shortest unique endings of their paths."""
    found = []
    paths = [run.folder.resolve().parts for run in runs]
    for place, run in enumerate(runs):
        for length in range(1, len(paths[place]) + 1):
            ending = paths[place][-length:]
            if sum(path[-length:] == ending for path in paths) == 1:
                break
        found.append(dataclasses.replace(run, name="/".join(ending)))
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


def read_log(run: RunFolder) -> Log:
    """Sorts the events of a run's log into series."""
    log = Log()
    for event in run.events():
        try:
            _take(log, event or {})
        except (ValueError, KeyError, TypeError):
            log.unread += 1
    return log


def _take(log: Log, event: dict[str, Any]) -> None:
    kind, step = event["event"], float(event["step"])
    if kind == "teacher":
        _add(log.teachers, step, event.get("teacher_score"))
    elif kind in ("train", "eval"):
        group = log.train if kind == "train" else log.scores
        for name, value in event.items():
            if name not in ("event", "step", "epoch", "seconds") and isinstance(value, int | float):
                _add(group.setdefault(name.removeprefix("eval_"), Series()), step, value)
    log.step = max(log.step, step)


def _add(series: Series, step: float, value: Any) -> None:
    series.steps.append(step)
    series.values.append(float("nan") if value is None else float(value))


# ------------------------------------------------------------ model/ and what came of it


def has_model(run: Run) -> bool:
    return any(run.files.model.glob(WEIGHTS))


def matrices(run: Run) -> Iterator[tuple[Site, Array]]:
    """The prunable matrices of a run's model, [outputs, inputs], one at a time; missing ones are skipped."""
    from safetensors import SafetensorError, safe_open

    for path in sorted(run.files.model.glob(WEIGHTS)):
        require_file(path)
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
    """A tensor's name in the file: some files omit the prefix of the base model, or add one."""
    if tensor in names:
        return tensor
    tail = tensor.partition(".")[2]
    found = [name for name in names if name == tail or name.endswith(f".{tensor}")]
    return found[0] if len(found) == 1 else None


def size(folder: Path) -> int | None:
    """The bytes of a model folder's weights."""
    return sum(path.stat().st_size for path in folder.glob(WEIGHTS)) or None
