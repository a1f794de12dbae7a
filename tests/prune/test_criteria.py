"""Each criterion's state after three steps against a computation by hand, and what every method promises."""

import numpy as np
import pytest
import torch
from torch import nn

import tiny
from pinscher import Pruner, sparsity
from pinscher.prune import CRITERIA
from pinscher.prune.criteria import hashed_uniform
from pinscher.prune.gates import gate_of

METHODS = list(CRITERIA)
LR = 0.1


class Steps:
    """Runs three optimiser steps with given gradients on one matrix and remembers (weight_t, grad_t, weight_t+1)."""

    def __init__(self, method: str, interval: int = 3, **options: object) -> None:
        torch.manual_seed(0)
        self.model = tiny.Net(width=4, blocks=1).double()
        settings = {"interval": interval, "warmup": 0, "cooldown": 1, "sparsity": 0.5}
        config = tiny.config(method, steps=6, options=options, **settings)
        self.pruner = Pruner(self.model, config)
        self.site = self.pruner.sites[0]
        optimizer = torch.optim.SGD(self.pruner.param_groups(), lr=LR)
        self.pruner.attach(optimizer)
        self.seen = []
        for _ in range(3):
            for parameter in self.model.parameters():
                parameter.grad = torch.randn_like(parameter)
            weight = self.site.weight.numpy().copy()
            grad = self.site.owner.grad.view(-1).numpy().copy()
            optimizer.step()
            self.seen.append((weight, grad, weight - LR * grad))

    def state(self, name: str) -> np.ndarray:
        return self.site.state[name].numpy()


def fold(windows, beta1, beta2):
    mean, spread = np.zeros_like(windows[0]), np.zeros_like(windows[0])
    for now in windows:
        mean = beta1 * mean + (1 - beta1) * now
        spread = beta2 * spread + (1 - beta2) * np.abs(now - mean)
    return mean, spread


QUANTITIES = {
    ("pins", "abs"): lambda w, g, after: np.abs(LR * g * g - g * w),
    ("pins", "signed"): lambda w, g, after: LR * g * g - g * w,
    ("pins", "update"): lambda w, g, after: -g * after,
    ("platon", "after"): lambda w, g, after: np.abs(g * after),
    ("platon", "before"): lambda w, g, after: np.abs(g * w),
}


@pytest.mark.parametrize(("method", "variant"), QUANTITIES)
@pytest.mark.parametrize("smoothing", ["window", "ema"])
@pytest.mark.filterwarnings("ignore:pins with score")
def test_smoothed_state_after_three_steps(method, variant, smoothing):
    option = "score" if method == "pins" else "timing"
    run = Steps(method, **{option: variant}, smoothing=smoothing)
    quantity = [QUANTITIES[method, variant](*step) for step in run.seen]
    windows = [sum(quantity) / 3] if smoothing == "window" else quantity
    mean, spread = fold(windows, 0.85, 0.99 if method == "pins" else 0.95)
    np.testing.assert_allclose(run.state("mean"), mean, rtol=1e-12)
    scores = run.pruner.ranking.scores(run.site).read(slice(None)).numpy()
    if variant in ("signed", "update"):
        assert "spread" not in run.site.state  # a signed score is never multiplied by its uncertainty
        np.testing.assert_allclose(scores, mean, rtol=1e-12)
    else:
        np.testing.assert_allclose(run.state("spread"), spread, rtol=1e-12)
        np.testing.assert_allclose(scores, mean * spread, rtol=1e-12)
    if smoothing == "window":
        assert not run.site.state["sum"].any()  # the next window starts empty


def test_a_window_holds_the_sum_until_it_ends():
    run = Steps("pins", interval=4)
    quantity = [QUANTITIES["pins", "abs"](*step) for step in run.seen]
    np.testing.assert_allclose(run.state("sum"), sum(quantity), rtol=1e-12)
    assert not run.site.state["mean"].any()


@pytest.mark.parametrize("variant", ["abs", "signed", "update"])
def test_unsmoothed_pins_scores_the_last_step(variant):
    run = Steps("pins", interval=1, score=variant, smoothing="none")
    assert run.site.state == {}
    expected = QUANTITIES["pins", variant](*run.seen[-1])
    kept = run.pruner.mask(run.site.name).view(-1).numpy()
    assert expected[kept].min() >= expected[~kept].max()


def test_update_is_the_paper_score_with_the_true_update():
    """-g dθ - g θ_t with the optimiser's own dθ equals -g θ_t+1."""
    for weight, grad, after in Steps("magnitude").seen:
        np.testing.assert_allclose(-grad * (after - weight) - grad * weight, -grad * after, rtol=1e-9, atol=1e-12)


