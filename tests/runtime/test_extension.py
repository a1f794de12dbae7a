"""A new instruction set is one native/kernels_X.cpp and one row in native/isas.inc: nothing else names a set."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from pinscher import native
from pinscher.runtime import choice
from pinscher.runtime.kernels import Weights

ROOT = Path(__file__).resolve().parents[2]
NATIVE = ROOT / "native"
CORE = native.core()
ROW = re.compile(r"^ISA\((\w+), ([\d.]+), ([\d.]+), ([\d.]+), ([\d.]+)\)$", re.MULTILINE)
COSTING = ("f32", "i8", "groups", "dense8")  # beside "dense", which costs 1
ROWS = {
    name: {"dense": 1.0} | {kind: float(cost) for kind, cost in zip(COSTING, costs, strict=True)}
    for name, *costs in ROW.findall((NATIVE / "isas.inc").read_text())
}

# Every row of the list, which set is taken without being asked for, and what the first one computes beside the last.
PROGRAM = """
#include "kernels.h"
#include <cstdio>

int main() {
  const auto& every = pinscher::all_isas();
  for (const auto& isa : every) {
    const auto [f32, i8, groups, dense8] = isa.costs;
    std::printf("%s %g %g %g %g\\n", isa.kernels.name, f32, i8, groups, dense8);
  }
  std::printf("taken %s\\n", pinscher::kernels()->name);
  const pinscher::Line line{0, 3};
  const uint8_t at[] = {0, 1, 2};
  const float values[] = {0.5f, -2.0f, 3.0f};
  static float x[3 * pinscher::TILE], y[2][pinscher::TILE];
  for (size_t i = 0; i < 3 * pinscher::TILE; ++i) x[i] = 0.25f * static_cast<float>(i);
  const pinscher::Kernels* sets[] = {&every.front().kernels, &every.back().kernels};
  for (int i = 0; i < 2; ++i) sets[i]->spmm_f32({&line, 1, at, values}, x, y[i], 5);
  for (int i = 0; i < 5; ++i) std::printf("product %g %g\\n", y[0][i], y[1][i]);
}
"""


def test_every_set_has_its_file_and_its_row():
    assert {path.stem.removeprefix("kernels_") for path in NATIVE.glob("kernels_*.cpp")} == set(ROWS)


def test_the_extension_has_the_rows_of_this_architecture():
    compiled = CORE.isas(all=True)
    assert compiled == [name for name in ROWS if name in compiled]  # in the order of the list, the widest first
    assert compiled[-1] == list(ROWS)[-1] == CORE.isas()[-1]  # which runs anywhere
    assert {name: CORE.costs(name) for name in compiled} == {name: ROWS[name] for name in compiled}
    with pytest.raises(ValueError, match="no such instruction set"):
        CORE.costs("abacus")


def of_groups(kept: int, each: int = 4) -> Weights:
    """A matrix of 100 groups of four inputs, of which some hold so many nonzeros each."""
    weight = torch.zeros(100, 4)
    weight[:kept, :each] = 1
    return Weights(dense=weight.view(10, 40).numpy())


@pytest.mark.parametrize("isa", CORE.isas())
@pytest.mark.parametrize("each", [1, 2, 3, 4])
def test_every_set_decides_by_its_own_row(isa, each, monkeypatch):
    """The kind that costs least of those with activations of enough bits, whatever is kept."""
    monkeypatch.setenv("PINSCHER_ISA", isa)
    assert native.isa() == isa
    row = ROWS[isa]
    for kept in range(1, 101):
        cost = {
            "groups": row["groups"] * kept,
            "dense8": row["dense8"] * 100,
            "i8": row["i8"] * kept * each,
            "f32": row["f32"] * kept * each,
            "dense": 400,
        }
        for bits, allowed in ((8, list(cost)), (16, ["i8", "f32", "dense"]), (32, ["f32", "dense"])):
            found = choice.kind_of(of_groups(kept, each), bits)
            assert found in allowed
            assert cost[found] == min(cost[kind] for kind in allowed)


def test_no_other_file_names_a_set():
    """Dispatch, tests, benchmarks and builds take sets from the list; only the portable one is known everywhere."""
    files = [*ROOT.glob("src/pinscher/**/*.py"), *ROOT.glob("tests/**/*.py"), *ROOT.glob("benchmarks/*.py")]
    files += [ROOT / "CMakeLists.txt", ROOT / "Makefile", *NATIVE.iterdir()]
    sets = "|".join(list(ROWS)[:-1])
    named = re.compile(rf"[\"']({sets})[\"']|kernels_({sets})|({sets})_kernels")
    naming = {path.name for path in files if named.search(re.sub("//.*", "", path.read_text()))}
    hides = {"hide_avx512.py"}  # its purpose is one machine
    assert naming == {f"kernels_{name}.cpp" for name in list(ROWS)[:-1]} | hides


def test_a_set_of_ones_own_is_compiled_listed_and_taken(tmp_path):
    """The portable set under another name, as the widest."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.fail("this test needs a C++ compiler, as the native code does: install g++, or set CXX")
    for path in [*NATIVE.glob("kernels*"), *NATIVE.glob("*.inc")]:
        shutil.copy(path, tmp_path)
    (tmp_path / "kernels_madeup.cpp").write_text(
        (NATIVE / "kernels_scalar.cpp").read_text().replace("scalar", "madeup")
    )
    rows = (NATIVE / "isas.inc").read_text()
    (tmp_path / "isas.inc").write_text(rows.replace("#if", "ISA(madeup, 0.5, 0.25, 3, 2)\n#if", 1))
    (tmp_path / "program.cpp").write_text(PROGRAM)
    sources = sorted(path.name for path in tmp_path.glob("*.cpp"))
    subprocess.run([compiler, "-std=c++17", "-O0", *sources, "-o", "program"], cwd=tmp_path, check=True)
    said = subprocess.check_output([tmp_path / "program"], text=True).splitlines()
    listed = [line.split() for line in said if not line.startswith(("taken", "product"))]
    assert [name for name, *_ in listed] == ["madeup", *CORE.isas(all=True)]
    assert [float(number) for number in listed[0][1:]] == [0.5, 0.25, 3, 2]
    assert "taken madeup" in said
    products = np.array([line.split()[1:] for line in said if line.startswith("product")], float)
    x = 0.25 * np.arange(3 * 64).reshape(3, 64)[:, :5]
    assert (products == (np.array([0.5, -2, 3]) @ x)[:, None]).all()
