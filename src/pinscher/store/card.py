"""The model card: what the model is, how good, how small, and how to load it; with a picture of what was kept where."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from pinscher.models.names import Place, short_blocks

PICTURE = "density.png"
RERANKER = "CrossEncoder"
PIPELINES = {
    "SentenceTransformer": {"pipeline_tag": "sentence-similarity"},
    RERANKER: {"pipeline_tag": "text-ranking"},
}


def write(
    folder: Path,
    model: Any,
    size: int,
    facts: Mapping[str, Any],
    settings: Mapping[str, Any],
    densities: Mapping[Place, float],
) -> None:
    """Writes README.md and the picture into the folder."""
    if densities:
        draw(densities, folder / PICTURE)
    (folder / "README.md").write_text(text(model, size, facts, settings, densities), encoding="utf-8")


def text(
    model: Any, size: int, facts: Mapping[str, Any], settings: Mapping[str, Any], densities: Mapping[Place, float]
) -> str:
    """The card as Markdown.

    Args:
        model: the stored model.
        size: bytes of its files.
        facts: how it was made: base_model, task, scores, dense_scores, sparsity, method; and loads_as, the class of
            sentence-transformers; all optional.
        settings: how its values are stored.
        densities: fraction kept, for each matrix.
    """
    name = type(model).__name__
    base, task = _base(facts), facts.get("task")
    dense = sum(p.numel() * p.element_size() for p in model.parameters())
    about = f"A pruned {name}"
    if base:
        about += f" made from {base}"
    if task:
        about += f", fine-tuned on {task}"
    lines = ["---", yaml.safe_dump(_front(facts), sort_keys=True).strip(), "---", "", f"# {_title(facts, name)}", ""]
    lines += [f"{about}, stored small by pinscher.", "", *_table(size, dense, facts, settings, densities), ""]
    lines += ["## How to load it", "", "```python", *_loading(name, facts.get("loads_as")), "```", ""]
    lines += _loaded(facts.get("loads_as"))
    if densities:
        lines += ["## What was kept", "", f"![Fraction of weights kept in each matrix]({PICTURE})", ""]
    return "\n".join(lines)


def _loading(name: str, wrapper: str | None) -> list[str]:
    """The lines of code that load the model: with transformers, or a class of sentence-transformers."""
    here = "…this folder or its name on the hub…"
    if wrapper is None:
        lines = ["import pinscher  # lets transformers read the file", f"from transformers import {name}"]
        return [*lines, "", f'model = {name}.from_pretrained("{here}")']
    lines = [
        "import pinscher  # lets sentence-transformers read the file",
        f"from sentence_transformers import {wrapper}",
    ]
    use = 'scores = model.predict([("a question", "a text")])' if wrapper == RERANKER else 'model.encode(["a text"])'
    return [*lines, "", f'model = {wrapper}("{here}")', use]


def _loaded(wrapper: str | None) -> list[str]:
    if wrapper is not None:
        return ["On a CPU it runs in pinscher's sparse runtime, which skips the zeros.", ""]
    return [
        "What comes out is an ordinary dense-weight model with exact zeros: `pipeline`, `save_pretrained` and",
        "further training work as with any other.",
        "",
    ]


def _front(facts: Mapping[str, Any]) -> dict[str, Any]:
    front: dict[str, Any] = {"library_name": "transformers", "tags": ["pinscher", "pruned", "sparse"]}
    if (wrapper := facts.get("loads_as")) is not None:
        front |= {"library_name": "sentence-transformers", **PIPELINES[wrapper]}
        front["tags"] = ["sentence-transformers", *front["tags"]]
    if (base := str(facts.get("base_model") or "")) and _is_on_hub(base):
        front["base_model"] = base
    if facts.get("task"):
        front["tags"].append(str(facts["task"]))
    return front


def _is_on_hub(base: str) -> bool:
    """Whether a name is a hub id, not a package or a local folder."""
    return not base.startswith((".", "/", "~", "pypi:")) and base.count("/") <= 1 and not Path(base).exists()


def _base(facts: Mapping[str, Any]) -> str:
    """The name of the base model; of a folder only the last part, since the path is private."""
    base = str(facts.get("base_model") or "").removeprefix("pypi:")
    return base if _is_on_hub(base) else Path(base).name


def _title(facts: Mapping[str, Any], name: str) -> str:
    base = Path(_base(facts) or name).name
    sparsity = f", {facts['sparsity']:.0%} pruned" if "sparsity" in facts else ""
    return f"{base}{sparsity}"


def _table(
    size: int, dense: int, facts: Mapping[str, Any], settings: Mapping[str, Any], densities: Mapping[Place, float]
) -> list[str]:
    rows = [("size on disk", f"{dense / 1e6:.1f} MB", f"{size / 1e6:.1f} MB ({dense / size:.1f}× smaller)")]
    if "sparsity" in facts:
        rows.append(("zeros in the blocks", "", f"{facts['sparsity']:.1%}"))
    elif densities:
        rows.append(("mean density of the matrices", "", f"{sum(densities.values()) / len(densities):.1%}"))
    if facts.get("method"):
        rows.append(("method", "", str(facts["method"])))
    before = facts.get("dense_scores") or {}
    for score, value in (facts.get("scores") or {}).items():
        rows.append((f"{score} (test)", f"{before[score]:.2f}" if score in before else "", f"{value:.2f}"))
    for score, value in (facts.get("stored_scores") or {}).items():
        rows.append((f"{score} (test), as stored", "", f"{value:.2f}"))
    stored = f"blocks {settings['values']}, embeddings {settings['embeddings']}, head {settings['head']}"
    rows.append(("values", "", stored))
    return ["| | dense | this model |", "|---|---|---|", *(f"| {a} | {b} | {c} |" for a, b, c in rows)]


def draw(densities: Mapping[Place, float], path: Path) -> None:
    """A picture with a row for each block and a column for each kind of matrix, darker where more was kept."""
    from matplotlib.figure import Figure

    blocks, kinds, table = grid(densities)
    figure = Figure(figsize=(1.6 + 1.15 * len(kinds), 1.4 + 0.34 * len(blocks)), layout="constrained", dpi=110)
    axes = figure.subplots()
    picture = axes.imshow(table, cmap="Blues", vmin=0, vmax=max(0.01, max(densities.values())), aspect="auto")
    axes.set_xticks(range(len(kinds)), [kind.replace(".", "\n") for kind in kinds], fontsize=8)
    axes.set_yticks(range(len(blocks)), blocks, fontsize=8)
    axes.set_ylabel("block")
    middle = max(densities.values()) * 0.6
    for y, row in enumerate(table):
        for x, value in enumerate(row):
            if value == value:
                colour = "white" if value > middle else "black"
                axes.text(x, y, f"{value:.0%}", ha="center", va="center", fontsize=7, color=colour)
    figure.colorbar(picture, ax=axes, format=lambda share, _: f"{share:.0%}", label="kept")
    axes.set_title("Weights kept in each matrix", fontsize=10)
    figure.savefig(path)


def grid(densities: Mapping[Place, float]) -> tuple[list[str], list[str], list[list[float]]]:
    """Blocks, kinds and the densities between them; NaN where a block has no such matrix."""
    blocks = list(dict.fromkeys(place.block for place in densities))
    kinds = list(dict.fromkeys(place.kind for place in densities))
    cells = {(place.block, place.kind): density for place, density in densities.items()}
    return short_blocks(blocks), kinds, [[cells.get((b, k), float("nan")) for k in kinds] for b in blocks]
