"""Makes every engine of latency.py believe that the processor has AVX2 and nothing newer: no AVX-512, no VNNI.

The bounds of latency.py were set on such a machine. torch, oneDNN, MKL and pinscher are told by variables, DeepSparse
by a description of the machine, which its own arch.bin writes. ONNX Runtime asks the processor and cannot be told: it
gets a copy of itself, for this run only, in which hide_avx512.c gives the answer.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TOLD = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "NM_ARCH": "avx2",
    "PINSCHER_ISA": "avx2",
}
CPUID, TRAP = b"\x0f\xa2", b"\x0f\x0b"  # of the same length
NEWER = ("vnni", "vbmi", "vbmi2", "bf16")


def variables(scratch: Path, deepsparse: Path | None) -> dict[str, str]:
    """What to add to the environment of the engines; files that they need go into `scratch`."""
    shim = scratch / "hide_avx512.so"
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", str(shim), str(HERE / "hide_avx512.c")], check=True)
    path = os.pathsep.join(filter(None, [str(_onnxruntime(scratch)), os.environ.get("PYTHONPATH")]))
    found = TOLD | {"LD_PRELOAD": str(shim), "PYTHONPATH": path}
    if deepsparse is not None:
        found["NM_ARCH_FILE"] = str(_description(scratch, deepsparse))
    return found


def _onnxruntime(scratch: Path) -> Path:
    spec = find_spec("onnxruntime")
    assert spec is not None
    assert spec.origin is not None
    shutil.copytree(Path(spec.origin).parent, scratch / "plain" / "onnxruntime")
    [library] = (scratch / "plain" / "onnxruntime" / "capi").glob("onnxruntime_pybind11_state*.so")
    data = bytearray(library.read_bytes())
    for place in _places(library):
        assert data[place : place + 2] == CPUID
        data[place : place + 2] = TRAP
    library.write_bytes(data)
    return scratch / "plain"


def _places(library: Path) -> list[int]:
    """Where in the file cpuid stands."""
    listed = subprocess.run(["readelf", "-SW", str(library)], check=True, capture_output=True, text=True).stdout
    parts = re.findall(r"PROGBITS\s+([0-9a-f]+)\s+([0-9a-f]+)\s+([0-9a-f]+)", listed)
    sections = [tuple(int(number, 16) for number in part) for part in parts]  # address, place in the file, size
    code = ["objdump", "-d", "--no-show-raw-insn", str(library)]
    said = subprocess.run(code, check=True, capture_output=True, text=True).stdout
    addresses = [int(address, 16) for address in re.findall(r"^\s*([0-9a-f]+):\s+cpuid", said, re.MULTILINE)]
    assert addresses
    return [next(place + a - start for start, place, size in sections if start <= a < start + size) for a in addresses]


def _description(scratch: Path, deepsparse: Path) -> Path:
    [program] = deepsparse.glob("lib/python*/site-packages/deepsparse/arch.bin")
    said = subprocess.run([str(program), "--output=full"], check=True, capture_output=True, text=True).stdout
    machine: dict[str, Any] = json.loads(said)
    machine |= {"isa": "avx2", **{name: False for name in NEWER if name in machine}}
    path = scratch / "machine.json"
    path.write_text(json.dumps(machine))
    return path
