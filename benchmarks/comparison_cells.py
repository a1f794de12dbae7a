"""Keeps the finished runs of a comparison without their models, so that it can be gone on with elsewhere.

    python benchmarks/comparison_cells.py keep runs/comparison       # into benchmarks/results/comparison
    python benchmarks/comparison_cells.py restore runs/comparison    # and back
    python benchmarks/comparison_cells.py page runs/comparison --cells 'sst2-*-seed2'    # where models are there

A kept run is its settings, its result and its log; `pinscher compare` takes it for finished. Folders of the machine it
ran on are left out of the settings: data is named as $DATA/TASK. The page is `pinscher report` of the runs as they are
kept, with their models.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import yaml

from pinscher.report import command as reports

KEPT = Path(__file__).parent / "results" / "comparison"
CELLS = Path("runs/comparison/cells")  # what folders are called, wherever they were
TABLES = ("results.csv", "table.md", "table.tex", "table.html")
PLACES = ("data", "train_file", "validation_file", "test_file")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["keep", "restore", "page"])
    parser.add_argument("comparison", type=Path)
    parser.add_argument("--kept", type=Path, default=KEPT)
    parser.add_argument("--cells", default="sst2-*-seed2", help="the runs of the page")
    args = parser.parse_args()
    if args.action == "keep":
        keep(args.comparison, args.kept)
    elif args.action == "page":
        page(args.comparison, args.kept, args.cells)
    else:
        for cell in sorted((args.kept / "cells").iterdir()):
            if not (args.comparison / "cells" / cell.name).exists():
                shutil.copytree(cell, args.comparison / "cells" / cell.name)


def keep(comparison: Path, kept: Path) -> None:
    for cell in sorted((comparison / "cells").iterdir()):
        result = cell / "result.json"
        if result.exists() and json.loads(result.read_text())["status"] == "finished":
            keep_cell(cell, kept / "cells" / cell.name)
    for name in TABLES:
        if (comparison / name).exists():
            text = (comparison / name).read_text().replace(str(comparison.resolve()), "runs/comparison")
            (kept / name).write_text(text)


def keep_cell(cell: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for name in ("result.json", "log.jsonl"):
        shutil.copyfile(cell / name, target / name)
    told = yaml.safe_load((cell / "config.yaml").read_text())
    for part in ("run", "asked"):
        portable(told.get(part) or {}, cell.name)
    (target / "config.yaml").write_text(yaml.safe_dump(told, sort_keys=False, allow_unicode=True))


def page(comparison: Path, kept: Path, cells: str) -> None:
    """KEPT/CELLS.html, in the order of the scores."""
    found = [cell for cell in (comparison.resolve() / "cells").glob(cells) if (cell / "model").is_dir()]
    scores = {cell.name: json.loads((cell / "result.json").read_text()) for cell in found}
    found.sort(key=lambda cell: -scores[cell.name]["metrics"]["pruned"][scores[cell.name]["main"]])
    output = kept.resolve() / f"{cells.replace('-*', '')}.html"
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):  # the page names folders as they are given
        for cell in found:
            keep_cell(cell, CELLS / cell.name)
            (CELLS / cell.name / "model").symlink_to(cell / "model")
        print(*reports.run([str(CELLS / cell.name) for cell in found], str(output)))


def portable(settings: dict[str, Any], cell: str) -> None:
    """Replaces folders of this machine in place."""
    if "output" in settings:
        settings["output"] = str(CELLS / cell)
    if settings.get("teacher"):
        settings["teacher"] = str(CELLS / Path(settings["teacher"]).parent.name / "model")
    for name in PLACES:
        if settings.get(name):
            settings[name] = f"$DATA/{Path(settings[name]).name}"


if __name__ == "__main__":
    main()
