"""Stored models with one thing changed, checksums made right again, and pushed through everything that reads them.

    python tests/mutants.py --count 10000 --seed 1          # a long run; --case 17 does one again, and shows its error

A mutant is made from its number and the seed alone. It ends well if a reader refuses it with an InputError that names
the folder, or loads what the file says: then plain transformers has the stored numbers, and `pinscher.load` computes
what transformers computes. Everything else is unexpected: another exception, a crash, more than SECONDS, or more than
MEMORY. transformers reads config.json and the index before we are asked, so what it says about those is its own.

benchmarks/fuzz.py does the same for single matrices and files, by the hundred thousand.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import pinscher
from pinscher.commands import export, inspect
from pinscher.errors import InputError
from pinscher.store import file, payload
from pinscher.store.codecs import CODECS
from tiny_models import HEADS, VOCABULARY
from tiny_store import MB, joined, resealed, split, vector, write_tensors

SECONDS, WAITING = 20, 300  # of computing for one mutant and all readers, and of time, which is short on a busy machine
MEMORY = 700 * MB  # the files have some 30 kB
UNEXPECTED, REFUSED, LOADED = "UNEXPECTED", "refused", "loaded"
BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", {"codecs": ("entropy",), "head": "int8"}),
    "gpt2": ("gpt2-lm", {"codecs": ("csr",), "embeddings": "int8"}),
    "llama": ("llama-lm", {"codecs": ("delta",), "values": "fp16", "embeddings": "bf16"}),
    "distilbert": ("distilbert", {"codecs": ("bitmask", "dense"), "values": "int4", "max_shard_size": "5KB"}),
    "t5": ("t5", {"codecs": ("entropy",), "values": "bf16"}),
    "roberta": ("roberta", {"codecs": ("blocks",), "values": "int4"}),
}
EDGES = (0, 1, 2, 3, 7, 16, 127, 255, 256, 65535, 65536, 1 << 24, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
ODD = (None, True, 0, -1, 1, 3, 10**6, 10**12, 2**63, 10**30, 0.5, float("inf"), "", "x", [], [1], {}, {"a": 1})
TYPES = ("F32", "F16", "BF16", "F64", "U8", "I8", "I32", "I64", "BOOL", "F8_E4M3", "F4", "C64", "PKL")


Told = tuple[int, str, list[tuple[str, str, str]]]  # of a mutant: its number, its kind, and how each reader took it


class UnexpectedError(Exception):
    """A reader gave something else than the file holds."""


@dataclass
class Model:
    """The files of one stored model, in memory: tensors by file, config and index."""

    files: dict[str, dict[str, torch.Tensor]]
    texts: dict[str, str]

    def write(self, folder: Path) -> None:
        """All of them, with right checksums."""
        folder.mkdir()
        for name, text in self.texts.items():
            (folder / name).write_text(text)
        for name, tensors in self.files.items():
            write_tensors(folder / name, {each: tensor.contiguous() for each, tensor in tensors.items()})


def prepare(folder: Path) -> dict[str, Model]:
    """A stored model of every kind."""
    made, dice = {}, torch.Generator()
    for name, (head, settings) in BASES.items():
        model = HEADS[head].make()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    width = 4 if settings["codecs"] == ("blocks",) and parameter.shape[1] % 4 == 0 else 1
                    groups = torch.rand(len(parameter), parameter.shape[1] // width, generator=dice.manual_seed(1))
                    parameter *= groups.repeat_interleave(width, 1) < 0.4
        pinscher.save_pretrained(model, folder / name, **settings)
        files = {}
        for path in file.files_of(folder / name):
            with transformers.modeling_utils.safe_open(path, framework="pt") as opened:
                files[path.name] = {key: opened.get_tensor(key).clone() for key in opened.keys()}  # noqa: SIM118
        texts = {path.name: path.read_text() for path in (folder / name).glob("*.json")}
        made[name] = Model(files, texts)
    return made


# ------------------------------------------------------------ changes of tensors, before checksums are computed

Dice = random.Random


def some(model: Model, dice: Dice, packed: bool | None = None) -> tuple[dict[str, torch.Tensor], str]:
    """A file's tensors, and the name of one of them."""
    choices = [
        (tensors, name)
        for tensors in model.files.values()
        for name, tensor in sorted(tensors.items())
        if packed is None or file.is_packed(tensor) == packed
    ]
    return dice.choice(choices)


