"""Which entropy coder: bytes against the entropy, and speed, on the gaps and codes of one pruned BERT-base matrix.

    pip install constriction zstandard brotli
    python benchmarks/coders.py --output benchmarks/results/coders.txt

The input is what the entropy codec hands on: the gaps between the kept weights of a 3072 x 768 matrix N(0, 0.04)
pruned by magnitude, and their INT8 codes. Every coder gets the same arrays and must give them back. Speeds are
medians, the coders taking turns.
"""

from __future__ import annotations

import argparse
import lzma
import statistics
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import brotli
import constriction
import numpy as np
import torch
import zstandard

from pinscher.store import streams, twoway
from pinscher.store.quantize import quantize


class Coder(NamedTuple):
    encode: Callable[[np.ndarray], Any]
    decode: Callable[[Any, np.ndarray], np.ndarray]  # the second argument only tells type and length
    size: Callable[[Any], int] = len


def of_bytes(encode: Callable[[bytes], bytes], decode: Callable[[bytes], bytes]) -> Coder:
    return Coder(lambda a: encode(a.tobytes()), lambda data, like: np.frombuffer(decode(data), like.dtype))


def ans() -> Coder:
    """constriction's range-ANS with the array's own frequencies, whose bytes (two a symbol) are counted."""

    def model(frequencies: np.ndarray) -> Any:
        return constriction.stream.model.Categorical(
            (frequencies / frequencies.sum()).astype(np.float32), perfect=False
        )

    def encode(array: np.ndarray) -> tuple[Any, np.ndarray]:
        symbols = array.view(np.uint8).astype(np.int32)
        frequencies = np.bincount(symbols, minlength=256)
        coder = constriction.stream.stack.AnsCoder()
        coder.encode_reverse(symbols, model(frequencies))
        return coder.get_compressed(), frequencies

    def decode(data: tuple[Any, np.ndarray], like: np.ndarray) -> np.ndarray:
        coder = constriction.stream.stack.AnsCoder(data[0])
        return coder.decode(model(data[1]), like.size).astype(np.uint8).view(like.dtype)

    return Coder(encode, decode, lambda data: data[0].nbytes + 2 * int((data[1] > 0).sum()))


CODERS = {
    "pcodec, level 12": Coder(streams.stream, lambda data, like: streams.Reader(memoryview(data)).stream(like.size)),
    "constriction, rANS": ans(),
    "zstandard -3": of_bytes(zstandard.ZstdCompressor(level=3).compress, lambda d: zstandard.decompress(d)),
    "zstandard -19": of_bytes(zstandard.ZstdCompressor(level=19).compress, lambda d: zstandard.decompress(d)),
    "brotli -9": of_bytes(lambda d: brotli.compress(d, quality=9), brotli.decompress),
    "zlib -9": of_bytes(lambda d: zlib.compress(d, 9), zlib.decompress),
    "lzma -6": of_bytes(lzma.compress, lzma.decompress),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    lines = ["$ python benchmarks/coders.py", ""]
    for sparsity in (0.8, 0.9):
        arrays = gaps_and_codes(sparsity)
        entropy = sum(twoway.entropy(np.bincount(a.view(np.uint8), minlength=256)) / 8 for a in arrays)
        count = sum(a.size for a in arrays)
        lines += [f"{sparsity:.0%} pruned: {count:,} symbols, {entropy:,.0f} bytes of entropy", ""]
        lines += [f"{'':22}{'bytes':>10}{'over':>9}{'encode':>13}{'decode':>13}"]
        times = timed(arrays)
        for name, coder in CODERS.items():
            made = [coder.encode(a) for a in arrays]
            for array, data in zip(arrays, made, strict=True):
                assert (coder.decode(data, array) == array).all(), name
            size = sum(map(coder.size, made))
            speeds = "".join(f"{count / seconds / 1e6:8.0f} M/s" for seconds in times[name])
            lines.append(f"{name:22}{size:10,}{size / entropy - 1:+9.2%} {speeds}")
        lines.append("")
    print("\n".join(lines))
    if args.output:
        args.output.write_text("\n".join(lines))


def gaps_and_codes(sparsity: float) -> list[np.ndarray]:
    weight = torch.randn(3072, 768, generator=torch.Generator().manual_seed(0)) * 0.04
    size = np.sort(weight.abs().numpy().ravel())
    weight[weight.abs() < float(size[int(sparsity * size.size)])] = 0
    codes = quantize(weight, search=False).codes.numpy()
    gaps = np.diff(np.flatnonzero(codes), prepend=-1) - 1
    assert gaps.max() < 256
    return [gaps.astype(np.uint8), codes[codes != 0]]


def timed(arrays: list[np.ndarray], turns: int = 5) -> dict[str, tuple[float, float]]:
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in CODERS}
    for _ in range(turns):
        for name, coder in CODERS.items():
            start = time.perf_counter()
            made = [coder.encode(a) for a in arrays]
            middle = time.perf_counter()
            for data, array in zip(made, arrays, strict=True):
                coder.decode(data, array)
            took[name].append((middle - start, time.perf_counter() - middle))
    return {
        name: (statistics.median(a), statistics.median(b))
        for name, pairs in took.items()
        for a, b in [zip(*pairs, strict=True)]
    }


if __name__ == "__main__":
    main()
