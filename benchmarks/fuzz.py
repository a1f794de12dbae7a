"""Damages stored matrices and files in every way that a small mutator knows, and checks that each ends well.

    python benchmarks/fuzz.py --output benchmarks/results/fuzz.txt          # 100,000 cases
    python benchmarks/fuzz.py --case 4711                                    # one of them again, with its error

A case is made from its number and the seed alone. What must come out:

    payload            a packed matrix, its bytes changed           refused, or the matrix if nothing changed
    payload, sealed    the same, its checksum made right            refused, or a matrix as its header says; the native
    payload, composed  streams of any numbers, in the right order    code and the reference agree
    file               a safetensors file, its bytes changed        refused, or the same tensors
    file, sealed       its tensors or header changed, sums right    refused, or tensors
    index              the index of three shards, its text changed  refused, or all the tensors

Refused means DamagedError. Anything else is unexpected: another exception, other weights, a signal, more than --seconds
for a case, or more than --memory of address space beyond what the process had before. Cases run in a child that is
replaced when it dies.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from pinscher import native
from pinscher.store import file, payload, twoway
from pinscher.store.codecs import CODECS
from pinscher.store.streams import DamagedError, stream

EDGES = (0, 1, 2, 127, 128, 255, 256, 65535, 65536, 1 << 24, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
UNEXPECTED = "UNEXPECTED"
Told = tuple[str, str, float, int]  # of a case: its kind, how it ended, seconds, bytes of memory so far


class UnexpectedError(Exception): ...


# What is damaged.
def bases() -> list[bytes]:
    """Payloads of every codec, of several types, with one level and with many."""
    made = []
    generator = np.random.default_rng(0)
    chance = np.exp(generator.normal(-1, 1.5, (30, 1)) + generator.normal(0, 1.5, (1, 24)))
    for shape, likely in (((5, 9), 0.4), ((30, 24), chance), ((3, 40), 0.9), ((6, 0), 1.0)):
        weight = generator.normal(0, 1, shape) * (generator.random(shape) < likely)
        for codec in CODECS:
            for values in (None, "int8", "bf16"):
                made.append(payload.pack(torch.from_numpy(weight).float(), values, codecs=(codec,)))
            made.append(payload.pack(torch.from_numpy(np.round(9 * weight)).long(), codecs=(codec,), transposed=True))
    codes = generator.integers(-100, 100, (40, 30)).astype(np.int8)
    rows, columns = (generator.integers(0, 4, count).astype(np.uint8) for count in codes.shape)
    classes, kept = twoway.Classes(rows, columns), (twoway.mask_classes, twoway.value_classes)
    twoway.mask_classes = twoway.value_classes = lambda *_: classes  # seven levels of either kind
    made.append(payload.pack(torch.from_numpy(codes * (codes % 3 == 0)), codecs=("entropy",)))
    twoway.mask_classes, twoway.value_classes = kept
    for tall, wide in ((1, 4), (2, 3), (16, 16)):  # plain where they are small, else at their entropy
        for shape in ((2 * tall, 2 * wide), (96, 96)):
            chance = np.exp(generator.normal(-1, 1, (shape[0] // tall, 1))) * np.ones(shape[1] // wide)
            weight = generator.normal(0, 1, shape) * np.kron(
                generator.random(chance.shape) < chance, np.ones((tall, wide))
            )
            for values in ("fp32", "int4"):
                made.append(payload.pack(torch.from_numpy(weight + 0.0).float(), values, codecs=("blocks",)))
    return made


BASES = bases()
TENSORS = {
    "a.bias": torch.arange(5.0),
    "b.weight": torch.frombuffer(bytearray(BASES[9]), dtype=torch.uint8),
    "c.weight": torch.frombuffer(bytearray(BASES[-1]), dtype=torch.uint8),
    "d.half": torch.ones(2, 3, dtype=torch.bfloat16),
}


def bits(tensor: Tensor) -> tuple[Any, ...]:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return tensor.dtype, tuple(tensor.shape), data


WANTED = {name: bits(payload.unpack(t) if t.dtype == torch.uint8 else t) for name, t in TENSORS.items()}


# How it is damaged.
def mutate(data: bytes, dice: random.Random) -> bytes:
    """One to three changes."""
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        data = dice.choice(CHANGES)(bytearray(data), dice)
    return data


def flip(data: bytearray, dice: random.Random) -> bytes:
    for _ in range(dice.choice((1, 1, 2, 8))):
        if data:
            at = dice.randrange(len(data))
            data[at] = dice.choice((data[at] ^ 1 << dice.randrange(8), 0, 127, 128, 255, dice.randrange(256)))
    return bytes(data)


def lengthen_or_cut(data: bytearray, dice: random.Random) -> bytes:
    added = dice.choice((bytes(1), dice.randbytes(dice.randrange(1, 40)), bytes(dice.randrange(99))))
    return dice.choice((bytes(data) + added, bytes(data[: dice.randrange(len(data) + 1)])))


def splice(data: bytearray, dice: random.Random) -> bytes:
    """A piece of another payload, in place of one of its own or between two."""
    other = dice.choice(BASES)
    start, at = dice.randrange(len(other)), dice.randrange(len(data) + 1)
    piece = other[start : start + dice.randrange(1, 60)]
    return bytes(data[:at] + piece + data[at + dice.choice((0, len(piece), dice.randrange(60))) :])


def repeat(data: bytearray, dice: random.Random) -> bytes:
    start = dice.randrange(len(data) + 1)
    end = start + dice.randrange(40)
    return bytes(data[:end] + data[start:end] * dice.choice((1, 3, 50)) + data[end:])


def integer(data: bytearray, dice: random.Random) -> bytes:
    """A field of 1 to 8 bytes becomes the edge of a type, or a little more or less; mostly near the start."""
    width = dice.choice((1, 2, 4, 4, 4, 8))
    if len(data) <= width:
        return bytes(data)
    at = dice.choice((4, 5, 6, 7, 8, 12, 20, 21, dice.randrange(len(data)), dice.randrange(len(data))))
    at = min(at, len(data) - width)
    old = int.from_bytes(data[at : at + width], "little")
    new = dice.choice((dice.choice(EDGES), old + dice.choice((-1, 1, 8)), old * 2, dice.getrandbits(width * 8)))
    data[at : at + width] = (new % (1 << 8 * width)).to_bytes(width, "little")
    return bytes(data)


def varint(data: bytearray, dice: random.Random) -> bytes:
    """A length becomes a long one."""
    at, number = dice.randrange(len(data) + 1), dice.choice((*EDGES, 1 << 40, 1 << 62, (1 << 64) - 1))
    made = bytearray()
    while number > 127:
        made.append(number & 127 | 128)
        number >>= 7
    return bytes(data[:at] + made + bytes([number]) + data[at + dice.choice((0, 1, 2)) :])


CHANGES = (flip, flip, flip, lengthen_or_cut, splice, repeat, integer, integer, varint)


def sealed(data: bytes) -> bytes:
    """The payload with its checksum made right."""
    head, body = data[:16], data[20:]
    return head + struct.pack("<I", zlib.crc32(body, zlib.crc32(head + bytes(4)))) + body if len(data) >= 20 else data


# The cases of each kind.
def composed_payload(dice: random.Random, _: Path) -> bytes:
    """The streams of the entropy codec, of blocks or of single weights, each one readable, with numbers that fit each
    other or do not quite.
    """
    wrong = 0.0 if dice.random() < 0.3 else 0.1  # how likely a number is off
    grid = dice.randrange(1, 12), dice.randrange(1, 12)
    blocked = dice.random() < 0.5
    tall, wide = (dice.randrange(1, 5), dice.randrange(1, 5)) if blocked else (1, 1)
    rows, columns = grid[0] * tall, grid[1] * wide

    def off(number: int) -> int:
        return max(0, number + dice.choice((-1, 1, 9))) if dice.random() < wrong else number

    def numbers(count: int, low: int, high: int, kind: str) -> bytes:
        return stream(np.array([dice.randint(low, high) for _ in range(off(count))], dtype=kind))

    def classes(*counts: int) -> tuple[bytes, np.ndarray]:
        most = dice.choice((0, 0, 1, 3, 47, 48 if wrong else 47))
        sides = [np.array([dice.randint(0, most) for _ in range(count)], np.uint8) for count in counts]
        return b"".join(map(stream, sides)), np.add.outer(*sides)

    (mask, places), (sizes, grades) = classes(*grid), classes(rows, columns)
    body, kept = mask, 0
    for level in range(int(places.max()) + 1):
        count = int((places == level).sum())
        ones = off(dice.choice((0, count, dice.randint(0, count))))
        listed, kept = max(0, min(ones, count - ones)), kept + ones * tall * wide
        room = (count - listed) // max(listed, 1)
        body += bytes([ones]) + numbers(
            listed, 0, dice.choice((0, room, room + 1)), dice.choice(("u1", "u1", "u2", "u4"))
        )
    body += sizes
    for grade in range(int(grades.max()) + 1):
        likely = round(kept * float((grades == grade).mean()))
        least = dice.choice((0, 1)) if blocked else 1
        body += numbers(dice.choice((likely, kept, 0)), least, 99, "i1" if dice.random() > wrong / 5 else "i2")
    codec, head = (5, bytes([off(tall), off(wide), off(1)])) if blocked else (4, b"")
    return sealed(payload.HEADER.pack(b"PNSR", 1, codec, 0, dice.randrange(2), rows, columns, 0) + head + body)


def resealed_file(dice: random.Random, _: Path) -> bytes:
    """The file with one tensor changed, and sometimes the header; checksums are right where they can be."""
    tensors = dict(TENSORS)
    name = dice.choice(list(tensors))
    changed = mutate(bits(tensors[name])[2], dice)
    changed = sealed(changed) if name.endswith("weight") and dice.random() < 0.8 else changed
    tensors[name] = torch.tensor(list(changed), dtype=torch.uint8)
    sums = "".join(file.checksum(each, tensors[each]) for each in sorted(tensors))
    whole = save(tensors, {"format": "pt", "pinscher": "1", "checksums": sums})
    if dice.random() < 0.6:
        return whole
    size = struct.unpack("<Q", whole[:8])[0]
    header = json.loads(whole[8 : 8 + size])
    entry = header[dice.choice(list(tensors))]
    entry["dtype"] = dice.choice((entry["dtype"], "F32", "I8", "F4", "F8_E8M0", "C64", "U64", "BF16", "XX"))
    which = dice.choice(("shape", "data_offsets", "nothing"))
    entry[which] = [dice.choice((*EDGES, 1 << 62, (1 << 64) - 1)) for _ in range(dice.randrange(4))]
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + whole[8 + size :]


def changed_index(dice: random.Random, folder: Path) -> bytes:
    text = (folder / "index.json").read_text()
    if dice.random() < 0.5:
        return mutate(text.encode(), dice)
    places = json.loads(text)  # a name for another: a shard that is left out, or one that is not there
    names = sorted(set(places["weight_map"].values()))
    old, new = dice.choice(names), dice.choice((*names, "../x.safetensors", "/dev/zero", "", 7, None, "x" * 999))
    places["weight_map"] = {k: new if v == old else v for k, v in places["weight_map"].items()}
    return json.dumps(places).encode()


# What came of it: a judge says how it ended well, or raises; DamagedError is to end well, too.
def unchanged(data: bytes, _: Path) -> str:
    payload.unpack(data)
    if data not in BASES:
        raise UnexpectedError("a changed payload was read")
    return "the same"


def as_declared(data: bytes, _: Path) -> str:
    core, native.core, slow = native.core, lambda: None, None
    with contextlib.suppress(DamagedError):
        slow = bits(payload.unpack(data))
    native.core = core
    try:
        found = bits(payload.unpack(data))
    except DamagedError as error:
        if slow is not None:
            raise UnexpectedError(f"only the native code refuses it: {error}") from None
        raise
    shape = struct.unpack("<II", data[8:16])
    declared = torch.float32 if data[7] & 2 else payload.KINDS[data[6]], shape[::-1] if data[7] & 1 else shape
    if found != slow or found[:2] != declared:
        raise UnexpectedError(f"{found[:2]}, by the reference {slow and slow[:2]}, declared {declared}")
    return "as declared"


def stored(paths: list[Path]) -> dict[str, tuple[Any, ...]]:
    with file.Stored(paths) as opened:
        return {name: bits(tensor) for name, tensor in opened.items()}


def same_file(data: bytes, folder: Path) -> str:
    (folder / "case.safetensors").write_bytes(data)
    if stored([folder / "case.safetensors"]) != WANTED:
        raise UnexpectedError("other tensors")
    return "the same"


def some_file(data: bytes, folder: Path) -> str:
    (folder / "case.safetensors").write_bytes(data)
    return "as declared" if stored([folder / "case.safetensors"]) else "nothing"


def same_model(data: bytes, folder: Path) -> str:
    (folder / "shards" / file.INDEX).write_bytes(data)
    found = stored(file.files_of(folder / "shards"))
    if found != WANTED:
        raise UnexpectedError(f"only {sorted(found)}")
    return "the same"


KINDS = {  # how often, how made, how judged
    "payload": (3, lambda dice, _: mutate(dice.choice(BASES), dice), unchanged),
    "payload, sealed": (8, lambda dice, _: sealed(mutate(dice.choice(BASES), dice)), as_declared),
    "payload, composed": (4, composed_payload, as_declared),
    "file": (2, lambda dice, folder: mutate((folder / "whole" / file.SINGLE).read_bytes(), dice), same_file),
    "file, sealed": (2, resealed_file, some_file),
    "index": (1, changed_index, same_model),
}


def case(number: int, seed: int, folder: Path) -> tuple[str, bytes]:
    dice = random.Random(f"{seed} {number}")
    kind = dice.choices(list(KINDS), [often for often, _, _ in KINDS.values()])[0]
    return kind, KINDS[kind][1](dice, folder)


# Many of them, in a child that may die.
def plain(message: str) -> str:  # without what differs from case to case
    return re.sub(r"\d+", "#", re.sub(r"(/\S*|'.*'|\".*\")", "…", message))[:84]


def work(start: int, end: int, settings: argparse.Namespace, folder: Path, report: Path) -> None:
    """Cases one after the other, each told in a line of the report as soon as it is done."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a panic of Rust code talks
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + settings.memory * 2**20,) * 2)
    with report.open("w", buffering=1) as lines:
        for number in range(start, end):
            kind, data = case(number, settings.seed, folder)
            signal.setitimer(signal.ITIMER_REAL, settings.seconds)  # its signal ends the process, native code or not
            began = time.perf_counter()
            try:
                outcome = KINDS[kind][2](data, folder)
            except DamagedError as error:
                outcome = f"refused: {error}"
            except Exception as error:
                outcome = f"{UNEXPECTED}: {type(error).__name__}: {str(error)[:200]}"
            signal.setitimer(signal.ITIMER_REAL, 0)
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident) * 1024
            lines.write(json.dumps([kind, outcome, time.perf_counter() - began, grown]) + "\n")


