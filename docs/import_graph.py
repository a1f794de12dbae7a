"""Reads from the source which rooms import which, and keeps the picture in CONTRIBUTING.md up to date.

    python docs/import_graph.py            # print the section
    python docs/import_graph.py --write    # put it between its markers in CONTRIBUTING.md

A room is a folder of src/pinscher, or a file beside them. Every import counts, wherever in a file it is.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "pinscher"
PAGE = ROOT / "CONTRIBUTING.md"
START, END = "<!-- import graph: python docs/import_graph.py --write -->", "<!-- end of import graph -->"

Graph = dict[str, set[str]]  # room -> rooms that it imports


def imports(path: Path) -> set[str]:
    """The absolute names that a file imports, at any depth."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(f"{path}: relative import")
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def room_of(path: Path, source: Path = SOURCE) -> str:
    return path.relative_to(source).parts[0].removesuffix(".py")


def imported_rooms(path: Path, source: Path = SOURCE) -> set[str]:
    """The other rooms that a file imports. Names of the package itself, as `__version__`, are none."""
    names = {name.split(".")[1] for name in imports(path) if name.startswith("pinscher.")}
    return {name for name in names if not name.startswith("__")} - {room_of(path, source)}


def graph(source: Path = SOURCE) -> Graph:
    """Every room with the rooms that it imports."""
    found: Graph = {}
    for path in sorted(source.rglob("*.py")):
        found.setdefault(room_of(path, source), set()).update(imported_rooms(path, source))
    return found


def ordered(rooms: Mapping[str, set[str]]) -> list[str]:
    """The rooms with those that are imported first.

    Raises:
        graphlib.CycleError: if two rooms import each other, directly or not.
    """
    sorter = TopologicalSorter({room: sorted(others) for room, others in sorted(rooms.items())})
    return list(sorter.static_order())


def ground(rooms: Mapping[str, set[str]], source: Path = SOURCE) -> set[str]:
    """The files beside the folders: small modules that the rooms stand on."""
    return {room for room in rooms if not (source / room).is_dir() and not room.startswith("__")}


def reduced(rooms: Mapping[str, set[str]]) -> Graph:
    """The same graph without the imports that a longer way shows too."""
    reach: Graph = {}
    for room in ordered(rooms):
        reach[room] = set(rooms.get(room, ())).union(*(reach[other] for other in rooms.get(room, ())))
    return {room: {o for o in others if not any(o in reach[via] for via in others)} for room, others in rooms.items()}


def section(rooms: Mapping[str, set[str]], source: Path = SOURCE) -> str:
    """A picture of the folders without arrows that others imply, and a table of all that is imported."""
    below = ground(rooms, source)
    order = [room for room in ordered(rooms) if room not in below and not room.startswith("_")]
    drawn = reduced(rooms)
    arrows = [f"    {room} --> {other}" for room in order for other in order if other in drawn[room]]
    table = ["| room | imports the rooms | and the files |", "|---|---|---|"]
    for room in order:
        inside = [other for other in order if other in rooms[room]]
        beside = [f"{other}.py" for other in sorted(rooms[room] & below) if not other.startswith("_")]
        named = "all others" if {*inside, room} == set(order) else ", ".join(inside)
        table.append(f"| `{room}/` | {named or '–'} | {', '.join(beside) or '–'} |")
    return "\n".join(["```mermaid", "flowchart RL", *arrows, "```", "", *table])


def updated(page: str, text: str) -> str:
    """A page with the text between the two markers."""
    before, start, rest = page.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"the page has no section between {START} and {END}")
    return f"{before}{START}\n\n{text}\n\n{END}{after}"


def main() -> None:
    text = section(graph())
    if "--write" in sys.argv[1:]:
        PAGE.write_text(updated(PAGE.read_text(encoding="utf-8"), text), encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
