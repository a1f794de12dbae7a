"""One self-contained HTML page of some runs: data, style and script in one file; nothing comes from a network."""

from __future__ import annotations

import html
import json
from importlib import resources
from pathlib import Path
from string import Template

from pinscher import checkpoint
from pinscher.report.facts import Facts

NAMED = 3  # runs that the title names
SCRIPTS = ("charts.js", "pattern.js", "page.js")


def build(facts: Facts, refresh: float | None = None) -> str:
    """The page as text; with `refresh` the browser loads it anew after so many seconds."""
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
    """JSON that may stand in a script element: nothing in it can end the element or start a comment."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _patterns(facts: Facts) -> list[str]:
    """Each pattern in an element of its own: the browser reads the one that is looked at."""
    return [
        f'<script type="text/plain" id="pattern-{run}-{place}" data-factor="{pattern.factor}">{pattern.data}</script>'
        for run, found in enumerate(facts.patterns)
        for place, pattern in enumerate(found)
    ]


def _part(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


def write(facts: Facts, path: str | Path, every: float | None = None) -> Path:
    """Writes the page, whole or not at all; while runs go on, one that loads itself anew after `every` seconds."""
    return checkpoint.write_text(path, build(facts, every if facts.data["watching"] else None))
