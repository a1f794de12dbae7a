"""Times a pruned model in each engine, and compares the answers: a table, JSON, a picture and a recommendation.

Every engine is a process of its own; they take turns, one call each, so that a busy moment of the machine hits all.
"""

from __future__ import annotations

import importlib.util
import io
import itertools
import logging
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from pinscher.errors import InputError
from pinscher.files import write_bytes
from pinscher.models.families import family_of
from pinscher.registry import unknown
from pinscher.runtime import engines
from pinscher.runtime.engines import Arrays, Worker
from pinscher.store import onnx, saving

SHAPES = tuple((batch, length) for batch in (1, 8) for length in (32, 128, 384))
LEAST, MOST, CALLS = 4, 20, 2  # rounds, and calls of an engine in each that count, at least
PAUSE, WARM, TURN = 0.1, 0.15, 0.15  # seconds: before a turn, of calls that do not count, of calls that do
CLOSE = 0.02  # of the range of a regression's answers: nearer ones are the same
AGREE = 0.995  # of the answers must be torch's for an engine to be recommended


def available(wanted: list[str] | None = None) -> list[str]:
    """The engines that can run here; asked for by name, one that cannot is an error."""
    for name in wanted or []:
        if name not in engines.BUILD:
            raise InputError(unknown("engine", name, engines.BUILD) + ".")
        if missing := _missing(name):
            raise InputError(f"the engine {name} needs {missing[0]}. Install it with: pip install {' '.join(missing)}")
    if wanted:
        return ["torch", *(name for name in wanted if name != "torch")]  # the others are compared with it
    return [name for name in engines.BUILD if not _missing(name)]


def left_out() -> str:
    """Which engines cannot run here, and how to install what they need; nothing if all can."""
    found = {name: missing for name in engines.BUILD if (missing := _missing(name))}
    packages = dict.fromkeys(itertools.chain.from_iterable(found.values()))
    return f"not installed: {', '.join(found)} (pip install {' '.join(packages)})" if found else ""


def _missing(engine: str) -> list[str]:
    """The packages that an engine needs and that are not installed."""
    return [name for name in engines.PACKAGES.get(engine, ()) if importlib.util.find_spec(name) is None]


def prepare(
    model: Any, tokenizer: Any, folder: Path, names: list[str], say: Callable[[str], None], batches: Any = None
) -> dict[str, int]:
    """Writes what the engines read; gives the bytes on disk of every engine that can have the model."""
    wanted = {engines.FILES[name] for name in names}
    if "plain" in wanted:
        model.save_pretrained(folder / "plain")
    for values, name in (("fp32", "small-fp32"), ("int8", "small-int8")):
        if name in wanted:
            saving.save_pretrained(model, folder / name, values=values)
    if any(path.startswith(("onnx", "openvino")) for path in wanted):
        (folder / "onnx").mkdir()
        try:
            onnx.export(model, folder / "onnx", tokenizer, task_batches=batches)
            if any(path.startswith("openvino") for path in wanted):
                _convert(model, folder, batches, quantised=engines.FILES["openvino-int8"] in wanted)
            if any(path.startswith("onnx") for path in wanted):
                _fuse(model, folder / "onnx")
        except InputError as error:
            say(f"without ONNX and OpenVINO: {error}")
            names = [name for name in names if not engines.FILES[name].startswith(("onnx", "openvino"))]
    return {name: _size(folder / engines.FILES[name]) for name in names}


def _convert(model: Any, folder: Path, batches: Any, quantised: bool) -> None:
    """What users of OpenVINO do: convert the model, and quantise it with NNCF on rows of the task if there are any."""
    openvino = importlib.import_module("openvino")
    converted = openvino.Core().read_model(folder / "onnx" / onnx.FP32)
    openvino.save_model(converted, folder / engines.FILES["openvino"], compress_to_fp16=False)
    if not quantised:
        return
    nncf = importlib.import_module("nncf")
    logging.getLogger("nncf").setLevel(logging.ERROR)
    names = {name for port in converted.inputs for name in port.names}
    rows = [{name: np.asarray(value) for name, value in batch.items() if name in names} for batch in batches or ()]
    rows = rows or [{name: v for name, v in inputs_of(model, 8, 64).items() if name in names}]
    made = nncf.quantize(converted, nncf.Dataset(rows), model_type=nncf.ModelType.TRANSFORMER, subset_size=len(rows))
    openvino.save_model(made, folder / engines.FILES["openvino-int8"])


