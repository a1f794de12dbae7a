"""A pruner goes on from a checkpoint: the model's zeros, and its own state."""

import pytest
import torch

import tiny
from pinscher import Pruner, sparsity
from pinscher.prune import CRITERIA
from tiny_pruner import started, step, zeros

# ---------------------------------------------------------------- continued checkpoints


@pytest.mark.parametrize("method", list(CRITERIA))
def test_continues_from_a_checkpoint_that_holds_zeros(method):
    torch.manual_seed(0)
    net = tiny.Net()
    first = Pruner(net, tiny.config("magnitude", steps=30, interval=5, sparsity=0.5))
    tiny.train(net, first, 30)
    first.finish()
    assert sparsity(net) == 0.5
    pruner = Pruner(net, tiny.config(method, steps=60, interval=5, sparsity=0.8), calibration=tiny.batches())
    assert pruner.schedule.initial == 0.5
    assert abs(pruner.schedule.density(0) - 0.5) < 1e-12
    tiny.train(net, pruner, 60)
    pruner.finish()
    assert zeros(pruner) == 3072 - 614


def test_a_model_sparser_than_the_target_is_refused():
    net = tiny.Net()
    for site in Pruner(net, tiny.config()).sites:
        site.owner.data[: site.shape[0] // 2] = 0
    pruner = Pruner(net, tiny.config(sparsity=0.3))
    with pytest.raises(ValueError, match=r"already 50.0% sparse.*initial_sparsity=0"):
        pruner.attach(torch.optim.SGD(net.parameters(), lr=0.1))
    assert Pruner(net, tiny.config(sparsity=0.3, initial_sparsity=0.0)).schedule.initial == 1.0


def test_a_few_zeros_by_chance_do_not_start_pruning_early():
    net = tiny.Net()
    net.blocks[0].up.weight.data[0, 0] = 0
    assert Pruner(net, tiny.config()).schedule.initial == 1.0


def test_a_resumed_run_past_its_end_does_not_claim_the_target():
    net, pruner, optimizer = started("pins", steps=100)
    for _ in range(31):
        step(net, optimizer)
    shorter = Pruner(net, tiny.config("pins", steps=30, interval=5))
    with pytest.warns(UserWarning, match="total_steps"):
        shorter.load_state_dict(pruner.state_dict())
    with pytest.raises(RuntimeError, match="not reached"):
        shorter.finish()
    shorter.finish(early=True)
    assert zeros(shorter) == 3072 - 614


@pytest.mark.parametrize("track", [True, False])
def test_resuming_with_or_without_stored_masks(track):
    net, pruner, optimizer = started("pins", track_revived=track, hold="always")
    for _ in range(42):
        step(net, optimizer)
    other = Pruner(net, tiny.config("pins", interval=5, track_revived=not track, hold="always"))
    with pytest.warns(UserWarning, match="track_revived"):
        other.load_state_dict(pruner.state_dict())
    assert all(torch.equal(other.mask(s.name), pruner.mask(s.name)) for s in pruner.sites)
    pruner.detach()
    other.attach(optimizer)
    for _ in range(18):
        step(net, optimizer)
    assert zeros(other) == 3072 - 614


def test_non_contiguous_weights_are_pruned_in_place():
    net = tiny.Net()
    layer = net.blocks[0].up
    layer.weight.data = layer.weight.data.t().contiguous().t()
    assert not layer.weight.is_contiguous()
    pruner = Pruner(net, tiny.config("magnitude", steps=20, interval=5))
    tiny.train(net, pruner, 20)
    assert zeros(pruner) == 3072 - 614


def test_bf16_weights_keep_fp32_scores():
    net = tiny.Net().bfloat16()
    pruner = Pruner(net, tiny.config(steps=20, interval=5))
    tiny.train(net, pruner, 20)
    assert pruner.sites[0].state["mean"].dtype == torch.float32
    assert zeros(pruner) == 3072 - 614


def test_tied_weights_are_pruned_once():
    for method in ("pins", "movement", "l0", "pst"):
        torch.manual_seed(0)
        net = tiny.Net()
        net.blocks[2].up.weight = net.blocks[0].up.weight
        pruner = Pruner(net, tiny.config(method, steps=40, interval=5))
        assert pruner.total == 2560
        tiny.train(net, pruner, 40)
        pruner.finish()
        assert net.blocks[2].up.weight is net.blocks[0].up.weight
        assert sparsity(net) == 0.8


# ---------------------------------------------------------------- state


@pytest.mark.parametrize("method", list(CRITERIA))
def test_state_is_plain_data_and_tensors(method):
    net, pruner, optimizer = started(method)
    for _ in range(20):
        step(net, optimizer)

    def walk(value):
        if isinstance(value, dict):
            for key, item in value.items():
                assert isinstance(key, str)
                walk(item)
        elif isinstance(value, list):
            for item in value:
                walk(item)
        else:
            assert value is None or isinstance(value, bool | int | float | str | torch.Tensor)

    walk(pruner.state_dict())


def test_state_of_another_run_is_refused_and_changes_nothing():
    net, pruner, optimizer = started("pins")
    for _ in range(10):
        step(net, optimizer)
    state = pruner.state_dict()
    _, other, _ = started("platon")
    with pytest.raises(ValueError, match="method='pins'"):
        other.load_state_dict(state)
    assert other.t == 0
    _, wider, _ = started("pins", exclude_modules=["down"])
    with pytest.raises(ValueError, match=r"other matrices.*blocks\.0\.down"):
        wider.load_state_dict(state)
    with pytest.raises(ValueError, match="version 99"):
        pruner.load_state_dict({**state, "version": 99})
    state["sites"]["blocks.0.up"].pop("mean")
    with pytest.raises(ValueError, match=r"mean of blocks\.0\.up is missing"):
        started("pins")[1].load_state_dict(state)


def test_resuming_with_a_longer_schedule_warns():
    _, pruner, _ = started("pins")
    with pytest.warns(UserWarning, match="total_steps"):
        started("pins", steps=90)[1].load_state_dict(pruner.state_dict())


def test_works_with_accelerate(tmp_path):
    from accelerate import Accelerator

    ends = []
    for resume in (False, True):
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True)
        net = tiny.Net()
        pruner = Pruner(net, tiny.config(steps=20, interval=5))
        net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=3e-3))
        pruner.attach(optimizer)
        accelerator.register_for_checkpointing(pruner)
        if resume:
            accelerator.load_state(tmp_path / "half")
        while pruner.t < 20:
            optimizer.zero_grad()
            accelerator.backward(tiny.loss_of(net, *tiny.task()))
            optimizer.step()
            if pruner.t == 12 and not resume:
                accelerator.save_state(tmp_path / "half", safe_serialization=True)
        ends.append(torch.cat([p.detach().view(-1) for p in net.parameters()]))
    assert torch.equal(*ends)
    assert sparsity(net) == 1 - 614 / 3072
