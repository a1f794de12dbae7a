"""Makes the runs of a comparison as tasks of a Ray cluster: `pinscher compare --ray ADDRESS`.

A task starts the run in its own process (worker.py) on the node that Ray chose, with a thread for each CPU it was
given, and holds the run's lock there. All nodes must see the comparison's folder under the same path. When a task is
cancelled, its run saves and stops; when a task is lost, so is its run, which is resumed later.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import socket
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pinscher import files
from pinscher.compare import session as sessions
from pinscher.compare import worker
from pinscher.compare.grid import Trial
from pinscher.compare.session import Session
from pinscher.errors import InputError, first_line
from pinscher.runfolder import RunFolder
from pinscher.train.config import RunConfig

LOCAL = "local"


@dataclass(frozen=True)
class Cluster:
    """A connected cluster. Each run gets `cpus` CPUs of one node."""

    ray: Any
    cpus: int
    sign: Path  # a file in the comparison's folder: a node that sees it shares the folder

    def room(self) -> int:
        """How many runs fit at once; it changes as nodes join and leave."""
        return sum(cpus // self.cpus for cpus in _cpus_of_nodes(self.ray))

    def start(self, session: Session, trial: Trial) -> Run | None:
        config = session.config(trial)
        if config is None:
            return None
        claim, held = session.claim_of(trial)
        trouble = session.trouble(trial).resolve()
        task = {
            "config": dataclasses.replace(config, output=str(config.folder.resolve())).to_dict(),
            "trouble": str(trouble),
            "claim": str(claim.resolve()),
            "held": held,
            "sign": str(self.sign),
        }
        # A run that is lost is a failure, as it is on one machine: the same command resumes it.
        remote = self.ray.remote(num_cpus=self.cpus, max_retries=0)(perform)
        return Run(self.ray, remote.options(name=trial.name).remote(task), trouble)


@dataclass(frozen=True)
class Run:
    """A run on the cluster."""

    ray: Any
    reference: Any
    trouble: Path

    def status(self) -> str | None:
        """How the run ended; None while it runs or waits for a node."""
        if not self._is_over():
            return None
        try:
            status, why = self.ray.get(self.reference)
        except self.ray.exceptions.TaskCancelledError:  # before its process was started
            return worker.INTERRUPTED
        except self.ray.exceptions.RayError as error:  # the node is gone, or its memory was full
            status, why = worker.FAILED, f"lost by the cluster: {first_line(error)}"
        if why:
            files.write_text(self.trouble, f"{why}\n")
        return str(status)

    def stop(self) -> None:
        """Asks the run to save and stop."""
        self.ray.cancel(self.reference, force=False)

    def end(self) -> None:
        """Ends the run now."""
        if not self._is_over():
            self.ray.cancel(self.reference, force=True)

    def _is_over(self) -> bool:
        return bool(self.ray.wait([self.reference], timeout=0)[0])


@contextlib.contextmanager
def connected(address: str, output: Path, jobs: int = 1, cpus_per_run: int | None = None) -> Iterator[Cluster]:
    """Connects to a cluster while the block runs.

    Args:
        address: HOST:PORT, ray://HOST:PORT, `auto` for the cluster of this machine, or `local` for one that is started
            on this machine and ends with the block.
        output: the comparison's folder, which all nodes share.
        jobs: how many runs share a node; decides the CPUs of a run where they are not given.
        cpus_per_run: CPUs, and threads, of a run.

    Raises:
        InputError: if Ray is not installed, there is no such cluster, or no node has enough CPUs.
    """
    try:
        import ray
    except ImportError:
        raise InputError("--ray needs Ray: pip install 'pinscher[ray]'") from None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster of our own tells nobody
    _check_reachable(address)
    own: dict[str, Any] = {"include_dashboard": False} if address == LOCAL else {}
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **own)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise _unreachable(address, first_line(error)) from None
    sign = output.resolve() / f".ray-{uuid.uuid4().hex}"
    try:
        cpus = _cpus_of_run(_cpus_of_nodes(ray), jobs, cpus_per_run)
        files.write_text(sign, "")
        yield Cluster(ray, cpus, sign)
    finally:
        sign.unlink(missing_ok=True)
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Raises InputError if nobody listens at HOST:PORT. Ray itself tries for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not (colon and port.isdigit()):
        return
    try:
        socket.create_connection((host, int(port)), timeout=sessions.PATIENCE).close()
    except (OSError, OverflowError) as error:
        raise _unreachable(address, first_line(error)) from None


def _unreachable(address: str, why: str) -> InputError:
    start = "start one with `ray start --head`, or use --ray local"
    return InputError(f"cannot connect to a Ray cluster at {address}: {why.rstrip('.')}; {start}.")


def _cpus_of_nodes(ray: Any) -> list[int]:
    """The CPUs of each node that may run tasks."""
    found = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    return [cpus for cpus in found if cpus > 0]


def _cpus_of_run(nodes: list[int], jobs: int, wanted: int | None) -> int:
    """The CPUs asked for, else those that let `jobs` runs share the smallest node."""
    if not nodes:
        raise InputError("the Ray cluster has no CPUs: start its nodes with --num-cpus.")
    if wanted is not None and wanted > max(nodes):
        raise InputError(f"--cpus-per-run {wanted} fits no node: the largest has {max(nodes)} CPUs.")
    return wanted or max(1, min(nodes) // jobs)


# ------------------------------------------------------------ on a node


def perform(task: dict[str, Any]) -> tuple[str, str]:
    """Makes a run on this node; returns its status, and the reason of a failure that its process did not record."""
    try:
        _check_shared(Path(task["sign"]))
        return _performed(task), ""
    except InputError as error:
        return worker.FAILED, first_line(error)


def _check_shared(sign: Path) -> None:
    """Waits a moment, since network file systems show new files late."""
    until = time.monotonic() + sessions.PATIENCE
    while not sign.exists():
        if time.monotonic() > until:
            host = os.uname().nodename
            raise InputError(f"{host} does not see {sign.parent}: --ray needs a folder that all nodes share.")
        time.sleep(sessions.LOOK)


def _performed(task: dict[str, Any]) -> str:
    import ray

    config = RunConfig.from_dict(task["config"])
    context: Any = ray.get_runtime_context()
    threads = int(context.get_assigned_resources()["CPU"])
    with sessions.claimed(Path(task["claim"]), task["held"]) as lock:
        if RunFolder(config.folder).is_finished:
            return worker.FINISHED
        process = worker.start(config, Path(task["trouble"]), threads, (lock.fileno(),))
        try:
            return _waited(process)
        finally:
            process.end()


def _waited(process: worker.Process) -> str:
    while True:
        try:
            while (status := process.status()) is None:
                time.sleep(sessions.LOOK)
            return status
        except KeyboardInterrupt:  # raised by Ray when the task is cancelled
            process.stop()
