"""ONNX files give the model's outputs and keep its zeros; a failure leaves nothing behind."""

import copy
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper

from pinscher.errors import InputError
from pinscher.store.onnx import FP32, INT8, export
from pinscher.store.saving import matrices
from tiny_models import BERT, HEADS, VOCABULARY, Head

MORE = {
    "camembert": Head("classes", "CamembertForSequenceClassification", "CamembertConfig", BERT),
    "electra": Head("classes", "ElectraForSequenceClassification", "ElectraConfig", {**BERT, "embedding_size": 8}),
    "mpnet": Head("classes", "MPNetForSequenceClassification", "MPNetConfig", BERT),
    "mpnet-tokens": Head("tokens", "MPNetForTokenClassification", "MPNetConfig", BERT),
    "roberta-spans": Head("spans", "RobertaForQuestionAnswering", "RobertaConfig", BERT),
    "xlm-roberta": Head("tokens", "XLMRobertaForTokenClassification", "XLMRobertaConfig", BERT),
}
NOT_SUPPORTED = {"deberta-v2", "modernbert", "t5"}
SUPPORTED = {name: head for name, head in (HEADS | MORE).items() if name not in NOT_SUPPORTED}
SHAPES = [(1, 1), (1, 7), (3, 12), (5, 24)]


def pruned(head="bert", share=0.8, **settings):
    """A tiny model, most weights of its blocks exact zeros."""
    model = SUPPORTED[head].make(**settings).eval()
    with torch.no_grad():
        for name, matrix in matrices(model).items():
            if matrix.role == "matrix":
                weight = model.get_parameter(name)
                weight[weight.abs() <= weight.abs().flatten().kthvalue(int(share * weight.numel())).values] = 0
    return model


def batches(model, shapes=SHAPES, seed=3):
    """Random rows, the first of each batch padded, with token types where the model reads them."""
    generator = torch.Generator().manual_seed(seed)
    for rows, columns in shapes:
        ids = torch.randint(3, VOCABULARY, (rows, columns), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, columns // 2 + 1 :] = 0
        batch = {"input_ids": ids.masked_fill(mask == 0, model.config.pad_token_id), "attention_mask": mask}
        yield batch | ({"token_type_ids": ids % 2} if model.config.model_type in ("bert", "electra") else {})


def outputs(model, batch):
    with torch.no_grad():
        found = model(**batch)
    names = ["start_logits", "end_logits"] if "start_logits" in found else ["logits"]
    return [found[name].numpy() for name in names]


def run(path, batch):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, {name: value.numpy() for name, value in batch.items()})


def constants(proto):
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}


def products(proto, operators, place):
    """The constant matrix of each product of the blocks, by the name of its module."""
    known, found = constants(proto), {}
    for node in proto.graph.node:
        if node.op_type in operators and node.input[place] in known:
            found[node.name.rpartition("/")[0].removeprefix("/model/").replace("/", ".")] = known[node.input[place]]
    return found


def blocks(model):
    """The blocks' matrices [inputs, outputs] by module."""
    state = model.state_dict()
    return {
        matrix.path: (state[name] if matrix.transposed else state[name].T).numpy()
        for name, matrix in matrices(model).items()
        if matrix.role == "matrix"
    }


@pytest.fixture(scope="module", params=SUPPORTED)
def exported(request, tmp_path_factory):
    model, folder = pruned(request.param), tmp_path_factory.mktemp("onnx")
    assert export(model, folder, task_batches=batches(model, [(8, 24)] * 4, seed=5)) == [folder / FP32, folder / INT8]
    return model, folder


def test_fp32_gives_the_models_outputs_whatever_the_size_and_padding(exported):
    model, folder = exported
    for batch in batches(model):
        for want, got in zip(outputs(model, batch), run(folder / FP32, batch), strict=True):
            assert got.shape == want.shape
            assert np.abs(got - want).max() <= 1e-4


def test_int8_is_close(exported):
    model, folder = exported
    batch = next(batches(model, [(32, 24)]))
    for want, got in zip(outputs(model, batch), run(folder / INT8, batch), strict=True):
        assert got.shape == want.shape
        assert np.corrcoef(got.ravel(), want.ravel())[0, 1] >= 0.98


