"""Records when the teacher changes in a real run of PINS with self-regularisation.

    python benchmarks/teacher_trace.py --model MODEL_DIR --data DATA_DIR/cola --output TRACE.json

MODEL_DIR is any Hugging Face encoder, DATA_DIR/cola holds train.jsonl.gz and validation.jsonl.gz with the fields of the
`datasets` library. A tenth of the training set is split off as validation; the development set is only the test.
`step_overhead.py` replays the trace. A plain PyTorch loop with no Trainer: it is also the smallest honest example.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import pinscher


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--method", default="pins")
    parser.add_argument("--objective", default="self-regularization")
    parser.add_argument("--sparsity", type=float, default=0.8)
    parser.add_argument("--rows", type=int, help="maximum number of training rows, after shuffling")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-5)
    parser.add_argument("--warmup", type=float, default=500)
    parser.add_argument("--cooldown", type=float, default=1500)
    parser.add_argument("--evaluate-every", type=int, default=50)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()
    torch.manual_seed(args.seed)

    rows = read(args.data / "train.jsonl.gz")
    order = torch.randperm(len(rows)).tolist()
    rows = [rows[i] for i in order][: args.rows]
    validation, train = rows[: len(rows) // 10], rows[len(rows) // 10 :]
    test = read(args.data / "validation.jsonl.gz")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=2, dtype=torch.float32)

    steps_per_epoch = len(train) // args.batch
    total = steps_per_epoch * args.epochs
    config = pinscher.PruningConfig(
        method=args.method, sparsity=args.sparsity, total_steps=total, warmup=args.warmup, cooldown=args.cooldown
    )
    pruner = pinscher.Pruner(model, config)
    optimizer = torch.optim.AdamW(pruner.param_groups(), lr=args.lr, fused=True)
    pruner.attach(optimizer)
    decay = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: min(t / (0.06 * total), (total - t) / (0.94 * total))
    )
    teacher = pinscher.Teacher(model, args.objective)

    trace: list[dict[str, Any]] = []
    started = time.perf_counter()
    step = 0
    for epoch in range(args.epochs):
        shuffled = torch.randperm(len(train)).tolist()
        for i in range(steps_per_epoch):
            if step % args.evaluate_every == 0:
                score = matthews(model, tokenizer, validation)
                changed = teacher.consider(score)
                trace.append({"step": step, "score": score, "teacher": changed, "density": pruner.kept / pruner.total})
                passed = time.perf_counter() - started
                print(f"epoch {epoch} step {step}/{total} {trace[-1]} best {teacher.best} {passed:.0f} s", flush=True)
            batch = encode(tokenizer, [train[j] for j in shuffled[i * args.batch : (i + 1) * args.batch]])
            outputs = model(**batch)
            loss = outputs.loss + teacher.loss(batch, outputs)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            decay.step()
            optimizer.zero_grad()
            step += 1
    pruner.finish()
    pruner.summary()
    result = {
        "model": Path(args.model).name,
        "task": args.data.name,
        **{k: v for k, v in vars(args).items() if k not in ("model", "data", "output")},
        "train_rows": len(train),
        "steps_per_epoch": steps_per_epoch,
        "total_steps": total,
        "test_score": matthews(model, tokenizer, test),
        "sparsity_reached": pinscher.sparsity(model),
        "seconds": round(time.perf_counter() - started),
        "evaluations": trace,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print({k: v for k, v in result.items() if k != "evaluations"})


def read(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as lines:
        return [json.loads(line) for line in lines]


def encode(tokenizer: Any, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    texts = [[row[k] for row in rows] for k in ("sentence", "sentence1", "sentence2") if k in rows[0]]
    batch = tokenizer(*texts, truncation=True, max_length=128, padding=True, return_tensors="pt")
    return {**batch, "labels": torch.tensor([row["label"] for row in rows])}


@torch.no_grad()
def matthews(model: torch.nn.Module, tokenizer: Any, rows: list[dict[str, Any]]) -> float:
    model.eval()
    rows = sorted(rows, key=lambda row: len(str(row)))
    said, true = [], []
    for i in range(0, len(rows), 64):
        batch = encode(tokenizer, rows[i : i + 64])
        true += batch.pop("labels").tolist()
        said += model(**batch).logits.argmax(1).tolist()
    model.train()
    both = torch.tensor([said, true], dtype=torch.float64)
    correlation = float(torch.corrcoef(both)[0, 1])
    return 0.0 if correlation != correlation else correlation


if __name__ == "__main__":
    main()
