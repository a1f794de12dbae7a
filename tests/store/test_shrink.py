"""`--shrink`: dead features and heads are really gone, the outputs are the same, and the folder loads."""

import copy
import json
import re

import pytest
import torch
import transformers

import pinscher
from pinscher.commands import export
from pinscher.errors import InputError
from pinscher.models.families import FAMILIES
from pinscher.models.sizes import sizes_of, uneven
from pinscher.prune import Pruner, PruningConfig
from pinscher.store import exchange, saving
from pinscher.store.shrink import shrink_
from tiny_command import finished_run, outcome
from tiny_models import BERT, HEADS, Head

MODELS = {
    "bert": HEADS["bert"],
    "roberta": HEADS["roberta"],
    "distilbert": HEADS["distilbert"],
    "electra": Head(
        "classes", "ElectraForSequenceClassification", "ElectraConfig", {**BERT, "embedding_size": 8, "num_labels": 3}
    ),
    "bert-tokens": HEADS["tokens"],
    "distilbert-spans": HEADS["distilbert-spans"],
    "gpt2": HEADS["gpt2"],
    "gpt2-lm": HEADS["gpt2-lm"],
}
WIDER = {"num_attention_heads": 4, "hidden_act": "gelu"}
SETTINGS = {"BertConfig": WIDER, "RobertaConfig": WIDER, "ElectraConfig": WIDER}
SETTINGS |= {"DistilBertConfig": {"n_heads": 4}, "GPT2Config": {"n_head": 4, "n_inner": 32}}


def made(name: str):
    """A model with four heads whose biases are not zero, as after training."""
    model = MODELS[name].make(**SETTINGS[MODELS[name].config]).eval()
    torch.manual_seed(1)
    for parameter, tensor in model.named_parameters():
        if parameter.endswith("bias"):
            tensor.data.normal_(0, 0.3)
    return model


def parts(model):
    """Each layer's matrices as [outputs, inputs], by role; writing changes the model."""
    family = FAMILIES[model.config.model_type]
    for layer in model.base_model.get_submodule(family.layers):
        found = {}
        for role in ("out", "up", "down"):
            found[role] = layer.get_submodule(getattr(family, role)).weight.data
        if len(family.qkv) == 1:
            found = {role: weight.T for role, weight in found.items()}
            found |= dict(zip("qkv", layer.get_submodule(family.qkv[0]).weight.data.T.chunk(3), strict=True))
        else:
            found |= {role: layer.get_submodule(n).weight.data for role, n in zip("qkv", family.qkv, strict=True)}
        yield found


def kill(model) -> None:
    """Features that nothing reads, constant ones, both; a head pruned whole, one not read, one of constant values."""
    for i, layer in enumerate(parts(model)):
        layer["up"][0:6] = 0.0
        layer["down"][:, 4 : 10 + 5 * i] = 0.0  # another number in each layer
        for role in "qkv":
            layer[role][0:4] = 0.0
        layer["out"][:, 0:4] = 0.0
        if i == 1:
            layer["out"][:, 4:8] = 0.0
            layer["v"][12:16] = 0.0


def outputs(model) -> torch.Tensor:
    """Logits for rows of uneven length, the hidden ones left out."""
    torch.manual_seed(2)
    ids = torch.randint(3, 40, (3, 12))
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    mask[2, :4] = 0  # hidden at the beginning, as decoders have it
    with torch.no_grad():
        found = model.eval()(input_ids=ids.masked_fill(mask == 0, 0), attention_mask=mask)
    logits = torch.cat([v.reshape(3, -1, v.shape[-1]) if v.dim() == 3 else v[:, None] for v in found.values()
                        if isinstance(v, torch.Tensor)], -1)  # fmt: skip
    return logits[mask.bool()] if logits.shape[1] == 12 else logits