def test_zeros_stay_zeros(exported):
    model, folder = exported
    wanted = blocks(model)
    plain = products(onnx.load(folder / FP32), ("MatMul", "Gemm"), 1)
    codes = products(onnx.load(folder / INT8), ("QLinearMatMul",), 3)
    assert set(codes) == set(wanted) <= set(plain)
    for module, weight in wanted.items():
        assert np.array_equal(plain[module], weight)  # every zero, and every other number
        assert (weight == 0).mean() > 0.79
        assert codes[module].dtype == np.int8
        assert not codes[module][weight == 0].any()


def test_int8_has_one_scale_for_each_output(exported):
    model, folder = exported
    proto = onnx.load(folder / INT8)
    known, scaled = constants(proto), {node.input[0]: node for node in proto.graph.node if node.op_type == "Mul"}
    parts = {node.input[0]: node.output[0] for node in proto.graph.node if node.op_type == "DequantizeLinear"}
    rounded = {}
    for node in proto.graph.node:
        if node.op_type == "QLinearMatMul":
            codes, scale, zero = (known[name] for name in node.input[3:6])
            assert scale.shape == zero.shape == known[node.input[6]].shape == ()  # what DeepSparse asks for
            assert zero == 0
            columns = known[scaled[parts[node.output[0]]].input[1]]
            rounded[node.name.rpartition("/")[0].removeprefix("/model/").replace("/", ".")] = codes * scale * columns
    for module, weight in blocks(model).items():
        # within half a step of the column, or a little cut off at its end
        assert (np.abs(rounded[module] - weight) <= 0.16 * np.abs(weight).max(0) + 1e-9).all()
        error = np.square(rounded[module] - weight).sum() / np.square(weight).sum()
        assert error < 1e-4


def test_int8_is_in_operator_form(exported):
    _, folder = exported
    for name in (FP32, INT8):
        proto = onnx.load(folder / name)
        onnx.checker.check_model(proto, full_check=True)
        assert proto.ir_version <= 9
        assert [entry.domain for entry in proto.opset_import] == [""]
        assert proto.opset_import[0].version <= 18
    known = constants(proto)
    operators = {node.op_type for node in proto.graph.node}
    assert "QLinearMatMul" in operators
    assert not operators & {"MatMulInteger", "DynamicQuantizeLinear", "Identity"}
    assert not any(node.op_type == "DequantizeLinear" and node.input[0] in known for node in proto.graph.node)


def test_sizes_are_free(exported):
    _, folder = exported
    for name in (FP32, INT8):
        graph = onnx.load(folder / name).graph
        for value in [*graph.input, *graph.output]:
            dimensions = [size.dim_param for size in value.type.tensor_type.shape.dim]
            assert dimensions[0] == "batch"
            assert value.name in ("logits",) or dimensions[1] == "sequence"


def test_the_callers_model_is_untouched(tmp_path):
    model = pruned("gpt2-lm").train()
    before, config = copy.deepcopy(model.state_dict()), copy.deepcopy(model.config.to_dict())
    attention, random = model.config._attn_implementation, torch.get_rng_state()
    export(model, tmp_path)
    assert all(module.training for module in model.modules())
    assert model.config.to_dict() == config
    assert model.config._attn_implementation == attention != "eager"
    assert torch.equal(torch.get_rng_state(), random)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_matrices_without_a_weight_left(tmp_path):
    model = pruned()
    with torch.no_grad():
        for layer in model.bert.encoder.layer:  # equal matrices, which the exporter merges
            layer.attention.self.query.weight.zero_()
            layer.attention.self.key.weight.zero_()
    export(model, tmp_path)
    assert not products(onnx.load(tmp_path / INT8), ("QLinearMatMul",), 3)[
        "bert.encoder.layer.1.attention.self.key"
    ].any()
    batch = next(batches(model, [(3, 12)]))
    (want,), (fp32,), (int8,) = outputs(model, batch), run(tmp_path / FP32, batch), run(tmp_path / INT8, batch)
    assert np.abs(fp32 - want).max() <= 1e-4
    assert np.corrcoef(int8.ravel(), want.ravel())[0, 1] >= 0.98


