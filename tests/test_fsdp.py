"""FSDP2 and HSDP on gloo ranks: the masks and weights of one process, to the last bit, from parts of them only."""

import pytest
import torch
import torch.distributed as dist

import tiny_sharded as ranks
from pinscher import checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fsdp")


@pytest.fixture(scope="module", params=ranks.WORLDS)
def compared(folder, request):
    """All runs on so many ranks."""
    ranks.launch(ranks.WORLDS[request.param], folder / request.param, ranks.compare)
    return folder / request.param


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


def test_ranks_make_the_masks_and_weights_of_one_process(compared, alone):
    for name in ranks.RUNS:
        try:
            assert_same(checkpoint.load(compared / name.replace(":", "of")), alone(name))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.fixture(scope="module")
def saved(folder):
    ranks.launch((2,), folder, ranks.save)
    return folder


@pytest.mark.parametrize("world", ranks.WORLDS)
def test_saved_on_two_ranks_and_resumed_on_any_number(saved, world, alone):
    ranks.launch(ranks.WORLDS[world], saved / f"resumed-{world}", ranks.resume)
    for name in ranks.RESUMED:
        if name == "l0":  # draws anew from where it resumes
            continue
        assert_same(checkpoint.load(saved / f"resumed-{world}" / name), alone(name))