def test_sensitivity_ranks_by_the_step_before():
    run = Steps("sensitivity", interval=3)
    weight, grad, _ = run.seen[-1]
    score = np.abs(weight * grad)
    kept = run.pruner.mask(run.site.name).view(-1).numpy()
    assert score[kept].min() >= score[~kept].max()


def test_magnitude_ranks_the_updated_weights():
    run = Steps("magnitude", interval=3)
    kept = run.pruner.mask(run.site.name).view(-1).numpy()
    after = np.abs(run.seen[-1][2])
    assert after[kept].min() >= after[~kept].max()


def test_snip_sums_before_anything_trains():
    run = Steps("snip", batches=3)
    first = run.seen[0][0]
    np.testing.assert_array_equal(run.seen[2][0], first)  # nothing moved while it measured
    np.testing.assert_allclose(run.state("sum"), sum(np.abs(w * g) for w, g, _ in run.seen), rtol=1e-12)


def test_snip_leaves_optimiser_and_weights_alone_while_it_measures():
    torch.manual_seed(0)
    net = tiny.Net()
    before = {name: p.clone() for name, p in net.named_parameters()}
    pruner = Pruner(net, tiny.config("snip", options={"batches": 5}))
    optimizer = tiny.train(net, pruner, 4)
    assert not optimizer.state
    assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())


def test_random_is_the_same_on_any_host():
    scores = hashed_uniform(7, "encoder.layer.0.query", 6)
    expected = [0.0] * 6
    # An independent computation with Python's integers.
    import hashlib

    digest = hashlib.blake2b(b"7/encoder.layer.0.query", digest_size=8).digest()
    key, full = int.from_bytes(digest, "little"), 2**64 - 1
    for i in range(6):
        x = (i * (-7046029254386353131 & full) + key) & full
        for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1)):
            x = ((x ^ (x >> shift)) * (factor & full)) & full
        expected[i] = (x >> 40) / 2**24
    assert scores.tolist() == expected
    assert torch.equal(hashed_uniform(7, "encoder.layer.0.query", 3, offset=3), scores[3:])
    assert not torch.equal(hashed_uniform(8, "encoder.layer.0.query", 6), scores)
    many = hashed_uniform(0, "x", 100_000)
    assert abs(float(many.mean()) - 0.5) < 0.005
    assert abs(float(many.var()) - 1 / 12) < 0.001


def test_signed_smoothing_warns():
    with pytest.warns(UserWarning, match="mostly noise"):
        CRITERIA["pins"](score="signed")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("target", [0.5, 0.8, 0.9])
