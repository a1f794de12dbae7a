"""Every criterion, pattern and scope reaches exactly its target; units are whole; masks are those of brute force."""

import math
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from pinscher import Pruner, PruningConfig
from pinscher.prune import CRITERIA, find_sites, prune_once
from pinscher.prune.masking import Ranks, kept_reference
from pinscher.prune.patterns import SCOPES, parse
from tiny_patterns import (
    PATTERNS,
    Given,
    Net,
    assert_units_whole,
    blocks,
    masks,
    oriented,
    pruned_net,
    sparsity_of,
    unit_size,
)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("method", list(CRITERIA))
def test_reaches_exactly_its_target(method, pattern, scope):
    net, pruner = pruned_net(method, pattern, scope=scope)
    pruner.finish()
    density = 1 - sparsity_of(pattern)
    kept = sum(int(oriented(site).sum()) for site in pruner.sites)
    assert kept == pruner.kept == pruner.target
    assert_units_whole(pattern, net, pruner)
    largest = max(unit_size(pattern, site) for site in pruner.sites)
    assert abs(kept - density * pruner.total) <= largest / 2
    if scope == "global" and pattern not in ("rows", "columns"):  # whose units are of two sizes
        assert kept == math.floor(density * (pruner.total // largest) + 0.5) * largest
    groups = {"matrix": lambda s: s.name, "layer": lambda s: s.block, "kind": lambda s: s.kind, "global": lambda s: ""}
    if pattern == "heads" and scope in ("matrix", "kind"):
        groups[scope] = groups["layer"]
    for key in {groups[scope](site) for site in pruner.sites}:  # every scope has its share
        members = [site for site in pruner.sites if groups[scope](site) == key]
        share = sum(int(oriented(site).sum()) for site in members) - density * sum(site.numel for site in members)
        assert abs(share) <= largest


@pytest.mark.parametrize("method", ["wanda", "sparsegpt", "magnitude", "random"])
@pytest.mark.parametrize("pattern", ["2:4", "rows", "heads"])
def test_prune_once_takes_patterns(method, pattern):
    torch.manual_seed(0)
    net = Net()
    prune_once(net, method, 0.5, tiny.batches(), pattern=pattern)
    pruner = Pruner(net, tiny.config("magnitude", sparsity=0.5, pattern=pattern))
    assert pruner.kept == pruner.target
    assert_units_whole(pattern, net, pruner)


# ---------------------------------------------------------------- against brute force


@st.composite
def matrices(draw, rows: int, columns: int):
    """Up to three matrices of one shape, with few values, so that there are many ties."""
    shape = rows * draw(st.integers(1, 3)), columns * draw(st.integers(1, 3))
    values = st.lists(st.integers(-3, 3), min_size=math.prod(shape), max_size=math.prod(shape))
    return [torch.tensor(draw(values)).view(shape).float() for _ in range(draw(st.integers(1, 3)))]


@pytest.mark.parametrize("pattern", ["4x1", "1x4", "2x3", "rows", "columns"])
@given(data=st.data(), density=st.floats(0, 1), scope=st.sampled_from(["global", "matrix"]))
@settings(max_examples=40, deadline=None)
def test_whole_units_are_those_of_a_stable_sort(pattern, data, density, scope):
    sizes = (1, 1) if "x" not in pattern else tuple(map(int, pattern.split("x")))
    weights = data.draw(matrices(*sizes))
    net = Given(*weights)
    sites = find_sites(net)
    sums = [blocks(pattern, site, w.abs()).sum(1) for site, w in zip(sites, weights, strict=True)]
    if scope == "global":
        kept = kept_reference(sums, math.floor(density * sum(s.numel() for s in sums) + 0.5))
    else:
        ends = [math.floor(density * sums[0].numel() * i + 0.5) for i in range(len(sums) + 1)]
        kept = [kept_reference([s], ends[i + 1] - ends[i])[0] for i, s in enumerate(sums)]
    for site, mask, stays in zip(sites, masks(net, density, pattern=pattern, scope=scope), kept, strict=True):
        ours = blocks(pattern, site, mask)
        assert torch.equal(ours, stays[:, None].expand_as(ours))


@given(data=st.data(), n=st.integers(1, 3), keep=st.integers(0, 8))
@settings(max_examples=60, deadline=None)
def test_n_of_m_keeps_the_best_that_leave_n_in_each_group(data, n, keep):
    """Of all masks with as many ones and at least N in each group of four, none has a larger sum of scores."""
    weight = data.draw(matrices(1, 4).map(lambda found: found[0][:2, :4]))
    groups = weight.abs().reshape(-1, 4)
    total = groups.numel()
    keep = min(max(keep, n * len(groups)), total)
    (mask,) = masks(Given(weight), keep / total, pattern=f"{n}:4", sparsity=1 - n / 4)
    assert int(mask.sum()) == keep
    assert bool((mask.reshape(-1, 4).sum(1) >= n).all())
    best = -1.0
    for chosen in combinations(range(total), keep):
        other = torch.zeros(total, dtype=torch.bool)
        other[list(chosen)] = True
        if bool((other.view(-1, 4).sum(1) >= n).all()):
            best = max(best, float(groups.view(-1)[other].sum()))
    assert float(weight.abs()[mask].sum()) == best


def test_n_of_m_breaks_ties_by_position():
    equal = torch.ones(3, 8)
    (mask,) = masks(Given(equal), 0.5, pattern="2:4", sparsity=0.5)
    assert torch.equal(mask, torch.tensor([1, 1, 0, 0, 1, 1, 0, 0]).bool().expand(3, 8))
    (mask,) = masks(Given(equal), 14 / 24, pattern="2:4", sparsity=0.5)
    assert torch.equal(mask[0], torch.tensor([1, 1, 1, 1, 1, 1, 0, 0]).bool())  # two more, from the beginning
    assert int(mask[1:].sum()) == 8


def test_units_of_two_sizes_keep_their_share():
    """Rows of 16 and of 32 weights are not ranked against each other: each kind keeps its share."""
    net = Given(torch.rand(10, 16), 100 + torch.rand(10, 32), torch.rand(10, 16), transposed=False)
    first, second, third = masks(net, 0.3, pattern="rows")
    assert int(second[:, 0].sum()) == 3
    assert int(first[:, 0].sum()) + int(third[:, 0].sum()) == 6


# ---------------------------------------------------------------- the run


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_masking_of_the_ramp_keeps_the_exact_count(pattern):
    torch.manual_seed(0)
    net = Net()
    pruner = Pruner(net, tiny.config("pins", steps=20, interval=2, pattern=pattern, sparsity=sparsity_of(pattern)))
    optimizer = torch.optim.AdamW(pruner.param_groups(), lr=3e-3)
    pruner.attach(optimizer)
    x, y = tiny.task()
    counts = []
    for t in range(1, 21):
        optimizer.zero_grad()
        tiny.loss_of(net, x[:32], y[:32]).backward()
        optimizer.step()
        if pruner.schedule.due(t):
            counts.append(sum(int(pruner.mask(site.name).sum()) for site in pruner.sites))
            assert counts[-1] == pruner.ranking.count(pruner.schedule.density(t))
            assert counts[-1] == sum(int(oriented(site).sum()) for site in pruner.sites)
            if ":" not in pattern:
                assert_units_whole(pattern, net, pruner)
    assert counts[0] > counts[-1]  # it went in steps
    assert_units_whole(pattern, net, pruner)


@pytest.mark.parametrize("pattern", ["2:4", "4x1", "heads"])
def test_without_regrowth_dead_units_stay_dead(pattern):
    torch.manual_seed(0)
    net = Net()
    net.layers[0].up.weight.data[0, 0] = 0.0  # one zero does not make a unit dead
    net.layers[0].attention.q_proj.weight.data[0, 0] = 0.0
    settings = {"interval": 2, "regrow": False, "hold": "always", "sparsity": sparsity_of(pattern)}
    pruner = Pruner(net, tiny.config("pins", steps=20, pattern=pattern, **settings))
    optimizer = torch.optim.AdamW(pruner.param_groups(), lr=3e-3)
    pruner.attach(optimizer)
    x, y = tiny.task()
    dead: dict[str, torch.Tensor] = {}
    for t in range(1, 21):
        optimizer.zero_grad()
        tiny.loss_of(net, x[:32], y[:32]).backward()
        optimizer.step()
        now = {site.name: ~pruner.mask(site.name) for site in pruner.sites} if pruner.schedule.due(t) else dead
        assert all(not bool((dead[name] & ~now[name]).any()) for name in dead)
        dead = now
        for site in pruner.sites if dead else ():
            assert not site.owner.detach()[dead[site.name]].any()  # held
    assert_units_whole(pattern, net, pruner) if pattern != "heads" else None
    assert pruner.kept == pruner.target


@pytest.mark.parametrize("pattern", ["2:4", "heads"])
@pytest.mark.parametrize("method", ["pins", "smvp", "l0"])
def test_resumed_is_bit_identical(method, pattern):
    settings = {"interval": 2, "warmup": 1, "cooldown": 4, "sparsity": sparsity_of(pattern), "scope": "layer"}
    x, y = tiny.task()

    def start():
        torch.manual_seed(0)
        net = Net()
        pruner = Pruner(net, tiny.config(method, steps=12, pattern=pattern, **settings))
        optimizer = torch.optim.AdamW(pruner.param_groups(), lr=3e-3)
        pruner.attach(optimizer)
        return net, pruner, optimizer

    def steps(net, optimizer, first, last):
        for t in range(first, last):
            torch.manual_seed(t)
            optimizer.zero_grad()
            tiny.loss_of(net, x[t : t + 32], y[t : t + 32]).backward()
            optimizer.step()

    whole, pruner, optimizer = start()
    ends = []
    for at in (5, 9):
        steps(whole, optimizer, 0 if at == 5 else 5, at)
        saved = [{k: v.clone() for k, v in whole.state_dict().items()}, pruner.state_dict(), optimizer.state_dict()]
        saved = torch.utils._pytree.tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, saved)
        again, other, restarted = start()
        again.load_state_dict(saved[0])
        other.load_state_dict(saved[1])
        restarted.load_state_dict(saved[2])
        steps(again, restarted, at, 12)
        ends.append([p.detach().clone() for p in other.finish().parameters()])
    steps(whole, optimizer, 9, 12)
    pruner.finish()
    for end in ends:
        assert all(torch.equal(a, b) for a, b in zip(end, whole.parameters(), strict=True))
    assert_units_whole(pattern, whole, pruner)


def test_a_checkpoint_of_before_there_were_patterns_resumes():
    torch.manual_seed(0)
    pruner = Pruner(Net(), tiny.config())
    state = pruner.state_dict()
    del state["config"]["pattern"], state["config"]["scope"]
    pruner.load_state_dict(state)
    with pytest.raises(ValueError, match="made with pattern='unstructured', this run has 'rows'"):
        Pruner(Net(), tiny.config(pattern="rows")).load_state_dict(state)


def test_pst_ranks_each_matrix_unless_told_otherwise():
    for scope, equal in ((None, True), ("matrix", True), ("global", False)):
        _, pruner = pruned_net("pst", scope=scope)
        shares = [abs(int(pruner.mask(s.name).sum()) - 0.4 * s.numel) for s in pruner.sites]
        assert (max(shares) <= 1) == equal


# ---------------------------------------------------------------- mistakes

MISTAKES = {
    "2x": "unknown pattern '2x'",
    "0x4": "unknown pattern",
    "4:4": "between 1 and 3 can be kept, not 4",
    "0:4": "not 0",
    "2:4": "sparsity must be 0.5, not 0.8",
    "1:3": "sparsity must be 0.666667, not 0.8",
}


@pytest.mark.parametrize("pattern", MISTAKES)
def test_what_no_pattern_can_be(pattern):
    with pytest.raises(ValueError, match=MISTAKES[pattern]):
        PruningConfig(pattern=pattern)


def test_a_third_is_near_enough():
    assert PruningConfig(pattern="1:3", sparsity=0.666667, total_steps=99).make_schedule().final == 1 / 3


def test_an_unknown_scope():
    with pytest.raises(ValueError, match="scope must be one of global, matrix, layer, kind, not 'row'"):
        PruningConfig(scope="row")


@pytest.mark.parametrize(
    ("pattern", "says"),
    [("3x1", "layers.0.up: its 32 outputs are no multiple of 3"), ("1x5", "its 16 inputs"), ("2:5", "its 16 inputs")],
)
def test_a_pattern_that_does_not_fit_names_the_matrix(pattern, says):
    excluded = {"exclude_modules": "attention.*|.*proj|.*attn"}
    with pytest.raises(ValueError, match=f"does not fit.*{says}.*exclude_modules"):
        Pruner(Net(), tiny.config(pattern=pattern, sparsity=0.6, **excluded))


def test_units_are_not_sharded():
    two = Ranks(0, 2, lambda counts: counts)
    with pytest.raises(ValueError, match="units need whole matrices or DTensors"):
        Pruner(Net(), tiny.config(pattern="rows"), ranks=two)


def test_scores_that_are_not_numbers():
    weight = torch.ones(2, 8)
    weight[0, :3] = torch.nan
    for pattern, sparsity in (("2:4", 0.5), ("1x4", 0.1)):
        with pytest.raises(ValueError, match="too many scores are NaN"):
            masks(Given(weight), 1 - sparsity, pattern=pattern, sparsity=sparsity)


def test_names_of_patterns():
    assert parse("16x16") == parse("16x16") != parse("16x8")