def change_payload(model: Model, dice: Dice, change: Callable[[bytearray], bytes | bytearray]) -> None:
    tensors, name = some(model, dice, packed=True)
    data = bytes(change(bytearray(tensors[name].numpy().tobytes())))
    tensors[name] = vector(resealed(data) if len(data) >= payload.HEADER.size else data)


def payload_header(model: Model, dice: Dice) -> None:
    """Magic, version, codec, type, flags, rows or columns."""

    def change(data: bytearray) -> bytearray:
        at, width = dice.choice(((0, 1), (4, 1), (5, 1), (6, 1), (7, 1), (8, 4), (12, 4)))
        known = {5: range(len(CODECS) + 1), 6: range(len(payload.KINDS) + 1), 7: range(5)}
        old = int.from_bytes(data[at : at + width], "little")
        new = dice.choice((*known.get(at, EDGES), old + 1, old - 1, old * 2))
        data[at : at + width] = (new % (1 << 8 * width)).to_bytes(width, "little")
        if dice.random() < 0.2:  # the other way round, as a whole
            data[8:16] = data[12:16] + data[8:12]
        return data

    change_payload(model, dice, change)


def payload_body(model: Model, dice: Dice) -> None:
    """Bytes of the streams, changed, cut, doubled or added."""

    def change(data: bytearray) -> bytes | bytearray:
        for _ in range(dice.choice((1, 1, 2, 5))):
            at = dice.randrange(payload.HEADER.size, len(data)) if len(data) > payload.HEADER.size else 0
            way = dice.randrange(5)
            if way < 2:
                data[at] = dice.choice((data[at] ^ 1 << dice.randrange(8), 0, 127, 128, 255))
            elif way == 2:
                data = data[: max(at, payload.HEADER.size)]
            elif way == 3:
                data += dice.randbytes(dice.randrange(1, 30))
            else:
                data[at:at] = data[at : at + dice.randrange(1, 20)]
        return data

    change_payload(model, dice, change)


def payload_of_another(model: Model, dice: Dice) -> None:
    (tensors, name), (others, other) = some(model, dice, packed=True), some(model, dice)
    tensors[name] = others[other].clone()


def repacked(model: Model, dice: Dice) -> None:
    """A real matrix of another shape, type, size or side."""
    tensors, name = some(model, dice, packed=True)
    rows, columns = (dice.choice((0, 1, 8, 16, 17, 32, 48, 64, 4096)) for _ in range(2))
    weight = torch.zeros(rows, columns, dtype=dice.choice((torch.float32, torch.int64, torch.bool, torch.float16)))
    if dice.random() < 0.5:
        weight = payload.unpack(tensors[name]).clone()
    if weight.numel() and weight.is_floating_point() and dice.random() < 0.3:
        weight.view(-1)[0] = dice.choice((3e38, -3e38, 1e-40, -0.0)) if weight.dtype == torch.float32 else 1
    kind = dice.choice((None, None, "int8", "fp16")) if weight.dtype == torch.float32 else None
    try:
        tensors[name] = vector(payload.pack(weight, kind, transposed=dice.random() < 0.3, search=False))
    except InputError:  # not what is tried here
        tensors[name] = vector(payload.pack(torch.zeros(rows, columns)))


