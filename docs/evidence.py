"""Brings what pages link to outside of docs/ into the site: what was measured is read beside what is said of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
OUTSIDE = re.compile(r"\]\((?:\.\./)+(benchmarks/[^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds every file of benchmarks/results."""
    for path in sorted((ROOT / "benchmarks" / "results").rglob("*")):
        if path.is_file():
            name = path.relative_to(ROOT).as_posix()
            files.append(File(name, str(ROOT), config["site_dir"], config["use_directory_urls"]))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Points links at them: what lies beside docs/ in the repository lies beside the pages in the site."""
    up = "../" * page.file.src_uri.count("/")
    return OUTSIDE.sub(lambda match: f"]({up}{match[1]})", markdown)
