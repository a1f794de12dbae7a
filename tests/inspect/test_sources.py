"""Checkpoints and masks are read as others write them."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils import prune as torch_prune

import pinscher
from pinscher.commands import inspect as inspecting
from pinscher.errors import InputError
from pinscher.inspect import masks
from pinscher.prune.sites import find_sites
from tiny_models import HEADS, pruned_bert


@pytest.fixture
def bert():
    return pruned_bert()


def zeros_of(place, **settings):
    found = inspecting.look(str(place), settings.pop("rule", None), rank=False)
    return {m.name: m.zeros for m in found.matrices}, found


def test_platon_state_dicts_with_prefixes(bert, tmp_path):
    model, zeros = bert
    wrapped = {f"module.{name}": value for name, value in model.state_dict().items()}
    torch.save({"state": wrapped, "epoch": 3, "config": {"lr": 1e-5}}, tmp_path / "model_2.pt")
    bare, found = zeros_of(tmp_path / "model_2.pt")
    assert bare == zeros
    assert "no config.json" in found.notes[0]
    model.config.save_pretrained(tmp_path)  # with it the model is known
    known, found = zeros_of(tmp_path / "model_2.pt")
    assert (known, found.notes) == (zeros, [])
    inner = {name.removeprefix("bert."): value for name, value in model.state_dict().items()}
    torch.save(inner, tmp_path / "model_2.pt")
    known, found = zeros_of(tmp_path)
    assert {f"bert.{name}": count for name, count in known.items()} == zeros
    assert found.notes == []


def test_an_old_torch_file_that_is_no_zip(bert, tmp_path):
    model, zeros = bert
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    model.config.save_pretrained(tmp_path)
    assert zeros_of(tmp_path)[0] == zeros


def test_sparseml_folders_and_shards(bert, tmp_path):
    model, zeros = bert
    model.config.save_pretrained(tmp_path / "ml")
    torch.save(model.state_dict(), tmp_path / "ml" / "pytorch_model.bin")
    torch.save({"args": 1}, tmp_path / "ml" / "training_args.bin")
    (tmp_path / "ml" / "recipe.yaml").write_text("pruning_modifiers:\n  - !GMPruningModifier\n    params: __ALL__\n")
    seen, found = zeros_of(tmp_path / "ml")
    assert seen == zeros
    assert "SparseML" in found.notes[0]
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert zeros_of(tmp_path / "shards")[0] == zeros
    next((tmp_path / "shards").glob("*.safetensors")).unlink()
    with pytest.raises(InputError, match="the model is not complete"):
        zeros_of(tmp_path / "shards")


def test_torch_prune_keeps_masks_beside_the_weights(tmp_path):
    model = HEADS["bert"].make()
    linears = [module for module in model.bert.encoder.modules() if isinstance(module, nn.Linear)]
    for module in linears:
        torch_prune.l1_unstructured(module, "weight", amount=0.25)
    expected = [int((module.weight == 0).sum()) for module in linears]
    torch.save(model.state_dict(), tmp_path / "pruned.pt")
    seen, found = zeros_of(tmp_path / "pruned.pt")
    assert list(seen.values()) == expected == [module.weight.numel() // 4 for module in linears]
    assert "torch.nn.utils.prune" in found.notes[0]


def test_matrices_stay_in_order_where_only_some_have_masks():
    first, last = torch.eye(2), torch.ones(2, 2)
    tensors = {"0.weight_orig": last, "0.weight_mask": first, "1.weight": last, "2.weight_orig": last}
    done = masks.applied(tensors | {"2.weight_mask": last})
    assert list(done.tensors) == ["0.weight", "1.weight", "2.weight"]
    assert torch.equal(done.tensors["0.weight"], first)


def scored(tmp_path, shape=lambda rows, columns: (rows, columns), key="mask_scores", method=None):
    """A model with scores for each of its matrices, saved as movement pruning saves it."""
    model = HEADS["bert"].make()
    torch.manual_seed(1)
    state = dict(model.state_dict())
    sites = find_sites(model)
    scores = {site.name: torch.randn(shape(*site.shape)) for site in sites}
    state |= {f"{name}.{key}": value for name, value in scores.items()}
    torch.save(state, tmp_path / "pytorch_model.bin")
    told = model.config.to_dict() | {
        "model_type": "masked_bert",
        "architectures": ["MaskedBertModel"],
    }
    (tmp_path / "config.json").write_text(json.dumps(told | ({"pruning_method": method} if method else {})))
    return sites, scores


def test_movement_scores_prune_as_they_were_trained(tmp_path):
    sites, scores = scored(tmp_path, method="topK")
    seen, found = zeros_of(tmp_path, rule=masks.Rule(threshold=0.15))
    assert seen == {site.name: site.numel - int(0.15 * site.numel) for site in sites}
    assert "pruned by topK, threshold 0.15" in " ".join(found.notes)
    seen, _ = zeros_of(tmp_path, rule=masks.Rule("sigmoied_threshold", 0.6))
    assert seen == {name: int((torch.sigmoid(s) <= 0.6).sum()) for name, s in scores.items()}
    seen, _ = zeros_of(tmp_path, rule=masks.Rule("threshold", -0.5))
    assert seen == {name: int((s <= -0.5).sum()) for name, s in scores.items()}
    seen, _ = zeros_of(tmp_path, rule=masks.Rule("l0"))
    assert seen == {name: int((1.2 * torch.sigmoid(s) <= 0.1).sum()) for name, s in scores.items()}
    seen, _ = zeros_of(tmp_path, rule=masks.Rule("threshold", 99.0))  # half a percent stays, as in the original
    assert seen == {site.name: site.numel - int(0.005 * site.numel) - 1 for site in sites}
    seen, _ = zeros_of(tmp_path, rule=masks.Rule("magnitude", 0.5))
    assert seen == {site.name: site.numel - site.numel // 2 for site in sites}
    with pytest.raises(InputError, match="--mask-threshold"):
        zeros_of(tmp_path)


def test_nn_pruning_scores_of_blocks_and_of_rows(tmp_path):
    key = "mask_module.context_modules.0.mask_scores"
    _, scores = scored(tmp_path, lambda rows, columns: (rows // 4, columns // 4), key)
    args = {"dense_pruning_method": "sigmoied_threshold", "attention_pruning_method": "sigmoied_threshold"}
    (tmp_path / "sparse_args.json").write_text(json.dumps(args | {"final_threshold": 0.5}))
    seen, _ = zeros_of(tmp_path)
    assert seen == {name: 16 * int((s <= 0).sum()) for name, s in scores.items()}
    sites, scores = scored(tmp_path, lambda rows, columns: (rows,), key)
    seen, found = zeros_of(tmp_path)
    assert seen == {site.name: int((scores[site.name] <= 0).sum()) * site.shape[1] for site in sites}
    assert {m.pattern.name for m in found.matrices} == {"rows"}
    (tmp_path / "sparse_args.json").write_text(json.dumps(args | {"dense_pruning_method": "topK"}))
    with pytest.raises(InputError, match="mixes mask methods"):
        zeros_of(tmp_path)
    (tmp_path / "sparse_args.json").unlink()
    with pytest.raises(InputError, match="--mask-method"):
        zeros_of(tmp_path)
    _, _ = scored(tmp_path, lambda rows, columns: (rows, columns - 1), key)
    with pytest.raises(InputError, match="do not fit their weight"):
        zeros_of(tmp_path, rule=masks.Rule("threshold", 0.0))


def test_our_small_file(bert, tmp_path):
    model, zeros = bert
    pinscher.save_pretrained(model, tmp_path / "small", values="fp32")
    assert zeros_of(tmp_path / "small")[0] == zeros
    assert zeros_of(tmp_path / "small" / "model.safetensors")[0] == zeros


def test_a_model_that_transformers_does_not_know(tmp_path):
    torch.manual_seed(0)
    tensors = {f"stack.{i}.mix.weight": torch.randn(16, 16) for i in range(2)} | {"embed.weight": torch.randn(99, 16)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "novel", "architectures": ["NovelModel"]}))
    seen, found = zeros_of(tmp_path)
    assert list(seen) == ["stack.0.mix", "stack.1.mix"]
    assert found.notes[0].startswith("transformers knows no model NovelModel: ")
