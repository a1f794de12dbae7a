"""The pruner in plain loops: holding, regrowth, skipped steps, bad gradients, continued checkpoints, refusals."""

import math

import pytest
import torch
from torch import nn

import tiny
from pinscher import Pruner, sparsity
from pinscher.prune import CRITERIA
from pinscher.prune.gates import Gated

RANKED = [name for name in CRITERIA if not issubclass(CRITERIA[name], Gated)]
LEARNED = [name for name in CRITERIA if issubclass(CRITERIA[name], Gated)]


def zeros(pruner: Pruner) -> int:
    return sum(site.zeros() for site in pruner.sites)


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    tiny.loss_of(net, *tiny.task()).backward()
    optimizer.step()


def started(method: str = "pins", optimizer=torch.optim.AdamW, seed: int = 0, **settings):
    torch.manual_seed(seed)
    net = tiny.Net()
    pruner = Pruner(net, tiny.config(method, **{"interval": 5, **settings}), calibration=tiny.batches())
    optimizer = optimizer(pruner.param_groups(), lr=3e-3)
    pruner.attach(optimizer)
    return net, pruner, optimizer


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


# ---------------------------------------------------------------- skipped steps and bad gradients


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("method", ["pins", "platon", "sensitivity", "magnitude", "movement"])
def test_a_step_skipped_by_gradscaler_counts_for_nothing(fused, method):
    """A run with infinite gradients thrown in ends exactly where the run without them ends."""
    ends = []
    for bad_steps in (set(), {3, 4, 17, 30}):
        torch.manual_seed(0)
        net = tiny.Net()
        pruner = Pruner(net, tiny.config(method, steps=40, interval=5))
        optimizer = torch.optim.AdamW(pruner.param_groups(), lr=3e-3, fused=fused)
        pruner.attach(optimizer)
        # A power of two scales without rounding; growth is off so that both runs scale alike.
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=10**6, backoff_factor=0.5)
        attempts = 0
        while pruner.t < 40:
            attempts += 1
            before = pruner.t
            optimizer.zero_grad()
            scaler.scale(tiny.loss_of(net, *tiny.task())).backward()
            bad = attempts in bad_steps
            if bad:
                next(net.parameters()).grad.fill_(math.inf)
            scaler.step(optimizer)
            scaler.update()
            assert pruner.t == before + (not bad)
        assert attempts == 40 + len(bad_steps)
        ends.append(torch.cat([p.detach().view(-1) for p in net.parameters()]))
    assert torch.equal(*ends)


@pytest.mark.parametrize("method", ["pins", "platon"])
def test_scores_under_a_fused_optimiser_see_unscaled_gradients(method):
    means = []
    for scale in (1.0, 1024.0):
        net, pruner, optimizer = started(method, lambda p, lr: torch.optim.AdamW(p, lr, fused=True))
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale != 1.0)
        for _ in range(5):
            optimizer.zero_grad()
            scaler.scale(tiny.loss_of(net, *tiny.task())).backward()
            scaler.step(optimizer)
            scaler.update()
        means.append(pruner.sites[0].state["mean"])
    torch.testing.assert_close(*means, rtol=1e-5, atol=1e-12)