def plain_tensor(model: Model, dice: Dice) -> None:
    """A tensor that is not packed, of another shape or type, or one that was."""
    tensors, name = some(model, dice)
    tensor = payload.unpack(tensors[name]) if file.is_packed(tensors[name]) else tensors[name]
    kinds = (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool)
    changes: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
        lambda t: t.to(dice.choice(kinds)),
        lambda t: t.reshape(-1),
        lambda t: t.unsqueeze(0),
        lambda t: t.T if t.dim() == 2 else t[:1],
        lambda t: t[:-1],
        lambda t: t[:0],
        lambda t: t.reshape(-1)[0] if t.numel() else t,
        lambda t: torch.cat([t, t]),
        lambda t: torch.full_like(t, float("nan")),
        lambda t: t,
    )
    tensors[name] = dice.choice(changes)(tensor).clone()


def missing(model: Model, dice: Dice) -> None:
    tensors, name = some(model, dice)
    del tensors[name]


def renamed(model: Model, dice: Dice) -> None:
    tensors, name = some(model, dice)
    others = ("x", "", name + ".x", name.partition(".")[2] or "y", f"bert.{name}", name.upper(), "ü", "a" * 3000, "\0")
    tensors[dice.choice(others)] = tensors.pop(name)


def added(model: Model, dice: Dice) -> None:
    """Tensors that the model does not know, or knows already."""
    tensors, name = some(model, dice)
    other, _ = some(model, dice)
    if dice.random() < 0.4:
        other[name] = tensors[name].clone()
    elif dice.random() < 0.5:
        empty = vector(payload.pack(torch.zeros(1024, 1024), codecs=("delta",), search=False))
        tensors |= {f"more.{number}.weight": empty.clone() for number in range(dice.choice((1, 30, 200)))}
    else:
        tensors["more"] = torch.ones(dice.choice((0, 1, 50)))


# ------------------------------------------------------------ changes of the JSON beside them


def fields(settings: Any) -> list[tuple[Any, Any]]:
    """Every place in nested JSON, as its container and key."""
    found = []
    if isinstance(settings, dict | list):
        for key in list(settings) if isinstance(settings, dict) else range(len(settings)):
            found += [(settings, key), *fields(settings[key])]
    return found


def change_field(container: Any, key: Any, dice: Dice) -> None:
    old, way = container[key], dice.randrange(4)
    if way == 0 and isinstance(container, dict):
        del container[key]
    elif way == 1 and isinstance(old, int | float) and not isinstance(old, bool):
        container[key] = dice.choice((old + 1, old - 1, old * 2, -old, old * 1000, old * 10**9, float(old), str(old)))
    else:
        container[key] = dice.choice(ODD)


def config(model: Model, dice: Dice) -> None:
    settings = json.loads(model.texts["config.json"])
    for _ in range(dice.choice((1, 1, 2))):
        change_field(*dice.choice(fields(settings)), dice)
    model.texts["config.json"] = json.dumps(settings)


def quantization_config(model: Model, dice: Dice) -> None:
    """What config.json says about us."""
    settings = json.loads(model.texts["config.json"])
    ours = settings["quantization_config"]
    way = dice.randrange(4)
    if way == 0:
        ours["shrunk"] = dice.choice(
            (*ODD, [[1, 1], [1, 1]], [[2, 32], [1, 7]], [[2, 32]], [[0, 0]] * 2, [[9, 99]] * 2)
        )
    elif way == 1:
        settings["architectures"] = dice.choice((*ODD, ["Trainer"], ["BertModel"], ["AutoModel"], ["__init__"], [7]))
    elif way == 2:
        settings["quantization_config"] = dice.choice(ODD)
    else:
        change_field(ours, dice.choice(sorted(ours)), dice)
    model.texts["config.json"] = json.dumps(settings)


def broken_text(model: Model, dice: Dice) -> None:
    """A JSON file that is none any more."""
    name = dice.choice(sorted(model.texts))
    text = model.texts[name]
    at = dice.randrange(len(text))
    model.texts[name] = dice.choice((text[:at], text[:at] + "}" + text[at:], "", "[]", "null", "[" * 9999, "7", '"x"'))


