"""Every row says what is so in transformers, and nobody else knows a family by name."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

import pinscher
from pinscher.errors import InputError
from pinscher.models import families
from pinscher.models.families import FAMILIES, max_positions
from pinscher.models.sizes import sizes_of

SOURCE = Path(pinscher.__file__).parent
# Where the paper's four models are called by the names that its table has for them, and where text-embeddings-inference
# calls a task by the config's word for a family.
NAMES_OF_OTHERS = {"compare/published.py", "serve/app.py"}
# 4 heads of 8 features, 48 features in the feed-forward part, under whatever names a config has for them.
SIZES = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "n_inner": 48}
SIZES |= {"max_position_embeddings": 24, "embedding_size": 16, "n_layers": 2, "hidden_dim": 48}
INNER = {"intermediate_size": 48}


def made(name: str, head: Any = transformers.AutoModel, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **SIZES, **INNER, **settings)
    return head.from_config(config).eval()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_layer_has_the_modules_of_its_row(name):
    row, base = FAMILIES[name], made(name)
    for layer in base.get_submodule(row.layers):
        shapes = [tuple(layer.get_submodule(part).weight.shape) for parts in row.products for part in parts]
        assert sum(map(len, row.products)) == len(shapes)
        assert all(32 in shape for shape in shapes)
        matrices = {id(m) for m in layer.modules() if getattr(getattr(m, "weight", None), "dim", lambda: 0)() == 2}
        named = {id(layer.get_submodule(part)) for parts in row.products for part in parts}
        assert matrices == named  # all of them, and no other
        assert layer.get_submodule(row.attention) is not layer
        assert all(layer.get_submodule(part).weight.shape == (32,) for part in (row.attention_norm, row.mlp_norm))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_config_has_the_sizes_under_the_names_of_the_row(name):
    row, base = FAMILIES[name], made(name)
    assert getattr(base.config, row.heads) == 4
    assert getattr(base.config, row.inner) == 48
    assert getattr(base.config, row.activation) in families.ACTIVATIONS
    if row.can_shrink:
        assert [(sizes.heads, sizes.inner) for sizes in sizes_of(base)] == [(4, 48)] * 2
    else:
        with pytest.raises(InputError, match=f"cannot take heads and features out of {name}"):
            sizes_of(base)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_norm_stands_where_the_row_says(name):
    """What goes into the first layer goes through its norm at once, or into the attention as it is."""
    row, base, seen = FAMILIES[name], made(name), {}
    layer = base.get_submodule(row.layers)[0]
    layer.get_submodule(row.qkv[0]).register_forward_pre_hook(lambda _, given: seen.update(attention=given[0]))
    layer.get_submodule(row.attention_norm).register_forward_hook(lambda *told: seen.setdefault("norm", told[-1]))
    base(torch.tensor([[5, 6, 7]]))
    assert (seen["attention"] is seen["norm"]) == (row.norms == "pre")


@pytest.mark.parametrize("name", FAMILIES)
def test_embeddings_are_those_of_the_row(name):
    row, base = FAMILIES[name], made(name)
    tables = {path for path, module in base.named_modules() if isinstance(module, torch.nn.Embedding)}
    assert tables == {*row.embeddings, *([row.relative_bias] if row.relative_bias else [])}
    assert base.get_submodule(row.embeddings[0]) is base.get_input_embeddings()
    assert row.has_token_types == any(path.endswith("token_type_embeddings") for path in tables)
    if row.embeddings_norm:
        assert isinstance(base.get_submodule(row.embeddings_norm), torch.nn.LayerNorm)
    if row.projection:
        assert base.get_submodule(row.projection).weight.shape == (32, 16)


@pytest.mark.parametrize("name", FAMILIES)
def test_tokenizers_give_types_where_the_row_says_so(name):
    """A tokenizer may give types that its model has no embedding for, as DistilBERT's does: these do not count."""
    row = FAMILIES[name]
    kind = getattr(transformers, TOKENIZER_MAPPING_NAMES.get(name, "PreTrainedTokenizerBase"))
    assert row.tokenizer_gives_types == (row.has_token_types and "token_type_ids" in kind.model_input_names)


@pytest.mark.parametrize("padding", [0, 1, 3])
@pytest.mark.parametrize("name", [name for name, row in FAMILIES.items() if len(row.embeddings) > 1])
def test_a_model_takes_just_as_many_tokens_as_are_told(name, padding):
    base = made(name, pad_token_id=padding)
    longest = max_positions(base.config)
    assert base(torch.full((1, longest), 7))[0].shape[1] == longest
    with pytest.raises((IndexError, RuntimeError)):
        base(torch.full((1, longest + 1), 7))


