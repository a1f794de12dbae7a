"""Wanda and SparseGPT with patterns and scopes, against slow references; a failure changes nothing."""

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import tiny
from pinscher import Pruner, sparsity
from pinscher.prune import find_sites, hessian, prune_once
from pinscher.prune.masking import kept_reference
from tiny_matrices import error, inputs, matrix

BOTH = ["wanda", "sparsegpt"]


def one_matrix(weight: torch.Tensor, transposed: bool) -> nn.Module:
    """A model of one matrix, which is stored one way or the other."""
    layer = Conv1D(*weight.shape) if transposed else nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = (weight.T if transposed else weight).contiguous().clone()
    whole = nn.ModuleDict({"layer": layer})
    whole.forward = layer.__call__
    return whole


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    return [site.owner.detach().clone() for site in find_sites(model)]


# ---------------------------------------------------------------- one matrix


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("scope", [None, "matrix", "global"])
@pytest.mark.parametrize(("n", "m"), [(2, 4), (4, 8), (1, 3)])
def test_wanda_n_of_m_by_brute_force(n, m, scope, transposed):
    weight, x = matrix(6, 24).float(), inputs(24).float()
    expected = weight.clone()
    for row in range(6):
        for start in range(0, 24, m):
            scores = [float(weight[row, j].abs() * x[:, j].norm()) for j in range(start, start + m)]
            for j in sorted(range(m), key=scores.__getitem__)[: m - n]:
                expected[row, start + j] = 0.0
    model = one_matrix(weight, transposed)
    prune_once(model, "wanda", 1 - n / m, [x], pattern=f"{n}:{m}", scope=scope, target_modules="layer")
    ours = model["layer"].weight.detach()
    assert torch.equal(ours.T if transposed else ours, expected)


def surgery(weight: torch.Tensor, h: torch.Tensor, gone: torch.Tensor, group: tuple[int, int] | None = None):
    """Optimal Brain Surgeon, column by column, with a fresh inverse of what is left; a group's mask when it is due."""
    weight, gone = weight.clone(), gone.clone()
    for j in range(weight.shape[1]):
        if group is not None and j % group[1] == 0:
            n, m = group
            costs = torch.stack([weight[:, k] ** 2 / torch.linalg.inv(h[k:, k:])[0, 0] for k in range(j, j + m)], 1)
            gone[:, j : j + m] = True
            gone[:, j : j + m].scatter_(1, costs.topk(n).indices, False)
        inverse = torch.linalg.inv(h[j:, j:])
        for row in range(weight.shape[0]):
            if gone[row, j]:
                weight[row, j:] -= weight[row, j].clone() / inverse[0, 0] * inverse[:, 0]
                weight[row, j] = 0.0
    return weight, gone


def damped(x: torch.Tensor) -> torch.Tensor:
    h = x.T @ x
    return h + 0.01 * h.diagonal().mean() * torch.eye(len(h), dtype=h.dtype)


@pytest.mark.parametrize("block", [1, 5, 16, 128])
def test_sparsegpt_makes_up_for_a_mask_that_is_given(block):
    weight, x = matrix(6, 16), inputs(16)
    gone = matrix(6, 16, 7) > 0.2
    gone[2] = True  # a whole row, too
    ours, given = weight.clone(), ~gone
    assert torch.equal(hessian.sparsegpt_(ours, x.T @ x, given, block=block), gone)
    assert torch.equal(given, ~gone)
    expected, _ = surgery(weight, damped(x), gone)
    torch.testing.assert_close(ours, expected, rtol=1e-8, atol=1e-9)
    assert torch.equal(ours == 0, gone)
    assert error(x, weight, ours) < error(x, weight, weight.masked_fill(gone, 0.0))


def test_one_column_is_the_closed_form():
    """Nothing is left out of H before the first column, so the others' move is the best there is."""
    weight, x = matrix(5, 8), inputs(8)
    given = torch.ones(5, 8, dtype=torch.bool)
    given[:, 0] = False
    ours = weight.clone()
    hessian.sparsegpt_(ours, x.T @ x, given)
    inverse = torch.linalg.inv(damped(x))
    torch.testing.assert_close(ours, weight - weight[:, :1] / inverse[0, 0] * inverse[0], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("block", [1, 4, 6, 128])
@pytest.mark.parametrize("group", [(2, 4), (4, 8)])
def test_sparsegpt_chooses_a_group_when_it_is_reached(group, block):
    weight, x = matrix(6, 16), inputs(16)
    ours = weight.clone()
    pruned = hessian.sparsegpt_(ours, x.T @ x, group, block=block)
    expected, gone = surgery(weight, damped(x), torch.zeros(6, 16, dtype=torch.bool), group)
    assert torch.equal(pruned, gone)
    torch.testing.assert_close(ours, expected, rtol=1e-8, atol=1e-9)


def test_a_score_is_what_the_outputs_lose_if_the_others_make_up_for_it():
    weight, x = matrix(3, 6), inputs(6)
    h, scores = damped(x), hessian.surgeon_scores(weight, x.T @ x)
    for row in range(3):
        for q in range(6):
            rest = [j for j in range(6) if j != q]
            move = torch.zeros(6, dtype=torch.float64)
            move[q] = -weight[row, q]
            move[rest] = -torch.linalg.solve(h[rest][:, rest], h[rest, q] * move[q])
            torch.testing.assert_close(scores[row, q], move @ h @ move)
    x[:, 2] = 0.0
    scores = hessian.surgeon_scores(weight, x.T @ x)
    assert bool((scores[:, 2] == 0).all())
    assert int((scores == 0).sum()) == 3


# ---------------------------------------------------------------- the two walks


def seen_by(net: nn.Module, sites, batches) -> dict[str, torch.Tensor]:
    found: dict[str, list[torch.Tensor]] = {site.name: [] for site in sites}
    hooks = [
        site.module.register_forward_pre_hook(lambda m, args, to=found[site.name]: to.append(args[0])) for site in sites
    ]
    with torch.no_grad():
        for batch in batches:
            net(batch)
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(parts) for name, parts in found.items()}