def index(model: Model, dice: Dice) -> None:
    if file.INDEX not in model.texts:
        model.texts[file.INDEX] = json.dumps({"metadata": {}, "weight_map": dict.fromkeys(["a"], file.SINGLE)})
        return
    told = json.loads(model.texts[file.INDEX])
    places = told["weight_map"]
    names = sorted(set(places.values()))
    new = dice.choice(
        (*names, "../x.safetensors", "/dev/zero", "model.safetensors", "", 7, None, [names[0]], "x" * 999)
    )
    way = dice.randrange(4)
    if way == 0:
        places[dice.choice(sorted(places))] = new
    elif way == 1:
        old = dice.choice(names)
        told["weight_map"] = {key: new if place == old else place for key, place in places.items()}
    elif way == 2:
        del places[dice.choice(sorted(places))]
    else:
        change_field(*dice.choice(fields(told)[:3]), dice)
    model.texts[file.INDEX] = json.dumps(told)


CHANGES: dict[str, tuple[int, Callable[[Model, Dice], None]]] = {
    "payload header": (5, payload_header),
    "payload body": (5, payload_body),
    "payload of another": (1, payload_of_another),
    "repacked": (4, repacked),
    "plain tensor": (4, plain_tensor),
    "missing": (2, missing),
    "renamed": (1, renamed),
    "added": (2, added),
    "config": (6, config),
    "quantization config": (3, quantization_config),
    "broken text": (2, broken_text),
    "index": (2, index),
    "file header": (4, lambda *_: None),  # below: it is changed when it is written
    "metadata": (2, lambda *_: None),
}
ITS_OWN = ("config", "quantization config", "broken text", "index")  # which transformers reads before we are asked


def change_header_(path: Path, dice: Dice) -> None:
    """A field of the header of a safetensors file: offsets, types, shapes; sums stay."""
    header, data = split(path.read_bytes())
    name = dice.choice([key for key in sorted(header) if key != "__metadata__"])
    entry = header[name]
    way = dice.randrange(5)
    if way == 0:
        entry["dtype"] = dice.choice(TYPES)
    elif way == 1:
        entry["shape"] = dice.choice(([], [0], [1], [2**32, 2**32], [2**63], [-1], [1] * 70, entry["shape"][::-1], "x"))
    elif way == 2:
        start, end = entry["data_offsets"]
        entry["data_offsets"] = dice.choice(([start, end + 1], [end, start], [start + 1, end], [0, 2**63], [0], None))
    elif way == 3:
        change_field(*dice.choice(fields(header)), dice)
    else:
        data = dice.choice((data[:-1], data + b"\0", b""))
    path.write_bytes(joined(header, data))


def change_metadata_(path: Path, dice: Dice) -> None:
    header, data = split(path.read_bytes())
    told = header["__metadata__"]
    key = dice.choice(sorted(told))
    if dice.random() < 0.3:
        del told[key]
    else:
        told[key] = dice.choice(
            ("", "2", "0" * 8, told[key][:-8], told[key] + "0" * 8, told[key].upper(), "é" * 9, 7, None)
        )
    path.write_bytes(joined(header, data))


def make(number: int, seed: int, bases: dict[str, Model], folder: Path) -> tuple[str, Path]:
    """Writes one mutant; returns the kind of its change, and its folder."""
    dice = random.Random(f"{seed} {number}")
    base = bases[dice.choice(sorted(bases))]
    model = Model({name: dict(tensors) for name, tensors in base.files.items()}, dict(base.texts))
    kind = dice.choices(list(CHANGES), [often for often, _ in CHANGES.values()])[0]
    CHANGES[kind][1](model, dice)
    place = folder / f"mutant-{number}"
    model.write(place)
    if kind in ("file header", "metadata"):
        change = change_header_ if kind == "file header" else change_metadata_
        change(place / dice.choice(sorted(model.files)), dice)
    return kind, place


# ------------------------------------------------------------ readers


def read_stored(folder: Path) -> None:
    with file.Stored(file.files_of(folder)) as stored:
        for name, tensor in stored.items():
            head = stored.head(name)
            if head is not None and tuple(tensor.shape) != head.shape:
                raise UnexpectedError(f"{name} has another shape than its header says")