@pytest.mark.parametrize("name", MODELS)
def test_a_plain_shrunk_model_is_the_same_model(name, tmp_path):
    model = made(name)
    kill(model)
    wanted, before = outputs(model), model.num_parameters()
    removed = shrink_(model, plain=True)
    torch.testing.assert_close(outputs(model), wanted, rtol=0, atol=1e-5)
    assert [now.inner for _, now in removed.layers] == [22, 22]  # 10 of the first layer's features are dead, of 32
    assert removed.features_left == 5  # of the second's 15
    assert removed.heads_left == 1 + 3
    assert removed.after == model.num_parameters() == before - 2 * 10 * (2 * 16 + 1)
    model.save_pretrained(tmp_path / "plain")
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert config[FAMILIES[model.config.model_type].inner] == 22
    again = type(model).from_pretrained(tmp_path / "plain")
    torch.testing.assert_close(outputs(again), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_a_small_file_knows_every_layer(name, tmp_path):
    model = made(name)
    kill(model)
    wanted = outputs(model)
    removed = shrink_(model, plain=False)
    torch.testing.assert_close(outputs(model), wanted, rtol=0, atol=1e-5)
    assert [(now.heads, now.inner) for _, now in removed.layers] == [(3, 22), (1, 17)]
    assert removed.heads_left == removed.features_left == removed.lines_left == 0
    with pytest.raises(InputError, match="no plain config"):
        exchange.to_hf(model, tmp_path / "plain")
    saving.save_pretrained(model, tmp_path / "small", values="keep")
    again = type(model).from_pretrained(tmp_path / "small")
    assert sizes_of(again) == sizes_of(model)
    torch.testing.assert_close(outputs(again), wanted, rtol=0, atol=1e-5)
    assert uneven(again) == uneven(model)  # so it can be stored again


def test_a_shrunk_model_runs_fast_and_writes_text(tmp_path):
    for name in ("bert", "gpt2-lm"):
        model = made_dead(name)
        for layer in parts(model):
            for weight in layer.values():
                weight[torch.rand_like(weight) < 0.9] = 0.0
        whole, wanted = copy.deepcopy(model), outputs(model)
        shrink_(model, plain=False)
        assert uneven(model) is not None
        fast = pinscher.accelerate(model, mode="fp32")
        assert any(type(module).__name__ == "SparseLinear" for module in fast.modules())
        torch.testing.assert_close(outputs(fast), wanted, rtol=0, atol=1e-5)
        saving.save_pretrained(model, tmp_path / name, values="keep")
        torch.testing.assert_close(outputs(pinscher.load(tmp_path / name, mode="fp32")), wanted, rtol=0, atol=1e-5)
    ids = torch.randint(3, 40, (2, 5))
    texts = [m.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0) for m in (whole, model)]
    assert torch.equal(*texts)


def test_layers_of_different_widths_still_run_whole_in_native_code(tmp_path):
    model = made("bert")
    for i, layer in enumerate(parts(model)):
        for weight in layer.values():
            weight[torch.rand_like(weight) < 0.9] = 0.0
        layer["v"][:, :2] = layer["out"][:, ::2] = 0.5  # no head is dead
        layer["down"][:, : 7 + i] = 0.0
    wanted = outputs(model)
    shrink_(model, plain=False)
    assert len({sizes.inner for sizes in sizes_of(model)}) == 2
    saving.save_pretrained(model, tmp_path / "small", values="keep")
    for fast in (pinscher.accelerate(model, mode="fp32"), pinscher.load(tmp_path / "small", mode="fp32")):
        assert hasattr(fast.base_model, "fast_layers")
        # The last row hides its first token, from which the answer is read: native layers do not compute that.
        torch.testing.assert_close(outputs(fast)[:2], wanted[:2], rtol=0, atol=1e-5)


def made_dead(name: str):
    model = made(name)
    kill(model)
    return model


