"""Every criterion, pattern and scope reaches exactly its target; units are whole; masks are those of brute force."""

import json
import math
import re
from itertools import combinations

import pytest
import torch
import torch.nn.functional as F
import transformers
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import tiny
import tiny_tasks
from pinscher import Pruner, PruningConfig
from pinscher.prune import CRITERIA, find_sites, prune_once
from pinscher.prune.masking import Ranks, kept_reference
from pinscher.prune.patterns import SCOPES, parse
from pinscher.train import runfolder
from pinscher.train.config import RunConfig
from tiny_command import SHORT, outcome
from tiny_models import HEADS

PATTERNS = ["unstructured", "2:4", "4:8", "4x1", "1x4", "16x16", "rows", "columns", "heads"]
STEPS = 4


class Conv1D(nn.Module):
    """GPT-2's: the matrix is stored [inputs, outputs]."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.nf = outputs
        self.weight = nn.Parameter(0.2 * torch.randn(inputs, outputs))

    def forward(self, x):
        return x @ self.weight


class Attention(nn.Module):
    """Two heads with projections of their own, two for one key and value, or all three in one stored matrix."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.num_heads = kind, 4
        if kind == "fused":
            self.c_attn, self.c_proj = Conv1D(48, 16), Conv1D(16, 16)
        else:
            shared = 8 if kind == "grouped" else 16
            self.q_proj, self.k_proj, self.v_proj = nn.Linear(16, 16), nn.Linear(16, shared), nn.Linear(16, shared)
            self.o_proj = nn.Linear(16, 16)

    def forward(self, x):
        if self.kind == "fused":
            three = self.c_attn(x).chunk(3, -1)
        else:
            three = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = (part.unflatten(-1, (-1, 4)).transpose(0, 1) for part in three)
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(0, 1).flatten(-2)
        return (self.c_proj if self.kind == "fused" else self.o_proj)(out)


class Layer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.attention, self.norm = Attention(kind), nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        x = self.norm(x + self.attention(x))
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self, *kinds: str) -> None:
        super().__init__()
        self.input = nn.Linear(8, 16)
        self.layers = nn.ModuleList(Layer(kind) for kind in kinds or ("plain", "fused"))
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        x = self.input(x)
        for layer in self.layers:
            x = layer(x)
        return {"logits": self.head(x)}


def sparsity_of(pattern: str) -> float:
    kept, _, of = pattern.partition(":")
    return 1 - int(kept) / int(of) if of else 0.6


def pruned_net(method: str = "magnitude", pattern: str = "unstructured", steps: int = STEPS, seed: int = 0, **more):
    """A net trained to the end, and its pruner."""
    torch.manual_seed(seed)
    net = more.pop("net", None) or Net()
    more = {"interval": 1, "warmup": 1, "cooldown": 1, "sparsity": sparsity_of(pattern)} | more
    if method == "snip":
        more["options"] = {"batches": 2}
    pruner = Pruner(net, tiny.config(method, steps=steps, pattern=pattern, **more), calibration=tiny.batches())
    tiny.train(net, pruner, steps)
    return net, pruner


def oriented(site) -> torch.Tensor:
    """[outputs, inputs], True where a weight is not zero."""
    weight = site.owner.detach()
    return (weight.T if site.transposed else weight) != 0


def unit_shape(pattern: str, site) -> tuple[int, int]:
    outputs, inputs = oriented(site).shape
    if pattern in ("rows", "columns"):
        return (1, inputs) if pattern == "rows" else (outputs, 1)
    return tuple(map(int, pattern.split("x")))


def unit_size(pattern: str, site) -> int:
    if pattern == "heads":
        return 4 * 4 * 16  # four matrices, four features of a head, 16 features of the model
    return 1 if pattern == "unstructured" or ":" in pattern else math.prod(unit_shape(pattern, site))


def blocks(pattern: str, site, values: torch.Tensor) -> torch.Tensor:
    """[units, weights of a unit]."""
    rows, columns = unit_shape(pattern, site)
    return torch.stack([piece.reshape(-1) for band in values.split(rows) for piece in band.split(columns, 1)])


def head_slices(kind: str, unit: int):
    """Where a head lies in each matrix, worked out by hand: four heads of four features."""
    mine = slice(4 * unit, 4 * unit + 4)
    if kind == "fused":
        rows = [*range(4 * unit, 4 * unit + 4)]
        return {"c_attn": ([r + 16 * third for third in range(3) for r in rows], 0), "c_proj": (mine, 1)}
    if kind == "grouped":
        wide = slice(8 * unit, 8 * unit + 8)
        return {"q_proj": (wide, 0), "k_proj": (mine, 0), "v_proj": (mine, 0), "o_proj": (wide, 1)}
    return {"q_proj": (mine, 0), "k_proj": (mine, 0), "v_proj": (mine, 0), "o_proj": (mine, 1)}


