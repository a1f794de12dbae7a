"""Prunes any torch model while it trains. Torch only: nothing here knows of transformers, files or tasks."""

from pinscher.prune.config import PruningConfig
from pinscher.prune.criteria import CRITERIA, Criterion
from pinscher.prune.once import prune_once
from pinscher.prune.pruner import Pruner
from pinscher.prune.schedule import SCHEDULES, Schedule
from pinscher.prune.sites import Site, find_sites, sparsity
from pinscher.prune.teacher import Teacher, TeacherConfig

__all__ = [
    "CRITERIA",
    "SCHEDULES",
    "Criterion",
    "Pruner",
    "PruningConfig",
    "Schedule",
    "Site",
    "Teacher",
    "TeacherConfig",
    "find_sites",
    "prune_once",
    "sparsity",
]