@pytest.mark.parametrize("plain", [True, False])
def test_what_is_dead_altogether_and_what_is_not(plain):
    model = made("bert")
    wanted = outputs(model)
    removed = shrink_(model, plain)
    assert (removed.before, removed.heads_left, removed.features_left) == (removed.after, 0, 0)
    assert torch.equal(outputs(model), wanted)
    assert uneven(model) is None
    for layer in parts(model):
        for weight in layer.values():
            weight.zero_()
    wanted = outputs(model)
    removed = shrink_(model, plain)
    torch.testing.assert_close(outputs(model), wanted, rtol=0, atol=1e-5)
    assert [now.inner for _, now in removed.layers] == [1, 1]  # a matrix is never empty
    assert [now.heads for _, now in removed.layers] == ([4, 4] if plain else [1, 1])


@pytest.mark.parametrize("pattern", ["heads", "rows", "columns"])
@pytest.mark.parametrize("name", ["bert", "distilbert", "gpt2"])
def test_what_a_pattern_prunes_can_be_removed(name, pattern):
    """The pruner and the shrinker mean the same thing by a head, a row and a column."""
    model = made(name)
    pruner = Pruner(model, PruningConfig(method="magnitude", total_steps=10, interval=1, pattern=pattern, sparsity=0.5))
    pruner.ranking.rank(0.5)
    with torch.no_grad():
        pruner.ranking.apply()
    wanted = outputs(model)
    removed = shrink_(model, plain=False)
    torch.testing.assert_close(outputs(model), wanted, rtol=0, atol=1e-5)
    assert removed.after < removed.before
    if pattern == "heads":
        assert sum(now.heads for _, now in removed.layers) - removed.heads_left == 4
        assert removed.lines_left == 0
    else:
        assert sum(now.inner for _, now in removed.layers) < 64
        assert removed.lines_left > 0


@pytest.mark.parametrize("sizes", [[[3, 22]], [[0, 22], [3, 22]], [[3, 22], [3, 33]], "all", [[3.0, 22], [3, 22]]])
def test_sizes_that_are_no_sizes(sizes, tmp_path):
    model = made_dead("bert")
    shrink_(model, plain=False)
    saving.save_pretrained(model, tmp_path / "small", values="keep")
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    config["quantization_config"]["shrunk"] = sizes
    (tmp_path / "small" / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"sizes of the layers in config\.json do not fit"):
        type(model).from_pretrained(tmp_path / "small")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = finished_run(tmp_path_factory.mktemp("run"))
    model = export.load(str(folder)).model
    kill_some(model)
    model.save_pretrained(folder / "model")
    return folder


def kill_some(model) -> None:
    """The upper half of the features, and the first head."""
    for layer in parts(model):
        layer["down"][:, : layer["down"].shape[1] // 2] = 0.0
        layer["out"][:, : layer["out"].shape[1] // model.config.num_attention_heads] = 0.0


def test_the_command(run, tmp_path, capsys):
    before = outputs(export.load(str(run)).model)
    for form in ("hf", "pinscher"):
        words = ["export", run, "--output", tmp_path / form, "--format", form, "--values", "keep", "--shrink"]
        code, out, err = outcome(words, capsys)
        assert code == 0, err
        found = re.search(r"shrunk from ([\d,]+) to ([\d,]+) parameters: ([\d,]+) of ([\d,]+) feed-forward", out)
        was, now, gone, features = (int(number.replace(",", "")) for number in found.groups())
        assert now < was
        assert gone * 2 >= features
        assert ("dead heads that stay" in out) == (form == "hf")
        model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / form)
        assert model.num_parameters() == now
        torch.testing.assert_close(outputs(model), before, rtol=0, atol=1e-5)


def test_mistakes_of_the_command(run, tmp_path, capsys):
    for form in ("onnx", "scipy"):
        words = ["export", run, "--output", tmp_path / form, "--format", form, "--shrink"]
        code, _, err = outcome(words, capsys)
        assert code == 2
        assert "--shrink goes with --format pinscher or hf" in err
        assert not (tmp_path / form).exists()
    HEADS["t5"].make().save_pretrained(tmp_path / "t5")
    code, _, err = outcome(["export", tmp_path / "t5", "--output", tmp_path / "small", "--shrink"], capsys)
    assert code == 2
    assert "--shrink does not know where t5 keeps its layers" in err
    assert not (tmp_path / "small").exists()
