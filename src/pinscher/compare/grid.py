"""A comparison, read from a YAML file and flags: methods × tasks × sparsities × seeds, as cells in running order."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from pinscher.compare import DECIDED, ablations, paper, published
from pinscher.errors import InputError
from pinscher.prune import CRITERIA
from pinscher.prune.teacher import EMPIRICAL_RISK
from pinscher.registry import did_you_mean
from pinscher.settings import NOT_NEGATIVE, RATE, SEED, SPARSITY, number, numbers_in
from pinscher.train import plan as planning
from pinscher.train import recipes
from pinscher.train.config import DENSE, RunConfig, RunTeacher, flat

Settings = dict[str, Any]

AXES = ("methods", "tasks", "sparsity", "seeds", "tune", "search", "paper")
FIELDS = {setting.name: setting for setting in dataclasses.fields(RunConfig)}
# Settings that a dense run ignores.
TEACHING = {setting.name for setting in dataclasses.fields(RunTeacher)} - {"objective"}
PRUNING = {n for n, f in FIELDS.items() if f.metadata["group"] == "Pruning"} | TEACHING
FIRST_SEED = 42  # the default of a single run; further seeds are 1, 2, 3, …
SEEDS = dataclasses.replace(NOT_NEGATIVE, most=1000, asks="takes a number, or seeds with commas between them,")
LABEL = re.compile(r"[\w.=+-]+")
FACTORS = (1, 3)  # multiples of the learning rate, for methods without a main option of their own


@dataclass(frozen=True)
class Trial:
    """One run: a cell, or one candidate of a cell that is tuned."""

    name: str
    tuned: Settings
    config: RunConfig


@dataclass(frozen=True)
class Cell:
    """A method on a task at a sparsity with a seed. `task` and `variant` are labels."""

    task: str
    variant: str
    sparsity: float  # 0 for dense
    seed: int
    trials: tuple[Trial, ...]
    teacher: str | None = None  # the name of the dense cell that is its teacher

    @property
    def name(self) -> str:
        return cell_name(self.task, self.variant, self.sparsity, self.seed)

    @property
    def config(self) -> RunConfig:
        return self.trials[0].config


def cell_name(task: str, variant: str, sparsity: float, seed: int) -> str:
    percent = f"-{100 * sparsity:g}" if sparsity else ""
    return f"{task}-{variant}{percent}-seed{seed}"


@dataclass(frozen=True)
class Comparison:
    """The definition of a comparison.

    A cell's settings come from its task's recipe, the settings for all cells, its task, and its method; later ones win.
    """

    methods: dict[str, Settings]
    tasks: dict[str, Settings]
    sparsities: tuple[float, ...]
    seeds: tuple[int, ...]
    settings: Settings = field(default_factory=dict)
    tune: dict[str, list[Any]] = field(default_factory=dict)
    paper: str | None = None
    search: bool = False  # choose each method's main setting from two values, by validation score

    def __post_init__(self) -> None:
        own = {"method": {"method"}, "task": {"task", "recipe"}}
        for noun, some in (("method", self.methods), ("task", self.tasks)):
            for label, settings in some.items():
                _check_settings(settings, f"{noun} {label}", own[noun])
                if not LABEL.fullmatch(label):
                    raise InputError(f"the {noun} {label!r} names folders: use letters, digits and - _ . = + only.")
        _check_settings(self.settings, "the comparison")
        _check_settings(self.tune, "--tune")
        for name in self.tune:
            setter = next((label for label, settings in self.methods.items() if name in settings), None)
            if setter is not None:
                raise InputError(f"--tune {name} would undo what the method {setter} sets.")
        if not isinstance(self.search, bool):
            raise InputError(f"search must be true or false, not {self.search!r}.")
        published.check(self.paper)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `of` reads again."""
        told: dict[str, Any] = {"paper": self.paper} if self.paper else {}
        told |= {"search": True} if self.search else {}
        axes = {"methods": self.methods, "tasks": self.tasks, "sparsity": list(self.sparsities)}
        return {**axes, "seeds": list(self.seeds), "tune": self.tune, **told, **self.settings}

    # ------------------------------------------------------------ cells

    def cells(self, output: Path) -> list[Cell]:
        """All cells in running order: those of the first seed before those of the second, dense first."""
        found: dict[str, Cell] = {}
        for seed, task in itertools.product(self.seeds, self.tasks):
            pruned = [
                self._cell(output, task, variant, sparsity, seed)
                for sparsity in self.sparsities
                for variant in self.methods
                if self._method(variant) != DENSE
            ]
            dense = [variant for variant in self.methods if self._method(variant) == DENSE]
            if any(cell.teacher for cell in pruned) and DENSE not in dense:
                dense.append(DENSE)
            for cell in [*(self._cell(output, task, variant, 0.0, seed) for variant in dense), *pruned]:
                found[cell.name] = cell
        return list(found.values())

    @property
    def variants(self) -> list[str]:
        """The rows of the table: the methods as they were named."""
        return list(self.methods)

    def _method(self, variant: str) -> str:
        return str(self.methods.get(variant, {}).get("method", variant))

    def _cell(self, output: Path, task: str, variant: str, sparsity: float, seed: int) -> Cell:
        name = cell_name(task, variant, sparsity, seed)
        is_dense = self._method(variant) == DENSE
        axes = {n: values for n, values in self.tune.items() if not (is_dense and n in PRUNING | {"objective"})}
        searched = self._searched(task, variant) if self.search else {}
        if twice := next(iter(axes.keys() & searched.keys()), None):
            raise InputError(f"--search tries values of {twice} for {variant}, --tune others: leave one of them out.")
        axes |= searched
        trials = []
        for values in itertools.product(*axes.values()):
            tuned = dict(zip(axes, values, strict=True))
            own = "".join(f"-{n}={value}" for n, value in tuned.items())
            config = self._config(task, variant, sparsity, seed, _placed_options(tuned), output / f"{name}{own}")
            said = {n: getattr(config, n) if n in FIELDS else config.option[n] for n in tuned}
            trials.append(Trial(f"{name}{own}", said, config))
        config = trials[0].config
        taught = config.teaching.distils and config.teacher is None
        return Cell(task, variant, sparsity, seed, tuple(trials), cell_name(task, DENSE, 0.0, seed) if taught else None)

    def _searched(self, task: str, variant: str) -> dict[str, list[Any]]:
        """The main setting of a method with its candidate values: an option of the method, or the learning rate."""
        told = _merged(self.settings, self.tasks[task], self.methods.get(variant, {}))
        method = self._method(variant)
        own = None if method == DENSE or method not in CRITERIA else CRITERIA[method].searched
        if own is not None:
            return {} if own[0] in told.get("option", {}) else {own[0]: list(own[1])}
        rate = number(RATE, told["learning_rate"], "--learning-rate") if told.get("learning_rate") else None
        if rate is None:
            raise InputError(f"--search tries other learning rates for {variant}: give the one to start from.")
        return {"learning_rate": [float(f"{factor * rate:.12g}") for factor in FACTORS]}

    def _config(self, task: str, variant: str, sparsity: float, seed: int, tuned: Settings, folder: Path) -> RunConfig:
        told = _merged(self.settings, self.tasks[task], self.methods.get(variant, {}), tuned)
        told = {"method": variant, **told}
        told = recipes.applied(str(told["recipe"]), told) if told.get("recipe") else told
        told = {"task": task, **told}
        if told["method"] == DENSE:
            told = {n: value for n, value in told.items() if n not in PRUNING} | {"objective": EMPIRICAL_RISK}
        elif told["method"] != "pins":
            told.setdefault("objective", EMPIRICAL_RISK)  # as in the paper, where only pins has a teacher
        told |= {"sparsity": sparsity, "seed": seed, "output": str(folder), "export": False}
        config = RunConfig.from_dict(told)
        planning.task_of(config)
        return config


