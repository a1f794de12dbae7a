"""Export to other formats: a plain Hugging Face folder, and sparse matrices for scipy."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pinscher import files
from pinscher.errors import InputError
from pinscher.models.sizes import uneven
from pinscher.store.calibration import importances
from pinscher.store.payload import KEPT
from pinscher.store.quantize import LARGEST, Quantized, dequantize, quantize
from pinscher.store.saving import KEEP, matrices, untied

INDEX = "matrices.json"


def to_hf(
    model: Any,
    folder: Path,
    tokenizer: Any = None,
    wanted: dict[str, str] | None = None,
    calibration: Iterable[Mapping[str, Any]] | None = None,
    beside: Mapping[str, bytes] | None = None,
) -> Path:
    """A folder as transformers writes it, zeros included; values are rounded as in the small file.

    The model is not changed.
    """
    if uneven(model) is not None:
        raise InputError("the model's layers are of sizes that no plain config can tell: use --format pinscher.")
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    known = matrices(model)
    layers = [matrix.path for matrix in known.values() if matrix.role != "embedding"]
    weights = {} if calibration is None else importances(model, calibration, layers)
    for name, matrix in known.items():
        place, how = state[name].data_ptr(), (wanted or {}).get(matrix.role, KEEP)
        rounded = _rounded(state[name], how, matrix.transposed, weights.get(matrix.path))
        state |= {other: rounded for other, tensor in state.items() if tensor.data_ptr() == place}  # tied ones too
    with files.whole(folder) as fresh:
        model.save_pretrained(fresh, state_dict=state)
        if tokenizer is not None:
            tokenizer.save_pretrained(fresh)
        files.fill(fresh, beside or {})
    return folder


def to_scipy(model: Any, folder: Path, values: str = "int8") -> Path:
    """One NAME.npz for each matrix of the blocks, the rest in rest.npz, and a list of all.

    `scipy.sparse.load_npz(NAME.npz)` gives the CSR matrix, output rows first; where values are int8 to int4 it
    holds the codes, and `numpy.load(NAME.npz)["scale"]` the scale of each row.
    """
    state, known = untied(model), matrices(model)
    blocks = {name: m for name, m in known.items() if m.role == "matrix" and name in state}
    index: dict[str, Any] = {"values": values, "matrices": {}}
    with files.whole(folder) as fresh:
        for name, matrix in blocks.items():
            weight = state[name].detach().cpu()
            arrays = _csr(weight.T if matrix.transposed else weight, values)
            np.savez_compressed(fresh / f"{name}.npz", **arrays)
            index["matrices"][name] = {"file": f"{name}.npz", "transposed": matrix.transposed}
        rest = {name: _numpy(tensor) for name, tensor in state.items() if name not in blocks}
        np.savez_compressed(fresh / "rest.npz", **rest)
        (fresh / INDEX).write_text(json.dumps(index, indent=1) + "\n")
        model.config.save_pretrained(fresh)
    return folder


def _rounded(weight: Tensor, how: str, transposed: bool, importance: Tensor | None) -> Tensor:
    if how == KEEP:
        return weight
    if how in KEPT:
        return weight.to(KEPT[how]).to(weight.dtype)
    rows = weight.T if transposed else weight
    rounded = dequantize(*quantize(rows, how, importance)).to(weight.dtype)
    return rounded.T.contiguous() if transposed else rounded


def _csr(weight: Tensor, values: str) -> dict[str, Any]:
    """The arrays of scipy.sparse.save_npz, and the scales."""
    scale: Tensor | None = None
    if values in LARGEST:
        made: Quantized = quantize(weight, values)
        data, scale = made.codes.numpy(), made.scale
    elif values in KEPT and values != "bf16":
        data = weight.to(KEPT[values]).float().contiguous().numpy()  # scipy does not compute in fp16
    else:
        raise InputError(f"scipy has no {values} matrices: give --values int8, int7, int6, int4, fp16 or fp32.")
    row, column = np.nonzero(data)
    indptr = np.zeros(data.shape[0] + 1, np.int32)
    indptr[1:] = np.cumsum(np.bincount(row, minlength=data.shape[0]))
    arrays: dict[str, Any] = {
        "format": np.array(b"csr"),
        "shape": np.array(data.shape),
        "indptr": indptr,
        "indices": column.astype(np.int32),
        "data": data[row, column],
    }
    return arrays if scale is None else arrays | {"scale": scale.numpy()}


def _numpy(tensor: Tensor) -> Any:
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
