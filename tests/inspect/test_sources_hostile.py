"""Whatever the files beside the weights hold, and whatever is in the weights: an analysis, or one sentence."""

import json
import math
from itertools import product

import pytest
import torch
from safetensors.torch import save_file

from pinscher.commands import inspect as inspecting
from pinscher.errors import InputError
from pinscher.inspect.masks import METHODS, Rule
from pinscher.models.names import head_size

ODD = (None, True, 0, -1, 3, 10**30, 0.5, math.inf, math.nan, "", "x", [], [1], {}, {"a": 1})
WEIGHTS = {f"layers.{number}.query.weight": torch.ones(8, 8) for number in range(2)}
SCORES = "layers.0.query.mask_scores"
TYPES = (torch.float32, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64)
SHAPES = ((), (0,), (8,), (0, 8), (3, 5), (8, 8), (4, 2), (2, 2, 2))


def look(folder, tensors, rule=None, **files):
    """An analysis, or the sentence of its refusal; any other error is a fault."""
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    try:
        return inspecting.look(str(folder), rule, rank=False)
    except InputError as error:
        return str(error)


@pytest.mark.parametrize("name", ["n_heads", "num_attention_heads", "dim", "hidden_size", "head_dim", "d_kv"])
def test_sizes_in_a_config_are_numbers_or_nothing(name, tmp_path):
    for value in ODD:
        size = head_size({"hidden_size": 8, "num_attention_heads": 2, name: value})
        assert type(size) is int
        assert size >= 0
        told = look(tmp_path, WEIGHTS, config={name: value})
        assert not isinstance(told, str) or f"asks for {name} = {value}" in told


@pytest.mark.parametrize("name", ["final_threshold", "dense_pruning_method"])
def test_settings_of_masks_are_checked(name, tmp_path):
    scores = WEIGHTS | {SCORES: torch.rand(8, 8)}
    for value in ODD:
        settings = {"dense_pruning_method": "topK", "final_threshold": 0.25} | {name: value}
        told = look(tmp_path, scores, sparse_args=settings)
        assert isinstance(told, str) == (value not in (0, 0.5) or name != "final_threshold"), (value, told)


@pytest.mark.parametrize("value", ODD)
def test_the_method_in_a_config_is_a_known_one(value, tmp_path):
    told = look(tmp_path, WEIGHTS | {SCORES: torch.rand(8, 8)}, Rule(None, 0.5), config={"pruning_method": value})
    assert "mask method" in told or "--mask-method" in told


@pytest.mark.parametrize("threshold", [-1.0, 5.0])
def test_a_fraction_to_keep_is_one(threshold, tmp_path):
    told = look(tmp_path, WEIGHTS | {SCORES: torch.rand(8, 8)}, Rule("topK", threshold))
    assert told.startswith("--mask-threshold must lie in [0, 1]")


def test_an_index_names_files(tmp_path):
    for value in ODD:
        told = look(tmp_path, WEIGHTS, **{"model.safetensors.index": {"weight_map": {"a": value, "b": "c"}}})
        assert "lacks" in told


@pytest.mark.parametrize("method", METHODS)
def test_scores_of_any_shape_and_type(method, tmp_path):
    for shape, kind in product(SHAPES, TYPES):
        told = look(tmp_path, WEIGHTS | {SCORES: torch.ones(shape).to(kind)}, Rule(method, 0.5))
        fits = shape in ((8, 8), (4, 2), (8,)) and kind != torch.complex64
        assert isinstance(told, str) != fits, (shape, kind, told)


def test_weights_of_any_shape_and_type(tmp_path):
    for shape, kind in product(SHAPES, TYPES):
        weight = torch.ones(shape).to(kind)
        look(
            tmp_path, WEIGHTS | {"layers.0.key.weight": weight, "layers.0.key.mask_scores": weight.clone()}, Rule("l0")
        )
        pair = {"layers.0.key.weight_orig": weight, "layers.0.key.weight_mask": torch.ones(shape)}
        told = look(tmp_path, WEIGHTS | pair)
        assert isinstance(told, str) == (kind == torch.complex64), (shape, kind, told)