def test_half_precision_is_written_as_fp32(tmp_path):
    model = pruned().bfloat16()
    export(model, tmp_path)
    batch = next(batches(model, [(3, 12)]))
    assert np.abs(run(tmp_path / FP32, batch)[0] - outputs(copy.deepcopy(model).float(), batch)[0]).max() <= 1e-4
    assert model.dtype == torch.bfloat16


def test_scales_come_from_the_batches(tmp_path):
    model, scales = pruned(), []
    rows = next(batches(model, [(8, 24)]))
    one = {"input_ids": rows["input_ids"][:1, :2], "labels": torch.tensor([1])}  # a mask and types are made up for it
    for given in (None, None, iter([rows]), [one]):
        export(model, tmp_path, task_batches=given, length=24)
        known = constants(onnx.load(tmp_path / INT8))
        scales.append(np.array([value for name, value in known.items() if name.endswith("_product_scale")]))
    assert np.array_equal(scales[0], scales[1])  # random tokens, but always the same
    assert not np.array_equal(scales[0], scales[2])
    assert scales[3].mean() < scales[2].mean()


class Words:
    """What a tokenizer is to the export."""

    def __init__(self, *names):
        self.model_input_names = ["input_ids", "attention_mask", *names]

    def save_pretrained(self, folder):
        if not self.model_input_names:
            raise OSError("no space left")
        Path(folder, "tokenizer.json").write_text("{}")


def test_a_tokenizer_names_the_inputs_and_goes_along(tmp_path):
    for words, number in ((Words(), 2), (Words("token_type_ids"), 3)):
        paths = export(pruned(), tmp_path, words)
        assert paths == [tmp_path / FP32, tmp_path / INT8, tmp_path / "tokenizer.json"]
        assert len(onnx.load(paths[1]).graph.input) == number
    assert sorted(path.name for path in tmp_path.iterdir()) == [INT8, FP32, "tokenizer.json"]


def test_a_failure_leaves_no_file(tmp_path, monkeypatch):
    words = Words()
    words.model_input_names = []  # it fails when it is saved, after both models
    with pytest.raises(OSError, match="no space"):
        export(pruned(), tmp_path, words)
    assert not list(tmp_path.iterdir())
    export(pruned(), tmp_path)
    kept = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(
            onnx.checker, "check_model", lambda proto: 1 / any("QLinear" in n.op_type for n in proto.graph.node)
        )
        with pytest.raises(ZeroDivisionError):
            export(pruned(seed=1), tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == kept


@pytest.mark.parametrize("name", ["onnx", "onnxruntime"])
def test_a_missing_package_is_named(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match=rf"{name}.*pip install 'pinscher\[onnx\]'"):
        export(pruned(), tmp_path)


@pytest.mark.parametrize("head", sorted(NOT_SUPPORTED))
def test_what_is_not_supported_is_refused(head, tmp_path):
    with pytest.raises(InputError, match="cannot be written as ONNX: supported are bert, camembert, distilbert"):
        export(HEADS[head].make(), tmp_path)


def test_bad_input_is_refused(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="supported are bert"):
        export(torch.nn.Linear(2, 2), tmp_path)
    with pytest.raises(InputError, match="is not a folder"):
        export(pruned(), tmp_path / "nowhere")
    with pytest.raises(InputError, match="at least one batch"):
        export(pruned(), tmp_path, task_batches=[])
    with pytest.raises(InputError, match="lacks input_ids: it has labels"):
        export(pruned(), tmp_path, task_batches=[{"labels": torch.tensor([1])}])
    with pytest.raises(InputError, match="length 0"):
        export(pruned(), tmp_path, length=0)
    with pytest.raises(InputError, match=r"set model\.config\.pad_token_id"):
        export(pruned("gpt2", pad_token_id=None), tmp_path)
    broken = pruned()
    broken.bert.encoder.layer[1].output.dense.weight.data[0, 0] = torch.nan
    with pytest.raises(InputError, match="are all weights finite"):
        export(broken, tmp_path)
    gated = pruned()
    torch.nn.utils.parametrizations.weight_norm(gated.classifier)
    with pytest.raises(InputError, match=r"call pruner\.finish"):
        export(gated, tmp_path)
    monkeypatch.setattr("pinscher.store.onnx.LIMIT", 10_000)
    with pytest.raises(InputError, match="too large for one ONNX file"):
        export(pruned(), tmp_path)
    assert not list(tmp_path.iterdir())
