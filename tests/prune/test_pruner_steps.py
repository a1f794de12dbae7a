"""Which steps count: skipped ones, failed ones, bad gradients, accumulation."""

import math

import pytest
import torch

import tiny
from pinscher import Pruner
from tiny_pruner import LEARNED, started, step


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