def assert_units_whole(pattern: str, net: nn.Module, pruner: Pruner) -> None:
    """No unit is kept in part; N:M keeps N in each group."""
    if pattern == "heads":
        for layer in net.layers:
            kind = layer.attention.kind
            for unit in range(2 if kind == "grouped" else 4):
                alive = []
                for name, (places, dim) in head_slices(kind, unit).items():
                    module = getattr(layer.attention, name)
                    weight = module.weight.detach().T if isinstance(module, Conv1D) else module.weight.detach()
                    alive.append((weight[places] if dim == 0 else weight[:, places]).reshape(-1) != 0)
                alive = torch.cat(alive)
                assert bool(alive.all()) or not bool(alive.any())
    elif ":" in pattern:
        n, m = map(int, pattern.split(":"))
        for site in pruner.sites:
            assert bool((oriented(site).reshape(-1, m).sum(1) == n).all())
    elif pattern != "unstructured":
        for site in pruner.sites:
            kept = blocks(pattern, site, oriented(site))
            assert bool((kept.all(1) | ~kept.any(1)).all())


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


class Given(nn.Module):
    """Matrices with given weights, each in a block of its own; every other one is stored transposed."""

    def __init__(self, *weights: torch.Tensor, transposed: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for i, weight in enumerate(weights):
            layer = nn.Module()
            if transposed and i % 2:
                layer.dense = Conv1D(*weight.shape)
                layer.dense.weight.data = weight.T.contiguous().clone()
            else:
                layer.dense = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
                layer.dense.weight.data = weight.clone()
            self.layers.append(layer)


def masks(net: nn.Module, density: float, regrow: bool = True, **settings) -> list[torch.Tensor]:
    """What one ranking by magnitude keeps, [outputs, inputs]."""
    config = PruningConfig(
        method="magnitude", total_steps=10, interval=1, initial_sparsity=0, regrow=regrow, **settings
    )
    pruner = Pruner(net, config)
    pruner.ranking.rank(density)
    found = [pruner.mask(site.name).T if site.transposed else pruner.mask(site.name) for site in pruner.sites]
    assert sum(int(mask.sum()) for mask in found) == pruner.kept == pruner.ranking.count(density)
    return found


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
    """Of all masks with so many ones and at least N in each group of four, none has a larger sum of scores."""
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


@pytest.mark.parametrize("kind", ["plain", "fused", "grouped"])
def test_heads_are_ranked_by_the_sum_over_their_matrices(kind):
    torch.manual_seed(0)
    net = Net(kind, kind)
    config = PruningConfig(method="magnitude", total_steps=10, pattern="heads", interval=1)
    pruner = Pruner(net, config)
    assert {site.name.split(".")[-1] for site in pruner.sites} == set(head_slices(kind, 0))
    sums = []
    for layer in net.layers:
        for unit in range(2 if kind == "grouped" else 4):
            total = 0.0
            for name, (places, dim) in head_slices(kind, unit).items():
                module = getattr(layer.attention, name)
                weight = module.weight.detach().abs().double()
                weight = weight.T if isinstance(module, Conv1D) else weight
                total += float((weight[places] if dim == 0 else weight[:, places]).sum())
            sums.append(total)
    pruner.ranking.rank(0.5)
    pruner.ranking.apply()
    assert_units_whole("heads", net, pruner)
    units = len(sums) // 2
    order = sorted(range(len(sums)), key=lambda i: -sums[i])[: len(sums) // 2]
    name = "c_proj" if kind == "fused" else "o_proj"
    for i in range(2):
        output = pruner.mask(f"layers.{i}.attention.{name}")
        columns = (output.T if kind == "fused" else output)[0].view(units, -1)[:, 0]
        assert [unit + i * units in order for unit in range(units)] == columns.tolist()


def test_torch_attention_has_heads_too():
    net = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2)
    pruner = Pruner(net, PruningConfig(method="magnitude", total_steps=10, pattern="heads", interval=1))
    assert {site.kind for site in pruner.sites} == {"self_attn.in_proj_weight", "self_attn.out_proj"}
    pruner.ranking.rank(0.5)
    for i in range(2):
        rows = pruner.mask(f"layers.{i}.self_attn.in_proj_weight")[:, 0]
        columns = pruner.mask(f"layers.{i}.self_attn.out_proj")[0]
        assert torch.equal(rows.view(3, 16), columns.expand(3, 16))
        assert torch.equal(columns, columns.view(4, 4)[:, :1].expand(4, 4).reshape(-1))


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "deberta-v2", "gpt2", "llama", "t5"])
def test_nothing_reads_a_pruned_head(name):
    """In real architectures: what query, key and value of pruned heads hold makes no difference any more."""
    model = HEADS[name].make().eval()
    pruner = Pruner(model, PruningConfig(method="random", total_steps=99, pattern="heads", sparsity=0.5))
    with torch.no_grad():
        pruner.ranking.rank(0.5)
        pruner.ranking.apply()
    ids = torch.arange(3, 11)[None]
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if name == "t5" else {})
    with torch.no_grad():
        before = model(**inputs).logits
        written = [site for site in pruner.sites if re.search("[qkv]|attn$", site.kind.rsplit(".", 1)[-1])]
        assert 2 * len(written) >= len(pruner.sites)
        for site in written:
            dead = ~pruner.mask(site.name)
            site.owner.data[dead] = torch.randn(int(dead.sum()))
        after = model(**inputs).logits
        for site in written:
            site.owner.data[pruner.mask(site.name)] *= -2.0
        assert not torch.allclose(model(**inputs).logits, before, atol=1e-3)  # the others are read
    torch.testing.assert_close(after, before, rtol=0, atol=1e-5)


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