def read_transformers(folder: Path) -> Any:
    """The model, compared with what the file holds."""
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    model, told = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
    state = model.state_dict()
    if not state or told["mismatched_keys"]:
        raise UnexpectedError(f"mismatched: {told['mismatched_keys']}")
    if random_blocks := [key for key in told["missing_keys"] if any(part.isdigit() for part in key.split("."))]:
        raise UnexpectedError(f"made up: {random_blocks}")
    with file.Stored(file.files_of(folder)) as stored:
        for key in set(stored.names()) & set(state):
            wanted = stored.tensor(key).to(state[key].dtype)
            if not np.array_equal(wanted.float().numpy(), state[key].float().numpy(), equal_nan=True):
                raise UnexpectedError(f"{key} is not what the file holds")
    return model.eval()


def read_fast(folder: Path) -> Any:
    return pinscher.load(folder, mode="fp32", threads=1)


def read_engine(folder: Path) -> Any:
    """None for models that need PyTorch."""
    try:
        return pinscher.Engine(folder, mode="fp32", threads=1)
    except InputError as error:
        if "PyTorch" not in str(error):
            raise
    return None


def read_export(folder: Path) -> None:
    export.load(str(folder))


def read_inspect(folder: Path) -> None:
    inspect.look(str(folder), rank=False)


READERS: dict[str, Callable[[Path], Any]] = {
    "stored": read_stored,
    "from_pretrained": read_transformers,
    "load": read_fast,
    "Engine": read_engine,
    "export": read_export,
    "inspect": read_inspect,
}


def compare(plain: Any, fast: Any) -> None:
    """The two readers must have loaded the same model."""
    sizes = [float(p.detach().abs().max()) for p in plain.parameters() if p.numel()]
    if not max(sizes) < 100:  # NaN, or numbers that no sum can be compared with
        return
    ids = torch.arange(2, 14).view(2, 6) % min(VOCABULARY, plain.get_input_embeddings().weight.shape[0])
    more = {"decoder_input_ids": ids} if plain.config.is_encoder_decoder else {}
    with torch.no_grad():
        try:
            wanted = plain(input_ids=ids, **more)[0]
        except Exception:  # a config with which the model loads and does not run
            return
        found = fast(input_ids=ids, **more)[0]
    if wanted.isfinite().all() and not torch.allclose(found, wanted, rtol=1e-2, atol=1e-2):
        raise UnexpectedError(f"load gives other outputs, by {float((found - wanted).abs().max()):.3g}")


def compare_engine(fast: Any, engine: Any) -> None:
    """Both stand on the same core: the same numbers, to the last bit."""
    ids = torch.arange(2, 14).view(2, 6) % min(VOCABULARY, engine.config.vocab_size)
    try:
        with torch.no_grad():
            wanted = fast(input_ids=ids)[0].numpy()
    except InputError:  # a config with which the model loads and does not run
        return
    found = next(iter(engine.run(ids.numpy()).values()))
    if not np.array_equal(found, wanted, equal_nan=True):
        raise UnexpectedError("Engine gives other outputs than load")


def judge(kind: str, folder: Path) -> list[tuple[str, str, str]]:
    """How each reader took a mutant: its name, the outcome, and what was said."""
    told, models = [], {}
    for name, read in READERS.items():
        try:
            models[name] = read(folder)
            told.append((name, LOADED, ""))
        except InputError as error:
            is_named = str(folder) in str(error) or "config.json" in str(error) or "format version" in str(error)
            outcome = REFUSED if is_named or kind in ITS_OWN else UNEXPECTED
            told.append((name, outcome, f"{type(error).__name__}: {error}"))
        except Exception as error:
            its_own = name == "from_pretrained" and kind in ITS_OWN and not isinstance(error, UnexpectedError)
            told.append((name, REFUSED if its_own else UNEXPECTED, f"{type(error).__name__}: {error}"))
    if models.get("from_pretrained") is not None and models.get("load") is not None:
        try:
            compare(models["from_pretrained"], models["load"])
        except Exception as error:
            told.append(("compare", UNEXPECTED, f"{type(error).__name__}: {error}"))
    if models.get("Engine") is not None and (models.get("load") is not None or kind not in ITS_OWN):
        try:
            if models.get("load") is None:
                raise UnexpectedError("Engine takes what load refuses")
            compare_engine(models["load"], models["Engine"])
        except Exception as error:
            told.append(("compare Engine", UNEXPECTED, f"{type(error).__name__}: {error}"))
    return told


