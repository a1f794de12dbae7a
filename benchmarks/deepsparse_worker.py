"""DeepSparse 1.8 as an engine of pinscher.runtime.engines; runs in an environment of its own (latency.py starts it).

python benchmarks/deepsparse_worker.py MODEL.onnx THREADS BATCH LENGTH
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

from pinscher.runtime.engines import Arrays, send, work


def main() -> None:
    path, threads, batch, length = sys.argv[1], *map(int, sys.argv[2:5])
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # before the import: it prints
    os.environ["NM_DISABLE_ANALYTICS"] = "1"  # likewise: it would ask the network
    from deepsparse import Engine

    with tempfile.TemporaryDirectory() as scratch:
        own = Path(scratch, "model.onnx")  # DeepSparse writes the shape into the file it is given
        shutil.copy(path, own)
        engine = Engine(str(own), batch_size=batch, num_cores=threads, input_shapes=[[batch, length]] * 3)
        names = engine.input_names

        def run(inputs: Arrays) -> Arrays:
            return {"logits": engine.run([np.ascontiguousarray(inputs[name]) for name in names])[0]}

        send(answers, {}, {})
        work(run, sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
