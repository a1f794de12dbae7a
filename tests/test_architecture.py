"""Rooms import one way, the picture of it is up to date, tests mirror the source, the package is light to import."""

import re
import resource
import subprocess
import sys
from graphlib import CycleError

import pytest

import import_graph

SOURCE = import_graph.SOURCE
# Which rooms a room may import from; a top-level file is a room of its own. `prune` stands alone on torch.
GROUND = {"errors", "extras", "files", "locks", "native", "registry", "runfolder", "settings"}
ROOMS = {"models", "prune", "train", "compare", "store", "runtime", "report", "inspect", "integrations", "serve"}
ROOMS |= {"commands"}
MAY_IMPORT = {
    "__init__": {"extras", "integrations", "models", "prune", "train", "store", "runtime"},
    "__main__": {"commands"},
    "_native": set(),
    "errors": set(),
    "extras": {"errors"},
    "files": {"errors"},
    "locks": set(),
    "native": {"_native", "errors"},
    "registry": set(),
    "runfolder": {"errors", "files", "locks"},
    "settings": {"errors", "registry"},
    "models": {"errors", "registry"},
    "prune": {"errors", "models", "native", "registry", "settings"},
    "train": GROUND | {"models", "prune"},
    "compare": GROUND | {"models", "prune", "train"},
    "store": GROUND | {"models"},
    "runtime": GROUND | {"models", "store"},
    "integrations": GROUND | {"models", "store", "runtime"},
    "serve": GROUND | {"models", "runtime"},
    "report": GROUND | {"models"},
    "inspect": GROUND | {"models"},
    "commands": GROUND | ROOMS - {"commands"},
}
FOREIGN_TO_PRUNE = {"transformers", "datasets", "accelerate", "safetensors", "rich", "typer", "sklearn"}
HEAVY = ("torch", "transformers", "datasets", "matplotlib", "numpy", "scipy", "sklearn", "pandas", "pyarrow")
IMPORT_SECONDS, HELP_SECONDS = 0.15, 0.5  # of CPU; 0.02 and 0.25 on an idle machine

FILES = sorted(SOURCE.rglob("*.py"))


# ------------------------------------------------------------ rooms


@pytest.mark.parametrize("path", FILES, ids=[str(f.relative_to(SOURCE)) for f in FILES])
def test_rooms_import_one_way(path):
    room = import_graph.room_of(path)
    others = import_graph.imported_rooms(path)
    assert others <= MAY_IMPORT[room], f"{room} must not import {others - MAY_IMPORT[room]}"
    if room == "prune":
        assert not {name.split(".")[0] for name in import_graph.imports(path)} & FOREIGN_TO_PRUNE


def test_the_rules_allow_no_circle():
    import_graph.ordered(MAY_IMPORT)
    with pytest.raises(CycleError):
        import_graph.ordered(MAY_IMPORT | {"models": {"errors", "commands"}})


def test_every_import_is_seen(tmp_path):
    """At the top, in a function, for types only; by either form of the statement."""
    for room in ("low", "high"):
        (tmp_path / room).mkdir()
    (tmp_path / "low" / "a.py").write_text("import os\nfrom pinscher import __version__\nfrom pinscher.low import b\n")
    (tmp_path / "high" / "c.py").write_text("def f():\n    import pinscher.low.a\n")
    (tmp_path / "top.py").write_text("if TYPE_CHECKING:\n    from pinscher import high\n")
    rooms = import_graph.graph(tmp_path)
    assert rooms == {"low": set(), "high": {"low"}, "top": {"high"}}
    assert import_graph.ordered(rooms) == ["low", "high", "top"]
    assert import_graph.reduced({**rooms, "top": {"high", "low"}}) == rooms
    (tmp_path / "low" / "b.py").write_text("from pinscher.top import x\n")
    with pytest.raises(CycleError):
        import_graph.ordered(import_graph.graph(tmp_path))
    (tmp_path / "low" / "b.py").write_text("from . import a\n")
    with pytest.raises(ValueError, match="relative import"):
        import_graph.graph(tmp_path)