def run(settings: argparse.Namespace, folder: Path) -> list[Told]:
    told: list[Told] = []
    while len(told) < settings.mutations:
        end = min(len(told) + 5000, settings.mutations)
        (folder / "report").write_text("")
        child = os.fork()
        if child == 0:
            try:
                work(len(told), end, settings, folder, folder / "report")
            finally:
                os._exit(0)
        status = os.waitpid(child, 0)[1]
        told += [json.loads(line) for line in (folder / "report").read_text().splitlines()]
        if len(told) < end:  # it died of the next one
            name = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"exit {status}"
            reason = f"more than {settings.seconds} s" if name == "SIGALRM" else f"killed by {name}"
            told.append((case(len(told), settings.seed, folder)[0], f"{UNEXPECTED}: {reason}", 0.0, 0))
    return told


def summary(told: list[Told], settings: argparse.Namespace, seconds: float) -> str:
    outcomes = Counter((kind, outcome.split(":")[0]) for kind, outcome, _, _ in told)
    reasons = Counter(plain(outcome[9:]) for _, outcome, _, _ in told if outcome.startswith("refused"))
    words = sorted({word for _, word in outcomes} | {"refused", UNEXPECTED})
    lines = [f"{'':19}" + "".join(f"{word:>14}" for word in words)]
    lines += [f"{kind:19}" + "".join(f"{outcomes[kind, word]:>14,}" for word in words) for kind in KINDS]
    slowest, most = max(t[2] for t in told) * 1000, max(t[3] for t in told) / 2**20
    lines += ["", f"{len(told):,} cases of seed {settings.seed} in {seconds:.0f} s"]
    lines += [f"at most {slowest:.0f} ms for one, of {settings.seconds} s; {most:.0f} MB, of {settings.memory} MB"]
    lines += ["", "why they were refused:"]
    lines += [f"{count:>10,}  {reason}" for reason, count in reasons.most_common(40)]
    bad = [(number, *each[:2]) for number, each in enumerate(told) if each[1].startswith(UNEXPECTED)]
    lines += ["", f"{UNEXPECTED}: {len(bad):,}" + " (--case N does one again)" * bool(bad)]
    shown = [each for name in KINDS for each in [one for one in bad if one[1] == name][:12]]
    lines += [f"{number:>10}  {kind}: {outcome.partition(': ')[2]}" for number, kind, outcome in shown]
    return "\n".join(lines) + "\n"


