"""RunFolder: the only reader and writer of run folders, the interface between training and everything else.

    RUN/config.yaml               resolved settings, versions, data fingerprint, prunable matrices
    RUN/log.jsonl                 one event a line: train, eval, teacher
    RUN/result.json               status, scores, sparsity, seconds, checksums of the model
    RUN/model/                    an ordinary Hugging Face folder with exact zeros
    RUN/predictions/              the answers to the test set, in the benchmark's own format
    RUN/checkpoints/checkpoint-N/ while the run is under way
    RUN/dense/                    the dense run of --baseline, a run folder itself
    RUN/export/  RUN/export-FORMAT/  RUN/eval/  RUN/eval-export/  RUN/bench.json  RUN/tensorboard/    once made

It takes and returns plain values only: reading a folder needs neither torch nor the classes of a run.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from pinscher import files, locks
from pinscher.errors import InputError

DENSE = "dense"
FINISHED, INTERRUPTED, RUNNING = "finished", "interrupted", "running"
CHECKPOINT = "checkpoint-"
SCORES = "scores.json"  # of eval/ and eval-export/
LOCK = ".lock"  # while a process works in the folder
PATIENCE = 2.0  # seconds to wait for a process that was just killed
_held: set[Path] = set()  # the folders that this process has locked
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class RunFolder:
    """A folder that holds a run, or will."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.log = self.path / "log.jsonl"
        self.result = self.path / "result.json"
        self.bench = self.path / "bench.json"
        self.model = self.path / "model"
        self.predictions = self.path / "predictions"
        self.checkpoints = self.path / "checkpoints"
        self.tensorboard = self.path / "tensorboard"
        self.export = self.path / "export"
        self.scored = self.path / "eval"  # what `pinscher eval` wrote
        self.export_scored = self.path / "eval-export"  # the same, of the stored model
        self.export_scores = self.export_scored / SCORES

    def export_in(self, form: str) -> Path:
        """Where `pinscher export` writes the run's model in another format."""
        return self.path / f"export-{form}"

    def __str__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    @cached_property
    def dense(self) -> RunFolder:
        """The dense run of --baseline."""
        return RunFolder(self.path / DENSE)

    # ------------------------------------------------------------ what it is

    @property
    def is_run(self) -> bool:
        """Whether a run was started here. A model folder may have a config.yaml too, but never without config.json."""
        return self.config.exists() and not (self.path / "config.json").exists()

    @property
    def status(self) -> str:
        """finished, interrupted or running; a run that was killed could not report it and counts as running."""
        said = str(self.read_result().get("status") or RUNNING)
        if said == INTERRUPTED and self.log.exists() and self.log.stat().st_mtime > self.result.stat().st_mtime:
            return RUNNING  # it was resumed
        return said

    @property
    def is_finished(self) -> bool:
        return self.read_result().get("status") == FINISHED

    def require_run(self) -> None:
        """Raises InputError if this is not a run."""
        if not self.is_run:
            why = "its config.json is a model's" if self.config.exists() else "it has no config.yaml"
            raise InputError(f"{self.path} is not a run: {why}.")

    def require_model(self) -> Path:
        """The folder of the run's model; raises InputError if the run has not got that far."""
        if not self.model.exists():
            raise InputError(f"{self.path} has no model yet: continue it with: pinscher prune --resume {self.path}")
        return self.model

    # ------------------------------------------------------------ one process at a time

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes out of this folder while the block runs. A process may lock it again.

        A folder that is created for the lock is removed afterwards if it is still empty.

        Raises:
            InputError: if another process works here, with its name.
        """
        place = self.path.resolve()
        if place in _held:
            yield
            return
        check_writable(self.path)
        made = [path for path in (place, *place.parents) if not path.exists()]
        self._make(place)
        try:
            with self._lock(place):
                _held.add(place)
                try:
                    yield
                finally:
                    _held.discard(place)
        finally:
            with contextlib.suppress(OSError):  # not empty
                for path in made:
                    path.rmdir()

    @contextlib.contextmanager
    def _lock(self, place: Path) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(locks.locked(place / LOCK, PATIENCE, keep=False))
            except locks.HeldError as held:
                raise InputError(
                    f"{self.path} is being worked on by {held.holder}: wait until that ends, or stop it first."
                ) from None
            yield

    # ------------------------------------------------------------ making it

    def check_new(self, overwrite: bool) -> None:
        """Raises InputError if a new run must not be put here."""
        check_writable(self.path)
        if not self.is_run:
            left = [path.name for path in self.path.iterdir()] if self.path.is_dir() else []
            left = [name for name in left if name not in (DENSE, LOCK) and not name.endswith(".new")]
            if left:  # a kill may leave a lock file or a temporary one
                raise InputError(f"{self.path} is not empty and not a run: choose another --output.")
        elif not overwrite:
            status = FINISHED if self.is_finished else INTERRUPTED
            resume = "" if status == FINISHED else f"continue it with: pinscher prune --resume {self.path}, or "
            raise InputError(f"{self.path} holds a run already ({status}): {resume}replace it with --overwrite.")

    def create(self, config: Mapping[str, Any], overwrite: bool = False) -> None:
        """Creates the folder, with only config.yaml in it."""
        self._make(self.path)
        if overwrite:
            self._clear()
        # default_flow_style=None with this width gives every prunable matrix a line of its own.
        text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True, default_flow_style=None, width=1000)
        files.write_text(self.config, text)

    def _make(self, place: Path) -> None:
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot write {self.path}: {error.strerror}. Choose another --output.") from None

    def _clear(self) -> None:
        """Removes everything but the lock; the settings last, so that a kill leaves a run that can be overwritten."""
        inside = [path for path in self.path.glob("*") if path.name != LOCK]
        try:
            for path in sorted(inside, key=lambda path: path == self.config):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
        except OSError as error:
            raise InputError(f"cannot remove {error.filename}: {error.strerror}. Choose another --output.") from None

    # ------------------------------------------------------------ config.yaml, result.json, bench.json

    def read_config(self) -> dict[str, Any]:
        """What config.yaml holds; its settings are under `run`.

        Raises:
            InputError: if this is not a run, or the file is damaged.
        """
        self.require_run()
        require_file(self.config)
        try:
            found = yaml.load(self.config.read_text(encoding="utf-8"), Loader=LOADER)
        except UnicodeDecodeError:
            raise InputError(f"{self.config} is damaged: it is not a text file.") from None
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise InputError(f"{self.config} is damaged: {' '.join(str(error).split())}") from None
        if found is None:
            raise InputError(f"{self.config} is empty: make the run again.")
        if not isinstance(found, dict) or not isinstance(found.get("run"), dict):
            raise InputError(f"{self.config} is not a run's: it has no settings under `run`.")
        return found

    def read_result(self) -> dict[str, Any]:
        """What result.json holds; nothing if the run has not ended.

        Raises:
            InputError: if the file is damaged.
        """
        return read_json(self.result, f"remove {self.path}, and make the run again")

    def write_result(self, result: Mapping[str, Any]) -> None:
        _write_json(self.result, result)

    def forget_result(self) -> None:
        """Resets the run to its start: with its settings, but without a result or a checkpoint."""
        self.remove_checkpoints()
        self.result.unlink(missing_ok=True)

    def read_bench(self) -> dict[str, Any]:
        """What bench.json holds; nothing if the model was not timed."""
        return read_json(self.bench)

    def write_bench(self, report: Mapping[str, Any]) -> None:
        _write_json(self.bench, report)

    def read_export_scores(self) -> dict[str, float]:
        """The scores of the small file on the test set; none if it was not scored."""
        return read_json(self.export_scores).get("metrics") or {}

    # ------------------------------------------------------------ log.jsonl

    def events(self) -> Iterator[dict[str, Any] | None]:
        """The events of the log in order; None for a line that cannot be read, as a kill or a running write leaves."""
        if not self.log.exists():
            return
        require_file(self.log)
        with open(self.log, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.strip():
                    yield _event(line)

    def append_event(self, event: Mapping[str, Any]) -> None:
        with open(self.log, "a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")

    def cut_log(self, step: int) -> dict[str, Any] | None:
        """Drops the events after a step, which a resumed run will repeat; returns the last remaining one."""
        require_file(self.log)
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines() if self.log.exists() else []
        kept = [(line, event) for line in lines if (event := _event(line)) is not None and event["step"] <= step]
        files.write_text(self.log, "".join(f"{line}\n" for line, _ in kept))
        return kept[-1][1] if kept else None

    # ------------------------------------------------------------ checkpoints

    def remove_checkpoints(self) -> None:
        """Removes the checkpoints, and leftovers of killed processes; files that a reporter put there stay."""
        ours = re.compile(rf"{CHECKPOINT}\d+|best|\.({CHECKPOINT}\d+|best)\.(new|old|gone)")
        for path in self.checkpoints.glob("*"):
            if ours.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.checkpoints.rmdir()


def checkpoints(folder: Path) -> dict[int, Path]:
    """The checkpoints in a folder by their step. Other folders, such as checkpoint-backup, are ignored."""
    found = folder.glob(f"{CHECKPOINT}*")
    steps = {path.name.removeprefix(CHECKPOINT): path for path in found if path.is_dir()}
    return {int(step): path for step, path in steps.items() if re.fullmatch("[0-9]+", step)}


@contextlib.contextmanager
def holding(*places: Path) -> Iterator[None]:
    """Locks the runs that contain some places, while the block writes there; a place outside of any run needs no lock.

    Of nested runs the inner one is locked: RUN/dense is a run of its own.

    Raises:
        InputError: if another process works in one of them; see `RunFolder.locked`.
    """
    with contextlib.ExitStack() as stack:
        for place in places:
            above = (RunFolder(path) for path in (place.resolve(), *place.resolve().parents))
            if (run := next((folder for folder in above if folder.is_run), None)) is not None:
                stack.enter_context(run.locked())
        yield


def check_writable(folder: Path, flag: str = "--output") -> None:
    """Raises InputError if a folder cannot be made or written, before any work is done for it."""
    files.check_name(folder, flag)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"cannot write {folder}: it is a file. Choose another {flag}.")
    above = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not above.is_dir():
        raise InputError(f"cannot write {folder}: {above} is a file. Choose another {flag}.")
    if not os.access(above, os.W_OK):
        raise InputError(f"cannot write {folder}: you may not write in {above}. Choose another {flag}.")


def require_file(path: Path) -> None:
    """Raises InputError for anything but a file: reading a pipe would block for ever."""
    if path.exists() and not path.is_file():
        raise InputError(f"{path} is a folder, a pipe or a device, not a file: remove it, or copy the run again.")


def read_json(path: Path, remedy: str = "") -> dict[str, Any]:
    """The object that a JSON file holds; an empty one if there is no file.

    Raises:
        InputError: if the file is damaged, with the remedy.
    """
    require_file(path)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is damaged: {remedy or error}.") from None
    if not isinstance(found, dict):
        raise InputError(f"{path} is damaged: {remedy or 'it does not hold an object'}.")
    return found


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    files.write_text(path, json.dumps(content, indent=1) + "\n")


def _event(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
        return found if isinstance(found, dict) and isinstance(found["step"], int | float) else None
    except (ValueError, KeyError, RecursionError):
        return None
