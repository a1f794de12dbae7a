"""Export to ONNX with all zeros: model.onnx in fp32 and model.int8.onnx, for ONNX Runtime and for engines that skip
zeros, such as DeepSparse.

In INT8 every product y = x·W + b of the blocks becomes

    y = columns ⊙ (QLinearMatMul(quantize(x), codes) dequantized) + b        W ≈ scale · codes · diag(columns)

which is INT8 with one scale for each output and codes of 7 bits. The columns are a separate product because DeepSparse
uses a slow, dense routine for a QLinearMatMul with a vector of scales, and a sparse one for a single scale. It also
equalises the outputs before they are rounded to eight bits. Embeddings, attention scores, norms and the head stay fp32:
quantized attention scores were slower, and logits of eight bits would have ties.
"""

from __future__ import annotations

import copy
import importlib
import io
import os
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from pinscher.errors import InputError
from pinscher.models import families
from pinscher.store.quantize import quantize
from pinscher.store.saving import matrices

FP32, INT8 = "model.onnx", "model.int8.onnx"
OPSET, IR = 14, 8  # norms are plain nodes, which every engine fuses; DeepSparse 1.8 reads at most opset 18 and IR 9
# Codes of 7 bits: ONNX Runtime adds two products of 8 bits in 16 where a processor has AVX2 but no VNNI, and 255 · 127
# twice does not fit.
CODES = "int7"
LIMIT = 2_000_000_000  # bytes; protobuf ends at 2^31
CLOSE = 1e-3  # of the largest output; tracing costs rounding only

Batch = Mapping[str, Any]
Ranges = dict[str, tuple[float, float]]


def export(
    model: Any,
    folder: Path,
    tokenizer: Any = None,
    *,
    task_batches: Iterable[Batch] | None = None,
    length: int = 128,
) -> list[Path]:
    """Writes model.onnx and model.int8.onnx into an existing folder, completely or not at all; returns the files.

    The model is not changed. Inputs are input_ids, attention_mask and, where the tokenizer makes them, token_type_ids,
    int64 [batch, sequence] of any size; outputs are logits, or start_logits and end_logits. Decoders get no cache.

    Args:
        model: a transformers model of a known family with a head for sequences, tokens, answers or a causal one.
        folder: where the files go; files of these names are replaced.
        tokenizer: stored beside them.
        task_batches: batches on which the INT8 scales of activations are measured; a few hundred rows of the training
            data are enough. Without them random tokens with a fixed seed are used, which is less accurate.
        length: tokens in a row of those random tokens.

    Raises:
        InputError: for a model that is not supported or not finite or too large, for no batches, or without the
            packages onnx and onnxruntime.
    """
    onnx, runtime = _packages()
    folder = Path(folder)
    _check(model, folder, length)
    plain = _Plain(model, tokenizer)
    examples = _random_batches(plain, length)
    proto = _traced(plain, examples[0], onnx)
    _compare(proto, plain, examples[1], runtime)
    products = _products(proto, plain.model, onnx)
    batches = examples if task_batches is None else task_batches
    ranges = _ranges(proto, products, (plain.complete(batch) for batch in batches), onnx, runtime)
    with tempfile.TemporaryDirectory(prefix=".onnx.", dir=folder) as fresh:
        for name, made in ((FP32, proto), (INT8, _rebuilt(proto, products, ranges, onnx))):
            onnx.checker.check_model(made)
            Path(fresh, name).write_bytes(made.SerializeToString())
        if tokenizer is not None:
            tokenizer.save_pretrained(fresh)
        return _moved(Path(fresh), folder)