def test_positions_that_are_not_limited():
    assert max_positions(transformers.T5Config()) == families.NO_LIMIT
    assert max_positions(transformers.BertConfig()) == 512
    assert max_positions(transformers.RobertaConfig(max_position_embeddings=514)) == 512


@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_are_of_the_class_of_the_row(name):
    assert type(made(name)(torch.tensor([[5, 6]]))).__name__ == FAMILIES[name].result


@pytest.mark.parametrize("name", FAMILIES)
def test_a_token_sees_those_behind_it_unless_the_row_says_otherwise(name):
    base = made(name)
    one, other = (base(torch.tensor([[5, 6, last]]))[0] for last in (7, 8))
    assert torch.equal(one[:, :2], other[:, :2]) == FAMILIES[name].causal


@pytest.mark.parametrize("name", FAMILIES)
def test_a_classifier_takes_its_token_where_the_row_says(name):
    """By which token of the last layer the logits change, and which module is given all tokens."""
    row, model = FAMILIES[name], made(name, transformers.AutoModelForSequenceClassification, pad_token_id=0)
    ids, given = torch.tensor([[5, 6, 7, 8]]), {}
    for who, module in (
        ("pooler", getattr(model.base_model, "pooler", None)),
        ("head", getattr(model, "classifier", None)),
    ):
        if module is not None:
            module.register_forward_pre_hook(lambda _, x, who=who: given.update({who: x[0].dim()}))
    plain = model(ids).logits
    assert (
        given
        == {"pooler": {"pooler": 3, "head": 2}, "head": {"head": 3}, "first": {"head": 2}, "last": {}}[row.pooling]
    )
    places = []
    for place in range(4):
        noise = torch.zeros(1, 4, 32)
        noise[:, place] = torch.randn(32)
        hook = model.base_model.get_submodule(row.layers)[-1].register_forward_hook(
            lambda _, __, out, noise=noise: (out[0] + noise, *out[1:]) if isinstance(out, tuple) else out + noise
        )
        if not torch.equal(model(ids).logits, plain):
            places.append(place)
        hook.remove()
    assert places == [3 if row.pooling == "last" else 0]


def test_families_are_told_by_model_config_and_file():
    model = made("bert")
    assert families.family_of(model) is families.family_of(model.config) is FAMILIES["bert"]
    assert families.type_of({"model_type": "t5"}) == "t5"
    assert families.type_of({}) == families.type_of({"model_type": 5}) == families.type_of(None) == ""
    assert families.family_of(made("t5", num_layers=1)) is families.family_of(torch.nn.Linear(2, 2)) is None


@pytest.mark.parametrize(
    "settings", [{"is_decoder": True}, {"hidden_act": "mish"}, {"is_decoder": True, "add_cross_attention": True}]
)
def test_a_model_that_native_layers_do_not_know(settings):
    assert families.native_family(made("bert")) is FAMILIES["bert"]
    assert families.native_family(made("bert", **settings)) is None
    assert families.native_family(made("gpt2")) is families.native_family(made("llama")) is None


def known_by_name(source: str) -> list[str]:
    """What some code says of families by their names, or asks a config for its family's name."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr == "model_type":
            found.append(f"line {node.lineno}: .model_type")
        if isinstance(node, ast.Constant) and node.value in ("model_type", *FAMILIES):
            found.append(f"line {node.lineno}: {node.value!r}")
    return found


def test_no_other_module_knows_a_family_by_name():
    assert known_by_name((SOURCE / "models" / "families.py").read_text())
    assert known_by_name("if config.model_type in some: pass") == ["line 1: .model_type"]
    assert known_by_name("x = ('bert', 'berta')\ny = getattr(c, 'model_type')") == [
        "line 1: 'bert'",
        "line 2: 'model_type'",
    ]
    files = {path.relative_to(SOURCE).as_posix(): path for path in SOURCE.rglob("*.py")}
    others = {name: known_by_name(path.read_text()) for name, path in files.items() if name != "models/families.py"}
    assert {name: lines for name, lines in others.items() if lines and name not in NAMES_OF_OTHERS} == {}


def test_classes_are_swapped_in_one_place():
    """Reading __class__ is no surgery; giving a module another one is."""
    swaps = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            targets = node.targets if isinstance(node, ast.Assign) else []
            if any(isinstance(target, ast.Attribute) and target.attr == "__class__" for target in targets):
                swaps.append(path.relative_to(SOURCE).as_posix())
    assert swaps == ["models/surgery.py"]
