"""What the tests of store/ share: pruned matrices of every shape, payloads and files with any content and a valid
checksum, and a child process in which nothing can take too much memory or time.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pinscher.store import file, payload

INTEGERS = tuple(np.dtype(kind) for kind in ("int8", "int16", "int32", "int64"))
PATTERNS = ("random", "rows", "columns", "both", "block", "diagonal", "1x4", "4x1", "3x2", "16x16")
MB = 1 << 20


def pruned(
    rows: int, columns: int, density: float, dtype: Any = np.int8, pattern: str = "random", seed: int = 0
) -> np.ndarray:
    """A matrix of integers with zeros; `pattern` says where what is kept gathers: "1x4" in blocks of that shape, of
    whose weights one in twenty is a zero all the same, as rounding leaves them.
    """
    random = np.random.default_rng(seed)
    chance = np.full((rows, columns), density)
    if pattern in ("rows", "both"):
        chance = chance * np.exp(random.normal(0, 2, (rows, 1)))
    if pattern in ("columns", "both"):
        chance = chance * np.exp(random.normal(0, 2, (1, columns)))
    if pattern == "block":
        chance[rows // 3 :] *= 0.02
        chance[:, : columns // 2] *= 0.02
    if pattern == "diagonal":
        chance[np.abs(np.subtract.outer(np.arange(rows), np.arange(columns))) > 2] = 0
    kept = random.random((rows, columns)) < chance
    if pattern[:1].isdigit():
        tall, wide = map(int, pattern.split("x"))
        kept = kept[: -(-rows // tall), : -(-columns // wide)].repeat(tall, 0).repeat(wide, 1)[:rows, :columns]
        kept &= random.random((rows, columns)) < 0.95
    info = np.iinfo(dtype)
    size = min(info.max, 40 if info.max < 128 else 10**9)
    values = np.round(random.laplace(0, size / 4, (rows, columns))).clip(info.min, info.max).astype(dtype)
    values[values == 0] = 1
    if values.size > 1:  # the ends of the range are coded like any other number
        values.flat[0], values.flat[-1] = info.min, info.max
    return np.where(kept, values, 0).astype(dtype)


def bits(tensor: Tensor) -> bytes:
    """A tensor's bytes: equal for equal numbers only if their signs and NaNs are equal, too."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def identical(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)


def sealed(codec: int, kind: int, flags: int, rows: int, columns: int, body: bytes, version: int = 1) -> bytes:
    """A payload that says so, with the checksum that an attacker would compute; written from the format alone."""
    head = struct.pack("<4sBBBBII", b"PNSR", version, codec, kind, flags, rows, columns)
    return head + struct.pack("<I", zlib.crc32(body, zlib.crc32(head + bytes(4)))) + body


def resealed(data: bytes) -> bytes:
    """The same payload with its checksum made right."""
    head, body = data[:16], data[20:]
    return head + struct.pack("<I", zlib.crc32(body, zlib.crc32(head + bytes(4)))) + body


def vector(data: bytes) -> Tensor:
    """A payload as a file holds it."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], **metadata: str | None) -> Path:
    """A safetensors file with right checksums; entries of the metadata can be replaced, or left out with None."""
    from safetensors.torch import save_file

    sums = "".join(file.checksum(name, tensors[name]) for name in sorted(tensors))
    known = {"format": "pt", "pinscher": "1", "checksums": sums} | metadata
    save_file(dict(tensors), path, metadata={key: value for key, value in known.items() if value is not None})
    return path


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file."""
    size = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def joined(header: Any, data: bytes) -> bytes:
    """A safetensors file of a header, which may say anything, and data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def flips(data: bytes) -> Iterator[bytes]:
    """The data with each byte changed in turn, by one bit or by all."""
    for place in range(len(data)):
        for change in (1 << place % 8, 255):
            yield data[:place] + bytes([data[place] ^ change]) + data[place + 1 :]


def confined(work: Callable[[], Any], memory: int = 256 * MB, seconds: int = 20) -> tuple[str, str]:
    """Does the work in a child with limited address space and time; says how it ended.

    ("returned", its repr), ("raised NAME", the message), or ("died", the signal): a crash, a hang, or Rust without
    memory. A child of the test, so that a file can harm nothing but its own test.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            _limit(memory, seconds)
            found = ("returned", repr(work()))
        except BaseException as error:
            found = (f"raised {type(error).__name__}", str(error) or traceback.format_exc(limit=2))
        with os.fdopen(writing, "w") as pipe:
            json.dump(found, pipe)
            pipe.flush()
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        told = pipe.read()
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status) or not told:
        name = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"status {status}"
        return "died", "SIGALRM: too slow" if name == "SIGALRM" else name
    kind, message = json.loads(told)
    return kind, message


def _limit(memory: int, seconds: int) -> None:
    """From now on this process has limited room and time; SIGALRM ends it even inside native code."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + memory, now + memory))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(seconds)


def read_all(path: Path) -> dict[str, Tensor]:
    """Every tensor of one file, as the model has it."""
    with file.Stored([path]) as stored:
        return {name: tensor.clone() for name, tensor in stored.items()}


def dequantised(weight: Tensor, how: str, transposed: bool = False, importance: Tensor | None = None) -> Tensor:
    """What a weight is after a round trip through the file, by the definition: scale[i] · code[i, j]."""
    if how in ("keep", "fp32", "fp16", "bf16"):
        kept = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}.get(how, weight.dtype)
        return weight.to(kept).to(weight.dtype)
    from pinscher.store.quantize import quantize

    codes, scale = quantize(weight.T if transposed else weight, how, importance)
    rows = torch.from_numpy(codes.numpy().astype(np.float32) * scale.numpy().astype(np.float32)[:, None])
    return (rows.T if transposed else rows).to(weight.dtype)


KIND_OF = {dtype: number for number, dtype in enumerate(payload.KINDS)}
