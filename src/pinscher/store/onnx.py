"""A pruned model as ONNX, zeros and all: model.onnx in fp32 and model.int8.onnx, for ONNX Runtime and for engines that
skip zeros, such as DeepSparse.

In INT8 every product y = x·W + b of the blocks becomes

    y = columns ⊙ (QLinearMatMul(quantize(x), codes) dequantized) + b        W ≈ scale · codes · diag(columns)

which is INT8 with one scale for each output. The columns are a product of their own because DeepSparse hands a
QLinearMatMul with a vector of scales to a slow and dense routine; one number it multiplies sparsely. It also evens out
the outputs before they are cut to eight bits. Embeddings, attention scores, norms and the head stay fp32: quantized,
the scores only took longer, and eight bits of logits would make ties.
"""

from __future__ import annotations

import copy
import importlib
import io
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from pinscher.errors import InputError
from pinscher.store.quantize import quantize
from pinscher.store.saving import matrices

FP32, INT8 = "model.onnx", "model.int8.onnx"
OPSET, IR = 14, 8  # norms as plain nodes, which every engine fuses; DeepSparse 1.8 reads opset 18 and IR 9 at most
LIMIT = 2_000_000_000  # bytes; protobuf ends at 2^31
ENCODERS = ("bert", "distilbert", "electra", "mpnet", "roberta", "xlm-roberta")
DECODERS = ("gpt2", "llama")
SHIFTED = ("mpnet", "roberta", "xlm-roberta")  # their positions start behind the padding token's number
TYPED = ("bert", "electra")  # their tokenizers tell the first sentence from the second
CLOSE = 1e-3  # of the largest output; tracing costs rounding only

Batch = Mapping[str, Any]


def export(
    model: Any,
    folder: Path,
    tokenizer: Any = None,
    *,
    task_batches: Iterable[Batch] | None = None,
    length: int = 128,
) -> list[Path]:
    """Writes model.onnx and model.int8.onnx into a folder that is there, whole or not at all; returns what it wrote.

    The model is not changed. Inputs are input_ids, attention_mask and, where the tokenizer makes them, token_type_ids,
    int64 [batch, sequence] of any size; outputs are logits, or start_logits and end_logits. Decoders get no cache.

    Args:
        model: a transformers model of ENCODERS or DECODERS with a head for sequences, tokens, answers or a causal one.
        folder: where the files go; files of these names are replaced.
        tokenizer: stored beside them.
        task_batches: what the INT8 scales of the activations are measured on; some hundred rows of the training data
            do. Without it they are measured on random tokens of a fixed seed: the file works, but less closely.
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
        _write(Path(fresh) / FP32, proto, onnx)
        _write(Path(fresh) / INT8, _rebuilt(proto, products, partial(_in_int8, ranges=ranges), onnx), onnx)
        if tokenizer is not None:
            tokenizer.save_pretrained(fresh)
        return _moved(Path(fresh), folder)


class _Plain(nn.Module):
    """The model as a function of tensors alone: no cache, no dropout, and masks spelt out. Works on a copy.

    transformers makes masks by indexing, which traces into many nodes; one that has its four dimensions it takes as
    it is.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).cpu().float()
        self.model.set_attn_implementation("eager")
        self.model.config.use_cache = False
        kind = model.config.model_type
        self.causal = kind in DECODERS
        self.inputs = ["input_ids", "attention_mask"]
        if kind in TYPED and (tokenizer is None or "token_type_ids" in tokenizer.model_input_names):
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
        """The inputs of a batch as arrays; a mask or types it lacks are those of one whole sentence."""
        ids = torch.as_tensor(batch["input_ids"])
        missing = {"attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
        whole = {name: torch.as_tensor(batch[name]) if name in batch else missing[name] for name in self.inputs}
        return {name: value.detach().cpu().long().numpy() for name, value in whole.items()}


def _packages() -> tuple[Any, Any]:
    """The modules onnx and onnxruntime, which only this needs."""
    try:
        return importlib.import_module("onnx"), importlib.import_module("onnxruntime")
    except ImportError as error:
        raise InputError(f"ONNX files need onnx and onnxruntime ({error}): pip install 'pinscher[onnx]'.") from None


def _check(model: Any, folder: Path, length: int) -> None:
    kind, name = getattr(getattr(model, "config", None), "model_type", None), type(model).__name__
    heads = ["ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"]
    if kind in DECODERS:
        heads = ["ForSequenceClassification", "LMHeadModel", "ForCausalLM"]
    if kind not in (*ENCODERS, *DECODERS) or not name.endswith(tuple(heads)):
        raise InputError(
            f"{name} cannot be written as ONNX: supported are {', '.join(ENCODERS)} for sequence or token "
            f"classification or question answering, and {', '.join(DECODERS)} for sequence classification or as a "
            "causal language model."
        )
    if any(parametrize.is_parametrized(module) for module in model.modules()):
        raise InputError("the model still has gates on its weights: call pruner.finish() before it is exported.")
    if kind in DECODERS and name.endswith(heads[0]) and model.config.pad_token_id is None:
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
    first = (config.pad_token_id or 0) + 1 if config.model_type in SHIFTED else 0
    longest = max(1, min(length, config.max_position_embeddings - first))
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
    """The model as a graph whose matrices are constants [inputs, outputs] named after their modules."""
    axes = {0: "batch", 1: "sequence"}
    every = dict.fromkeys(plain.inputs, axes) | dict.fromkeys(plain.outputs, axes if plain.by_token else {0: "batch"})
    values = tuple(torch.from_numpy(value) for value in plain.complete(batch).values())
    written = io.BytesIO()
    with warnings.catch_warnings(), torch.no_grad():
        # The newer exporter writes opset 18 at least, and graphs that DeepSparse does not fuse. What its tracer warns
        # of, sizes kept as constants, `_compare` would find.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            plain,
            values,
            written,  # type: ignore[arg-type]  # this exporter takes an open file
            dynamo=False,
            opset_version=OPSET,
            input_names=plain.inputs,
            output_names=plain.outputs,
            dynamic_axes=every,
        )
    proto = onnx.load_from_string(written.getvalue())
    proto.ir_version = min(proto.ir_version, IR)
    _rename_(proto)
    return proto


