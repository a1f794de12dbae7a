"""A stored file that lacks a weight, or holds one that does not fit, gives no model: by either reader, and by name."""

import json
from pathlib import Path

import pytest
import torch
import transformers

import pinscher
from pinscher.errors import InputError
from pinscher.store import file, payload
from pinscher.store.streams import DamagedError
from tiny_models import HEADS
from tiny_store import resealed, vector, write_tensors

READERS = {
    "load": pinscher.load,
    "from_pretrained": lambda folder: getattr(transformers, architecture(folder)).from_pretrained(folder),
}
MATRICES = {
    "bert": "bert.encoder.layer.1.attention.self.key.weight",
    "gpt2-lm": "transformer.h.1.attn.c_proj.weight",
    "llama-lm": "model.layers.0.mlp.down_proj.weight",
    "t5": "decoder.block.1.layer.0.SelfAttention.o.weight",
}


def architecture(folder: Path) -> str:
    return json.loads((folder / "config.json").read_text())["architectures"][0]


@pytest.fixture(params=MATRICES)
def stored(request, tmp_path) -> tuple[Path, str]:
    """A stored model, and the name of one matrix of its blocks."""
    pinscher.save_pretrained(HEADS[request.param].make(), tmp_path / "small")
    return tmp_path / "small", MATRICES[request.param]


@pytest.fixture
def bert(tmp_path) -> Path:
    pinscher.save_pretrained(HEADS["bert"].make(), tmp_path / "small")
    return tmp_path / "small"


def change(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    """Replaces or removes a stored tensor; all checksums are right."""
    with file.Stored(file.files_of(folder)) as opened:
        held = {each: opened.raw(each).clone() for each in opened.names()}
    assert name in held
    held |= {} if tensor is None else {name: tensor}
    write_tensors(folder / file.SINGLE, {n: t for n, t in held.items() if n != name or tensor is not None})


def raw(folder: Path, name: str) -> torch.Tensor:
    with file.Stored(file.files_of(folder)) as opened:
        return opened.raw(name).clone()


def refused(reader: str, folder: Path, *words: str) -> None:
    with pytest.raises(InputError) as told:
        READERS[reader](folder)
    for word in (str(folder / file.SINGLE), *words):
        assert word in str(told.value)


@pytest.mark.parametrize("reader", [*READERS, "Engine"])
def test_a_weight_under_two_names_is_refused(bert, reader):
    """One reader took the first of them, another the last."""
    name = "encoder.layer.0.output.dense.bias"
    with file.Stored(file.files_of(bert)) as opened:
        held = {each: opened.raw(each).clone() for each in opened.names()}
    write_tensors(bert / file.SINGLE, held | {name: torch.ones_like(held[f"bert.{name}"])})
    with pytest.raises(InputError, match=f"holds bert.{name} twice, as ") as told:
        (READERS | {"Engine": pinscher.Engine})[reader](bert)
    assert f"bert.{name}" in str(told.value)


@pytest.mark.parametrize("reader", READERS)
def test_a_missing_block_matrix_is_named(stored, reader):
    folder, name = stored
    change(folder, name, None)
    refused(reader, folder, name, "lacks")


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "name",
    [
        "bert.encoder.layer.0.output.LayerNorm.bias",
        "bert.encoder.layer.0.output.dense.bias",
        "bert.embeddings.word_embeddings.weight",
        "bert.pooler.dense.weight",
        "classifier.weight",
    ],
)
def test_any_missing_weight_of_the_stored_class_is_named(bert, reader, name):
    change(bert, name, None)
    refused(reader, bert, name, "lacks")


def test_a_bare_model_needs_its_blocks_too(bert):
    change(bert, MATRICES["bert"], None)
    with pytest.raises(InputError, match=r"lacks .*encoder\.layer\.1\.attention\.self\.key\.weight"):
        transformers.AutoModel.from_pretrained(bert)


def test_a_fresh_head_is_still_given(tmp_path):
    pinscher.save_pretrained(HEADS["bert"].make().bert, tmp_path / "small")
    _, told = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "small", num_labels=5, output_loading_info=True
    )
    assert told["missing_keys"] == {"classifier.weight", "classifier.bias"}


def test_a_bare_model_without_a_pooler_still_loads(tmp_path):
    made = transformers.BertModel(HEADS["bert"].make().config, add_pooling_layer=False)
    pinscher.save_pretrained(made, tmp_path / "small")
    _, told = transformers.AutoModel.from_pretrained(tmp_path / "small", output_loading_info=True)
    assert told["missing_keys"] == {"pooler.dense.weight", "pooler.dense.bias"}


@pytest.mark.parametrize("reader", READERS)
def test_a_matrix_of_another_shape_is_refused_by_both_readers(stored, reader):
    folder, name = stored
    change(folder, name, vector(payload.pack(torch.ones(3, 5), "int8")))
    refused(reader, folder, name, "is stored as [3, 5]")


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", ["packed", "plain"])
def test_a_matrix_of_another_type_is_refused_by_both_readers(bert, reader, kind):
    whole = torch.ones(16, 16, dtype=torch.int64)
    change(bert, MATRICES["bert"], vector(payload.pack(whole)) if kind == "packed" else whole)
    refused(reader, bert, MATRICES["bert"], "another type")


@pytest.mark.parametrize("reader", READERS)
def test_a_matrix_that_claims_to_be_transposed_is_refused(stored, reader):
    """One reader would turn it, the other would not."""
    folder, name = stored
    data = bytearray(raw(folder, name).numpy().tobytes())
    data[7] ^= payload.TRANSPOSED
    data[8:16] = bytes(data[12:16]) + bytes(data[8:12]) if data[8:12] != data[12:16] else data[8:16]
    change(folder, name, vector(resealed(bytes(data))))
    refused(reader, folder, name)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_another_version_is_refused_by_both_readers(bert, reader, version):
    config = json.loads((bert / "config.json").read_text())
    config["quantization_config"]["version"] = version
    (bert / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"format version .*, this pinscher reads 1: update pinscher") as told:
        READERS[reader](bert)
    assert str(told.value).startswith(str(bert / "config.json"))


@pytest.mark.parametrize("reader", READERS)
def test_the_cause_of_a_broken_matrix_is_told_with_file_and_tensor(bert, reader):
    """Inside of transformers' loading, which has a text of its own for every error."""
    data = bytearray(raw(bert, MATRICES["bert"]).numpy().tobytes())
    data[20] ^= 1  # the number of scales
    change(bert, MATRICES["bert"], vector(resealed(bytes(data))))
    with pytest.raises(DamagedError, match=r"model\.safetensors: .*key\.weight: .*(scales|stream)"):
        READERS[reader](bert)


class WithCounts(transformers.BertForSequenceClassification):
    """A model that keeps numbers beside its parameters."""

    def __init__(self, config: transformers.BertConfig) -> None:
        super().__init__(config)
        self.register_buffer("counts", torch.zeros(2, dtype=torch.int64))


def test_the_buffers_of_a_file_are_loaded(tmp_path):
    model = WithCounts(HEADS["bert"].make().config)
    model.counts += torch.tensor([3, 4])
    pinscher.save_pretrained(model, tmp_path / "small")
    assert pinscher.load(tmp_path / "small", task=WithCounts).counts.tolist() == [3, 4]