def test_heads_that_cannot_be_known():
    with pytest.raises(ValueError, match="finds no attention"):
        Pruner(tiny.Net(), tiny.config(pattern="heads"))
    with pytest.raises(ValueError, match=r"needs the value matrix that goes with layers\.0\.attention\.q_proj"):
        Pruner(Net(), tiny.config(pattern="heads", exclude_modules="v_proj"))
    net = Net()
    del net.layers[0].attention.num_heads
    with pytest.raises(ValueError, match=r"how many heads layers\.0\.attention\.q_proj has"):
        Pruner(net, tiny.config(pattern="heads"))
    net = Net()
    net.layers[0].attention.num_heads = 3
    with pytest.raises(ValueError, match="do not go together"):
        Pruner(net, tiny.config(pattern="heads"))
    net.layers[0].attention = nn.Module()
    net.layers[0].attention.Wqkv = nn.Linear(16, 48)
    with pytest.raises(ValueError, match=r"in which order layers\.0\.attention\.Wqkv holds"):
        Pruner(net, tiny.config(pattern="heads"))


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


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    root = tmp_path_factory.mktemp("command")
    tiny_tasks.write_files("sst2", root / "data")
    tiny_tasks.tiny_model("sst2", root / "model")
    return ["prune", "--model", root / "model", "--task", "sst2", "--data", root / "data", *SHORT, "--no-export"]


def test_the_command(words, tmp_path, capsys):
    flags = ["--pattern", "2:4", "--scope", "layer", "--sparsity", "0.5", "--output", tmp_path / "run"]
    code, _, err = outcome([*words, *flags], capsys)
    assert code == 0, err
    assert json.loads((tmp_path / "run" / "result.json").read_text())["sparsity"] == 0.5
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model")
    for site in find_sites(model):
        assert bool((oriented(site).reshape(-1, 4).sum(1) == 2).all())
    config = tmp_path / "run" / "config.yaml"
    settings = yaml.safe_load(config.read_text())
    assert settings["run"].pop("pattern") == "2:4"
    assert settings["run"].pop("scope") == "layer"
    config.write_text(yaml.safe_dump(settings))  # as a run of before there were patterns has it
    found = runfolder.config_of(tmp_path / "run")
    assert (found.pattern, found.scope) == ("unstructured", None)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--pattern 2:4", "sparsity must be 0.5, not 0.8"),
        ("--pattern 2by4", "unknown pattern '2by4'"),
        ("--pattern rows --scope here", "unknown scope 'here'"),
        ("--pattern 1x5", "pattern 1x5 does not fit"),
        ("--pattern 1x5 --dry-run", "pattern 1x5 does not fit"),
    ],
)
def test_mistakes_of_the_command_are_one_line(flags, says, words, tmp_path, capsys):
    code, _, err = outcome([*words, *flags.split(), "--output", tmp_path / "run"], capsys)
    assert code == 2
    assert says in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_where_a_run_goes_by_default():
    assert str(RunConfig(task="rte", sparsity=0.5, pattern="2:4").folder) == "runs/rte-pins-50-2of4"


def test_names_of_patterns():
    assert parse("16x16") == parse("16x16") != parse("16x8")
