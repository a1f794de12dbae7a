"""Every engine in a process of its own: one run's threads, caches and memory are not another's.

    python -m pinscher.runtime.engines NAME FILES THREADS

A worker reads requests from standard input and answers on standard output; a message is a line of JSON, then the bytes
of the arrays that it lists. Whatever else an engine prints goes to standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np

from pinscher.errors import InputError

Arrays = dict[str, Any]
Run = Callable[[Arrays], Arrays]
FILES = {  # what an engine reads, below the folder of files
    "torch": "plain",
    "torch-bf16": "plain",
    "torch-int8": "plain",
    "torch-compile": "plain",
    "onnxruntime": "onnx/model.onnx",
    "onnxruntime-int8": "onnx/dynamic.onnx",
    "openvino": "openvino/fp32.xml",
    "openvino-bf16": "openvino/fp32.xml",
    "openvino-int8": "openvino/int8.xml",
    "pinscher-fp32": "small-fp32",
    "pinscher-w8a8": "small-int8",
    "pinscher": "small-int8",
}
PACKAGES = {  # what an engine needs besides torch
    "torch-int8": ("torchao",),
    "onnxruntime": ("onnxruntime",),
    "onnxruntime-int8": ("onnxruntime",),
    "openvino": ("openvino",),
    "openvino-bf16": ("openvino",),
    "openvino-int8": ("openvino", "nncf"),
}


# ------------------------------------------------------------ engines


def _torch(path: Path, threads: int, *, dtype: str = "float32", compiled: bool = False, quantised: bool = False) -> Run:
    import torch
    import transformers

    torch.set_num_threads(threads)
    names = transformers.AutoConfig.from_pretrained(path).architectures
    model: Any = getattr(transformers, names[0]).from_pretrained(path).to(getattr(torch, dtype)).eval()
    if quantised:
        _quantise_(model)
    return _torch_run(torch.compile(model) if compiled else model)


def _quantise_(model: Any) -> None:
    """What users of torchao do: weights in INT8 by rows, activations in INT8 by tokens, before torch.compile."""
    torchao = importlib.import_module("torchao.quantization")
    torchao.quantize_(model, torchao.Int8DynamicActivationInt8WeightConfig())


def _torch_run(model: Any) -> Run:
    import torch

    def run(inputs: Arrays) -> Arrays:
        with torch.inference_mode():
            found = model(**{name: torch.from_numpy(value) for name, value in inputs.items()})
        return {name: value.float().numpy() for name, value in found.items() if name.endswith("logits")}

    return run


def _pinscher(path: Path, threads: int, mode: str) -> Run:
    import torch

    import pinscher

    torch.set_num_threads(threads)
    return _torch_run(pinscher.load(path, mode=mode, threads=threads))


def _onnxruntime(path: Path, threads: int) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    outputs = [output.name for output in session.get_outputs()]
    wanted = {value.name for value in session.get_inputs()}

    def run(inputs: Arrays) -> Arrays:
        given = {name: value for name, value in inputs.items() if name in wanted}
        return dict(zip(outputs, session.run(outputs, given), strict=True))

    return run


def _openvino(path: Path, threads: int, precision: str = "f32") -> Run:
    openvino = importlib.import_module("openvino")

    settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": precision, "PERFORMANCE_HINT": "LATENCY"}
    model = openvino.Core().compile_model(str(path), "CPU", settings)
    wanted = {name for port in model.inputs for name in port.names}

    def run(inputs: Arrays) -> Arrays:
        found = model({name: value for name, value in inputs.items() if name in wanted})
        return {next(iter(port.names)): np.asarray(value, np.float32) for port, value in found.items()}

    return run


BUILD: dict[str, Callable[[Path, int], Run]] = {
    "torch": _torch,
    "torch-bf16": lambda path, threads: _torch(path, threads, dtype="bfloat16"),
    "torch-int8": lambda path, threads: _torch(path, threads, compiled=True, quantised=True),
    "torch-compile": lambda path, threads: _torch(path, threads, compiled=True),
    "onnxruntime": _onnxruntime,
    "onnxruntime-int8": _onnxruntime,
    "openvino": _openvino,
    "openvino-bf16": lambda path, threads: _openvino(path, threads, "bf16"),
    "openvino-int8": _openvino,
    "pinscher-fp32": lambda path, threads: _pinscher(path, threads, "fp32"),
    "pinscher-w8a8": lambda path, threads: _pinscher(path, threads, "w8a8"),
    "pinscher": lambda path, threads: _pinscher(path, threads, "auto"),
}
assert BUILD.keys() == FILES.keys()


def is_dense(name: str) -> bool:
    """Whether an engine multiplies zeros as it does other weights."""
    return not name.startswith("pinscher")


# ------------------------------------------------------------ messages


def send(pipe: IO[bytes], message: dict[str, Any], arrays: Arrays) -> None:
    listed = [(name, str(value.dtype), value.shape) for name, value in arrays.items()]
    pipe.write(json.dumps({**message, "arrays": listed}).encode() + b"\n")
    for value in arrays.values():
        pipe.write(np.ascontiguousarray(value).tobytes())
    pipe.flush()


def receive(pipe: IO[bytes]) -> tuple[dict[str, Any], Arrays] | None:
    """A message, or None if the other side is gone."""
    line = pipe.readline()
    if not line:
        return None
    message = json.loads(line)
    arrays = {}
    for name, kind, shape in message["arrays"]:
        count = int(np.prod(shape)) * np.dtype(kind).itemsize
        arrays[name] = np.frombuffer(pipe.read(count), kind).reshape(shape).copy()
    return message, arrays


def peak_memory() -> int:
    """The most memory that this process has had, in bytes."""
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    return 1024 * int(found[1]) if found else 0


def work(run: Run, requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answers requests until there are no more."""
    while (message := receive(requests)) is not None:
        started = time.perf_counter()
        found = run(message[1])
        took = time.perf_counter() - started
        send(answers, {"seconds": took, "memory": peak_memory()}, found if message[0].get("outputs") else {})


class Worker:
    """An engine in its own process; a context manager."""

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  (a pipe that nobody reads would fill up)
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout
        self.memory = 0
        if receive(self._from) is None:
            self._fail()

    def run(self, inputs: Arrays, outputs: bool = False) -> tuple[float, Arrays]:
        """Seconds, and what the model says if asked for."""
        try:
            send(self._to, {"outputs": outputs}, inputs)
        except BrokenPipeError:
            self._fail()
        answer = receive(self._from)
        if answer is None:
            self._fail()
        assert answer is not None
        self.memory = answer[0]["memory"]
        return answer[0]["seconds"], answer[1]

    def _fail(self) -> None:
        self._process.wait()
        self._said.seek(0)
        said = self._said.read().decode(errors="replace").strip().splitlines()
        raise InputError(f"the engine {self.name} failed: {said[-1] if said else 'it ended without a word'}")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._said.close()


def start(name: str, files: Path, threads: int) -> Worker:
    """A worker for an engine of BUILD."""
    module = "pinscher.runtime.engines"
    return Worker(name, [sys.executable, "-W", "ignore", "-m", module, name, str(files / FILES[name]), str(threads)])


def main() -> None:
    name, path, threads = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever libraries print must not stand between answers
    run = BUILD[name](path, threads)
    send(answers, {}, {})
    work(run, sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
