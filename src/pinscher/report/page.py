"""One self-contained HTML page about some runs: data, style and script in one file, nothing from a network."""

from __future__ import annotations

import html
import json
from importlib import resources
from pathlib import Path
from string import Template

from pinscher import files
from pinscher.report.facts import Facts

NAMED = 3  # runs that the title names
SCRIPTS = ("charts.js", "pattern.js", "page.js")


def build(facts: Facts, refresh: float | None = None) -> str:
    """The page as text; with `refresh` the browser reloads it after that many seconds."""
    tables = facts.data["runs"]
    title = " · ".join(table["name"] for table in tables) if len(tables) <= NAMED else f"{len(tables)} runs"
    again = "" if refresh is None else f'<meta http-equiv="refresh" content="{max(1, round(refresh))}">'
    return Template(_part("page.html")).substitute(
        title=html.escape(title),
        refresh=again,
        style=_part("page.css"),
        script="".join(_part(name) for name in SCRIPTS),
        data=embedded(facts.data),
        patterns="\n".join(_patterns(facts)),
    )


def embedded(data: object) -> str:
    """JSON for a script element: nothing in it can end the element or start a comment."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _patterns(facts: Facts) -> list[str]:
    """Each pattern in its own element: the browser reads only the one that is shown."""
    return [
        f'<script type="text/plain" id="pattern-{run}-{place}" data-factor="{pattern.factor}">{pattern.data}</script>'
        for run, found in enumerate(facts.patterns)
        for place, pattern in enumerate(found)
    ]


def _part(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


def write(facts: Facts, path: str | Path, every: float | None = None) -> Path:
    """Writes the page, completely or not at all; while runs are unfinished, it reloads itself every `every` seconds."""
    return files.write_text(path, build(facts, every if facts.data["watching"] else None))