def _rename_(proto: Any) -> None:
    """Gives constants the names of the model's parameters, and takes out the copies that the exporter makes of them."""
    graph, names = proto.graph, {}
    taken = {tensor.name for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Identity" and node.input[0] in taken:
            names[node.output[0]] = node.input[0]
    nodes = [node for node in graph.node if not (node.op_type == "Identity" and node.output[0] in names)]
    fresh = {name: name.removeprefix("model.") for name in taken}
    for node in nodes:
        for place, name in enumerate(node.input):
            node.input[place] = names.get(name, name)
        weight = node.input[1] if node.op_type in ("MatMul", "Gemm") else ""
        if weight.startswith("onnx::") and weight in taken:
            fresh[weight] = f"{_module(node)}.weight"
    for node in nodes:
        for place, name in enumerate(node.input):
            node.input[place] = fresh.get(name, name)
    for tensor in graph.initializer:
        tensor.name = fresh[tensor.name]
    del graph.node[:]
    graph.node.extend(nodes)


def _module(node: Any) -> str:
    """The name of the module that a node was traced from: /model/encoder/layer.0/MatMul is of encoder.layer.0."""
    path: str = node.name.rpartition("/")[0]
    return path.removeprefix("/model/").replace("/", ".")


def _session(proto: Any, runtime: Any) -> Any:
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    return runtime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _compare(proto: Any, plain: _Plain, batch: Batch, runtime: Any) -> None:
    """Raises InputError unless the graph gives what the model gives, on a batch of another size than was traced."""
    values = plain.complete(batch)
    with torch.no_grad():
        wanted = plain(*map(torch.from_numpy, values.values()))
    for want, got in zip(wanted, _session(proto, runtime).run(plain.outputs, values), strict=True):
        off = float(np.abs(want.numpy() - got).max())
        if not off <= CLOSE * max(1.0, float(want.abs().max())):
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
    bias: str | None  # of a Gemm; a MatMul is followed by its own sum

    @property
    def input(self) -> str:
        return str(self.node.input[0])

    @property
    def weight(self) -> str:
        return str(self.node.input[1])

    @property
    def output(self) -> str:
        """What comes out before the columns are scaled."""
        return f"{self.node.output[0]}_product"


def _products(proto: Any, model: nn.Module, onnx: Any) -> list[_Product]:
    """The products with the matrices of the model's blocks, quantized."""
    blocks = {matrix.module for matrix in matrices(model).values() if matrix.role == "matrix"}
    weights = {tensor.name: tensor for tensor in proto.graph.initializer}
    products = []
    for node in proto.graph.node:
        if node.op_type not in ("MatMul", "Gemm") or node.input[1] not in weights or _module(node) not in blocks:
            continue
        weight = torch.from_numpy(onnx.numpy_helper.to_array(weights[node.input[1]]).copy())
        flipped = any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
        codes, scales = quantize(weight if flipped else weight.T)
        largest = scales.max().clamp_min(torch.finfo(torch.float32).tiny)
        columns = torch.where(scales > 0, scales / largest, 1.0)
        bias = node.input[2] if len(node.input) > 2 else None
        products.append(_Product(node, codes.T.contiguous().numpy(), largest.numpy(), columns.numpy(), bias))
    if lost := blocks - {_module(product.node) for product in products}:
        raise InputError(f"{type(model).__name__} cannot be written as ONNX: its graph lacks {min(lost)}.")
    return products


def _ranges(
    proto: Any, products: list[_Product], batches: Iterable[dict[str, Any]], onnx: Any, runtime: Any
) -> dict[str, tuple[float, float]]:
    """The least and the largest value, over the batches, of what goes into each product and of what comes out.

    Zero is always among them, so that it is exact. Measured inside the graph: no activations pile up.
    """
    watched = _rebuilt(proto, products, _in_fp32, onnx)
    names = list(dict.fromkeys(name for product in products for name in (product.input, product.output)))
    ends = [f"{name}_{end}" for name in names for end in ("min", "max")]
    del watched.graph.output[:]
    for name in names:
        for operator, end in (("ReduceMin", "min"), ("ReduceMax", "max")):
            watched.graph.node.append(onnx.helper.make_node(operator, [name], [f"{name}_{end}"], keepdims=0))
            kind = onnx.TensorProto.FLOAT
            watched.graph.output.append(onnx.helper.make_tensor_value_info(f"{name}_{end}", kind, []))
    session = _session(watched, runtime)
    seen = [np.stack(session.run(ends, batch)) for batch in batches]
    if not seen:
        raise InputError("the INT8 file needs at least one batch: give some rows of the training data.")
    extremes = np.stack([np.zeros_like(seen[0]), *seen])
    least, most = extremes.min(0)[::2], extremes.max(0)[1::2]
    return {name: (float(a), float(b)) for name, a, b in zip(names, least, most, strict=True)}


Constants = dict[str, Any]


def _in_fp32(product: _Product, onnx: Any) -> tuple[list[Any], Constants]:
    """The product as INT8 will have its matrix, in fp32."""
    name = f"{product.weight}_rounded"
    node = onnx.helper.make_node("MatMul", [product.input, name], [product.output], name=product.node.name)
    return [node], {name: product.codes * product.scale}


def _in_int8(product: _Product, onnx: Any, *, ranges: Mapping[str, tuple[float, float]]) -> tuple[list[Any], Constants]:
    """The product as QLinearMatMul, between a quantized input and an output made float again."""
    make, given, made, weight = onnx.helper.make_node, product.input, product.output, product.weight
    constants = {f"{weight}_codes": product.codes, f"{weight}_scale": product.scale, f"{weight}_zero": np.int8(0)}
    for name in (given, made):
        low, high = ranges[name]
        scale = np.float32((high - low) / 255 or 1.0)
        constants |= {f"{name}_scale": scale, f"{name}_zero": np.uint8(np.clip(np.rint(-low / scale), 0, 255))}
    before, after = ([f"{name}_scale", f"{name}_zero"] for name in (given, made))
    matrix = [f"{weight}_codes", f"{weight}_scale", f"{weight}_zero"]
    quantized, whole = f"{given}_quantized", f"{made}_quantized"
    nodes = [
        make("QuantizeLinear", [given, *before], [quantized], name=f"{given}_quantize"),
        make("QLinearMatMul", [quantized, *before, *matrix, *after], [whole], name=product.node.name),
        make("DequantizeLinear", [whole, *after], [made], name=f"{made}_dequantize"),
    ]
    return nodes, constants


def _rebuilt(
    proto: Any, products: list[_Product], multiply: Callable[[_Product, Any], tuple[list[Any], Constants]], onnx: Any
) -> Any:
    """A copy of the graph with every product remade as y = columns ⊙ multiply(x) + b."""
    make = onnx.helper.make_node
    constants: Constants = {}
    nodes: dict[str, Any] = {}  # by output, since products share what quantizes their input
    replaced = {product.node.output[0]: product for product in products}
    for node in proto.graph.node:
        product = replaced.get(node.output[0])
        if product is None:
            nodes[node.output[0]] = node
            continue
        inner, numbers = multiply(product, onnx)
        constants |= numbers | {f"{product.weight}_columns": product.columns}
        target = node.output[0] if product.bias is None else f"{node.output[0]}_scaled"
        inner.append(make("Mul", [product.output, f"{product.weight}_columns"], [target], name=f"{target}_columns"))
        if product.bias is not None:
            inner.append(make("Add", [target, product.bias], [node.output[0]], name=f"{target}_bias"))
        nodes |= {new.output[0]: new for new in inner if new.output[0] not in nodes}
    used = {name for node in nodes.values() for name in node.input}
    kept = [tensor for tensor in proto.graph.initializer if tensor.name in used]
    kept += [onnx.numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = onnx.helper.make_graph(nodes.values(), proto.graph.name, proto.graph.input, proto.graph.output, kept)
    made = onnx.helper.make_model(graph, opset_imports=proto.opset_import, producer_name=proto.producer_name)
    made.ir_version = proto.ir_version
    return made


def _write(path: Path, proto: Any, onnx: Any) -> None:
    onnx.checker.check_model(proto)
    with path.open("wb") as file:
        file.write(proto.SerializeToString())
        file.flush()
        os.fsync(file.fileno())


def _moved(fresh: Path, folder: Path) -> list[Path]:
    """Moves all files of one folder into another; the models are named first."""
    paths = [path for path in fresh.rglob("*") if path.is_file()]
    targets = []
    for path in sorted(paths, key=lambda path: (path.name not in (FP32, INT8), path.name != FP32, path.name)):
        targets.append(folder / path.relative_to(fresh))
        targets[-1].parent.mkdir(exist_ok=True)
        path.replace(targets[-1])
    return targets
