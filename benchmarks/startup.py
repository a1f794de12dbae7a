"""What a deployment costs without torch: installed size, time from import to the first answer, resident memory.

python benchmarks/startup.py RUN/export          # builds the wheel and makes a venv: needs a compiler and PyPI
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FIRST = """
import sys, time
start = time.perf_counter()
import pinscher
engine = pinscher.Engine(sys.argv[1])
read = time.perf_counter()
engine.vectors(engine.tokenizer(["a gripping, funny film"]).ids)
done = time.perf_counter()
import json, resource
parts = [matrix.bytes for layer in engine._model.core.packed for matrix in layer]
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps({
    "engine_seconds": read - start, "first_seconds": done - start, "matrices_mb": sum(parts) / 1e6,
    "resident_mb": int(status["VmRSS"].split()[0]) / 1e3,
    "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3, "torch": "torch" in sys.modules,
}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", name, str(ROOT)], check=True)
        (wheel,) = place.glob("*.whl")
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", place / "venv"], check=True)
        python = place / "venv" / "bin" / "python"
        subprocess.run([*pip, "--python", str(python), "install", str(wheel)], check=True)
        site = place / "venv" / "lib"
        size = sum(path.stat().st_size for path in site.rglob("*") if path.is_file() and path.suffix != ".pyc")
        print(f"wheel {wheel.stat().st_size / 1e6:.1f} MB, installed {size / 1e6:.1f} MB")
        for _ in range(args.turns):
            command = [python, "-c", FIRST, args.folder.resolve()]
            found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, cwd=name).stdout)
            assert not found.pop("torch")
            print("  ".join(f"{key} {value:.2f}" for key, value in found.items()), flush=True)


if __name__ == "__main__":
    main()