def _placed_options(tuned: Settings) -> Settings:
    """Tuned values as settings; names that are not settings are options of the method."""
    options = {name: value for name, value in tuned.items() if name not in FIELDS}
    return {name: value for name, value in tuned.items() if name in FIELDS} | ({"option": options} if options else {})


def _merged(*layers: Settings) -> Settings:
    """Merges layers of settings: later ones win; options of the method are merged."""
    told: Settings = {}
    for layer in layers:
        joined = {"option": {**told.get("option", {}), **layer["option"]}} if "option" in layer else {}
        told = {**told, **layer, **joined}
    return told


# ------------------------------------------------------------ from a file and flags


def read(
    path: str | Path | None, flags: Mapping[str, Any], ablation: str | None = None, recipe: str | None = None
) -> Comparison:
    """Reads a comparison from a YAML file or a recipe, and flags, which override both.

    Args:
        path: the file, with the keys `methods`, `tasks`, `sparsity`, `seeds`, `tune`, `search`, `paper` and any setting
            of a run.
        flags: the same keys; a setting given here applies to every cell, whatever the file says.
        ablation: an ablation whose variants are the methods.
        recipe: a table of the paper, instead of the file.
    """
    if recipe is not None:
        if path is not None:
            raise InputError("give either --recipe or --config.")
        told = paper.settings(recipe)
    else:
        told = RunConfig.settings_of(path) if path is not None else {}
    where = str(recipe or path or "the command")
    axes = {name: told.pop(name) for name in AXES if name in told}
    written = {noun: _labelled(axes.get(noun, []), noun, where) for noun in ("methods", "tasks")}
    axes |= {name: flags[name] for name in AXES if name in flags}
    if ablation is not None:
        if "methods" in flags:
            raise InputError("give either --methods or --ablation, which compares variants of pins.")
        axes["methods"] = ablations.variants(ablation)
    given = {name: value for name, value in flags.items() if name not in AXES}
    chosen = {noun: _labelled(axes.get(noun, []), noun, where) for noun in written}
    for noun, some in chosen.items():
        if not some:
            raise InputError(f"no {noun} to compare: give --{noun} A,B or a file with {noun}.")
        if noun in flags:
            chosen[noun] = _picked(some, written[noun], noun)
    methods, tasks = chosen["methods"], chosen["tasks"]
    if recipe is not None and (others := [label for label in tasks if label not in written["tasks"]]):
        raise InputError(f"{recipe} has no task {others[0]}: it has {', '.join(written['tasks'])}.")
    for label, settings in methods.items():
        if ablation is not None and (fixed := set(settings) & set(given) - {"option"}):
            raise InputError(f"--{fixed.pop().replace('_', '-')} is what the ablation varies ({label}).")
    told |= given
    for settings in (*methods.values(), *tasks.values()):
        for name in given:
            if name != "option" or ablation is None:
                settings.pop(name, None)
    if "data" in given:
        _spread(str(given["data"]), tasks)
        told.pop("data")
    tune = {str(n).replace("-", "_"): _distinct(v) for n, v in (axes.get("tune") or {}).items()}
    return Comparison(
        {label: _placed(settings, where) for label, settings in methods.items()},
        {label: _placed(settings, where) for label, settings in tasks.items()},
        _sparsities(axes.get("sparsity", [0.8])),
        _seeds(axes.get("seeds", 1)),
        _placed(told, where),
        {name: values for name, values in tune.items() if "tune" in flags or name not in given},
        axes.get("paper"),
        axes.get("search", False),
    )