def test_the_picture_in_contributing_is_up_to_date():
    page = import_graph.PAGE.read_text()
    text = import_graph.section(import_graph.graph())
    assert import_graph.updated(page, text) == page, "run: python docs/import_graph.py --write"
    assert "compare --> train" in text
    assert "| `prune/` |" in text


def test_contributing_names_files_that_exist():
    """The table of what touches one place names the test or guide that proves it."""
    page = import_graph.PAGE.read_text()
    named = [*re.findall(r"`(tests/[\w/]+\.py)`", page), *re.findall(r"\]\((docs/[\w/.-]+)\)", page)]
    assert len(named) > 8
    assert [name for name in named if not (import_graph.ROOT / name).is_file()] == []
    assert max(len(line) for line in page.splitlines() if not line.startswith("|")) <= 120


# ------------------------------------------------------------ tests mirror the source

TESTS = SOURCE.parents[1] / "tests"
ABOUT_ALL = {"architecture", "docs", "examples", "promises", "readme", "wheel"}  # at the top: tests of the repository


@pytest.mark.parametrize("path", sorted(TESTS.rglob("test_*.py")), ids=lambda path: str(path.relative_to(TESTS)))
def test_a_test_is_named_after_its_module(path):
    """test_pruner_state.py tests an aspect of pruner.py; test_extension.py tests what CONTRIBUTING says of its room."""
    name, room = path.stem.removeprefix("test_"), SOURCE / path.parent.relative_to(TESTS)
    modules = [module.stem for module in room.glob("*.py")] + ["extension"]
    about_all = path.parent == TESTS and name in ABOUT_ALL
    assert about_all or any(name == module or name.startswith(f"{module}_") for module in modules)


# ------------------------------------------------------------ light to import


def python(code: str) -> str:
    return subprocess.check_output([sys.executable, "-c", code], text=True)


def loaded_by(code: str) -> list[str]:
    """Which heavy modules are loaded after some code."""
    said = python(f"import sys\n{code}\nprint('loaded', *(m for m in {HEAVY} if m in sys.modules))")
    return said.splitlines()[-1].split()[1:]


def test_importing_the_package_is_light():
    assert loaded_by("import pinscher") == []
    code = "import time; t = time.process_time(); import pinscher; print(time.process_time() - t)"
    assert min(float(python(code)) for _ in range(3)) < IMPORT_SECONDS


@pytest.mark.parametrize(
    "words",
    [[], ["eval"], ["export"], ["bench"], ["serve"], ["report"], ["inspect"]],
    ids=lambda words: " ".join(words) or "-",
)
def test_help_is_light(words):
    """Only prune and compare need torch for it: their flags name all methods."""
    run = f"sys.argv = ['pinscher', *{words}, '--help']\nfrom pinscher.commands.app import main"
    assert loaded_by(f"{run}\ntry:\n    main()\nexcept SystemExit:\n    pass") == []


def test_help_is_quick():
    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "pinscher", "--help"], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(3)) < HELP_SECONDS


def test_no_command_loads_anything_heavy_before_it_runs():
    names = [f"pinscher.commands.{path.stem}" for path in sorted((SOURCE / "commands").glob("*.py"))]
    assert loaded_by(f"import {', '.join(name.removesuffix('.__init__') for name in names)}") == []


# ------------------------------------------------------------ names and files


def test_every_public_name_is_there():
    import pinscher

    assert all(getattr(pinscher, name) is not None for name in [*pinscher.__all__, "prune"])
    assert set(pinscher.__all__) == set(dir(pinscher))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        pinscher.nothing  # noqa: B018


def test_no_pickle_anywhere():
    for path in FILES:
        assert not {"pickle", "dill", "cloudpickle"} & import_graph.imports(path)
        calls = re.findall(r"torch\.load\((.*)\)", path.read_text())
        assert len(calls) == path.read_text().count("torch.load")
        assert not calls or path.name == "sources.py"  # other people's checkpoints, which are looked at
        assert all("weights_only=True" in call for call in calls)