def _fuse(model: Any, folder: Path) -> None:
    """What users of ONNX Runtime do: fuse the nodes of attention and norms, and quantise the weights dynamically."""
    import onnxruntime
    from onnxruntime.quantization import QuantType, quantize_dynamic

    onnxruntime.set_default_logger_severity(3)  # it warns of what its own tools leave behind
    logging.getLogger().setLevel(logging.ERROR)
    family = family_of(model)
    if family is not None and family.onnx_fusion:
        from onnxruntime.transformers.fusion_options import FusionOptions
        from onnxruntime.transformers.optimizer import optimize_model

        plain, divided = folder / "plain.onnx", folder / "divided.onnx"
        shutil.move(folder / onnx.FP32, plain)
        _divide(plain, divided)
        kind, heads = family.onnx_fusion, getattr(model.config, family.heads)
        how = FusionOptions(kind)
        how.use_raw_attention_mask(True)
        sizes = {"num_heads": heads, "hidden_size": model.config.hidden_size}
        fused = optimize_model(str(divided), kind, **sizes, optimization_options=how)
        fused.save_model_to_file(str(folder / onnx.FP32))
    how = {"DefaultTensorType": 1}  # fp32, for what comes out of a fused node
    files = folder / onnx.FP32, folder / "dynamic.onnx"
    quantize_dynamic(*files, per_channel=True, weight_type=QuantType.QInt8, extra_options=how)


def _divide(path: Path, target: Path) -> None:
    """Scores are multiplied by 1/√d; ONNX Runtime only knows attention where they are divided by √d."""
    import onnx as package

    proto = package.load(str(path))
    made = {name: node for node in proto.graph.node for name in node.output}
    for softmax in [node for node in proto.graph.node if node.op_type == "Softmax"]:
        scaled = made[made[softmax.input[0]].input[0]]
        if scaled.op_type == "Mul":
            factor = package.numpy_helper.to_array(made[scaled.input[1]].attribute[0].t)
            inverse = package.numpy_helper.from_array(np.asarray(1 / factor, np.float32), f"{scaled.name}_inverse")
            proto.graph.initializer.append(inverse)
            scaled.op_type, scaled.input[1] = "Div", inverse.name
    package.save(proto, str(target))


