"""Storing a model: whole or not at all, exact, with a card; the same model for others; and how large it will be."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
import transformers
import yaml
from torch import nn
from torch.nn.utils import parametrize

import pinscher
from pinscher.errors import InputError
from pinscher.store import budget, card, exchange, file, payload, saving
from pinscher.store.calibration import importances
from tiny_models import HEADS, VOCABULARY
from tiny_store import bits, dequantised, identical

QUERY = "bert.encoder.layer.0.attention.self.query.weight"
WORDS = "bert.embeddings.word_embeddings.weight"
ROLES = ("values", "embeddings", "head")


def make(name: str = "bert", sparsity: float = 0.6, **settings: Any) -> Any:
    model = HEADS[name].make(**settings).eval()
    prune(model, sparsity)
    return model


def prune(model: Any, sparsity: float) -> None:
    """By magnitude over all blocks together."""
    weights = [model.get_parameter(name) for name in blocks(model)]
    sizes = torch.cat([weight.detach().abs().view(-1) for weight in weights])
    if round(sparsity * len(sizes)):
        threshold = sizes.kthvalue(round(sparsity * len(sizes))).values
        with torch.no_grad():
            for weight in weights:
                weight *= weight.abs() > threshold


def blocks(model: Any) -> set[str]:
    return {name for name, matrix in saving.matrices(model).items() if matrix.role == "matrix"}


def stored(folder: Path) -> dict[str, torch.Tensor]:
    with file.Stored(file.files_of(folder)) as opened:
        return {name: tensor.clone() for name, tensor in opened.items()}


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in file.files_of(folder))


def batches() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, VOCABULARY, (4, length), generator=generator) for length in (5, 9, 7)]
    masks = [torch.arange(each.shape[1]) < torch.tensor([[2], [5], [3], [4]]) for each in ids]
    return [{"input_ids": i, "attention_mask": m.long(), "note": "no tensor"} for i, m in zip(ids, masks, strict=True)]


def everything(model: nn.Module) -> dict[str, Any]:
    state = {name: bits(tensor) for name, tensor in model.state_dict().items()}
    hooks = sum(len(module._forward_pre_hooks) for module in model.modules())
    return {"state": state, "hooks": hooks, "training": [module.training for module in model.modules()]}


@pytest.fixture
def no_pictures(monkeypatch):
    monkeypatch.setattr(card, "draw", lambda *_: None)


# What is a matrix, and of which kind.
def test_matrices_are_told_apart_by_what_they_are_for():
    found = saving.matrices(make())
    roles = {name: matrix.role for name, matrix in found.items()}
    assert roles[QUERY] == "matrix"
    assert roles[WORDS] == roles["bert.embeddings.position_embeddings.weight"] == "embedding"
    assert roles["bert.pooler.dense.weight"] == roles["classifier.weight"] == "head"
    assert len(blocks(make())) == 12
    assert not any(matrix.transposed for matrix in found.values())


def test_tied_weights_are_one_embedding_and_conv1d_is_transposed():
    model = make("gpt2-lm")
    found = saving.matrices(model)
    assert found["transformer.wte.weight"].role == "embedding"
    assert "lm_head.weight" not in found
    assert all(matrix.transposed == (name in blocks(model)) for name, matrix in found.items())
    state = saving.untied(model)
    assert "lm_head.weight" not in state
    assert len({tensor.data_ptr() for tensor in state.values()}) == len(state)
    turned = nn.ModuleDict({"head": nn.Linear(4, 6), "words": nn.Embedding(6, 4)})
    turned["head"].weight = turned["words"].weight
    assert saving.untied(turned).keys() == {"head.bias", "words.weight"}


@pytest.mark.parametrize("name", ["gpt2-lm", "t5"])
def test_a_tied_weight_is_stored_once(tmp_path, no_pictures, name):
    model = make(name)
    model.generation_config.max_new_tokens = 7
    pinscher.save_pretrained(model, tmp_path / "small")
    assert json.loads((tmp_path / "small" / "generation_config.json").read_text())["max_new_tokens"] == 7
    names = stored(tmp_path / "small").keys()
    tied = [n for n, t in model.state_dict().items() if t.data_ptr() == model.get_input_embeddings().weight.data_ptr()]
    assert len(tied) > 1
    assert len(names & set(tied)) == 1


# The folder.
@pytest.mark.parametrize("how", ["int8", "int6", "int4", "fp16", "bf16", "fp32", "keep"])
@pytest.mark.parametrize("role", ROLES)
def test_every_role_can_have_every_kind_of_values(tmp_path, no_pictures, role, how):
    model = make("bert")
    hows = dict.fromkeys(ROLES, "keep") | {role: how}
    pinscher.save_pretrained(model, tmp_path / "small", **hows)
    settings = json.loads((tmp_path / "small" / "config.json").read_text())["quantization_config"]
    assert settings == {"quant_method": "pinscher", "version": 1, **hows}
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, matrix in saving.matrices(model).items():
        if matrix.role == {"values": "matrix", "embeddings": "embedding", "head": "head"}[role]:
            kept = payload.KEPT.get(how, torch.float32)
            wanted[name] = dequantised(wanted[name], how).to(kept)
    found = stored(tmp_path / "small")
    assert [name for name in wanted if not identical(found[name], wanted[name])] == []


def test_storing_does_not_change_the_model(tmp_path, no_pictures):
    model = make()
    model.train()
    model.bert.embeddings.eval()
    before, config = everything(model), model.config.to_dict()
    pinscher.save_pretrained(model, tmp_path / "small", embeddings="int8", head="int4", calibration=batches())
    assert everything(model) == before
    assert model.config.to_dict() == config


def test_the_files_are_those_of_a_model_and_small(tmp_path):
    seen: list[tuple[int, int]] = []
    model = make(hidden_size=128, intermediate_size=256, sparsity=0.8)
    wanted = {"embeddings": "int8", "head": "int8", "progress": lambda *n: seen.append(n)}
    folder = pinscher.save_pretrained(model, tmp_path / "a" / "small", **wanted)
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["README.md", "config.json", "density.png", "model.safetensors"]
    assert seen == [(number, 17) for number in range(1, 18)]
    weights = sum(parameter.numel() for parameter in model.parameters())
    assert size_of(folder) < 0.45 * weights  # fp32 would take 4 bytes each
    assert (folder / "density.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_card_says_what_the_model_is(tmp_path):
    facts = {"base_model": "google/bert", "task": "rte", "method": "pins", "sparsity": 0.6}
    facts |= {"scores": {"accuracy": 71.25}, "dense_scores": {"accuracy": 72.5}}
    pinscher.save_pretrained(make(), tmp_path / "small", facts=facts, embeddings="bf16")
    text = (tmp_path / "small" / "README.md").read_text()
    front = yaml.safe_load(text.split("---")[1])
    assert front["base_model"] == "google/bert"
    assert {"pinscher", "rte"} <= set(front["tags"])
    size = f"{size_of(tmp_path / 'small') / 1e6:.1f} MB"
    for part in ("import pinscher", "BertForSequenceClassification", "60.0%", "72.50 | 71.25", "pins", size):
        assert part in text
    assert "blocks int8, embeddings bf16, head keep" in text
    assert "](density.png)" in text
    saving.rewrite_card(tmp_path / "small", make(), facts | {"stored_scores": {"accuracy": 70.5}})
    assert "70.50" in (tmp_path / "small" / "README.md").read_text()


@pytest.mark.parametrize("base", ["./runs/model", "/home/me/model", "pypi:thing", "a/b/c", "models/mine", None])
def test_the_card_names_no_folder_of_its_author_as_base_model(base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    text = card.text(make(), 1000, {"base_model": base}, {"values": "int8", "embeddings": "keep", "head": "keep"}, {})
    assert "base_model" not in yaml.safe_load(text.split("---")[1])
    assert base is None or base not in text
    assert "density.png" not in text


@pytest.mark.parametrize(("head", "names"), [("bert", ["0", "1"]), ("t5", ["encoder.block.0", "decoder.block.0"])])
def test_the_picture_has_a_row_for_each_block(head, names):
    """Blocks of encoder and decoder have the same numbers, and are different rows."""
    model = make(head)
    rows, kinds, table = card.grid(saving.densities(model))
    assert set(names) <= set(rows)
    assert len(rows) == len({*rows})
    shown = [value for row in table for value in row if value == value]
    wanted = [float((model.get_parameter(name) != 0).float().mean()) for name in blocks(model)]
    assert sorted(shown) == sorted(wanted)
    assert all(len(row) == len(kinds) for row in table)


# Whole or not at all.
def broken_draw(*_: Any) -> None:
    raise RuntimeError("no ink")


class BrokenTokenizer:
    def save_pretrained(self, folder: Path) -> None:
        (folder / "half").write_text("half")
        raise OSError("disk full")


@pytest.mark.parametrize("fault", ["picture", "tokenizer", "interrupt", "weights"])
@pytest.mark.parametrize("old", [True, False])
def test_a_failure_leaves_the_old_folder_or_nothing(tmp_path, monkeypatch, fault, old):
    folder = tmp_path / "small"
    if old:
        pinscher.save_pretrained(make(), folder, values="bf16")
    before = {path.name: path.read_bytes() for path in folder.iterdir()} if old else {}
    model, settings, error = make(), {}, RuntimeError
    if fault == "picture":
        monkeypatch.setattr(card, "draw", broken_draw)
    elif fault == "tokenizer":
        settings, error = {"tokenizer": BrokenTokenizer()}, OSError
    elif fault == "interrupt":
        error = KeyboardInterrupt
        monkeypatch.setattr(saving, "_write_config", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    else:
        error = InputError
        model.get_parameter(QUERY).data[0, 0] = float("nan")
    with pytest.raises(error):
        pinscher.save_pretrained(model, folder, **settings)
    assert folder.exists() == old
    assert ({path.name: path.read_bytes() for path in folder.iterdir()} if old else {}) == before
    assert [path.name for path in tmp_path.iterdir()] == (["small"] if old else [])


def test_a_folder_of_ours_is_replaced_and_an_empty_one_is_used(tmp_path, no_pictures):
    (tmp_path / "small").mkdir()
    pinscher.save_pretrained(make(), tmp_path / "small", max_shard_size="2KB")
    assert saving.is_ours(tmp_path / "small")
    pinscher.save_pretrained(make(), tmp_path / "small")
    assert [path.name for path in (tmp_path / "small").glob("model*")] == ["model.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


@pytest.mark.parametrize("text", ["", "[" * 100_000, "[]", '{"quantization_config": "pinscher"}', "{"])
def test_a_config_that_cannot_be_ours_is_not(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    assert not saving.is_ours(tmp_path)


@pytest.mark.parametrize("content", ["notes.txt", "config.json", "sub/deep"])
def test_a_folder_of_somebody_else_is_left_alone(tmp_path, content):
    (tmp_path / "mine" / content).parent.mkdir(parents=True)
    (tmp_path / "mine" / content).write_text('{"quantization_config": {"quant_method": "gptq"}}')
    with pytest.raises(InputError, match="holds something else"):
        pinscher.save_pretrained(make(), tmp_path / "mine")
    (tmp_path / "file").write_text("text")
    with pytest.raises(InputError, match="is a file"):
        pinscher.save_pretrained(make(), tmp_path / "file")
    assert (tmp_path / "mine" / content).read_text()


# What is refused.
@pytest.mark.parametrize("how", ["int8", "fp16", "keep"])
@pytest.mark.parametrize("name", [QUERY, WORDS, "classifier.weight", "classifier.bias"])
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path, no_pictures, name, how):
    for bad in (float("nan"), float("inf")):
        model = make()
        model.get_parameter(name).data.view(-1)[1] = bad
        with pytest.raises(InputError, match=name):
            pinscher.save_pretrained(model, tmp_path / "small", values=how, embeddings=how, head=how)
        assert not (tmp_path / "small").exists()


@pytest.mark.parametrize("name", [QUERY, WORDS])
def test_weights_too_large_for_fp16_are_refused_by_name(tmp_path, no_pictures, name):
    model = make()
    model.get_parameter(name).data[1, 1] = 1e5
    with pytest.raises(InputError, match=name):
        pinscher.save_pretrained(model, tmp_path / "small", values="fp16", embeddings="fp16")


@pytest.mark.parametrize("role", ROLES)
def test_unknown_values_are_refused_by_name(tmp_path, role):
    known = "int8, int7, int6, int4, fp32, fp16, bf16, keep"
    with pytest.raises(InputError, match=rf"unknown values 'int9'\. Did you mean 'int8'\? Known: {known}\.$"):
        pinscher.save_pretrained(make(), tmp_path / "small", **{role: "int9"})


def test_gates_and_models_of_another_kind_are_refused(tmp_path):
    with pytest.raises(InputError, match="only a transformers model"):
        pinscher.save_pretrained(nn.Linear(2, 2), tmp_path / "small")
    model = make()
    parametrize.register_parametrization(model.bert.encoder.layer[0].output.dense, "weight", nn.Identity())
    with pytest.raises(InputError, match=r"call pruner\.finish\(\)"):
        pinscher.save_pretrained(model, tmp_path / "small")


def test_a_row_of_bytes_that_is_no_matrix_is_stored_as_it_is_or_refused(tmp_path, no_pictures):
    """In the file a vector of bytes is a packed matrix; a model may have one that is not."""
    model = make()
    model.register_buffer("flags", torch.tensor([1, 2, 3], dtype=torch.uint8))
    try:
        pinscher.save_pretrained(model, tmp_path / "small")
    except InputError as error:
        told = str(error)
    else:
        told = "flags" if identical(stored(tmp_path / "small")["flags"], model.flags) else ""
    assert "flags" in told


def test_the_hub_gets_the_folder_and_its_refusal_is_told(tmp_path, no_pictures, monkeypatch):
    import huggingface_hub

    calls: list[Any] = []
    hub = type("Hub", (), {
        "create_repo": lambda _, name, exist_ok: type("Repo", (), {"repo_id": f"me/{name}"}),
        "upload_folder": lambda _, **given: calls.append(given) or "address",
    })  # fmt: skip
    monkeypatch.setattr(huggingface_hub, "HfApi", hub)
    pinscher.save_pretrained(make(), tmp_path / "small", push_to_hub="small")
    assert (calls[0]["repo_id"], calls[0]["folder_path"]) == ("me/small", tmp_path / "small")
    hub.create_repo = lambda *_, **__: (_ for _ in ()).throw(OSError("no network"))
    with pytest.raises(InputError, match=r"could not push to small: no network.* is complete"):
        pinscher.save_pretrained(make(), tmp_path / "small", push_to_hub="small")


# Calibration.
def test_importance_is_the_mean_square_of_the_inputs_without_padding():
    model = make(hidden_dropout_prob=0.5)
    name = QUERY.removesuffix(".weight")
    seen: list[torch.Tensor] = []
    model.get_submodule(name).register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].detach()))
    with torch.no_grad():
        for batch in batches():
            model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    there = [batch["attention_mask"].bool() for batch in batches()]
    wanted = torch.cat([each[mask] for each, mask in zip(seen, there, strict=True)]).double().square().mean(0)
    found = importances(model.train(), iter(batches()), [name])
    assert found.keys() == {name}
    torch.testing.assert_close(found[name], wanted.float())


def test_calibration_chooses_the_scales(tmp_path, no_pictures):
    model = make(hidden_size=32)
    wanted = importances(model, batches(), [name.removesuffix(".weight") for name in blocks(model)])
    pinscher.save_pretrained(model, tmp_path / "small", values="int4", embeddings="int8", calibration=batches())
    found = stored(tmp_path / "small")
    for name in blocks(model):
        importance = wanted[name.removesuffix(".weight")]
        assert identical(found[name], dequantised(model.get_parameter(name).detach(), "int4", importance=importance))
    pinscher.save_pretrained(model, tmp_path / "blind", values="int4", embeddings="int8")
    assert any(not identical(tensor, found[name]) for name, tensor in stored(tmp_path / "blind").items())
    padding = [batch | {"attention_mask": torch.zeros_like(batch["attention_mask"])} for batch in batches()]
    for nothing in ([], padding):
        with pytest.raises(InputError, match="at least one batch"):
            pinscher.save_pretrained(model, tmp_path / "none", calibration=nothing)


# The same model for others.
@pytest.mark.parametrize("name", ["bert", "gpt2-lm"])
@pytest.mark.parametrize("how", ["int8", "bf16", "keep"])
def test_a_plain_folder_holds_what_the_small_one_would(tmp_path, no_pictures, name, how):
    model = make(name)
    before = everything(model)
    wanted = {"matrix": how, "embedding": how, "head": how}
    exchange.to_hf(model, tmp_path / "plain", wanted=wanted)
    pinscher.save_pretrained(model, tmp_path / "small", values=how, embeddings=how, head=how)
    plain, small = (type(model).from_pretrained(tmp_path / place).state_dict() for place in ("plain", "small"))
    assert "quantization_config" not in (tmp_path / "plain" / "config.json").read_text()
    assert [n for n in small if not identical(plain[n], small[n])] == []
    assert everything(model) == before


@pytest.mark.parametrize("name", ["bert", "gpt2-lm"])
@pytest.mark.parametrize("how", ["int8", "int4", "fp32", "fp16"])
def test_scipy_reads_the_matrices(tmp_path, name, how):
    model = make(name)
    exchange.to_scipy(model, tmp_path / "scipy", how)
    index = json.loads((tmp_path / "scipy" / exchange.INDEX).read_text())
    assert index["matrices"].keys() == blocks(model)
    kept = 0
    for matrix, entry in index["matrices"].items():
        path = tmp_path / "scipy" / entry["file"]
        codes = scipy.sparse.load_npz(path)
        kept += codes.nnz
        assert codes.format == "csr"
        dense = codes.toarray().astype(np.float32)
        scale = np.load(path)["scale"][:, None] if how.startswith("int") else np.float32(1)
        weight = torch.from_numpy(dense * scale)
        found = weight.T if entry["transposed"] else weight
        wanted = dequantised(model.get_parameter(matrix).detach(), how, entry["transposed"])
        assert torch.equal(found, wanted)
    assert kept <= 0.41 * sum(model.get_parameter(matrix).numel() for matrix in blocks(model))
    rest = np.load(tmp_path / "scipy" / "rest.npz")
    assert set(rest) == saving.untied(model).keys() - blocks(model)
    assert all((rest[n] == model.state_dict()[n].numpy()).all() for n in rest)
    assert transformers.AutoConfig.from_pretrained(tmp_path / "scipy").model_type == model.config.model_type
    with pytest.raises(InputError, match="scipy has no bf16 matrices"):
        exchange.to_scipy(model, tmp_path / "other", "bf16")


# How large it will be.
WIDE = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 3, "vocab_size": 1000}
SIZES = [("bert", WIDE), ("gpt2-lm", {"n_embd": 96, "vocab_size": 900}), ("bert", {"num_hidden_layers": 12})]


@pytest.mark.parametrize("share", [0.03, 0.3, 0.9])
@pytest.mark.parametrize(("name", "settings"), SIZES, ids=["bert", "gpt2", "many small matrices"])
def test_a_file_of_the_sparsity_for_a_size_fits_it(tmp_path, no_pictures, name, settings, share):
    model = make(name, 0.0, **settings)
    bytes_at = budget.sizer(model, blocks(model))
    size = round(bytes_at(0.999) + share * (bytes_at(0.0) - bytes_at(0.999)))
    sparsity = budget.sparsity_for(size, model, blocks(model))
    assert bytes_at(sparsity) <= size < bytes_at(sparsity - 0.001)
    prune(model, sparsity)
    pinscher.save_pretrained(model, tmp_path / "small", embeddings="int8", head="int8")
    assert 0.85 * size < size_of(tmp_path / "small") <= size


def test_a_size_out_of_reach_is_told():
    model = make()
    with pytest.raises(InputError, match="is out of reach"):
        budget.sparsity_for(2000, model, blocks(model))
    assert budget.sparsity_for(10**9, model, blocks(model)) == 0.0


def test_sizes_are_read_as_people_write_them():
    known = {"20MB": 20_000_000, "1.5GiB": 3 * 2**29, "300000": 300_000, " 7 kb ": 7000, ".5KiB": 512, "9B": 9}
    assert {text: budget.parse(text) for text in known} == known
    for text in ("", "MB", "20 parsecs", "-3MB", "1e9", "2,5MB"):
        with pytest.raises(InputError, match="must be a size such as 20MB"):
            budget.parse(text)
