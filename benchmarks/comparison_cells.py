"""Keeps the finished runs of a comparison without their models, so that it can be gone on with elsewhere.

    python benchmarks/comparison_cells.py keep runs/comparison       # into benchmarks/results/comparison
    python benchmarks/comparison_cells.py restore runs/comparison    # and back

A kept run is its settings, its result and its log; `pinscher compare` takes it for finished. Folders of the machine it
ran on are left out of the settings: data is named as $DATA/TASK.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import yaml

KEPT = Path(__file__).parent / "results" / "comparison"
TABLES = ("results.csv", "table.md", "table.tex", "table.html")
PLACES = ("data", "train_file", "validation_file", "test_file")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["keep", "restore"])
    parser.add_argument("comparison", type=Path)
    parser.add_argument("--kept", type=Path, default=KEPT)
    args = parser.parse_args()
    if args.action == "keep":
        keep(args.comparison, args.kept)
    else:
        for cell in sorted((args.kept / "cells").iterdir()):
            if not (args.comparison / "cells" / cell.name).exists():
                shutil.copytree(cell, args.comparison / "cells" / cell.name)


def keep(comparison: Path, kept: Path) -> None:
    for cell in sorted((comparison / "cells").iterdir()):
        result = cell / "result.json"
        if not result.exists() or json.loads(result.read_text())["status"] != "finished":
            continue
        target = kept / "cells" / cell.name
        target.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(result, target / "result.json")
        shutil.copyfile(cell / "log.jsonl", target / "log.jsonl")
        told = yaml.safe_load((cell / "config.yaml").read_text())
        for part in ("run", "asked"):
            portable(told.get(part) or {}, cell.name)
        (target / "config.yaml").write_text(yaml.safe_dump(told, sort_keys=False, allow_unicode=True))
    for name in TABLES:
        if (comparison / name).exists():
            text = (comparison / name).read_text().replace(str(comparison.resolve()), "runs/comparison")
            (kept / name).write_text(text)


def portable(settings: dict[str, Any], cell: str) -> None:
    """Replaces folders of this machine in place."""
    if "output" in settings:
        settings["output"] = f"runs/comparison/cells/{cell}"
    for name in PLACES:
        if settings.get(name):
            settings[name] = f"$DATA/{Path(settings[name]).name}"


if __name__ == "__main__":
    main()
