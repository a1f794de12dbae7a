"""The pruner in plain loops: holding, regrowth, and what is refused."""

import math

import pytest
import torch

import tiny
from pinscher import Pruner, sparsity
from tiny_pruner import LEARNED, RANKED, started, step, zeros

# ---------------------------------------------------------------- hold and regrow


def heavy_ball(parameters, lr):
    return torch.optim.SGD(parameters, lr, momentum=0.9, weight_decay=0.1, nesterov=True)


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop, heavy_ball])
@pytest.mark.parametrize("method", RANKED)
def test_held_weights_stay_exactly_zero(method, make):
    net, pruner, optimizer = started(method, make, hold="always")
    for _ in range(60):
        step(net, optimizer)
        if pruner.ranking.exists:
            for site in pruner.sites:
                assert not site.owner[~pruner.mask(site.name)].any()
    assert zeros(pruner) == pruner.total - pruner.kept


def test_hold_in_the_cooldown_only():
    net, pruner, optimizer = started(hold="cooldown", cooldown=20)
    for t in range(1, 61):
        step(net, optimizer)
        held = zeros(pruner) == pruner.total - pruner.kept
        assert held or t < 40
        if pruner.ranking.exists and t < 40:
            assert held == pruner.schedule.due(t)  # between two maskings pruned weights move off zero


def test_hold_never_still_ends_exact():
    net, pruner, optimizer = started(hold="never", cooldown=20)
    for _ in range(60):
        step(net, optimizer)
    assert zeros(pruner) == pruner.total - pruner.kept
    for _ in range(3):  # past the end nothing comes back
        step(net, optimizer)
    pruner.finish()
    assert sparsity(net) == 1 - pruner.kept / pruner.total


@pytest.mark.parametrize("method", RANKED)
def test_without_regrowth_the_dead_stay_dead(method):
    net, pruner, optimizer = started(method, regrow=False)
    dead = {site.name: torch.zeros_like(site.owner, dtype=torch.bool) for site in pruner.sites}
    for t in range(1, 61):
        step(net, optimizer)
        if pruner.schedule.due(t):
            for site in pruner.sites:
                now = ~pruner.mask(site.name)
                assert not (dead[site.name] & ~now).any()
                dead[site.name] = now
            assert pruner.ranking.revived == 0
    assert sum(int(d.sum()) for d in dead.values()) == pruner.total - pruner.kept


def test_with_regrowth_some_come_back():
    net, pruner, optimizer = started("pins", track_revived=True)
    returned = rankings = 0
    for t in range(1, 61):
        step(net, optimizer)
        if pruner.schedule.due(t):
            returned, rankings = returned + pruner.ranking.revived, rankings + 1
    assert returned > 0
    assert (pruner.stats()["returned"], pruner.stats()["maskings"]) == (returned, rankings)
    other = Pruner(net, pruner.config)
    other.load_state_dict(pruner.state_dict())
    assert (other.ranking.returned, other.ranking.maskings) == (returned, rankings)


def test_stored_and_derived_masks_are_the_same():
    """Smoothed scores need no stored mask; asking for stored ones must not change anything."""
    ends = []
    for track in (False, True):
        net, pruner, optimizer = started("pins", hold="always", track_revived=track)
        for _ in range(60):
            step(net, optimizer)
        assert bool(pruner.ranking.pruned) == track
        ends.append(torch.cat([p.detach().view(-1) for p in net.parameters()]))
    assert torch.equal(*ends)


def test_all_equal_scores_keep_the_exact_count():
    net = tiny.Net()
    for parameter in net.parameters():
        parameter.data.fill_(0.5)
    pruner = Pruner(net, tiny.config("magnitude", steps=10, interval=1, warmup=0, sparsity=0.37))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    pruner.attach(optimizer)
    for t in range(1, 11):
        step(net, optimizer)
        assert zeros(pruner) == 3072 - math.floor(pruner.schedule.density(t) * 3072 + 0.5)
    # Ties are broken by site, then by index: what is left is a beginning.
    flat = torch.cat([site.owner.detach().view(-1) for site in pruner.sites])
    assert flat[: pruner.kept].all()


# ---------------------------------------------------------------- what is refused


