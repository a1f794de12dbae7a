"""How small the file is and how fast it is read, against bounds computed from the same codes and against other ways
to store them.

    python benchmarks/storage.py --output benchmarks/results/storage.txt       # BERT-base's shapes: single weights, 1x4
    python benchmarks/storage.py --model RUN/model …                           # models that were pruned

Everything is counted that a file needs to give the weights back: scales, headers, checksums, names. The bounds count
only codes:

    order 0       the mask as independent bits of one density a matrix, the codes by their frequencies in the matrix
    conditional   each mask bit by the additive model logit p = a_row + b_column fitted to the matrix; codes as above

Where blocks were pruned, a mask has one bit a block, and all codes of the kept blocks count, zeros too. The bounds
count nothing for the scales, the frequencies or the fitted numbers themselves.

Timings are medians, the sides taking turns.
"""

from __future__ import annotations

import argparse
import gzip
import io
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import zstandard
from safetensors.torch import save
from torch import Tensor

from pinscher.store import blocks, file, payload, twoway
from pinscher.store.quantize import dequantize, quantize

Weights = dict[str, Tensor]
BERT = {"attention.query": (768, 768), "attention.key": (768, 768), "attention.value": (768, 768)}
BERT |= {"attention.output": (768, 768), "intermediate": (3072, 768), "output": (768, 3072)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, action="append", default=[], help="folder of a pruned model")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--no-speed", action="store_true")
    args = parser.parse_args()
    lines = [f"$ python benchmarks/storage.py {' '.join(shown(word) for word in sys.argv[1:])}", ""]
    if args.model:
        for folder in args.model:
            weights = pruned_weights(folder)
            zeros = 1 - sum(int((w != 0).sum()) for w in weights.values()) / sum(w.numel() for w in weights.values())
            lines += report(f"{len(weights)} matrices of {shown(str(folder))}, {zeros:.1%} zeros", weights, True, args)
    else:
        for block, sparsity in itertools.product(((1, 1), (1, 4)), (0.8, 0.9)):
            title = f"BERT-base's {6 * args.layers} matrices, N(0, 0.04), {sparsity:.0%} pruned by magnitude"
            title += f" in blocks of {block[0]}x{block[1]}" if block != (1, 1) else ""
            lines += report(title, synthetic(args.layers, sparsity, block), False, args)
    text = "\n".join(lines)
    print(text)
    if args.output:
        args.output.write_text(text + "\n")


def shown(word: str) -> str:
    """A path without the machine it is on."""
    return "/".join(Path(word).parts[-2:]) if word.startswith("/") else word


def synthetic(layers: int, sparsity: float, block: tuple[int, int]) -> Weights:
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"bert.encoder.layer.{i}.{name}.weight": torch.randn(shape, generator=generator) * 0.04
        for i in range(layers)
        for name, shape in BERT.items()
    }
    tall, wide = block
    sizes = {n: w.abs().unflatten(0, (-1, tall)).unflatten(2, (-1, wide)).sum((1, 3)) for n, w in weights.items()}
    size = torch.cat([each.flatten() for each in sizes.values()]).numpy()
    at = int(sparsity * size.size)
    threshold = float(np.partition(size, at)[at])
    kept = {n: torch.from_numpy(blocks.spread((each >= threshold).numpy(), block)) for n, each in sizes.items()}
    return {name: torch.where(kept[name], w, 0.0) for name, w in weights.items()}


def pruned_weights(folder: Path) -> Weights:
    """The matrices of a model's blocks."""
    from transformers import AutoModel

    from pinscher.store.saving import matrices

    model = AutoModel.from_pretrained(folder)
    state = model.state_dict()
    return {name: state[name] for name, matrix in matrices(model).items() if matrix.role == "matrix"}


# ------------------------------------------------------------ sizes


def bounds(codes: dict[str, np.ndarray], shapes: dict[str, tuple[int, int]], conditional: bool) -> tuple[float, float]:
    """Bytes of the two bounds; `shapes` says in what blocks each matrix was pruned."""
    values = order0 = given = 0.0
    for name, matrix in codes.items():
        kept = blocks.joined(matrix != 0, shapes[name])
        coded = matrix[blocks.spread(kept, shapes[name])]
        values += twoway.entropy(np.bincount(coded.view(np.uint8), minlength=256)) / 8
        ones = int(kept.sum())
        order0 += twoway.entropy(np.array([ones, kept.size - ones])) / 8
        if conditional:
            alpha, beta = twoway.logits(kept, rounds=30)
            p = 1 / (1 + np.exp(-(alpha.astype(np.float64)[:, None] + beta)))
            given += -np.log2(np.clip(np.where(kept, p, 1 - p), 1e-12, 1)).sum() / 8
    return values + order0, values + given


def csr(matrix: np.ndarray, index: str) -> int:
    return matrix.shape[0] * 4 + 4 + int((matrix != 0).sum()) * (1 + np.dtype(index).itemsize)