class Careful(torch.optim.SGD):
    """An optimiser that leaves bad gradients out by itself, so that the weights survive them."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
        return super().step(closure)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("options", [{"smoothing": "window"}, {"smoothing": "ema"}, {"smoothing": "none"}])
@pytest.mark.filterwarnings("ignore:step")
def test_non_finite_gradients_never_enter_a_score(bad, options):
    """With a learning rate of zero every good step looks the same, so a score that only saw those is known."""
    net, pruner, optimizer = started("pins", Careful, options=options, warmup=0, hold="never")
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    pruner.ranking.apply = lambda: None  # leave the weights as they are
    for t in range(1, 31):
        optimizer.zero_grad()
        tiny.loss_of(net, *tiny.task()).backward()
        if t in (7, 10, 15, 16):  # in a window, at two ends of windows, and right after one
            pruner.sites[2].owner.grad.view(-1)[3] = bad
        optimizer.step()
    site = pruner.sites[2]
    grad = site.grad.clone()
    exact = (site.weight * grad).abs()
    if options["smoothing"] != "none":
        folds = {"window": 6, "ema": 26}[options["smoothing"]]
        torch.testing.assert_close(site.state["mean"], exact * (1 - 0.85**folds), rtol=1e-4, atol=1e-9)
    assert pruner.kept == math.floor(pruner.schedule.density(30) * 3072 + 0.5)


@pytest.mark.parametrize("method", LEARNED)
@pytest.mark.filterwarnings("ignore:step")
def test_non_finite_gradients_never_enter_a_learned_mask(method):
    net, pruner, optimizer = started(method, torch.optim.AdamW)
    for t in range(1, 13):
        optimizer.zero_grad()
        tiny.loss_of(net, *tiny.task()).backward()
        if t in (3, 10):
            for parameter in pruner.param_groups(gates_only=True)[0]["params"]:
                parameter.grad.view(-1)[0] = math.nan
        optimizer.step()
    assert all(p.isfinite().all() for p in pruner.param_groups(gates_only=True)[0]["params"])


def test_large_but_finite_gradients_count():
    net, pruner, optimizer = started("pins", lambda p, lr: torch.optim.SGD(p, 0.0))
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, 1e38)
    optimizer.step()
    assert pruner._observed == 1


def test_a_step_that_calls_its_parents_step_counts_once():
    class Inner(torch.optim.SGD):
        pass

    class Outer(Inner):
        def step(self, closure=None):
            return super().step(closure)

    net = tiny.Net()
    Inner(net.parameters(), lr=0.1)  # torch hooks a class's step when it is first used
    pruner = Pruner(net, tiny.config())
    optimizer = Outer(net.parameters(), lr=0.1)
    pruner.attach(optimizer)
    for _ in range(3):
        step(net, optimizer)
    assert pruner.t == 3


def test_a_step_that_fails_does_not_count_and_does_not_disturb_the_next():
    class Moody(torch.optim.SGD):
        fails = False

        def step(self, closure=None):
            if self.fails:
                raise RuntimeError("out of sorts")
            return super().step(closure)

    net = tiny.Net()
    pruner = Pruner(net, tiny.config())
    optimizer = Moody(net.parameters(), lr=0.1)
    pruner.attach(optimizer)
    step(net, optimizer)
    optimizer.fails = True
    with pytest.raises(RuntimeError, match="out of sorts"):
        step(net, optimizer)
    optimizer.fails = False
    step(net, optimizer)
    assert pruner.t == 2


def test_a_ranking_due_at_a_bad_step_waits_for_a_good_one():
    net, pruner, optimizer = started("sensitivity", Careful, warmup=0)
    for t in range(1, 8):
        optimizer.zero_grad()
        tiny.loss_of(net, *tiny.task()).backward()
        if t in (5, 6):
            pruner.sites[0].owner.grad.fill_(math.nan)
            with pytest.warns(UserWarning, match="non-finite"):
                optimizer.step()
        else:
            optimizer.step()
        assert (pruner.ranking.threshold is not None) == (t >= 7)
    assert pruner.kept == math.floor(pruner.schedule.density(7) * 3072 + 0.5)


def test_a_matrix_without_a_gradient_counts_as_zero():
    net, pruner, optimizer = started("pins", warmup=0)
    for t in range(1, 6):
        optimizer.zero_grad()
        tiny.loss_of(net, *tiny.task()).backward()
        if t == 5:
            pruner.sites[0].owner.grad = None
        optimizer.step()
    assert pruner.sites[0].state["mean"].any()  # the window was closed all the same
    assert not pruner.sites[0].state["sum"].any()


def test_gradient_accumulation_gives_the_same_masks():
    ends = []
    x, y = tiny.task(dtype=torch.float64)
    for pieces in (1, 4):
        torch.manual_seed(0)
        net = tiny.Net().double()
        pruner = Pruner(net, tiny.config(steps=30, interval=5))
        optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
        pruner.attach(optimizer)
        for _ in range(30):
            optimizer.zero_grad()
            for some_x, some_y in zip(x.chunk(pieces), y.chunk(pieces), strict=True):
                (tiny.loss_of(net, some_x, some_y) / pieces).backward()
            optimizer.step()
        ends.append(torch.cat([pruner.mask(s.name).view(-1) for s in pruner.sites]))
    assert torch.equal(*ends)


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
    with pytest.raises(RuntimeError, match="attached already"):
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
    assert groups[1]["lr"] == pruner.criterion.score_lr
    pruner.attach(torch.optim.AdamW(groups, lr=1e-3))
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
