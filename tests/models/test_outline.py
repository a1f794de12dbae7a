"""A config.json that asks for far more than the files hold is refused before there is room for any of it."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
import torch
import transformers

from pinscher.errors import InputError
from pinscher.models.hub import load_weights
from pinscher.models.outline import TooLargeError, outline
from tiny_models import HEADS

GIGABYTE = 1 << 30


def ask(folder: Path, **settings: int) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


@pytest.fixture
def folder(tmp_path) -> Path:
    HEADS["bert"].make().save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def _little_memory():
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + GIGABYTE, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


KINDS = (transformers.BertForSequenceClassification, transformers.AutoModelForSequenceClassification)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "size",
    [
        {"hidden_size": 10**7},
        {"hidden_size": 10**5, "intermediate_size": 10**6},
        {"max_position_embeddings": 10**9},
        {"type_vocab_size": 10**7},
        {"vocab_size": 10**7},
    ],
    ids=str,
)
@pytest.mark.usefixtures("_little_memory")
def test_sizes_that_the_file_cannot_hold_are_refused_without_room_for_them(kind, size, folder):
    ask(folder, **size)
    with pytest.raises(InputError, match=r"config\.json does not fit the weights: it asks for more than .* numbers"):
        load_weights(kind, str(folder))


@pytest.mark.parametrize(
    "size", [{"hidden_size": 18}, {"hidden_size": 256}, {"max_position_embeddings": 999}, {"type_vocab_size": 7}]
)
def test_a_small_misfit_names_the_weight(size, folder):
    ask(folder, **size)
    with pytest.raises(InputError, match=r"is stored as \[.*\], the model has \["):
        load_weights(transformers.BertForSequenceClassification, str(folder))


def test_a_new_head_and_narrow_numbers_are_let_through(folder, tmp_path):
    asked = {"num_labels": 900, "ignore_mismatched_sizes": True}
    model, _ = load_weights(transformers.AutoModelForSequenceClassification, str(folder), **asked)
    assert model.classifier.out_features == 900
    transformers.BertForSequenceClassification.from_pretrained(folder).half().save_pretrained(tmp_path / "half")
    load_weights(transformers.BertForSequenceClassification, str(tmp_path / "half"), dtype=torch.float32)


def test_an_outline_has_no_room_and_stops_in_time():
    made = []

    def make() -> torch.nn.Module:
        layers = torch.nn.ModuleList()
        for _ in range(100):
            layers.append(torch.nn.Linear(1000, 1000))
            made.append(1)
        return layers

    assert {weight.device.type for weight in outline(make, 200).parameters()} == {"meta"}
    for bounds, least in (((9,), 4), ((200, 3_000_000), 2)):
        made.clear()
        with pytest.raises(TooLargeError, match="it asks for more than"):
            outline(make, *bounds)
        assert len(made) == least
    assert len(list(make().parameters())) == 200  # nothing counts any more
