"""FSDP2 and HSDP on gloo ranks: the masks and weights of one process, to the last bit, from parts of them only.

Parameters are asserted to be DTensors, and gathering one raises while the pruner is at work: see tiny_sharded.py, which
is what each rank does.
"""

import json

import pytest
import torch
import torch.distributed as dist

import tiny_sharded as ranks
from pinscher.train import checkpoint


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """All runs on two ranks, some of them saved half-way."""
    return ranks.once(tmp_path_factory, "fsdp", lambda folder: ranks.launch((2,), folder, ranks.first))


@pytest.fixture(scope="module", params=ranks.WORLDS)
def world(two, request, tmp_path_factory):
    """All runs on a number of ranks, and what two ranks saved, resumed there."""
    job = ranks.resume if request.param == "2" else ranks.others
    shape = ranks.WORLDS[request.param]
    return ranks.once(tmp_path_factory, f"{two.name}/{request.param}", lambda folder: ranks.launch(shape, folder, job))


@pytest.fixture(scope="module")
def alone():
    """The same runs in one process, of ordinary tensors, each made when it is first asked for."""
    known = {}

    def run(name):
        if name not in known:
            net, pruner, optimizer, teacher = ranks.start(name)
            ranks.steps(net, optimizer, teacher, ties=name == "ties")
            known[name] = ranks.outcome(pruner, teacher)
        return known[name]

    assert not dist.is_initialized()
    return run


def assert_same(found, wanted):
    for part in ("masks", "model", "teacher"):
        assert found[part].keys() == wanted[part].keys()
        for name, tensor in wanted[part].items():
            assert torch.equal(found[part][name], tensor), (part, name)
    for key in ("stats", "zeros"):
        assert found[key] == wanted[key], key


def test_ranks_make_the_masks_and_weights_of_one_process(world, alone):
    for name in ranks.RUNS:
        try:
            assert_same(checkpoint.load(world / name.replace(":", "of")), alone(name))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def test_saved_on_two_ranks_and_resumed_on_any_number(world, alone):
    for name in ranks.RESUMED:
        try:
            assert_same(checkpoint.load(world / "resumed" / name), alone(name))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def test_the_ties_are_ties(alone):
    """Without stored masks: the threshold's quotas must have been shared out anew among the ranks."""
    _, pruner, *_ = ranks.start("ties")
    assert not pruner.ranking.store
    scores = alone("ties")["stats"]["threshold"]
    assert scores == 0.0


WORDS = {
    "wanda": "by calibration: no process holds a whole matrix. Prune before sharding",
    "sparsegpt": "by calibration: no process holds a whole matrix. Prune before sharding",
    "pst": "pst cannot be used with sharded weights",
    "pst, late": "pst cannot be used with sharded weights",
    "movement": "make the Pruner first, then call fully_shard, then build the optimiser from pruner.param_groups()",
    "late": "Call fully_shard first, then make the Pruner",
    "columns": "pattern columns does not fit the sharded blocks.0.up: each process holds 6 outputs of it",
    "2x1": "pattern 2x1 does not fit the sharded blocks.0.down: each process holds 3 outputs of it",
    "obert": "obert's blocks of 50 weights would be cut where blocks.0.up is: each process holds 36 of its weights",
    "Shard(1)": "only rows that are cut once can be pruned",
    "in part": "blocks.0.up is sharded but blocks.1.up is not",
    "load": "the model is not sharded: call fully_shard before",
    "once": "prune once before sharding",
}


def test_what_cannot_be_done_is_refused_with_a_remedy(two):
    said = json.loads((two / "said.json").read_text())
    assert said.keys() == WORDS.keys() == ranks.MISTAKES.keys()
    for name, words in WORDS.items():
        assert words in said[name], said[name]
