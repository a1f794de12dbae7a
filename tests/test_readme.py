"""The README's snippet runs as it stands and prints what the README says."""

import re
from pathlib import Path

from transformers import AutoModelForSequenceClassification

import pinscher

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_snippet_prints_what_the_readme_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    snippet = re.search(r"```python\n(.*?)```", README, re.DOTALL)[1]
    promised = re.search(r"```text\n(.*?)```", README, re.DOTALL)[1].rstrip().splitlines()
    assert len(snippet.strip().splitlines()) <= 12
    exec(compile(snippet, "README.md", "exec"), {})
    printed = capsys.readouterr().out.rstrip().splitlines()
    assert printed[0] == promised[0]  # sparsity and counts are exact
    assert len(printed) == len(promised)
    assert [line.split()[0] for line in printed[1:]] == [line.split()[0] for line in promised[1:]]
    # What was saved is an ordinary model that anyone loads, with its zeros.
    model = AutoModelForSequenceClassification.from_pretrained("pruned")
    assert abs(pinscher.sparsity(model) - 0.8) < 1e-5
    assert all(not name.startswith("parametrizations") for name, _ in model.named_parameters())


def test_the_readme_can_be_read_at_a_glance():
    lines = README.splitlines()
    assert len(lines) < 200
    assert [line for line in lines if len(line) > 120 and not line.startswith("|")] == []


def test_figures_name_their_source():
    for path in re.findall(r"\]\((benchmarks/\S+?|docs/\S+?|examples/\S+?)\)", README):
        assert (Path(__file__).parents[1] / path.partition("#")[0]).exists(), path