def prepare(folder: Path) -> None:
    """The whole file and the shards that cases are made from."""
    for name, size in (("whole", "1GB"), ("shards", 80)):
        (folder / name).mkdir()
        file.write(folder / name, TENSORS, size)
    assert len(file.files_of(folder / "shards")) > 2
    shutil.copy(folder / "shards" / file.INDEX, folder / "index.json")
    assert stored(file.files_of(folder / "whole")) == stored(file.files_of(folder / "shards")) == WANTED


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=int, default=5, help="for one case")
    parser.add_argument("--memory", type=int, default=384, help="MB of address space beyond what the process has")
    parser.add_argument("--case", type=int, help="do this one alone and show what it does")
    parser.add_argument("--output", type=Path)
    settings = parser.parse_args()
    torch.set_num_threads(1)
    assert native.core() is not None, "without native code there is nothing to compare"
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        prepare(Path(name))
        if settings.case is not None:
            kind, data = case(settings.case, settings.seed, Path(name))
            print(f"{kind}, {len(data)} bytes: {data[:2000].hex()}", flush=True)
            return print(KINDS[kind][2](data, Path(name))) or 0
        began = time.perf_counter()
        told = run(settings, Path(name))
        seconds = time.perf_counter() - began
    text = f"$ python benchmarks/fuzz.py {' '.join(sys.argv[1:])}\n\n{summary(told, settings, seconds)}"
    print(text, end="")
    if settings.output is not None:
        settings.output.write_text(text, encoding="utf-8")
    return int(any(outcome.startswith(UNEXPECTED) for _, outcome, _, _ in told))


if __name__ == "__main__":
    sys.exit(main())
