"""The table of a comparison: the paper's layout, what is best, and the four ways to write it."""

import html
import re
from io import StringIO

import pytest
from rich.console import Console
from scipy import stats

from pinscher.compare import grid, scoreboard, tables
from pinscher.compare.results import Row
from pinscher.compare.tables import Cell, Column, Table
from pinscher.train.tasks import TASKS

# ------------------------------------------------------------ the table


def row(cell: grid.Cell, score: float) -> Row:
    config = cell.config
    return Row(
        task=cell.task,
        method=config.method,
        variant=cell.variant,
        sparsity_asked=cell.sparsity,
        sparsity=cell.sparsity,
        seed=cell.seed,
        metric=TASKS[config.task].main,
        score=score,
        validation_metric=TASKS[config.task].main,
        validation=score,
        tuned="",
        candidates=1,
        picked=True,
        steps=1,
        seconds=1.0,
        threads=1,
        objective=config.objective,
        batch_size=32,
        learning_rate=1e-4,
        schedule="cubic",
        warmup=0.1,
        cooldown=0.35,
        interval=None,
        data="",
        model="m",
        folder=cell.name,
    )


SCORES = {
    ("sst2", "dense", 0.0): (92.0, 92.5, 93.0),
    ("sst2", "pins", 0.8): (91.0, 91.2, 91.5),
    ("sst2", "platon", 0.8): (90.0, 90.1, 90.6),  # 1.0, 1.1, 0.9 below: clear
    ("sst2", "magnitude", 0.8): (80.0, 81.0, 82.0),
    ("sst2", "pins", 0.9): (88.0, 90.0, 92.0),  # 1, -1, 3 above platon: not clear
    ("sst2", "platon", 0.9): (87.0, 91.0, 89.0),
    ("sst2", "magnitude", 0.9): (70.0, 99.0),  # a seed is missing: it cannot be first
    ("cola", "dense", 0.0): (50.0, 51.0, 52.0),
    ("cola", "pins", 0.8): (40.0, 41.0, 43.5),
    ("cola", "platon", 0.8): (42.0, 42.0, 44.0),
    ("cola", "magnitude", 0.8): (0.0, 0.0, 0.0),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    flags = {"methods": "pins,platon,magnitude,dense", "tasks": "sst2,cola", "sparsity": "0.8,0.9", "seeds": 3}
    comparison = grid.read(None, {**flags, "model": "some/MiniLM_x", "paper": "bert-base"})
    cells = comparison.cells(tmp_path_factory.mktemp("cells"))
    seeds = list(comparison.seeds)
    found = []
    for cell in cells:
        scores = SCORES.get((cell.task, cell.variant, cell.sparsity), ())
        if seeds.index(cell.seed) < len(scores):
            found.append(row(cell, scores[seeds.index(cell.seed)]))
    return scoreboard.make(comparison, cells, found)


def place(table: Table, sparsity: str, method: str, column: int) -> Cell:
    return next(row[column] for row in table.rows if (row[0].text, row[1].text) == (sparsity, method))


def test_the_layout_is_the_papers(made):
    assert [column.title for column in made.columns] == [
        "sparsity",
        "method",
        "sst2, accuracy",
        "paper: BERT-base",
        "cola, matthews",
        "paper: BERT-base",
        "mean",
    ]
    assert [[row[1].text for row in block] for block in made.blocks] == [
        ["dense"],
        ["pins", "platon", "magnitude (IMP)"],
        ["pins", "platon", "magnitude (IMP)"],
    ]
    assert place(made, "80 %", "pins", 2).text == "91.23 ± 0.25"
    assert place(made, "0 %", "dense", 2).text == "92.50 ± 0.50"
    assert [place(made, "80 %", name, 3).text for name in ("pins", "platon", "magnitude (IMP)")] == [
        "91.9",
        "91.2",
        "84.3",
    ]
    assert place(made, "90 %", "platon", 5).text == "44.3"
    assert place(made, "0 %", "dense", 5).text == "58.3"
    assert place(made, "90 %", "pins", 4).text == tables.MISSING
    assert place(made, "80 %", "pins", 6).text == "66.37 ± 1.03"  # (91 + 40) / 2, (91.2 + 41) / 2, (91.5 + 43.5) / 2


def test_the_best_is_bold_and_marked_if_it_is_clear(made):
    bold = {(row[0].text, row[1].text, i) for row in made.rows for i, cell in enumerate(row) if cell.bold}
    assert bold == {("80 %", "pins", 2), ("90 %", "pins", 2), ("80 %", "platon", 4), ("80 %", "platon", 6)}
    assert [place(made, s, "pins", 2).mark for s in ("80 %", "90 %")] == [True, False]
    assert place(made, "90 %", "magnitude (IMP)", 2).text.endswith("(2 of 3)")


def test_the_notes_say_how(made):
    notes = "\n".join(made.notes)
    p = stats.ttest_rel(SCORES["sst2", "pins", 0.8], SCORES["sst2", "platon", 0.8]).pvalue
    assert f"sst2, 80 %: pins is 1.00 above platon (p = {p:.3f}, 3 seeds), 1.27 below dense" in notes
    assert "cola, 80 %: platon is 1.17 above pins" in notes
    assert "objective self-regularization for pins; empirical-risk for platon, magnitude (IMP)" in notes
    assert "no setting was searched in this comparison" in notes
    assert f"{2 * 7 * 3 - sum(map(len, SCORES.values()))} of {2 * 7 * 3} cells are not finished" in notes
    assert "BERT-base in Pruning Pre-trained" in notes


def test_one_seed_has_no_significance(tmp_path):
    comparison = grid.read(None, {"methods": "pins,platon", "tasks": "sst2", "paper": "none"})
    cells = comparison.cells(tmp_path)
    table = scoreboard.make(comparison, cells, [row(cell, score) for cell, score in zip(cells, (90, 80), strict=True)])
    assert [(line[2].text, line[2].bold, line[2].mark) for line in table.rows] == [
        ("90.00", True, False),
        ("80.00", False, False),
    ]
    assert "One seed has no significance." in table.notes[0]
    assert "pins is 10.00 above platon." in table.notes[1]
    assert len(table.columns) == 3


def test_equals_are_both_bold(tmp_path):
    comparison = grid.read(None, {"methods": "pins,platon,l0", "tasks": "sst2", "seeds": 2})
    cells = comparison.cells(tmp_path)
    scores = {("pins", 42): 80, ("pins", 1): 90, ("platon", 42): 90, ("platon", 1): 80, ("l0", 42): 1, ("l0", 1): 1}
    table = scoreboard.make(comparison, cells, [row(cell, scores[cell.variant, cell.seed]) for cell in cells])
    assert [(line[2].bold, line[2].mark) for line in table.rows] == [(True, False), (True, False), (False, False)]
    assert "pins is level with platon (p = 1.000, 2 seeds)" in table.notes[1]


def test_an_ablation_shows_the_papers_figure_only_for_what_the_paper_ran(tmp_path):
    for axis, shown in (("smoothing", {"pins-smoothing-window"}), ("objective", None), ("regrow", {"pins-regrow-on"})):
        comparison = grid.read(None, {"tasks": "cola", "model": "x"}, axis)
        table = scoreboard.make(comparison, comparison.cells(tmp_path), [])
        theirs = {line[1].text: line[3].text for line in table.rows}
        if shown is None:
            assert theirs == {
                "dense": "58.3",
                "pins-empirical-risk": "55.4",
                "pins-knowledge-distillation": "56.0",
                "pins-self-regularization": "57.1",
            }
        else:
            assert {name for name, text in theirs.items() if text != tables.MISSING} == shown


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        ({}, {"dense", "pins", "platon"}),
        ({"objective": "self-regularization"}, {"dense", "pins"}),
        ({"objective": "empirical-risk"}, {"dense", "pins", "platon"}),
        ({"pattern": "4x1"}, {"dense"}),
        ({"scope": "matrix"}, {"dense"}),
        ({"exclude_modules": ["attention"]}, {"dense"}),
        ({"schedule": "linear"}, {"dense"}),
    ],
)
def test_the_papers_figure_stands_beside_the_papers_cells_only(flags, shown, tmp_path):
    comparison = grid.read(None, {"methods": "dense,pins,platon", "tasks": "cola", "model": "x", **flags})
    table = scoreboard.make(comparison, comparison.cells(tmp_path), [])
    theirs = {line[1].text: line[3].text for line in table.rows}
    assert {name for name, text in theirs.items() if text != tables.MISSING} == shown