def _picked(asked: Iterable[str], written: Mapping[str, Settings], noun: str) -> dict[str, Settings]:
    """The names given by flags, with their settings from the file; a task's own name selects all its entries."""
    found: dict[str, Settings] = {}
    for name in asked:
        same = {label: told for label, told in written.items() if noun == "tasks" and _task(label, told) == name}
        found |= {name: written[name]} if name in written else same or {name: {}}
    return found


def _task(label: str, settings: Settings) -> str:
    """The task of an entry."""
    recipe = recipes.settings(str(settings["recipe"])) if settings.get("recipe") else {}
    return str(settings.get("task") or recipe.get("task") or label)


def _spread(folder: str, tasks: dict[str, Settings]) -> None:
    """--data DIR means DIR/LABEL if that is a folder, else DIR/TASK; for a single task also DIR itself."""
    for label, settings in tasks.items():
        places = [Path(folder) / label, Path(folder) / _task(label, settings)]
        inside = next((place for place in places if place.is_dir()), None)
        settings["data"] = str(inside or (places[0] if len(tasks) > 1 else folder))


def _labelled(value: Any, noun: str, where: str) -> dict[str, Settings]:
    """Labels with settings, from `a,b`, [a, b] or {a: settings, b: settings}."""
    if not isinstance(value, dict):
        return {str(name): {} for name in _listed(value)}
    found = {}
    for label, settings in value.items():
        if not isinstance(settings, dict | None):
            raise InputError(f"{where}: {noun}: {label} must be settings as NAME: VALUE, not {settings!r}.")
        found[str(label)] = flat(settings or {}, f"{where}: {noun}: {label}")
    return found