class _Plain(nn.Module):
    """The model as a function of tensors only: no cache, no dropout, explicit masks. Works on a copy.

    transformers makes masks by indexing, which traces into many nodes; a mask with four dimensions is used unchanged.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).cpu().float()
        self.model.set_attn_implementation("eager")
        self.model.config.use_cache = False
        family = families.FAMILIES[families.type_of(model.config)]
        self.causal = family.causal
        self.inputs = ["input_ids", "attention_mask"]
        if family.tokenizer_gives_types and (tokenizer is None or "token_type_ids" in tokenizer.model_input_names):
            self.inputs.append("token_type_ids")
        head = type(model).__name__
        self.outputs = ["start_logits", "end_logits"] if head.endswith("QuestionAnswering") else ["logits"]
        self.by_token = not head.endswith("SequenceClassification")
        self.eval()

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(self.inputs, values, strict=True))
        seen = given["attention_mask"][:, None, None, :].float()
        if self.causal:
            place = torch.arange(values[0].shape[1])
            seen = seen * (place[None, :] <= place[:, None]).float()
        given["attention_mask"] = (1.0 - seen) * torch.finfo(torch.float32).min  # [batch, 1, 1 or queries, keys]
        found = self.model(**given, return_dict=True)
        return tuple(found[name] for name in self.outputs)

    def complete(self, batch: Batch) -> dict[str, Any]:
        """The inputs of a batch as arrays; a missing mask or missing types are those of one whole sentence."""
        if "input_ids" not in batch:
            raise InputError(f"a batch lacks input_ids: it has {', '.join(batch) or 'nothing'}.")
        ids = torch.as_tensor(batch["input_ids"])
        missing = {"attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
        whole = {name: torch.as_tensor(batch[name]) if name in batch else missing[name] for name in self.inputs}
        return {name: value.detach().cpu().long().numpy() for name, value in whole.items()}


def _packages() -> tuple[Any, Any]:
    """The modules onnx and onnxruntime, which are needed only here."""
    try:
        return importlib.import_module("onnx"), importlib.import_module("onnxruntime")
    except ImportError as error:
        raise InputError(f"ONNX files need onnx and onnxruntime ({error}): pip install 'pinscher[onnx]'.") from None


def _check(model: Any, folder: Path, length: int) -> None:
    family, name = families.family_of(model), type(model).__name__
    heads = ["ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"]
    if family is not None and family.causal:
        heads = ["ForSequenceClassification", "LMHeadModel", "ForCausalLM"]
    if family is None or not name.endswith(tuple(heads)):
        raise InputError(
            f"{name} cannot be written as ONNX: supported are {', '.join(families.encoders())} for sequence or token "
            f"classification or question answering, and {', '.join(families.decoders())} for sequence classification "
            "or as a causal language model."
        )
    if any(parametrize.is_parametrized(module) for module in model.modules()):
        raise InputError("the model still has gates on its weights: call pruner.finish() before it is exported.")
    if family.causal and name.endswith(heads[0]) and model.config.pad_token_id is None:
        raise InputError(f"{name} finds the last token by its padding: set model.config.pad_token_id.")
    size = 4 * sum(tensor.numel() for tensor in model.state_dict().values())
    if size > LIMIT:
        raise InputError(
            f"the model is too large for one ONNX file: {size / 1e9:.1f} GB in fp32, {LIMIT / 1e9:.1f} GB are "
            "possible; export it with --format pinscher instead."
        )
    if length < 1:
        raise InputError(f"length {length} is not possible: give the number of tokens of a row.")
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder: make it first.")


def _random_batches(plain: _Plain, length: int) -> list[Batch]:
    """Four batches of random tokens, always the same, of several lengths and with padding."""
    config, generator = plain.model.config, torch.Generator().manual_seed(0)
    longest = max(1, min(length, families.max_positions(config)))
    batches: list[Batch] = []
    for rows, columns in ((2, longest), (3, (longest + 1) // 2), (4, longest), (4, longest)):
        ids = torch.randint(0, config.vocab_size, (rows, columns), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, (columns + 1) // 2 :] = 0
        ids[mask == 0] = config.pad_token_id or 0
        types = torch.arange(columns).ge(columns // 4).long().expand(rows, -1)
        batches.append({"input_ids": ids, "attention_mask": mask, "token_type_ids": types})
    return batches


def _traced(plain: _Plain, batch: Batch, onnx: Any) -> Any:
    """The model as a graph of any batch and length, its constants named after the parameters."""
    axes = {0: "batch", 1: "sequence"}
    every = dict.fromkeys(plain.inputs, axes) | dict.fromkeys(plain.outputs, axes if plain.by_token else {0: "batch"})
    named: dict[str, Any] = {"input_names": plain.inputs, "output_names": plain.outputs, "dynamic_axes": every}
    values = tuple(torch.from_numpy(value) for value in plain.complete(batch).values())
    written: Any = io.BytesIO()
    with warnings.catch_warnings(), torch.no_grad():
        # The newer exporter writes opset 18 at least, DeepSparse's last. What this one warns of, sizes that became
        # constants, `_compare` would find.
        warnings.simplefilter("ignore")
        torch.onnx.export(plain, values, written, dynamo=False, opset_version=OPSET, **named)
    proto = onnx.load_from_string(written.getvalue())
    proto.ir_version = min(proto.ir_version, IR)
    _rename_(proto)
    return proto


def _rename_(proto: Any) -> None:
    """Gives constants the names of the model's parameters, and removes the exporter's duplicates."""
    graph = proto.graph
    constants = {tensor.name for tensor in graph.initializer}
    copies = {
        node.output[0]: node.input[0]
        for node in graph.node
        if node.op_type == "Identity" and node.input[0] in constants
    }
    nodes = [node for node in graph.node if node.output[0] not in copies]
    names = {name: name.removeprefix("model.") for name in constants if not name.startswith("onnx::")}
    for node in nodes:
        if node.op_type == "MatMul" and (weight := copies.get(node.input[1], node.input[1])) in constants:
            names.setdefault(weight, f"{_module(node)}.weight.T")
    names |= {copied: names.get(name, name) for copied, name in copies.items()}
    for node in nodes:
        for place, name in enumerate(node.input):
            node.input[place] = names.get(name, name)
    for tensor in graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)
    del graph.node[:]
    graph.node.extend(nodes)


def _module(node: Any) -> str:
    """The module from which a node was traced: encoder.layer.0 for /model/encoder/layer.0/MatMul."""
    path: str = node.name.rpartition("/")[0]
    return path.removeprefix("/model/").replace("/", ".")


def _session(proto: Any, runtime: Any) -> Any:
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    return runtime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _compare(proto: Any, plain: _Plain, batch: Batch, runtime: Any) -> None:
    """Raises InputError unless graph and model agree on a batch of another size than was traced."""
    values = plain.complete(batch)
    with torch.no_grad():
        wanted = plain.model(**{name: torch.from_numpy(value) for name, value in values.items()})
    for name, got in zip(plain.outputs, _session(proto, runtime).run(plain.outputs, values), strict=True):
        off = float(np.abs(wanted[name].numpy() - got).max())
        if not off <= CLOSE * max(1.0, float(wanted[name].abs().max())):  # also refuses NaN
            raise InputError(
                f"{type(plain.model).__name__} cannot be written as ONNX: with this configuration the graph is off by "
                f"{off:.2g}; are all weights finite?"
            )


@dataclass(frozen=True)
class _Product:
    """One product of the blocks: y = x·W, with W ≈ scale · codes · diag(columns)."""

    node: Any
    codes: Any  # int8 [inputs, outputs]
    scale: Any  # float32 []
    columns: Any  # float32 [outputs], 1 at most

    @property
    def ends(self) -> tuple[str, str]:
        """The names of the input, and of the output before the columns are scaled."""
        return self.node.input[0], f"{self.node.output[0]}_product"


def _products(proto: Any, model: nn.Module, onnx: Any) -> list[_Product]:
    """The products with the matrices of the model's blocks, quantized."""
    blocks = {matrix.path for matrix in matrices(model).values() if matrix.role == "matrix"}
    weights = {tensor.name: tensor for tensor in proto.graph.initializer}
    products = []
    for node in proto.graph.node:
        if node.op_type not in ("MatMul", "Gemm") or node.input[1] not in weights or _module(node) not in blocks:
            continue
        weight = torch.from_numpy(onnx.numpy_helper.to_array(weights[node.input[1]]).copy())
        flipped = any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
        codes, scales = quantize(weight if flipped else weight.T, CODES)
        scales = torch.where(scales > 0, scales, scales.max() or 1.0)  # any scale is right for a column of zeros
        largest = scales.max()
        products.append(_Product(node, codes.T.contiguous().numpy(), largest.numpy(), (scales / largest).numpy()))
    if lost := blocks - {_module(product.node) for product in products}:
        raise InputError(f"{type(model).__name__} cannot be written as ONNX: its graph lacks {min(lost)}.")
    return products


