"""Ranks, sizes and sums of a checkpoint are right."""

import numpy as np
import pytest
import torch

from pinscher.commands import inspect as inspecting
from pinscher.inspect import inspection as looking
from pinscher.inspect import sources
from pinscher.models.names import guessed
from pinscher.prune.sites import find_sites
from pinscher.store import payload
from tiny_models import HEADS


def checkpoint(tensors, **config):
    return sources.Checkpoint("it", tensors, config, None)


def look(tensors, **settings):
    config = settings.pop("config", {})
    return looking.inspect(checkpoint(tensors, **config), guessed(tensors), payload.sizes, **settings)


def test_ranks_are_numpys_and_sizes_are_those_of_real_files():
    torch.manual_seed(0)
    thin = torch.randn(48, 5) @ torch.randn(5, 32)
    sparse = torch.randn(48, 32) * (torch.rand(48, 32) < 0.2)
    sparse[:7] = 0
    found = look({"layers.0.a.weight": thin, "layers.0.b.weight": sparse, "layers.1.a.weight": torch.zeros(8, 16)})
    for matrix, weight in zip(found.matrices, (thin, sparse, torch.zeros(8, 16)), strict=True):
        assert matrix.rank == np.linalg.matrix_rank(weight.numpy())
        assert matrix.zeros == int((weight == 0).sum())
        for codec, size in matrix.sizes.items():
            assert size == len(payload.pack(weight, "int8", codecs=(codec,)))
    assert [m.rank for m in found.matrices] == [5, 32, 0]
    words = " ".join(looking.said(found))
    assert "layers.0.a (rank 5)" in words
    assert "1 is empty: only the bias is left of layers.1.a" in words


def test_sums_over_kinds_and_layers():
    torch.manual_seed(0)
    tensors = {f"h.{i}.{kind}.weight": torch.randn(16, 8) for i in range(3) for kind in ("up", "down")}
    tensors["h.1.up.weight"][:4] = 0
    found = look(tensors)
    kinds, layers = found.totals(lambda m: m.kind), found.totals(lambda m: m.layer)
    assert (kinds["up"]["zeros"], kinds["down"]["zeros"]) == (32, 0)
    assert [layer["weights"] for layer in layers.values()] == [256] * 3
    assert (layers["1"]["dead_rows"], layers["1"]["sparsity"]) == (4, 32 / 256)
    for sums in (kinds, layers):
        for codec in ("csr", "delta", "bitmask", "entropy", "blocks"):
            assert sum(s["sizes"][codec] for s in sums.values()) == sum(m.sizes[codec] for m in found.matrices)


def test_numbers_that_are_not_finite_are_told_and_the_rest_is_shown():
    found = look({"h.0.up.weight": torch.full((8, 8), torch.nan), "h.1.up.weight": torch.randn(8, 8)})
    assert [m.rank for m in found.matrices] == [None, 8]
    assert "1 of them hold NaN or infinity, first h.0.up" in " ".join(looking.said(found))


def test_without_a_model_matrices_are_recognised_by_name_and_shape():
    shapes = {
        "model.embed_tokens.weight": (64, 16),
        "blocks.0.attn.c_attn.weight": (16, 48),
        "blocks.0.ln_1.weight": (16,),
        "blocks.0.rel.relative_attention_bias.weight": (32, 4),
        "blocks.0.mlp.up.weight": (32, 16),
        "pooler.dense.weight": (16, 16),
        "lm_head.weight": (64, 16),
    }
    found = guessed({name: torch.randn(shape) for name, shape in shapes.items()})
    assert [(p.block, p.kind, p.transposed) for p, _ in found] == [
        ("blocks.0", "attn.c_attn", True),
        ("blocks.0", "mlp.up", False),
    ]
    flat = guessed({"first.weight": torch.randn(16, 16), "words.weight": torch.randn(1000, 16)})
    assert [place.name for place, _ in flat] == ["first"]


@pytest.mark.parametrize("name", ["bert", "distilbert", "gpt2", "llama-lm", "t5"])
def test_matrices_of_known_models_are_their_sites(name, tmp_path):
    model = HEADS[name].make()
    for number, site in enumerate(find_sites(model)):
        with torch.no_grad():
            site.weight[: 3 + number] = 0
    model.save_pretrained(tmp_path)
    found = inspecting.look(str(tmp_path), rank=False)
    assert [(m.name, m.zeros) for m in found.matrices] == [(s.name, s.zeros()) for s in find_sites(model)]
    assert found.notes == []
    for matrix, site in zip(found.matrices, find_sites(model), strict=True):
        assert matrix.shape == (tuple(site.shape)[::-1] if site.transposed else tuple(site.shape))


def test_dead_heads_are_seen_in_a_real_model(tmp_path):
    model = HEADS["bert"].make(hidden_size=64, num_attention_heads=4)
    attention = model.bert.encoder.layer[0].attention
    with torch.no_grad():
        for matrix in (attention.self.query, attention.self.key, attention.self.value):
            matrix.weight[16:32] = 0
        attention.output.dense.weight[:, 16:32] = 0
    model.save_pretrained(tmp_path)
    found = inspecting.look(str(tmp_path), layers=r"layer\.0\.attention")
    assert [(m.pattern.name, m.pattern.dead_heads) for m in found.matrices] == [("heads", 1)] * 4
