"""Models with every kind of attention, and what pruning by a pattern must leave of them."""

import math

import torch
import torch.nn.functional as F
from torch import nn

import tiny
from pinscher import Pruner, PruningConfig

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
