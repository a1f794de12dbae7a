"""What the site holds beside its pages: the measured files that they link to, and the fields of settings.

What lies beside docs/ in the repository lies beside the pages in the site.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
OUTSIDE = re.compile(r"\]\((?:\.\./)+(benchmarks/[^)\s]+)\)")
FIELDS = re.compile(r"<!-- fields of pinscher\.(\w+) -->")


def on_files(files: Files, config: Any) -> Files:
    """Adds every file of benchmarks/results, and what the settings in benchmarks/quality gave."""
    benchmarks = ROOT / "benchmarks"
    for path in sorted([*(benchmarks / "results").rglob("*"), *(benchmarks / "quality").glob("*.csv")]):
        if path.is_file():
            name = path.relative_to(ROOT).as_posix()
            files.append(File(name, str(ROOT), config["site_dir"], config["use_directory_urls"]))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Points links at them, and lists the fields of settings where a page asks for it."""
    up = "../" * page.file.src_uri.count("/")
    markdown = OUTSIDE.sub(lambda match: f"]({up}{match[1]})", markdown)
    return FIELDS.sub(lambda match: fields(match[1]), markdown)


def fields(name: str) -> str:
    """The fields of a dataclass of pinscher with their defaults and help, as a table."""
    import pinscher

    rows = ["| field | default | |", "|---|---|---|"]
    for one in dataclasses.fields(getattr(pinscher, name)):
        default = one.default_factory() if one.default is dataclasses.MISSING else one.default  # type: ignore[misc]
        text = str(one.metadata["help"]).replace("|", "\\|")
        rows.append(f"| `{one.name}` | `{default!r}` | {text} |")
    return "\n".join(rows)