# ------------------------------------------------------------ many of them, in a child that may die


def work(numbers: range, seed: int, bases: dict[str, Model], folder: Path, report: Path) -> None:
    """Mutants one after the other, each told in a line as soon as it is done."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a panic of Rust code talks
    os.dup2(2, 1)
    for end in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(end, signal.SIG_DFL)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY,) * 2)
    with report.open("w", buffering=1) as lines:
        for number in numbers:
            kind, place = make(number, seed, bases, folder)
            _stop_after(SECONDS, WAITING)
            told = judge(kind, place)
            _stop_after(0, 0)
            shutil.rmtree(place)
            lines.write(json.dumps([number, kind, told]) + "\n")


def _stop_after(seconds: float, waiting: float) -> None:
    """Ends this process after a limit of computing or time, also inside of native code; 0 is never."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, waiting)


def run(
    count: int,
    seed: int = 0,
    batch: int = 100,
    watch: Callable[[list[Told]], None] | None = None,
    seconds: float = math.inf,
) -> list[Told]:
    """Mutants through every reader: the number of each, the kind of its change, and what `judge` says.

    `watch` is given those of every batch as soon as it is done. No batch is started after `seconds`.
    """
    until = time.monotonic() + seconds
    torch.set_num_threads(1)
    _hush()
    told: list[Told] = []
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        folder = Path(name)
        bases = prepare(folder)
        for base in bases:  # what they import, children find imported
            bad = [each for each in judge("none", folder / base) if each[1] != LOADED]
            assert not bad, bad
        while len(told) < count and time.monotonic() < until:
            numbers = range(len(told), min(len(told) + batch, count))
            (folder / "report").write_text("")
            child = os.fork()
            if child == 0:
                try:
                    work(numbers, seed, bases, folder, folder / "report")
                finally:
                    os._exit(0)
            status = os.waitpid(child, 0)[1]
            told += [tuple(json.loads(line)) for line in (folder / "report").read_text().splitlines()]
            if len(told) <= numbers[-1]:  # it died of the next one
                died = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"status {status}"
                slow = died in ("SIGPROF", "SIGALRM")
                told.append((len(told), "?", [("?", UNEXPECTED, f"too slow ({died})" if slow else died)]))
            if watch is not None:
                watch(told[numbers[0] :])
    return told


def _hush() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def unexpected(told: list[Told]) -> list[str]:
    """What did not end well, a line each."""
    return [
        f"{number} ({kind}) {reader}: {said[:300]}"
        for number, kind, outcomes in told
        for reader, outcome, said in outcomes
        if outcome == UNEXPECTED
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no further batch after this")
    parser.add_argument("--case", type=int, help="do this one alone and show what each reader says")
    settings = parser.parse_args()
    if settings.case is not None:
        with tempfile.TemporaryDirectory() as name:
            kind, place = make(settings.case, settings.seed, prepare(Path(name)), Path(name))
            print(kind, *judge(kind, place), sep="\n")
        return 0
    told = run(
        settings.count,
        settings.seed,
        watch=lambda some: print(f"to {some[-1][0]}", *unexpected(some), sep="\n", flush=True),
        seconds=settings.seconds,
    )
    counts = Counter((kind, reader, outcome) for _, kind, outcomes in told for reader, outcome, _ in outcomes)
    for (kind, reader, outcome), count in sorted(counts.items()):
        print(f"{kind:20} {reader:16} {outcome:12} {count:>6}")
    bad = unexpected(told)
    print(f"{len(told)} mutants of seed {settings.seed}, {len(bad)} {UNEXPECTED}", *bad, sep="\n")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
