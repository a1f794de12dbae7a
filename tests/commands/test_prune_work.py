"""A run does nothing twice: models are loaded once, and their matrices looked for once."""

from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from pinscher.prune import find_sites
from tiny_command import SHORT, STEPS

LOOKING = ("prune.pruner", "train.plan", "train.pretrained", "train.fsdp")  # modules that look for matrices


@pytest.mark.parametrize("flags", [STEPS, [*SHORT, "--baseline"]], ids=["default", "baseline"])
def test_a_run_loads_models_and_looks_for_matrices_once(command, sst2, tmp_path, monkeypatch, flags):
    loaded: list[str] = []
    looked: list[object] = []  # the models themselves: an id could be that of a model that is gone
    load = PreTrainedModel.from_pretrained.__func__

    def loading(kind, place, *args, **kwargs):
        loaded.append(Path(place))
        return load(kind, place, *args, **kwargs)

    def looking(model, *args, **kwargs):
        looked.append(model)
        return find_sites(model, *args, **kwargs)

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(loading))
    for name in LOOKING:
        monkeypatch.setattr(importlib.import_module(f"pinscher.{name}"), "find_sites", looking)
    code, _, err = command("prune", *sst2, *flags, "--output", "out")
    assert code == 0, err
    # --baseline starts again from the given model; by default the pruning starts from the dense run's, in memory.
    starts = 2 if "--baseline" in flags else 1
    # What was trained is not read again. The small file is, to be scored as others will find it.
    assert loaded == [Path(sst2[1])] * starts + [Path("out/export")]
    assert (tmp_path / "out" / "dense" / "model").exists()
    assert len(looked) == 2  # the dense run's model, and the one that is pruned
    assert max(Counter(map(id, looked)).values()) == 1
