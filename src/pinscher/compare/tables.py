"""One table in four formats: terminal, Markdown, LaTeX (booktabs) and HTML, all with the same content."""

from __future__ import annotations

import html
import itertools
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

MISSING = "–"
MARK = "†"
GAP = 2  # between columns on a terminal
LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r"$\pm$",
    "†": r"$^\dagger$",
    "×": r"$\times$",
    "−": r"$-$",
    "–": "--",
}
STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }
div.table { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding-bottom: .5rem; font-weight: 600; }
th, td { padding: .25rem .75rem; text-align: right; vertical-align: bottom; }
td { white-space: nowrap; }
th.text, td.text { text-align: left; }
td.aside, th.aside { opacity: .7; }
thead tr, tbody, tfoot { border-bottom: 1px solid; }
thead { border-top: 2px solid; }
ul { padding-left: 1.2rem; max-width: 50rem; }
"""


@dataclass(frozen=True)
class Cell:
    """The text of a table cell, and how it is set."""

    text: str
    bold: bool = False
    mark: bool = False  # differs significantly

    @property
    def plain(self) -> str:
        return self.text + (f" {MARK}" if self.mark else "")


@dataclass(frozen=True)
class Column:
    title: str
    is_number: bool = True
    is_aside: bool = False  # not measured here


@dataclass(frozen=True)
class Table:
    """Columns, rows in blocks with a line between two of them, and notes below."""

    title: str
    columns: tuple[Column, ...]
    blocks: tuple[tuple[tuple[Cell, ...], ...], ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def rows(self) -> tuple[tuple[Cell, ...], ...]:
        return tuple(itertools.chain.from_iterable(self.blocks))


def show(table: Table, console: Console) -> None:
    """Prints the table on a terminal."""
    grid = Grid(title=Text(table.title), title_justify="left", box=None, pad_edge=False, show_edge=False)
    needed = 0
    for i, column in enumerate(table.columns):
        words = [*column.title.split(), *(row[i].plain for row in table.rows)]  # titles may wrap, figures not
        grid.add_column(
            Text(column.title),
            justify="right" if column.is_number else "left",
            style="dim" if column.is_aside else None,
            min_width=max(map(len, words), default=0),
        )
        needed += max(map(len, words), default=0) + GAP
    if needed > console.width:
        grid.width = needed  # rich would leave columns out
    for i, block in enumerate(table.blocks):
        if i:
            grid.add_row()
        for row in block:
            grid.add_row(*(Text(cell.plain, style="bold" if cell.bold else "") for cell in row))
    console.print(grid, crop=False, overflow="ignore")
    for note in table.notes:
        console.print(Text(note), soft_wrap=True)


def markdown(table: Table) -> str:
    """The table as GitHub Markdown; special characters are escaped."""
    lines = [f"**{_markdown(table.title)}**", ""]
    lines.append("| " + " | ".join(_markdown(column.title) for column in table.columns) + " |")
    lines.append("|" + "|".join("---:" if column.is_number else "---" for column in table.columns) + "|")
    for row in table.rows:
        lines.append("| " + " | ".join(map(_markdown_cell, row)) + " |")
    return "\n".join([*lines, "", *(f"- {_markdown(note)}" for note in table.notes)]) + "\n"


def _markdown(text: str) -> str:
    return "".join(f"\\{sign}" if sign in "\\`*_[]<>|#~" else sign for sign in text)


def _markdown_cell(cell: Cell) -> str:
    text = _markdown(cell.text)
    return (f"**{text}**" if cell.bold else text) + (f" {MARK}" if cell.mark else "")


def latex(table: Table) -> str:
    r"""The table as LaTeX, for \input with \usepackage{booktabs}."""
    layout = "".join("r" if column.is_number else "l" for column in table.columns)
    lines = [r"\begin{table}", r"\centering", rf"\begin{{tabular}}{{{layout}}}", r"\toprule"]
    lines += [" & ".join(_latex(column.title) for column in table.columns) + r" \\", r"\midrule"]
    for i, block in enumerate(table.blocks):
        lines += [r"\midrule"] if i else []
        for row in block:
            lines.append(" & ".join(_latex_cell(cell) for cell in row) + r" \\")
    signs, *others = table.notes or [""]  # the first explains bold and the dagger
    caption = f"{_latex(table.title)}. {_latex(signs)}".rstrip()
    lines += [r"\bottomrule", r"\end{tabular}", rf"\caption{{{caption}}}", r"\end{table}"]
    return "\n".join([*lines, *(f"% {note}" for note in others)]) + "\n"


def _latex(text: str) -> str:
    return "".join(LATEX.get(sign, sign) for sign in text)


def _latex_cell(cell: Cell) -> str:
    text = _latex(cell.text)
    return (rf"\textbf{{{text}}}" if cell.bold else text) + (LATEX[MARK] if cell.mark else "")


def page(table: Table) -> str:
    """The table as a self-contained HTML page."""

    def kind(column: Column) -> str:
        names = ["text"] * (not column.is_number) + ["aside"] * column.is_aside
        return f' class="{" ".join(names)}"' if names else ""

    head = "".join(f'<th scope="col"{kind(column)}>{html.escape(column.title)}</th>' for column in table.columns)
    bodies = []
    for block in table.blocks:
        rows = []
        for row in block:
            cells = zip(table.columns, row, strict=True)
            rows.append("<tr>" + "".join(f"<td{kind(column)}>{_html(cell)}</td>" for column, cell in cells) + "</tr>")
        bodies.append("<tbody>\n" + "\n".join(rows) + "\n</tbody>")
    title, notes = html.escape(table.title), "\n".join(f"<li>{html.escape(note)}</li>" for note in table.notes)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f'<div class="table"><table>\n<caption>{title}</caption>\n<thead>\n<tr>{head}</tr>\n</thead>\n'
        + "\n".join(bodies)
        + f"\n</table></div>\n<ul>\n{notes}\n</ul>\n</body>\n</html>\n"
    )


def _html(cell: Cell) -> str:
    text = html.escape(cell.text)
    return (f"<b>{text}</b>" if cell.bold else text) + (f" {MARK}" if cell.mark else "")
