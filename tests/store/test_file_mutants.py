"""Stored models with one thing changed and checksums made right: refused by name, or loaded as the file says."""

import os
import signal
from collections import Counter
from pathlib import Path

import mutants

COUNT = 200


def test_every_mutant_ends_well_in_every_reader():
    told = mutants.run(COUNT)
    assert mutants.unexpected(told) == []
    assert [number for number, _, _ in told] == list(range(COUNT))
    outcomes = Counter(outcome for _, _, outcomes in told for _, outcome, _ in outcomes)
    assert outcomes[mutants.REFUSED] > COUNT  # most changes matter
    assert outcomes[mutants.LOADED] > COUNT  # and most readers need not look at everything
    assert {kind for _, kind, _ in told} == set(mutants.CHANGES)


def test_the_judge_sees_a_reader_that_fails(monkeypatch):
    """One that raises something of its own, and one that dies."""

    def wrong(_: object) -> None:
        raise KeyError("x")

    monkeypatch.setitem(mutants.READERS, "stored", wrong)
    assert mutants.judge("missing", Path("nowhere"))[0] == ("stored", mutants.UNEXPECTED, "KeyError: 'x'")
    monkeypatch.setitem(mutants.READERS, "stored", lambda _: None)
    found = mutants.run(2, batch=2)
    assert mutants.unexpected(found) == []
    monkeypatch.setattr(
        mutants, "judge", lambda kind, _: [] if kind == "none" else os.kill(os.getpid(), signal.SIGKILL)
    )
    assert [said for _, _, [(_, _, said)] in mutants.run(2, batch=2)] == ["SIGKILL", "SIGKILL"]