def _ranges(proto: Any, products: list[_Product], batches: Iterable[Batch], onnx: Any, runtime: Any) -> Ranges:
    """The smallest and the largest value, over the batches, of the input and the output of each product.

    The range always includes zero, so that zero is exact. Computed inside the graph, so no activations are stored.
    """
    watched, number = _rebuilt(proto, products, None, onnx), onnx.TensorProto.FLOAT
    names = list(dict.fromkeys(name for product in products for name in product.ends))
    looks = [(f"{name}_{end}", name, f"Reduce{end}") for name in names for end in ("Min", "Max")]
    watched.graph.node.extend(onnx.helper.make_node(how, [name], [look], keepdims=0) for look, name, how in looks)
    del watched.graph.output[:]
    watched.graph.output.extend(onnx.helper.make_tensor_value_info(look, number, []) for look, _, _ in looks)
    session = _session(watched, runtime)
    seen = [np.stack(session.run([look for look, _, _ in looks], dict(batch))) for batch in batches]
    if not seen:
        raise InputError("the INT8 file needs at least one batch: give some rows of the training data.")
    extremes = np.stack([np.zeros_like(seen[0]), *seen])
    least, most = extremes.min(0)[::2], extremes.max(0)[1::2]
    return {name: (float(low), float(high)) for name, low, high in zip(names, least, most, strict=True)}


