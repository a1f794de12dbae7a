"""`pinscher inspect`: what it prints and writes, and mistakes."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from pinscher.store import payload
from tiny_command import outcome
from tiny_models import pruned_bert


@pytest.fixture
def bert():
    return pruned_bert()


def test_the_command_prints_sums_and_writes_json(bert, tmp_path, capsys):
    model, zeros = bert
    model.save_pretrained(tmp_path / "model")
    code, out, _ = outcome(["inspect", tmp_path / "model", "--json", tmp_path / "said.json"], capsys)
    assert code == 0
    written = json.loads((tmp_path / "said.json").read_text())
    assert {m["name"]: m["zeros"] for m in written["matrices"]} == zeros
    assert written["whole"]["zeros"] == sum(zeros.values())
    assert written["layers"].keys() == {"0", "1"}
    for name in (*written["kinds"], *written["words"]):
        assert name in out
    assert "\x1b" not in out  # plain, where no terminal is
    stored = load_file(tmp_path / "model" / "model.safetensors")
    first = stored["bert.encoder.layer.0.attention.self.query.weight"]
    assert written["matrices"][0]["sizes"]["entropy"] == len(payload.pack(first, "int8", codecs=("entropy",)))
    code, out, _ = outcome(["inspect", tmp_path / "model", "--layers", r"layer\.1\..*query", "--no-rank"], capsys)
    assert code == 0
    assert "attention.self.query" in out
    assert "attention.self.key" not in out


class Evil:
    def __reduce__(self):
        return (print, ("this must never be printed",))


def test_mistakes_are_one_line_and_code_2(tmp_path, capsys):
    torch.save({"weight": Evil()}, tmp_path / "evil.pt")
    (tmp_path / "broken.safetensors").write_bytes(b"not at all")
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("hello")
    torch.save([1, 2], tmp_path / "list.pt")
    save_file({"a": torch.ones(3)}, tmp_path / "vector.safetensors")
    save_file({"h.0.up.weight": torch.ones(8, 8)}, tmp_path / "fine.safetensors")
    for words, expected in {
        ("evil.pt",): "holds more than tensors",
        ("broken.safetensors",): "cannot read",
        ("empty",): "holds no model",
        ("notes.txt",): "is not a checkpoint",
        ("list.pt",): "holds no state dict",
        ("vector.safetensors",): "has no matrix to look at",
        ("nothing.bin",): "there is no file",
        ("fine.safetensors", "--layers", "("): "not a regular expression",
        ("fine.safetensors", "--layers", "down"): "has no matrix that --layers 'down' names",
        ("fine.safetensors", "--task", "sst2"): "--task goes with --sensitivity",
        ("fine.safetensors", "--rows", "9"): "--rows goes with --sensitivity",
        ("fine.safetensors", "--levels", "0.5"): "--levels goes with --sensitivity",
        ("fine.safetensors", "--mask-method", "guess"): "unknown mask method 'guess'",
        ("fine.safetensors", "--sensitivity", "--levels", "much"): "--levels takes numbers",
        ("fine.safetensors", "--sensitivity", "--task", "sst2"): "is a file",
    }.items():
        code, out, err = outcome(["inspect", tmp_path / words[0], *words[1:]], capsys)
        assert code == 2, words
        assert expected in err
        assert err.startswith("error: ")
        assert len(err.strip().splitlines()) == 1
        assert "never be printed" not in out + err