def _size(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size + (path.with_suffix(".bin").stat().st_size if path.suffix == ".xml" else 0)
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


@contextmanager
def workers(
    names: list[str], files: Path, threads: int, probe: Arrays, say: Callable[[str], None]
) -> Iterator[dict[str, Worker]]:
    """The engines, ready; one that cannot start or answer the probe is named and left out, unless it is torch."""
    with ExitStack() as stack:
        ready: dict[str, Worker] = {}
        for name in names:
            try:
                worker = engines.start(name, files, threads)
                stack.callback(worker.close)
                worker.run(probe)  # torch.compile compiles only now
                ready[name] = worker
            except InputError as error:
                if name == "torch":
                    raise
                say(str(error))
        yield ready


def inputs_of(model: Any, batch: int, length: int) -> Arrays:
    """Random tokens, always the same, nothing masked."""
    random = np.random.default_rng(0)
    ids = random.integers(5, model.config.vocab_size, (batch, length))
    found = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    family = family_of(model)
    has_types = family is not None and family.tokenizer_gives_types
    return found | ({"token_type_ids": np.zeros_like(ids)} if has_types else {})


def measure(ready: dict[str, Worker], inputs: Arrays, seconds: float) -> dict[str, dict[str, Any]]:
    """Latency and throughput of each engine on one batch; they take turns, for about `seconds` in all.

    A turn is a slice of time, the same for fast and slow engines: calls that warm up, then calls that count. Before it
    there is a pause, in which the threads of the engine before it fall asleep: some wait awake for a while and would
    take a core from the next.
    """
    took: dict[str, list[list[float]]] = {name: [] for name in ready}  # the calls of each turn
    rounds, total, started = 0, MOST, time.perf_counter()
    while rounds < total:
        for name, worker in ready.items():
            time.sleep(PAUSE)
            _calls(worker, inputs, WARM, 1)
            took[name].append(_calls(worker, inputs, TURN, CALLS))
        rounds += 1
        if rounds == 1:
            total = max(LEAST, min(MOST, int(seconds / (time.perf_counter() - started))))
    rows = len(inputs["input_ids"])
    found: dict[str, dict[str, Any]] = {}
    for name, turns in took.items():
        kept = sorted(itertools.chain.from_iterable(turns))
        middle = statistics.median(kept)
        late = kept[min(len(kept) - 1, int(0.95 * len(kept)))]
        found[name] = {"p50_ms": 1e3 * middle, "p95_ms": 1e3 * late, "rows_per_second": rows / middle}
        found[name]["turns_ms"] = [1e3 * statistics.median(turn) for turn in turns]
    return found


def times_as_fast(fast: dict[str, Any], slow: dict[str, Any]) -> float:
    """The median over all rounds of slow / fast, so that what slows a round down falls on both sides."""
    turns: Iterator[tuple[float, float]] = zip(fast["turns_ms"], slow["turns_ms"], strict=True)
    return statistics.median(b / a for a, b in turns)


def _calls(worker: Worker, inputs: Arrays, seconds: float, least: int) -> list[float]:
    """The seconds of each call, for at least `seconds` and at least `least` calls."""
    took: list[float] = []
    while len(took) < least or sum(took) < seconds:
        took.append(worker.run(inputs)[0])
    return took


def agreement(ready: dict[str, Worker], batches: list[Arrays]) -> dict[str, dict[str, float]]:
    """How often each engine gives torch's answer, and the largest difference of an output, over some batches."""
    said: dict[str, list[Any]] = {
        name: [next(iter(worker.run(batch, outputs=True)[1].values())) for batch in batches]
        for name, worker in ready.items()
    }
    wanted = np.concatenate([part.reshape(-1, part.shape[-1]) for part in said["torch"]])
    found = {}
    for name, parts in said.items():
        got = np.concatenate([part.reshape(-1, part.shape[-1]) for part in parts])
        same = are_close(got, wanted) if wanted.shape[-1] == 1 else got.argmax(-1) == wanted.argmax(-1)
        found[name] = {"same": float(same.mean()), "largest_difference": float(np.abs(got - wanted).max())}
    return found


def are_close(got: Any, wanted: Any) -> Any:
    """Which numbers are the same answer of a regression."""
    wanted = np.asarray(wanted, float)
    return np.abs(np.asarray(got, float) - wanted) <= CLOSE * np.ptp(wanted)


def advice(report: dict[str, Any]) -> str:
    """Which engine to use, in words; and which of the dense ones, for those who stay with a dense model."""
    lines = []
    for shape, engines_ in report["latency"].items():
        fit = {n: f["p50_ms"] for n, f in engines_.items() if report["agreement"][n]["same"] >= AGREE}
        best = min(fit, key=fit.__getitem__)
        dense = min((name for name in fit if engines.is_dense(name)), key=fit.__getitem__)
        gain = engines_["torch"]["p50_ms"] / fit[best]
        if best == "torch":
            lines.append(f"{shape}: stay with PyTorch; no engine with the same answers is faster.")
        elif best == dense:
            lines.append(f"{shape}: {best}, a dense engine, {gain:.1f} times as fast as PyTorch.")
        else:
            over = (
                ""
                if dense == "torch"
                else f", and {fit[dense] / fit[best]:.1f} times as {dense}, the fastest dense one"
            )
            lines.append(f"{shape}: {best}, {gain:.1f} times as fast as PyTorch{over}.")
    left = [n for n, found in report["agreement"].items() if found["same"] < AGREE]
    if left:
        lines.append(
            f"Not recommended, because fewer than {AGREE:.1%} of their answers are PyTorch's: {', '.join(left)}."
        )
    return "\n".join(lines)


def draw(report: dict[str, Any], path: Path) -> None:
    """Latency of each engine for each shape, as bars; shorter is better."""
    from matplotlib.figure import Figure

    shapes = list(report["latency"])
    figure = Figure(figsize=(3.2 * min(3, len(shapes)), 2.6 * -(-len(shapes) // 3)), layout="constrained")
    axes = np.atleast_1d(figure.subplots(-(-len(shapes) // 3), min(3, len(shapes)))).ravel()
    for axis, shape in zip(axes, shapes, strict=False):
        found = report["latency"][shape]
        names = list(found)[::-1]
        values = [found[name]["p50_ms"] for name in names]
        colors = ["#d55e00" if name.startswith("pinscher") else "#7f8fa6" for name in names]
        bars = axis.barh(names, values, color=colors)
        axis.bar_label(bars, [f"{value:.1f}" for value in values], padding=2, fontsize=7)
        axis.set_xlim(0, 1.2 * max(values))
        axis.set_title(shape, fontsize=9)
        axis.tick_params(labelsize=7)
        axis.set_xlabel("ms, median", fontsize=7)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    for axis in axes[len(shapes) :]:
        axis.set_visible(False)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=150)
    write_bytes(path, drawn.getvalue())