def test_trains_and_reaches_exactly_its_target(method, target):
    torch.manual_seed(0)
    net = tiny.Net(dropout=0.05)
    untrained = tiny.loss_of(net, *tiny.task()).item()
    pruner = Pruner(net, tiny.config(method, steps=120, sparsity=target), calibration=tiny.batches())
    tiny.train(net, pruner, 120)
    assert pruner.finish() is net
    keep = int((1 - target) * 3072 + 0.5)
    assert sum(int(torch.count_nonzero(s.owner)) for s in pruner.sites) == keep
    assert sparsity(net) == 1 - keep / 3072
    assert tiny.loss_of(net.eval(), *tiny.task()).item() < untrained
    assert not any(".parametrizations." in name for name in net.state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("method", METHODS)
def test_other_precisions_reach_the_target_too(method, dtype):
    torch.manual_seed(0)
    net = tiny.Net().to(dtype)
    pruner = Pruner(net, tiny.config(method, steps=20, interval=5), calibration=tiny.batches(dtype))
    tiny.train(net, pruner, 20)
    pruner.finish()
    assert abs(sparsity(net) - 0.8) < 0.01  # a kept weight may be zero by chance in bf16
    assert pruner.kept == 614


@pytest.mark.parametrize("method", METHODS)
def test_every_masking_keeps_the_exact_count(method):
    torch.manual_seed(0)
    net = tiny.Net()
    pruner = Pruner(net, tiny.config(method, steps=60, interval=5, sparsity=0.7), calibration=tiny.batches())
    x, y = tiny.task()
    optimizer = torch.optim.AdamW(pruner.param_groups(), lr=1e-3)
    pruner.attach(optimizer)
    maskings = 0
    for t in range(1, 61):
        optimizer.zero_grad()
        tiny.loss_of(net, x, y).backward()
        optimizer.step()
        controlled = (method == "smvp" and t < 60) or (method == "l0" and not pruner.schedule.settled(t))
        if pruner.schedule.due(t) and not controlled:
            maskings += 1
            keep = int(pruner.schedule.density(t) * 3072 + 0.5)
            assert pruner.kept == keep
            assert sum(int(pruner.mask(s.name).sum()) for s in pruner.sites) == keep
            zeros = sum(int((s.effective == 0).sum()) for s in pruner.sites)
            assert zeros == 3072 - keep
    assert maskings >= 1


@pytest.mark.parametrize("method", ["smvp", "l0"])
@pytest.mark.parametrize("target", [0.5, 0.8, 0.9])
@pytest.mark.parametrize("steps", [60, 200])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_controller_arrives_before_the_projection(method, target, steps, seed):
    torch.manual_seed(seed)
    net = tiny.Net(width=32)
    pruner = Pruner(net, tiny.config(method, steps=steps, sparsity=target))
    tiny.train(net, pruner, steps)
    assert abs(pruner.projection.density - (1 - target)) <= 0.02
    assert pruner.projection.changed <= 0.02


@pytest.mark.parametrize("method", ["smvp", "l0"])
def test_the_controller_follows_the_schedule(method):
    torch.manual_seed(0)
    net = tiny.Net(width=32)
    pruner = Pruner(net, tiny.config(method, steps=150))
    x, y = tiny.task()
    optimizer = torch.optim.AdamW(pruner.param_groups(), lr=3e-3)
    pruner.attach(optimizer)
    for t in range(1, 150):
        optimizer.zero_grad()
        tiny.loss_of(net, x, y).backward()
        optimizer.step()
        if pruner.schedule.due(t):
            net.eval()
            zeros = sum(int((s.effective == 0).sum()) for s in pruner.sites)
            net.train()
            assert abs(1 - zeros / pruner.total - pruner.schedule.density(t)) <= 0.02


def test_movement_gradient_is_straight_through():
    torch.manual_seed(0)
    net = tiny.Net(width=4, blocks=1)
    pruner = Pruner(net, tiny.config("movement"))
    site = pruner.sites[0]
    gate = gate_of(site)
    gate.mask[0] = False
    weight = site.owner
    out = gate(weight)
    pull = torch.randn_like(out)
    out.backward(pull)
    assert torch.equal(weight.grad, pull * gate.mask)
    assert torch.equal(gate.importance.grad, pull * weight.detach())


class Pulled:
    """A gated matrix under a loss with dL/dW' = pull, trained by plain SGD: easy to follow by hand."""

    def __init__(self, method: str, **options: object) -> None:
        torch.manual_seed(0)
        self.net = tiny.Net(width=4, blocks=1).double()
        settings = {"interval": 2, "warmup": 2, "cooldown": 2, "sparsity": 0.5}
        self.pruner = Pruner(self.net, tiny.config(method, steps=8, options=options, **settings))
        self.sites = self.pruner.sites
        self.gate = gate_of(self.sites[0])
        self.weight = self.sites[0].owner.detach().clone()
        self.pull = torch.randn_like(self.weight)
        self.hand = {name: p.detach().clone() for name, p in self.gate.named_parameters()}
        self.optimizer = torch.optim.SGD(self.pruner.param_groups(), lr=LR)
        self.pruner.attach(self.optimizer)

    def step(self) -> None:
        self.optimizer.zero_grad()
        sum((site.effective * self.pull_of(site)).sum() for site in self.sites).backward()
        self.optimizer.step()

    def pull_of(self, site) -> torch.Tensor:
        return self.pull if site is self.sites[0] else torch.ones_like(site.owner)

    def strength(self) -> float:
        """What a penalty weighs: λ is for the mean over the weights of BERT-base's blocks, whatever the model."""
        return 1 / 85e6


def by_size(weight: torch.Tensor) -> torch.Tensor:
    """The scores that movement starts with: in the order of |W|, from -0.5 to below 0."""
    order = sorted(range(weight.numel()), key=lambda i: abs(float(weight.flatten()[i])))
    scores = torch.empty_like(weight)
    for place, i in enumerate(order):
        scores.view(-1)[i] = 0.5 * (place / weight.numel() - 1)
    return scores


def test_movement_after_three_steps():
    run = Pulled("movement")
    scores, weight = by_size(run.weight), run.weight.clone()
    for _ in range(3):
        mask = run.gate.mask.clone()
        run.step()
        scores -= 1e-2 * run.pull * weight
        weight -= LR * run.pull * mask
    torch.testing.assert_close(run.gate.importance.detach(), scores)
    torch.testing.assert_close(run.sites[0].owner.detach(), weight)


def test_soft_movement_after_three_steps():
    run = Pulled("smvp", penalty=5e8)
    scores, weight = by_size(run.weight), run.weight.clone()
    for _ in range(3):
        mask, strength = scores > run.gate.level, run.strength()
        run.step()
        gentle = scores.sigmoid()
        scores -= 1e-2 * (run.pull * weight + 5e8 * strength * gentle * (1 - gentle))
        weight -= LR * run.pull * mask
    torch.testing.assert_close(run.gate.importance.detach(), scores)
    torch.testing.assert_close(run.sites[0].owner.detach(), weight)
    is_open = sum(int((gate_of(s).importance > gate_of(s).level).sum()) for s in run.sites)
    assert abs(is_open / run.pruner.total - run.pruner.schedule.density(3)) <= 0.02


def test_l0_after_three_steps():
    run = Pulled("l0", penalty=3e8, pressure=2.0)
    logits, weight, multiplier = torch.full_like(run.weight, 2.197), run.weight.clone(), 1.0
    for _ in range(3):
        gates = [gate_of(site) for site in run.sites]
        chances = torch.cat([(g.logits.detach() - 2 / 3 * np.log(0.1 / 1.1)).sigmoid().flatten() for g in gates])
        expected = int((chances * 1_000_000).long().sum()) / 1_000_000 / run.pruner.total
        multiplier = max(0.0, multiplier + 2.0 * (expected - run.pruner.schedule.density(run.pruner.t)))
        state, strength = torch.get_rng_state(), run.strength() * multiplier
        run.step()
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        u = torch.empty_like(logits).uniform_(1e-6, 1 - 1e-6)
        torch.set_rng_state(after)
        a = logits.clone().requires_grad_()
        z = (((u.log() - (1 - u).log() + a) / (2 / 3)).sigmoid() * 1.2 - 0.1).clamp(0, 1)
        (weight * z * run.pull).sum().backward()
        is_open = (logits - 2 / 3 * np.log(0.1 / 1.1)).sigmoid()
        logits -= 1e-1 * (a.grad + 3e8 * strength * is_open * (1 - is_open))
        weight -= LR * run.pull * z.detach()
        if run.pruner.schedule.due(run.pruner.t):  # the schedule wants some gates closed: they are moved just past it
            kept = run.pruner.mask(run.sites[0].name)
            closed = float(np.log(0.1 / 1.1))
            logits = torch.where(kept, logits.clamp(min=closed + 0.5), logits.clamp(max=closed - 0.5))
    torch.testing.assert_close(run.gate.logits.detach(), logits)
    torch.testing.assert_close(run.sites[0].owner.detach(), weight)


def test_pst_after_three_steps():
    run = Pulled("pst", rank=2)
    names = ("update_left", "update_right", "score_left", "score_right", "score_row", "score_column")
    u, v, a, b, r, c = (run.hand[name].clone() for name in names)
    assert not v.any()
    assert not any(x.any() for x in (b, r, c))
    for _ in range(3):
        mask = run.gate.mask.double()
        run.step()
        updated = run.weight + u @ v
        # W' = (W + UV) M: through the weight, and straight through the mask to the score |W + UV| + AB + R + C.
        to_score = run.pull * updated
        to_update = run.pull * mask + to_score * updated.sign()
        steps = (
            to_update @ v.T,
            u.T @ to_update,
            to_score @ b.T,
            a.T @ to_score,
            to_score.sum(1, True),
            to_score.sum(0, True),
        )
        u, v, a, b, r, c = (x - LR * g for x, g in zip((u, v, a, b, r, c), steps, strict=True))
    for name, expected in zip(names, (u, v, a, b, r, c), strict=True):
        torch.testing.assert_close(getattr(run.gate, name).detach(), expected)
    assert torch.equal(run.sites[0].owner.detach(), run.weight)


def test_pst_trains_only_its_own_parameters_and_the_head():
    net = tiny.Net()
    wrapped = nn.Module()
    wrapped.backbone, wrapped.head = net, nn.Linear(3, 3)
    wrapped.forward = lambda x: {"logits": wrapped.head(net(x)["logits"])}
    before = {name: p.clone() for name, p in wrapped.named_parameters()}
    pruner = Pruner(wrapped, tiny.config("pst", steps=40))
    tiny.train(wrapped, pruner, 40)
    trained = {n for n, p in wrapped.named_parameters() if n in before and not torch.equal(p, before[n])}
    assert trained == {"head.weight", "head.bias"}
    # Each matrix keeps its share: PST ranks within a matrix.
    for site in pruner.sites:
        assert abs(int(pruner.mask(site.name).sum()) - 0.2 * site.numel) <= 1


@pytest.mark.parametrize("method", ["pins", "platon"])
def test_bf16_state_gives_nearly_the_same_mask(method):
    masks = []
    for dtype in ("float32", "bfloat16"):
        torch.manual_seed(0)
        net = tiny.Net(width=64)
        pruner = Pruner(net, tiny.config(method, steps=300, state_dtype=dtype))
        tiny.train(net, pruner, 190, lr=1e-4)
        masks.append(torch.cat([pruner.mask(s.name).view(-1) for s in pruner.sites]))
        size = pruner.state_bytes() / (4 * pruner.total)
        assert size <= (3.0 if dtype == "float32" else 1.5)
    assert float((masks[0] != masks[1]).float().mean()) < 0.01
