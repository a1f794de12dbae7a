"""A new criterion is one registered class, a new gate one with its options: nothing else has to know of them."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pinscher
import tiny
from pinscher import Pruner
from pinscher.prune import CRITERIA, Criterion, prune_once
from pinscher.prune.gates import Gate, Gated
from pinscher.prune.masking import Scores
from pinscher.prune.sites import Site
from pinscher.train import checkpoint

STEPS = 60
SETTINGS = [
    {"sparsity": 0.8},
    {"sparsity": 0.8, "regrow": False},
    {"sparsity": 0.5, "pattern": "2:4"},
    {"sparsity": 0.75, "pattern": "rows", "scope": "matrix"},
]


@dataclass
class Restless(Criterion):
    """Keeps weights whose gradients were large in sum, with a memory of its own."""

    decay: float = 0.9

    def prepare(self, site: Site, state_dtype: torch.dtype) -> None:
        site.state["restlessness"] = torch.zeros_like(site.weight)

    def observe(self, site: Site, t: int, closing: int) -> None:
        if site.grad is not None:
            site.state["restlessness"].mul_(self.decay).add_(site.grad.abs())

    def scores(self, site: Site) -> Scores:
        return Scores(site.state["restlessness"])


class SquashedGate(Gate):
    """Scales every weight by the sigmoid of a learned number, and drops those with the smallest."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight)
        self.number = nn.Parameter(torch.full_like(weight, 4.0))

    def gated(self, weight: Tensor) -> Tensor:
        return weight * self.number.sigmoid() * self.mask

    def scores(self, weight: Tensor) -> Tensor:
        return self.number

    def baked(self, weight: Tensor) -> Tensor:
        return weight * self.number.sigmoid()

    def add_penalty(self, strength: float, total: int) -> None:
        if self.number.grad is not None:
            self.number.grad.add_(strength / total)


@dataclass
class Squashed(Gated[SquashedGate]):
    score_lr: float = 5e-2

    def make_gate(self, weight: Tensor) -> SquashedGate:
        return SquashedGate(weight)


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    CRITERIA.register("restless")(Restless)
    CRITERIA.register("squashed")(Squashed)
    yield
    for name in ("restless", "squashed"):
        del CRITERIA._entries[name]


def train(net: nn.Module, pruner: Pruner, optimizer: torch.optim.Optimizer, steps: range) -> None:
    x, y = tiny.task()
    for t in steps:
        rows = torch.randint(0, len(x), (32,), generator=torch.Generator().manual_seed(t))
        optimizer.zero_grad()
        tiny.loss_of(net, x[rows], y[rows]).backward()
        optimizer.step()


def start(method: str, settings: dict[str, object]) -> tuple[nn.Module, Pruner, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = tiny.Net()
    pruner = Pruner(net, tiny.config(method, steps=STEPS, **settings))
    optimizer = torch.optim.AdamW(pruner.param_groups(), lr=3e-3)
    pruner.attach(optimizer)
    return net, pruner, optimizer


@pytest.mark.parametrize("method", ["restless", "squashed"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_it_is_pruned_to_the_exact_target_and_resumed_bit_by_bit(method, settings, tmp_path):
    net, pruner, optimizer = start(method, settings)
    train(net, pruner, optimizer, range(25))
    checkpoint.save(tmp_path / "state", pruner=pruner.state_dict())
    weights, moments = copy.deepcopy((pruner.model_state_dict(), optimizer.state_dict()))
    train(net, pruner, optimizer, range(25, STEPS))
    finished = pruner.finish()

    again, resumed, optimizer = start(method, settings)
    again.load_state_dict(weights, strict=False)  # what is below a gate is in the pruner's state
    resumed.load_state_dict(checkpoint.load(tmp_path / "state")["pruner"])
    optimizer.load_state_dict(moments)
    train(again, resumed, optimizer, range(25, STEPS))
    resumed.finish()

    assert finished is net
    zeros = sum(int((site.owner == 0).sum()) for site in pruner.sites)
    assert zeros == pruner.total - pruner.target
    assert abs(zeros - settings["sparsity"] * pruner.total) <= 0.5
    assert set(net.state_dict()) == set(tiny.Net().state_dict())  # an ordinary model
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


@pytest.mark.parametrize("method", ["restless", "squashed"])
def test_it_is_finished_early(method):
    net, pruner, optimizer = start(method, {"sparsity": 0.8})
    train(net, pruner, optimizer, range(5))
    pruner.finish(early=True)
    assert abs(pinscher.sparsity(net) - 0.8) <= 0.5 / pruner.total


def test_its_attributes_say_what_it_can_do():
    assert Squashed.learns_masks
    assert not Restless.learns_masks
    with pytest.raises(ValueError, match="cannot prune without training: use magnitude"):
        prune_once(tiny.Net(), "restless")
    with pytest.raises(ValueError, match="method 'restless' has no option 'memory': its options are decay"):
        tiny.config("restless", options={"memory": 1})


def test_nothing_asks_for_the_class_of_a_criterion_gate_or_pattern():
    """The one place that does tells gates from other people's parametrizations."""
    from pinscher.prune import adapters, calibrated, criteria, fisher, gates, heads, patterns

    classes = {
        name
        for module in (adapters, calibrated, criteria, fisher, gates, heads, patterns)
        for name, kind in vars(module).items()
        if isinstance(kind, type) and issubclass(kind, Criterion | Gate | patterns.Pattern)
    }
    asked = []
    for path in Path(pinscher.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass"):
                named = {getattr(part, "id", getattr(part, "attr", "")) for part in ast.walk(node.args[1])}
                asked += [f"{path.name}: {name}" for name in sorted(named & classes)]
    assert asked == ["gates.py: Gate"]