def test_settings_that_differ_are_told_as_flags_have_them(tmp_path):
    slow = "{method: pins, interval: 5, option: {smoothing: ema}, regrow: false}"
    (tmp_path / "c.yaml").write_text(f"methods: {{pins: {{}}, slow: {slow}}}\ntasks: [cola]\nmodel: x")
    comparison = grid.read(tmp_path / "c.yaml", {})
    notes = " ".join(scoreboard.make(comparison, comparison.cells(tmp_path), []).notes)
    assert "interval default for pins; 5 for slow." in notes
    assert "option default for pins; smoothing=ema for slow." in notes
    assert "regrow on for pins; off for slow." in notes


# ------------------------------------------------------------ four ways to write it


def written(table: Table) -> dict[str, str]:
    file = StringIO()
    tables.show(table, Console(file=file, width=300))
    return {
        "terminal": file.getvalue(),
        "markdown": tables.markdown(table),
        "latex": tables.latex(table),
        "html": tables.page(table),
    }


def test_all_renderings_hold_the_same_numbers(made):
    expected = [re.findall(r"\d+\.\d+", " ".join(cell.plain for cell in row)) for row in made.rows]
    assert sum(map(len, expected)) > 30
    for name, text in written(made).items():
        if name == "html":
            text = re.sub(r"<style>.*?</style>", "", text, flags=re.DOTALL)
            lines = re.findall(r"<tr><td.*?</tr>", text)
        else:
            start = {"latex": r"^\d+ \\%", "markdown": r"^\| \d+ %", "terminal": r"^ *\d+ %"}[name]
            lines = [line for line in text.splitlines() if re.match(start, line)]
        assert [re.findall(r"\d+\.\d+", html.unescape(re.sub(r"<[^>]*>", " ", line))) for line in lines] == expected, (
            name
        )
        if name == "latex":  # the caption's signs
            for sign, command in tables.LATEX.items():
                text = text.replace(command, sign)
        notes = [note for note in made.notes if re.sub(r"\W", "", note) not in re.sub(r"\W", "", html.unescape(text))]
        assert not notes, name


