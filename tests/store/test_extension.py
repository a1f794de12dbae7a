"""A new codec is one class and one row: a copy of the package that has them stores models with it, and loads them.

The copy is run by an interpreter of its own. This one plays the reader who does not have the codec.
"""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import BertForSequenceClassification

import pinscher
from pinscher import native
from pinscher.errors import InputError
from pinscher.store.codecs import BY_NUMBER, CODECS, Array
from pinscher.store.streams import DamagedError, Reader

TESTS = Path(__file__).resolve().parent


class Diagonal:
    """1 | the main diagonal, where nothing else is kept; 0 | every value, row by row, otherwise."""

    number = 200

    def encode(self, matrix: Array) -> bytes:
        alone = np.count_nonzero(matrix.diagonal()) == np.count_nonzero(matrix)
        return (b"\1" if alone else b"\0") + (matrix.diagonal() if alone else matrix).tobytes()

    def decode(self, reader: Reader, rows: int, columns: int, dtype: np.dtype[Any]) -> Array:
        alone = reader.array(np.dtype(np.uint8), 1)[0]
        if alone > 1:
            raise DamagedError("it is neither a diagonal nor a whole matrix")
        if not alone:
            return reader.array(dtype, rows * columns).reshape(rows, columns).copy()
        out = np.zeros((rows, columns), dtype)
        place = np.arange(min(rows, columns))
        out[place, place] = reader.array(dtype, place.size)
        return out


STORES = """
import sys
from pathlib import Path

package, folder, tests = map(Path, sys.argv[1:])
sys.meta_path[:] = [f for f in sys.meta_path if "ScikitBuild" not in type(f).__name__]  # of an editable install
sys.path[:0] = [str(package.parent), str(tests.parent)]

import pytest
import torch
from transformers import BertForSequenceClassification

import pinscher
from pinscher.store import codecs
from pinscher.store.file import Stored, files_of
from tiny_models import HEADS

assert Path(codecs.__file__).parent == package / "store"
model = HEADS["bert"].make()
diagonal = {f"bert.encoder.layer.{i}.attention.self.query.weight" for i in range(2)}
for name, parameter in model.named_parameters():
    if name in diagonal:
        parameter.data = parameter.data.diagonal().diag()
pinscher.save_pretrained(model, folder, values="fp32")
with Stored(files_of(folder)) as stored:
    heads = {name: stored.head(name) for name in stored.names()}
assert {name for name, head in heads.items() if head and head.codec == codecs.CODECS["diagonal"].number} == diagonal
again = BertForSequenceClassification.from_pretrained(folder).state_dict()
assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())
chosen = ["-k", "diagonal", str(tests / "test_codecs.py"), str(tests / "test_payload.py")]
sys.exit(pytest.main(["-n", "0", "-p", "no:cacheprovider", "-c", str(tests.parents[1] / "pyproject.toml"), *chosen]))
"""


def extended(folder: Path) -> Path:
    """A copy of the package whose codecs.py has one class and one row more."""
    package = Path(pinscher.__file__).parent
    copy = Path(shutil.copytree(package, folder / "pinscher", ignore=shutil.ignore_patterns("__pycache__")))
    compiled = native.core()
    if compiled is not None:
        shutil.copy(compiled.__file__, copy)
    file = copy / "store" / "codecs.py"
    before, row, after = file.read_text().partition("BY_NUMBER = ")
    assert row
    file.write_text(f'{before}{inspect.getsource(Diagonal)}\n\nCODECS["diagonal"] = Diagonal()\n{row}{after}')
    return copy


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A model that the extended package stored; what it tested, passed."""
    root = tmp_path_factory.mktemp("extended")
    words = [sys.executable, "-c", STORES, extended(root), root / "small", TESTS]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "PYTHONSAFEPATH": "1"})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "passed" in done.stdout
    return root / "small"


def test_a_codec_of_ones_own_is_chosen_by_size_stored_loaded_and_tested(small):
    assert (small / "model.safetensors").is_file()


def test_a_reader_without_the_codec_says_so(small):
    assert Diagonal.number not in BY_NUMBER
    assert "diagonal" not in CODECS
    for load in (BertForSequenceClassification.from_pretrained, pinscher.load):
        with pytest.raises(InputError, match=r"query.*: it uses a codec or type that .* not know: update pinscher"):
            load(small)