def _distinct(value: Any) -> list[Any]:
    """The values without repeats; numbers are equal however they are written."""

    def key(word: Any) -> Any:
        try:
            return float(word)
        except (TypeError, ValueError):
            return str(word)

    found: dict[Any, Any] = {}
    for word in _listed(value):
        found.setdefault(key(word), word)
    return list(found.values())


def _listed(value: Any) -> Iterable[Any]:
    if isinstance(value, str):
        return [word.strip() for word in value.split(",") if word.strip()]
    return value if isinstance(value, list | tuple) else [value]


def _sparsities(value: Any) -> tuple[float, ...]:
    found = tuple(numbers_in(SPARSITY, _listed(value), "--sparsity"))
    if 0.0 in found:
        raise InputError("a sparsity of 0 is the method dense: add it to --methods instead.")
    if not found:
        raise InputError("no sparsity to compare at: give --sparsity 0.8,0.9.")
    return found


def _seeds(value: Any) -> tuple[int, ...]:
    """The seeds: a number is their count, a list or a comma gives the seeds themselves."""
    if isinstance(value, list | tuple) or (isinstance(value, str) and "," in value):
        found = tuple(numbers_in(SEED, _listed(value), "--seeds", whole=True))
    else:
        count = number(SEEDS, value, "--seeds", whole=True)
        found = tuple([FIRST_SEED, *(i for i in range(1, count + 1) if i != FIRST_SEED)][:count])
    if not found:
        raise InputError("no seeds to compare with: give --seeds 3, or the seeds themselves as 42,1,2.")
    return found


def _placed(settings: Settings, where: str) -> Settings:
    """Settings with $NAME replaced in paths, and paths made absolute."""
    found = dict(settings)
    for name in planning.PLACES:
        value = found.get(name)
        if not isinstance(value, str):
            continue
        value = os.path.expandvars(value)
        if missing := re.search(r"\$\{?(\w+)\}?", value):
            raise InputError(f"{where}: {name} is {settings[name]} but {missing[1]} is not set: export {missing[1]}=….")
        found[name] = str(Path(value).resolve()) if Path(value).exists() else value
    return found


def _check_settings(settings: Mapping[str, Any], where: str, also: set[str] | None = None) -> None:
    for name in settings:
        if name in {*DECIDED, "task", "method"} - (also or set()):
            raise InputError(f"{where} sets {name}, which the comparison decides: see methods, tasks, sparsity, seeds.")
        if name not in FIELDS:
            meant = did_you_mean(name, [*FIELDS, *AXES])
            raise InputError(f"{where} has an unknown setting {name!r}.{meant}")


def dump(comparison: Comparison) -> str:
    return yaml.safe_dump(comparison.to_dict(), sort_keys=False, allow_unicode=True)