@pytest.mark.parametrize("method", BOTH)
def test_two_walks_by_hand(method):
    """Scores come from the model as it was, what makes up for pruned weights from what pruned blocks give."""
    torch.manual_seed(0)
    net, slow = tiny.Net().double(), tiny.Net().double()
    slow.load_state_dict(net.state_dict())
    batches = tiny.batches(torch.float64)
    prune_once(net, method, 0.6, batches, scope="global")
    sites, seen, scores = find_sites(slow), seen_by(slow, find_sites(slow), batches), []
    for site in sites:
        x, weight = seen[site.name], site.owner.detach()
        inverse = torch.linalg.inv(damped(x)).diagonal()
        scores.append(weight.abs() * x.norm(dim=0) if method == "wanda" else weight**2 / inverse)
    total = sum(site.numel for site in sites)
    kept = kept_reference([s.view(-1) for s in scores], int(0.4 * total + 0.5))
    keeps = {site.name: k.view(site.shape) for site, k in zip(sites, kept, strict=True)}
    for block in dict.fromkeys(site.block for site in sites):
        group = [site for site in sites if site.block == block]
        for site, x in zip(group, seen_by(slow, group, batches).values(), strict=True):
            if method == "sparsegpt":
                hessian.sparsegpt_(site.owner.data, x.T @ x, keeps[site.name])
            site.owner.data *= keeps[site.name]
    for site, expected in zip(find_sites(net), weights_of(slow), strict=True):
        assert torch.equal(site.owner != 0, keeps[site.name])
        torch.testing.assert_close(site.owner.detach(), expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("method", BOTH)
def test_what_is_pruned_does_not_come_back(method):
    torch.manual_seed(0)
    net = tiny.Net()
    prune_once(net, method, 0.3, tiny.batches())
    before = [weight == 0 for weight in weights_of(net)]

    def go_on(**how):
        settings = {"steps": 1, "regrow": False, "warmup": 0, "cooldown": 0} | how
        Pruner(net, tiny.config(method, **settings), calibration=tiny.batches()).finish(early=True)

    kept = weights_of(net)
    with pytest.raises(ValueError, match="regrow=False lets none come back"):
        go_on(pattern="3:4", sparsity=0.25, initial_sparsity=0.0)
    assert all(torch.equal(a, b) for a, b in zip(weights_of(net), kept, strict=True))
    go_on(scope="layer", sparsity=0.6)
    assert all(bool((after[was] == 0).all()) for was, after in zip(before, weights_of(net), strict=True))
    assert sparsity(net) == pytest.approx(0.6, abs=1e-3)


@pytest.mark.parametrize("how", [{}, {"pattern": "2:4"}, {"scope": "layer"}, {"pattern": "rows"}])
@pytest.mark.parametrize("method", BOTH)
def test_a_failure_in_the_last_block_changes_nothing(method, how):
    """Wherever it happens: once blocks before it are pruned, too."""
    torch.manual_seed(0)
    net = tiny.Net()
    before, first = weights_of(net), find_sites(net)[0]
    settings = {"steps": 9, "warmup": 0, "cooldown": 1, "sparsity": 0.5}
    pruner = Pruner(net, tiny.config(method, **settings, **how), calibration=tiny.batches())

    def spoil(module, args):
        return (args[0] * torch.nan,) if bool((first.owner == 0).any()) else None

    hook = net.blocks[2].up.register_forward_pre_hook(spoil)
    with pytest.raises(ValueError, match=r"blocks\.2\.up are not finite"):
        pruner.finish(early=True)
    assert all(torch.equal(a, b) for a, b in zip(weights_of(net), before, strict=True))
    assert pruner.kept == pruner.total
    assert not pruner.criterion.measured
    hook.remove()
    pruner.finish(early=True)
    assert sparsity(net) == 0.5


@pytest.mark.parametrize("how", [{}, {"pattern": "2:4"}, {"pattern": "rows"}])
@pytest.mark.parametrize("method", BOTH)
def test_weights_that_are_not_finite_are_refused(method, how):
    net = tiny.Net()
    net.blocks[2].down.weight.data[0, 0] = torch.inf
    before = weights_of(net)
    with pytest.raises(ValueError, match=r"weights of blocks\.2\.down are not finite"):
        prune_once(net, method, 0.5, tiny.batches(), **how)
    assert all(torch.equal(a, b) for a, b in zip(weights_of(net), before, strict=True))
