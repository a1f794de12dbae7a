"""The rooms import one way only, and the package is light to import."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "pinscher"
# Which rooms a room may import from. `prune` stands alone on torch.
MAY_IMPORT = {
    "errors": set(),
    "native": {"_native", "errors"},
    "prune": {"native"},
    "checkpoint": set(),
    "sharded": {"checkpoint", "prune"},
    "train": {"prune", "checkpoint", "errors", "sharded"},
    "store": {"checkpoint", "errors", "native"},
    "runtime": {"errors", "native", "store"},
    "report": {"checkpoint", "errors"},
}
FOREIGN_TO_PRUNE = {"transformers", "datasets", "accelerate", "safetensors", "rich", "typer", "sklearn"}


def imports(path: Path) -> set[str]:
    """The absolute names a file imports, at any depth."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


FILES = sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=[str(f.relative_to(SOURCE)) for f in FILES])
def test_rooms_import_one_way(path):
    room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if room in ("__init__", "cli", "benching", "comparing", "export", "inspecting", "reporting", "__main__"):
        return
    others = {name.split(".")[1] for name in imports(path) if name.startswith("pinscher.")} - {room, "__version__"}
    assert others <= MAY_IMPORT[room], f"{room} must not import {others - MAY_IMPORT[room]}"
    if room == "prune":
        assert not {name.split(".")[0] for name in imports(path)} & FOREIGN_TO_PRUNE


def test_files_stay_small():
    for path in FILES:
        assert len(path.read_text().splitlines()) <= 400, f"{path.name} wants to be two rooms"


def test_importing_the_package_is_light():
    code = "import sys, pinscher; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_every_public_name_is_there():
    import pinscher

    assert all(getattr(pinscher, name) is not None for name in [*pinscher.__all__, "prune"])
    assert set(pinscher.__all__) == set(dir(pinscher))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        pinscher.nothing  # noqa: B018


def test_no_pickle_anywhere():
    for path in FILES:
        assert not {"pickle", "dill", "cloudpickle"} & imports(path)
        calls = re.findall(r"torch\.load\((.*)\)", path.read_text())
        assert len(calls) == path.read_text().count("torch.load")
        assert not calls or path.name == "sources.py"  # other people's checkpoints, which are looked at
        assert all("weights_only=True" in call for call in calls)
