"""Wanda, SparseGPT and oBERT against slow references in float64, and on real architectures."""

import math

import pytest
import torch
from torch import nn

import tiny
from pinscher import Pruner, sparsity
from pinscher.prune import CRITERIA, find_sites, fisher, hessian, prune_once
from pinscher.prune.calibrated import Calibrated
from tiny_matrices import error, inputs, matrix
from tiny_models import HEADS, collator, rows

ONCE = ["wanda", "sparsegpt", "obert", "magnitude", "random"]
ARCHITECTURES = ["gpt2-lm", "llama-lm", "bert", "t5", "distilbert-spans"]


# ---------------------------------------------------------------- Wanda


def test_wanda_by_hand():
    weight = torch.tensor([[3.0, -1.0, 2.0], [0.1, -5.0, 4.0]])
    x = torch.tensor([[1.0, 10.0, 0.0], [0.0, 0.0, 2.0]])
    scores = weight.abs() * x.norm(dim=0)  # [[3, 10, 4], [0.1, 50, 8]]
    assert scores.tolist()[0] == [3.0, 10.0, 4.0]
    pruned = hessian.wanda(weight, x.square().sum(0).double(), keep=2)
    assert pruned.tolist() == [[True, False, True], [True, False, True]]  # one a row, not the two largest of all
    # Three of six over two rows: the running total 1.5 rounds up, so the first row keeps two.
    pruned = hessian.wanda(weight, x.square().sum(0).double(), keep=3)
    assert pruned.tolist() == [[True, False, False], [True, False, True]]