def test_finish_before_the_end():
    net, pruner, optimizer = started("pins", steps=60)
    step(net, optimizer)
    with pytest.raises(
        RuntimeError, match=r"not reached: 1 of 60 steps are done, 3,072 weights are kept, 614 are wanted"
    ):
        pruner.finish()
    with pytest.raises(RuntimeError, match="measured nothing yet"):
        pruner.finish(early=True)
    for _ in range(10):
        step(net, optimizer)
    pruner.finish(early=True)
    assert zeros(pruner) == 3072 - 614
    assert pruner.finish() is net  # again is fine
    with pytest.raises(RuntimeError, match="finished"):
        pruner.attach(optimizer)


@pytest.mark.parametrize("method", LEARNED)
def test_finish_early_with_learned_masks(method):
    net, pruner, optimizer = started(method)
    for _ in range(7):
        step(net, optimizer)
    pruner.finish(early=True)
    assert zeros(pruner) == 3072 - 614


def test_attach_twice():
    _, pruner, optimizer = started()
    with pytest.raises(RuntimeError, match="already attached"):
        pruner.attach(optimizer)
    pruner.detach()
    pruner.attach(optimizer)


def test_deepspeed_is_refused():
    class DeepSpeedZeroOptimizer:
        pass

    pruner = Pruner(tiny.Net(), tiny.config())
    with pytest.raises(TypeError, match="DeepSpeed cannot be used"):
        pruner.attach(DeepSpeedZeroOptimizer())
    with pytest.raises(TypeError, match=r"needs a torch\.optim\.Optimizer"):
        pruner.attach(object())


def test_optimiser_in_backward_is_refused():
    net = tiny.Net()
    pruner = Pruner(net, tiny.config())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net.blocks[0].up.weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(TypeError, match=r"blocks\.0\.up is updated inside backward"):
        pruner.attach(optimizer)


def test_closures_are_refused():
    net, _, optimizer = started()
    with pytest.raises(TypeError, match="closure"):
        optimizer.step(lambda: tiny.loss_of(net, *tiny.task()))


def test_frozen_or_foreign_weights_are_named():
    net = tiny.Net()
    net.blocks[1].down.weight.requires_grad_(False)
    pruner = Pruner(net, tiny.config())
    with pytest.raises(ValueError, match=r"1 of 6 .*blocks\.1\.down.*exclude_modules"):
        pruner.attach(torch.optim.SGD(net.parameters(), lr=0.1))
    Pruner(net, tiny.config("magnitude")).attach(torch.optim.SGD(net.parameters(), lr=0.1))


@pytest.mark.parametrize("method", LEARNED)
def test_learned_masks_need_their_own_group(method):
    net = tiny.Net()
    before = torch.optim.AdamW(net.parameters(), lr=1e-3)
    pruner = Pruner(net, tiny.config(method))
    with pytest.raises(ValueError, match="not in this optimiser"):
        pruner.attach(before)
    with pytest.raises(ValueError, match="share a parameter group"):
        pruner.attach(torch.optim.AdamW(net.parameters(), lr=1e-3))
    groups = pruner.param_groups()
    assert groups[1].get("lr") == pruner.criterion.score_lr
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    assert optimizer.param_groups[1]["lr"] == (pruner.criterion.score_lr or 1e-3)  # none of its own: the model's
    pruner.attach(optimizer)
    (only,) = pruner.param_groups(gates_only=True)
    assert [*map(id, only["params"])] == [*map(id, groups[1]["params"])]


def test_summary_reads_well(capsys):
    net, pruner, optimizer = started("magnitude", steps=20)
    for _ in range(20):
        step(net, optimizer)
    text = pruner.summary()
    assert capsys.readouterr().out.rstrip() == text
    assert text.startswith("magnitude: step 20 of 20, sparsity 80.01% (target 80.00%), 614 of 3,072 weights left in 6 ")
    lines = text.splitlines()
    assert lines[2].split() == ["layer", "up", "down", "layer", "whole"]
    assert [line.split()[0] for line in lines[4:7]] == ["0", "1", "2"]
    assert lines[-1].split()[0] == "all"
    assert lines[-1].endswith("80.0 %")


def test_stats_for_a_log():
    net, pruner, optimizer = started("pins", steps=20)
    for _ in range(20):
        step(net, optimizer)
    stats = pruner.stats()
    assert stats["step"] == 20
    assert stats["density"] == 614 / 3072
    assert stats["density_target"] == pytest.approx(0.2)
    assert math.isfinite(stats["threshold"])


def test_unknown_mask_name():
    with pytest.raises(ValueError, match=r"'blocks\.0\.up'"):
        Pruner(tiny.Net(), tiny.config()).mask("nowhere")
