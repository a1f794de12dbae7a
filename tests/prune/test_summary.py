"""The table of what was pruned, and short names."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pinscher.models.names import short_names
from pinscher.prune.summary import Count, table


def test_short_names_are_the_shortest_endings_that_differ() -> None:
    assert short_names(["attention.self.query", "attention.output.dense", "intermediate.dense", "output.dense"]) == [
        "query",
        "attention.output.dense",
        "intermediate.dense",
        "output.dense",
    ]
    assert short_names(["mlp.c_proj", "attn.c_proj", "attn.c_attn"]) == ["mlp.c_proj", "attn.c_proj", "c_attn"]
    assert short_names(["dense", "output.dense"]) == ["dense", "output.dense"]
    assert short_names(["a_proj", "proj"]) == ["a_proj", "proj"]
    assert short_names(["only.one"]) == ["one"]
    assert short_names([]) == []


DOTTED = st.lists(st.sampled_from(["a", "b", "ab", "q"]), min_size=1, max_size=4).map(".".join)


@given(st.lists(DOTTED, unique=True, max_size=12))
def test_short_names_are_endings_all_different_and_no_longer_than_needed(names: list[str]) -> None:
    shorts = short_names(names)
    assert len(set(shorts)) == len(names)
    for name, short in zip(names, shorts, strict=True):
        assert name == short or name.endswith("." + short)
        if "." in short:
            shorter = short.split(".", 1)[1]
            assert sum(n == shorter or n.endswith("." + shorter) for n in names) > 1


def test_the_table_has_a_row_for_each_block_and_a_column_for_each_kind() -> None:
    counts = [
        Count("bert.encoder.layer.0", "attention.self.query", 1, 4),
        Count("bert.encoder.layer.0", "output.dense", 8, 8),
        Count("bert.encoder.layer.1", "attention.self.query", 0, 4),
        Count("bert.encoder.layer.1", "output.dense", 4, 8),
    ]
    assert table(counts, "a title").splitlines() == [
        "a title",
        "-----------------------------------",
        "layer   query    dense  layer whole",
        "-----------------------------------",
        "0      25.0 %  100.0 %       75.0 %",
        "1       0.0 %   50.0 %       33.3 %",
        "-----------------------------------",
        "all    12.5 %   75.0 %       54.2 %",
    ]


def test_a_kind_that_a_block_lacks_is_a_dash() -> None:
    counts = [
        Count("encoder.block.0", "layer.0.q", 1, 2),
        Count("decoder.block.0", "layer.0.q", 0, 2),
        Count("decoder.block.0", "layer.1.k", 2, 2),
    ]
    lines = table(counts, "").splitlines()
    assert [line.split() for line in (*lines[4:6], lines[-1])] == [
        ["encoder.block.0", "50.0", "%", "-", "50.0", "%"],
        ["decoder.block.0", "0.0", "%", "100.0", "%", "50.0", "%"],
        ["all", "25.0", "%", "100.0", "%", "50.0", "%"],
    ]


def test_matrices_outside_of_any_block_have_a_row_too() -> None:
    lines = table([Count("", "classifier", 1, 2), Count("", "pooler", 0, 2)], "title").splitlines()
    assert [line.split()[0] for line in lines[4:]] == ["-", "-" * len(lines[1]), "all"]


def test_the_whole_is_weighted_by_size_not_by_matrix() -> None:
    text = table([Count("0", "small", 1, 1), Count("0", "large", 0, 99)], "")
    assert text.splitlines()[-1].split() == ["all", "100.0", "%", "0.0", "%", "1.0", "%"]


def test_a_table_of_nothing_is_still_a_table() -> None:
    lines = table([], "nothing").splitlines()
    assert lines[0] == "nothing"
    assert lines[-1].split() == ["all", "-"]


@given(
    st.lists(
        st.builds(
            lambda block, kind, total, zeros: Count(f"h.{block}", kind, min(zeros, total), total),
            st.integers(0, 12),
            st.sampled_from(["attn.q", "attn.k", "mlp.fc"]),
            st.integers(1, 1000),
            st.integers(0, 1000),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_lines_of_a_table_are_as_long_as_each_other(counts: list[Count]) -> None:
    lines = table(counts, "title").splitlines()[1:]
    assert len({len(line) for line in lines}) == 1
    assert len(lines) == 5 + len({count.block for count in counts})