@pytest.mark.parametrize("keep", [0, 1, 33, 60, 119, 120])
def test_wanda_compares_within_rows_and_counts_exactly(keep):
    weight, x = matrix(10, 12), inputs(12)
    pruned = hessian.wanda(weight, x.square().sum(0), keep)
    assert int((~pruned).sum()) == keep
    assert set((~pruned).sum(1).tolist()) <= {keep // 10, math.ceil(keep / 10)}
    scores = weight.abs() * x.norm(dim=0)
    for row, gone in zip(scores, pruned, strict=True):
        if gone.any() and not gone.all():
            assert row[gone].max() <= row[~gone].min()


# ---------------------------------------------------------------- SparseGPT


def obs_reference(weight: torch.Tensor, x: torch.Tensor, keep: int, damping: float) -> torch.Tensor:
    """Optimal Brain Surgeon, column by column and row by row, with a fresh inverse of what is left every time."""
    weight, h = weight.clone(), x.T @ x
    h += damping * h.diagonal().mean() * torch.eye(len(h), dtype=h.dtype)
    columns = weight.shape[1]
    inverses = [torch.linalg.inv(h[j:, j:]) for j in range(columns)]
    costs = torch.stack([weight[:, j] ** 2 / inverses[j][0, 0] for j in range(columns)], 1)
    gone = costs <= costs.flatten().sort().values[costs.numel() - keep - 1]
    for row in range(weight.shape[0]):
        for j in range(columns):
            if gone[row, j]:
                weight[row, j:] -= weight[row, j].clone() / inverses[j][0, 0] * inverses[j][:, 0]
                weight[row, j] = 0.0
    return weight


@pytest.mark.parametrize("density", [0.2, 0.5, 0.75])
def test_sparsegpt_is_optimal_brain_surgeon_column_by_column(density):
    weight, x = matrix(6, 16), inputs(16)
    keep = round(density * weight.numel())
    ours = weight.clone()
    pruned = hessian.sparsegpt_(ours, x.T @ x, keep, damping=0.01, block=16)
    torch.testing.assert_close(ours, obs_reference(weight, x, keep, 0.01), rtol=1e-8, atol=1e-9)
    assert torch.equal(ours == 0, pruned)
    assert int((~pruned).sum()) == keep


@pytest.mark.parametrize("block", [1, 5, 8, 16, 100])
def test_lazy_updates_of_later_blocks_change_nothing(block):
    """With the mask given (all that may not stay is barred), blocks only save time."""
    weight, x = matrix(6, 16), inputs(16)
    barred = torch.zeros(6, 16, dtype=torch.bool)
    for j in range(16):  # the same number in each column, so that every block's share is what is left
        barred[torch.randperm(6, generator=torch.Generator().manual_seed(j))[:3], j] = True
    ends = []
    for size in (16, block):
        ours = weight.clone()
        assert torch.equal(hessian.sparsegpt_(ours, x.T @ x, 48, block=size, barred=barred), barred)
        ends.append(ours)
    torch.testing.assert_close(*ends)


@pytest.mark.parametrize("density", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("block", [8, 128])
def test_sparsegpt_reconstructs_better_than_wanda_and_magnitude(density, block):
    weight, x = matrix(24, 32), inputs(32)
    keep = round(density * weight.numel())
    ours = weight.clone()
    hessian.sparsegpt_(ours, x.T @ x, keep, block=block)
    by_wanda = weight.masked_fill(hessian.wanda(weight, x.square().sum(0), keep), 0.0)
    by_size = weight.masked_fill(hessian.lowest(weight.abs(), weight.numel() - keep), 0.0)
    assert error(x, weight, ours) < error(x, weight, by_wanda) < error(x, weight, by_size)


def test_inputs_that_are_always_zero_go_first_and_harm_nobody():
    weight, x = matrix(4, 8), inputs(8)
    x[:, [1, 5]] = 0.0
    ours = weight.clone()
    pruned = hessian.sparsegpt_(ours, x.T @ x, keep=20)
    assert pruned[:, [1, 5]].all()
    assert int((~pruned).sum()) == 20
    few = weight.clone()
    pruned = hessian.sparsegpt_(few, x.T @ x, keep=30)  # fewer go than are dead: the count is exact all the same
    assert int(pruned.sum()) == 2
    assert error(x, weight, few) == 0.0
    nothing = weight.clone()
    assert int(hessian.sparsegpt_(nothing, torch.zeros(8, 8, dtype=torch.float64), keep=16).sum()) == 16


# ---------------------------------------------------------------- oBERT


@pytest.mark.parametrize(("number", "width"), [(3, 5), (20, 5), (50, 50)])
@pytest.mark.parametrize("damping", [1e-7, 1e-3])
def test_the_recursion_gives_the_inverse_fisher(number, width, damping):
    gradients = torch.randn(number, 4, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    inverse = fisher.inverse_fisher(gradients, damping)
    for b in range(4):
        g = gradients[:, b]
        exact = torch.linalg.inv(damping * torch.eye(width, dtype=torch.float64) + g.T @ g / number)
        torch.testing.assert_close(inverse[b], exact, rtol=1e-6, atol=1e-6 * float(exact.abs().max()))


def test_saliency_and_update_by_brute_force(monkeypatch):
    monkeypatch.setattr(fisher, "CHUNK", 2 * 7 * 7)  # several parts
    size, width, damping = 31, 7, 1e-3  # the last block is ragged
    weight, gradients = matrix(1, size)[0], matrix(12, size, 5)
    found = fisher.saliency(weight, gradients, damping, width)
    pruned = fisher.saliency(weight, gradients, damping, width) < found.median()
    moved = weight.clone()
    fisher.compensate_(moved, gradients, pruned, damping, width)
    for start in range(0, size, width):
        at = slice(start, min(start + width, size))
        g, w, gone = gradients[:, at], weight[at], pruned[at]
        f = damping * torch.eye(len(w), dtype=torch.float64) + g.T @ g / 12
        inverse = torch.linalg.inv(f)
        torch.testing.assert_close(found[at], w**2 / (2 * inverse.diagonal()))
        # The minimum of δᵀFδ with δ_Q = -w_Q solves F_SS δ_S = F_SQ w_Q for the weights S that stay.
        expected = w.clone()
        expected[gone] = 0.0
        expected[~gone] += torch.linalg.solve(f[~gone][:, ~gone], f[~gone][:, gone] @ w[gone])
        torch.testing.assert_close(moved[at], expected)
    assert torch.equal(moved == 0, pruned)


def test_obert_remembers_the_last_gradients_only():
    net = tiny.Net(width=4, blocks=1).double()
    settings = {"interval": 1, "warmup": 0, "cooldown": 1, "sparsity": 0.5}
    pruner = Pruner(net, tiny.config("obert", steps=9, options={"gradients": 3, "update": False}, **settings))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    pruner.attach(optimizer)
    seen = []
    for _ in range(5):
        for parameter in net.parameters():
            parameter.grad = torch.randn_like(parameter)
        seen.append(pruner.sites[0].grad.clone())
        optimizer.step()
    kept = pruner.sites[0].state["gradients"]
    assert {tuple(g.tolist()) for g in kept} == {tuple(g.tolist()) for g in seen[-3:]}


def test_the_update_makes_up_for_what_was_pruned():
    torch.manual_seed(0)
    net = tiny.Net()
    tiny.train(net, Pruner(net, tiny.config("magnitude", steps=200, sparsity=0.0)), 200)
    trained = {name: p.clone() for name, p in net.state_dict().items()}
    x, y = tiny.task()
    wrapped = nn.Module()
    wrapped.net, wrapped.forward = net, lambda x, y: {"loss": tiny.loss_of(net, x, y)}
    after = {}
    for update in (True, False):
        net.load_state_dict(trained)
        data = list(zip(x.split(4), y.split(4), strict=True))
        prune_once(wrapped, "obert", 0.5, data, update=update, gradients=64, damping=1e-5)
        after[update] = tiny.loss_of(net, x, y).item()
    assert after[True] < after[False]


# ---------------------------------------------------------------- models


def made(head: str):
    kind = HEADS[head]
    data, collate = rows(kind.kind), collator(kind.kind)
    return kind.make(), [collate([data[i] for i in range(k, k + 8)]) for k in (0, 8, 16)]


@pytest.mark.parametrize("head", ARCHITECTURES)
@pytest.mark.parametrize("method", ONCE)
def test_prune_once_is_exact_on_every_architecture(head, method):
    target = 0.813
    model, batches = made(head)
    model.train()
    state = torch.get_rng_state()
    assert prune_once(model, method, target, batches) is model
    assert torch.equal(torch.get_rng_state(), state)
    total = sum(site.numel for site in find_sites(model))
    assert sum(site.zeros() for site in find_sites(model)) == total - math.floor((1 - target) * total + 0.5)
    assert model.training
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())
    if issubclass(CRITERIA[method], Calibrated):
        seen = 0
        for site in find_sites(model):  # every matrix has its share
            kept = int(torch.count_nonzero(site.owner))
            assert abs(kept - (1 - target) * site.numel) <= 1.5
            seen += kept
        assert seen == math.floor((1 - target) * total + 0.5)


@pytest.mark.parametrize("head", ["gpt2-lm", "llama-lm"])
def test_sequential_pruning_by_hand(head):
    """Block by block, each by the inputs that the pruned blocks before it give, without padding."""
    ours, batches = made(head)
    slow, _ = made(head)
    prune_once(ours, "wanda", 0.5, batches)
    for block in dict.fromkeys(site.block for site in find_sites(slow)):
        group = [site for site in find_sites(slow) if site.block == block]
        seen: dict[str, list[torch.Tensor]] = {site.name: [] for site in group}
        hooks = [
            site.module.register_forward_hook(lambda m, args, out, to=seen[site.name]: to.append(args[0]))
            for site in group
        ]
        with torch.no_grad():
            for batch in batches:
                slow.eval()(**batch)
        for hook in hooks:
            hook.remove()
        for site in group:
            x = torch.cat([s[b["attention_mask"].bool()] for s, b in zip(seen[site.name], batches, strict=True)])
            weight = site.owner.data.t() if site.transposed else site.owner.data
            scores = weight.abs() * x.norm(dim=0)
            out, features = weight.shape
            assert features % 2 == 0
            for row in range(out):
                weight[row, scores[row].sort().indices[: features // 2]] = 0.0
    for one, other in zip(find_sites(ours), find_sites(slow), strict=True):
        assert torch.equal(one.owner == 0, other.owner == 0), one.name
        assert torch.equal(one.owner, other.owner)


def test_a_transposed_matrix_is_pruned_as_its_transpose():
    class Conv1D(nn.Module):
        def __init__(self, weight: torch.Tensor) -> None:
            super().__init__()
            self.nf, self.weight = weight.shape[0], nn.Parameter(weight.t().contiguous())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight

    x = inputs(12).float()
    for method in ("wanda", "sparsegpt"):
        plain = nn.Linear(12, 8, bias=False)
        turned = Conv1D(plain.weight.detach())
        for model in (plain, turned):
            whole = nn.ModuleDict({"layer": model})
            whole.forward = model.__call__
            prune_once(whole, method, 0.6, [x], target_modules="layer")
        assert torch.equal(plain.weight, turned.weight.t())
        assert int((plain.weight == 0).sum()) == 96 - 38


def test_a_shared_matrix_sees_all_of_its_inputs():
    net = tiny.Net(blocks=2)
    net.blocks[1].up = net.blocks[0].up
    seen = []
    net.blocks[0].up.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    weight = net.blocks[0].up.weight.detach().clone()
    prune_once(net, "wanda", 0.5, [tiny.task()[0]], target_modules="up")
    pilot, again = seen[:2], seen[2:4]
    assert torch.equal(pilot[0], again[0])
    squares = torch.cat(again).square().sum(0).double()
    assert torch.equal(net.blocks[0].up.weight == 0, hessian.wanda(weight, squares, weight.numel() // 2))


def test_sparsegpt_hurts_a_trained_model_least():
    torch.manual_seed(0)
    net = tiny.Net(width=32)
    tiny.train(net, Pruner(net, tiny.config("magnitude", steps=300, sparsity=0.0)), 300)
    trained = {name: p.clone() for name, p in net.state_dict().items()}
    x, _ = tiny.task()
    before, off = net(x)["logits"].detach(), {}
    for method in ("random", "magnitude", "sparsegpt"):
        net.load_state_dict(trained)
        prune_once(net, method, 0.6, [x])
        off[method] = float((net(x)["logits"] - before).square().mean())
    assert off["sparsegpt"] < off["magnitude"] < off["random"]


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("method", ["wanda", "sparsegpt", "obert"])
@pytest.mark.parametrize("batches", [None, [], list])
def test_no_calibration_data_is_one_clear_line_and_changes_nothing(method, batches):
    net = tiny.Net()
    with pytest.raises(ValueError, match=rf"^{method} needs calibration data: give batches.*calibration=batches"):
        prune_once(net, method, 0.5, batches)
    assert sparsity(net) == 0


def test_a_run_without_calibration_data_is_refused_before_it_starts():
    net = tiny.Net()
    pruner = Pruner(net, tiny.config("wanda"))
    with pytest.raises(ValueError, match="wanda needs calibration data"):
        pruner.attach(torch.optim.SGD(net.parameters(), lr=0.1))


def test_methods_that_measure_while_training_cannot_prune_without():
    for method in ("pins", "platon", "snip", "movement", "l0"):
        with pytest.raises(ValueError, match=rf"{method} measures weights while they train.*use .*sparsegpt"):
            prune_once(tiny.Net(), method, 0.5, tiny.batches())


def test_what_cannot_be_is_said():
    net = tiny.Net()
    with pytest.raises(ValueError, match="outputs have no loss: put labels into the batches"):
        prune_once(net, "obert", 0.5, tiny.batches())
    with pytest.raises(ValueError, match=r"not finite.*Did training diverge"):
        prune_once(net, "wanda", 0.5, [torch.full((2, 8), torch.nan)])
    attention = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)])
    attention.forward = lambda x: attention[0](x)
    with pytest.raises(ValueError, match=r"see no inputs.*self_attn.*exclude_modules"):
        prune_once(attention, "wanda", 0.5, [torch.randn(2, 3, 8)])
    prune_once(net, "wanda", 0.5, tiny.batches())
    with pytest.raises(ValueError, match=r"already 50.0% sparse"):
        prune_once(net, "wanda", 0.3, tiny.batches())
    for options in ({"calibration": 0}, {"damping": 0.0}, {"block": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(options))} must be"):
            CRITERIA["sparsegpt"](**options)
    for options in ({"gradients": 0}, {"damping": 0.0}, {"block": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(options))} must be"):
            CRITERIA["obert"](**options)


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_sequences_and_functions_of_batches_are_the_same(method):
    ends = []
    for batches in (tiny.batches(), tiny.batches, iter(tiny.batches()), [(b,) for b in tiny.batches()]):
        torch.manual_seed(0)
        net = tiny.Net()
        prune_once(net, method, 0.5, batches)
        ends.append(torch.cat([site.owner.detach().view(-1) for site in find_sites(net)]))
    assert all(torch.equal(end, ends[0]) for end in ends)