def test_a_narrow_terminal_shows_every_column(made):
    file = StringIO()
    tables.show(made, Console(file=file, width=60))
    lines = [line for line in file.getvalue().splitlines() if re.match(r" *\d+ %", line)]
    found = [re.findall(r"\d+\.\d+", line) for line in lines]
    assert found == [re.findall(r"\d+\.\d+", " ".join(cell.plain for cell in row)) for row in made.rows]


def test_bold_and_marks_in_each(made):
    text = written(made)
    assert "**91.23 ± 0.25** †" in text["markdown"]
    assert r"\textbf{91.23 $\pm$ 0.25}$^\dagger$" in text["latex"]
    assert "<b>91.23 ± 0.25</b> †" in text["html"]
    assert "91.23 ± 0.25 †" in text["terminal"]
    assert all(rule in text["latex"] for rule in (r"\toprule", r"\bottomrule", r"\begin{tabular}{rlrrrrr}"))
    assert text["latex"].count(r"\midrule") == 3
    [caption] = re.findall(r"\\caption{.*}", text["latex"])  # whoever prints it sees what the signs mean
    assert r"Bold: the best of its sparsity; $^\dagger$: better than the runner-up" in caption
    assert r"p \textless{} 0.05" in caption
    assert text["html"].count("<tbody>") == 3


def test_signs_are_escaped():
    nasty = r"a_b & <c> | 5 % $x$ #1 {y} ~ ^ \z *w* [red]"
    table = Table(nasty, (Column(nasty, is_number=False),), (((Cell(nasty),),),), (nasty,))
    text = written(table)
    assert text["terminal"].count(nasty) == 4
    escaped = r"a\_b \& \textless{}c\textgreater{} | 5 \% \$x\$ \#1 \{y\} \textasciitilde{} \textasciicircum{} \textbackslash{}z *w* [red]"  # noqa: E501
    assert text["latex"].count(escaped) == 4
    assert "a_b &amp; &lt;c&gt; | 5 %" in text["html"]
    assert "<c>" not in text["html"]
    assert r"a\_b & \<c\> \| 5 % $x$ \#1 {y} \~ ^ \\z \*w\* \[red\]" in text["markdown"]
    assert text["markdown"].splitlines()[4].replace(r"\|", "").count("|") == 2


def test_words_are_about_the_method_with_most_seeds():
    scores = {
        ("magnitude", 0.9, "cola"): {42: 30.0},
        ("pins", 0.9, "cola"): {42: 19.0, 1: 18.0},
        ("dense", 0.0, "cola"): {42: 25.0, 1: 30.0},
    }
    said = scoreboard._verdict(scores, ["magnitude", "pins"], 0.9, "cola")
    assert said.startswith("cola, 90 %: pins is 9.00 below dense")
