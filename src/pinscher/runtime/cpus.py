"""How many CPUs this process may use: its affinity, and the limits that containers set with control groups."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path("/")


class Mount(NamedTuple):
    """A hierarchy of control groups that has CPU limits, as /proc/self/mountinfo tells of it."""

    version: int
    group: str  # the group that is seen at `place`
    place: str


def allowed() -> int:
    """The CPUs that the process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def sustained(root: Path = ROOT) -> int:
    """The CPUs that the process may keep busy: those it may run on, or fewer if a control group limits their time.

    A part of a CPU does not count beyond the first one: the group would be stopped again and again.
    """
    limits = list(_limits(root))
    return max(1, min(allowed(), int(min(limits)))) if limits else allowed()


def _limits(root: Path) -> Iterator[float]:
    """The limit, in CPUs, of each group that the process is in, and of those around it."""
    groups = _groups(root)
    for mount in _mounts(root):
        group = groups.get(mount.version)
        if group is None:
            continue
        top = root / mount.place.lstrip("/")
        for folder in _lineage(top, _below(group, mount.group)):
            limit = _limit_v2(folder) if mount.version == 2 else _limit_v1(folder)
            if limit is not None:
                yield limit


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # not on this system, or hidden from us
        return []


def _groups(root: Path) -> dict[int, str]:
    """The process's group in each version's hierarchy, from lines NUMBER:CONTROLLERS:GROUP."""
    found = {}
    for line in _lines(root / "proc/self/cgroup"):
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        if parts[:2] == ["0", ""]:
            found[2] = parts[2]
        elif "cpu" in parts[1].split(","):
            found[1] = parts[2]
    return found


def _mounts(root: Path) -> Iterator[Mount]:
    """From lines ID PARENT DEVICE ROOT PLACE OPTIONS … - KIND SOURCE OPTIONS."""
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        where, what = before.split(), after.split()
        if len(where) < 5 or len(what) < 3:
            continue
        if what[0] == "cgroup2":
            yield Mount(2, where[3], where[4])
        elif what[0] == "cgroup" and "cpu" in what[2].split(","):
            yield Mount(1, where[3], where[4])


def _below(group: str, top: str) -> PurePosixPath:
    """The group relative to the one that is mounted; that one itself if it is elsewhere, as in some containers."""
    try:
        below = PurePosixPath(group).relative_to(top)
    except ValueError:
        return PurePosixPath()
    return PurePosixPath() if ".." in below.parts else below


def _lineage(top: Path, below: PurePosixPath) -> Iterator[Path]:
    yield top
    for part in below.parts:
        top = top / part
        yield top


def _limit_v2(folder: Path) -> float | None:
    """Of cpu.max, which holds QUOTA PERIOD in microseconds, or max PERIOD."""
    return _share(" ".join(_lines(folder / "cpu.max")).split())


def _limit_v1(folder: Path) -> float | None:
    return _share([" ".join(_lines(folder / f"cpu.cfs_{name}_us")) for name in ("quota", "period")])


def _share(numbers: list[str]) -> float | None:
    if len(numbers) != 2 or not all(number.isdecimal() for number in numbers):  # -1 and max stand for no limit
        return None
    quota, period = (int(number) for number in numbers)
    return quota / period if quota and period else None
