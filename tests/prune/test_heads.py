"""Heads are pruned whole, in attention of every kind."""

import re

import pytest
import torch
from torch import nn

import tiny
from pinscher import Pruner, PruningConfig
from tiny_models import HEADS
from tiny_patterns import Conv1D, Net, assert_units_whole, head_slices

# ---------------------------------------------------------------- against brute force


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


# ---------------------------------------------------------------- mistakes


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