def _rebuilt(proto: Any, products: list[_Product], ranges: Ranges | None, onnx: Any) -> Any:
    """A copy of the graph with every product replaced: by INT8, or without ranges by fp32 with the same codes."""
    constants: dict[str, Any] = {}
    nodes: dict[str, Any] = {}  # by output, because products share the quantization of their input
    replaced = {product.node.output[0]: product for product in products}
    for node in proto.graph.node:
        product = replaced.get(node.output[0])
        made = [node] if product is None else _remade(product, ranges, constants, onnx.helper.make_node)
        nodes |= {new.output[0]: new for new in made}
    used = {name for node in nodes.values() for name in node.input}
    kept = [tensor for tensor in proto.graph.initializer if tensor.name in used]
    kept += [onnx.numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = onnx.helper.make_graph(nodes.values(), proto.graph.name, proto.graph.input, proto.graph.output, kept)
    model = onnx.helper.make_model(graph, opset_imports=proto.opset_import, producer_name=proto.producer_name)
    model.ir_version = proto.ir_version
    return model


def _remade(product: _Product, ranges: Ranges | None, constants: dict[str, Any], make: Any) -> list[Any]:
    """The nodes of a product, and of the bias of a Gemm; their constants are added."""
    (given, whole), weight, result = product.ends, product.node.input[1], product.node.output[0]
    if ranges is None:
        constants[f"{weight}_rounded"] = product.codes * product.scale
        nodes = [make("MatMul", [given, f"{weight}_rounded"], [whole])]
    else:
        matrix = [f"{weight}_codes", f"{weight}_scale", f"{weight}_zero"]
        constants |= dict(zip(matrix, (product.codes, product.scale, np.int8(0)), strict=True))
        for name in (given, whole):
            low, high = ranges[name]
            scale = np.float32((high - low) / 255 or 1.0)
            constants |= {f"{name}_scale": scale, f"{name}_zero": np.uint8(np.clip(np.rint(-low / scale), 0, 255))}
        before, after = ([f"{name}_scale", f"{name}_zero"] for name in (given, whole))
        inner = [f"{given}_quantized", *before, *matrix, *after]
        nodes = [
            make("QuantizeLinear", [given, *before], inner[:1], name=f"{given}_quantize"),
            make("QLinearMatMul", inner, [f"{whole}_quantized"], name=product.node.name),
            make("DequantizeLinear", [f"{whole}_quantized", *after], [whole], name=f"{whole}_dequantize"),
        ]
    constants[f"{weight}_columns"] = product.columns
    bias = product.node.input[2:]
    scaled = f"{result}_scaled" if bias else result
    nodes.append(make("Mul", [whole, f"{weight}_columns"], [scaled], name=f"{result}_columns"))
    return [*nodes, make("Add", [scaled, *bias], [result], name=f"{result}_bias")] if bias else nodes


def _moved(fresh: Path, folder: Path) -> list[Path]:
    """Moves all files of one folder into another, models first."""
    models = [fresh / FP32, fresh / INT8]
    rest = sorted(path for path in fresh.rglob("*") if path.is_file() and path not in models)
    targets = []
    for path in [*models, *rest]:
        targets.append(folder / path.relative_to(fresh))
        targets[-1].parent.mkdir(exist_ok=True)
        with path.open("rb") as written:
            os.fsync(written.fileno())
        path.replace(targets[-1])
    return targets