def others(codes: dict[str, np.ndarray], weights: Weights, scales: bytes) -> dict[str, int]:
    """What the same codes, or the same fp32 weights, take elsewhere; codes come with our own packed scales."""
    masks = b"".join(np.packbits(m != 0).tobytes() for m in codes.values())
    values = b"".join(m[m != 0].tobytes() for m in codes.values())
    squeezed = {name: dequantize(*quantize(w, search=False)) for name, w in weights.items()}
    buffer = io.BytesIO()
    torch.save(squeezed, buffer)
    zstd = zstandard.ZstdCompressor(level=19)
    return {
        "torch.save, fp32": buffer.getbuffer().nbytes,
        "safetensors, fp32, gzip -6": len(gzip.compress(save(squeezed), 6)),
        "csr int8 + int32 index": sum(csr(m, "i4") for m in codes.values()) + len(scales),
        "csr int8 + int16 index": sum(csr(m, "i2") for m in codes.values()) + len(scales),
        "bitmask + int8": len(masks) + len(values) + len(scales),
        "bitmask + int8, zstd -19": len(zstd.compress(masks + values)) + len(scales),
    }


def ours(weights: Weights, names: tuple[str, ...], search: bool = False) -> int:
    """Bytes of the real file on disk."""
    packed = {
        name: torch.frombuffer(bytearray(payload.pack(w, "int8", codecs=names, search=search)), dtype=torch.uint8)
        for name, w in weights.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        return sum(path.stat().st_size for path in file.write(Path(folder), packed))


def report(title: str, weights: Weights, conditional: bool, args: argparse.Namespace) -> list[str]:
    made = {name: quantize(w, search=False) for name, w in weights.items()}
    codes = {name: q.codes.numpy() for name, q in made.items()}
    scales = b"".join(payload.stream(q.scale.bfloat16().view(torch.uint16).numpy()) for q in made.values())
    shapes = {name: blocks.block_shape((w != 0).numpy()) for name, w in weights.items()}
    order0, given = bounds(codes, shapes, conditional)
    dense = sum(4 * w.numel() for w in weights.values())
    rows = others(codes, weights, scales)
    rows |= {f"pinscher, {name} only": ours(weights, (name,)) for name in ("csr", "delta", "bitmask")}
    ratio = f"{dense / 1e6:.1f} MB in fp32"
    small = ours(weights, tuple(payload.CODECS))
    rows["pinscher"] = small
    if any(shape != (1, 1) for shape in shapes.values()):
        rows["pinscher, without blocks"] = ours(weights, tuple(name for name in payload.CODECS if name != "blocks"))
    lines = [f"{title}; {ratio}", "", f"{'':34}{'MB':>9}{'ratio':>9}{'to order 0':>13}"]
    for name, size in sorted(rows.items(), key=lambda row: -row[1]):
        lines.append(f"{name:34}{size / 1e6:9.3f}{dense / size:8.2f}x{size / order0 - 1:+13.2%}")
    lines.append(f"{'order-0 bound of the codes':34}{order0 / 1e6:9.3f}{dense / order0:8.2f}x")
    if conditional:
        zstd = rows["bitmask + int8, zstd -19"]
        lines.append(f"{'conditional bound of the codes':34}{given / 1e6:9.3f}{dense / given:8.2f}x")
        lines += ["", f"pinscher against the conditional bound {small / given - 1:+.2%}, against bitmask + zstd -19"]
        lines[-1] += f" {small / zstd - 1:+.2%} (both with the same scales)"
    return [*lines, "", *([] if args.no_speed else speed(weights, dense)), ""]


# ------------------------------------------------------------ speed


def speed(weights: Weights, dense: int) -> list[str]:
    """Packing and unpacking on all cores, and one thread; the slow twin of the native code beside it."""
    threads = os.cpu_count() or 1
    torch.set_num_threads(1)
    started = time.perf_counter()
    with payload.workers(threads) as pool:
        packed = list(pool.map(lambda w: payload.pack(w, "int8"), weights.values()))
    encoding = time.perf_counter() - started

    def unpack(workers: int) -> Callable[[], None]:
        def go() -> None:
            with payload.workers(workers) as pool:
                for _ in pool.map(payload.unpack, packed):
                    pass

        return go

    took = interleaved({"all": unpack(threads), "one": unpack(1), "copy": lambda: copies(weights)})
    rate = {name: dense / seconds / 1e9 for name, seconds in took.items()}
    return [
        f"packing, scale search and all codecs tried, {threads} threads: {encoding:.1f} s",
        f"unpacking to fp32: {rate['all']:.2f} GB/s with {threads} threads, {rate['one']:.2f} GB/s with one "
        f"(a plain copy of the fp32 weights: {rate['copy']:.2f} GB/s)",
    ]


def copies(weights: Weights) -> None:
    for weight in weights.values():
        weight.clone()


def interleaved(jobs: dict[str, Callable[[], None]], turns: int = 9) -> dict[str, float]:
    took: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(turns + 1):
        for name, job in jobs.items():
            started = time.perf_counter()
            job()
            if turn:
                took[name].append(time.perf_counter() - started)
    return {name: statistics.median(times) for name, times in took.items()}


if __name__ == "__main__":
    main()
