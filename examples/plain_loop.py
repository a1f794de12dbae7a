"""Prunes a small transformer to 80 % while it learns, in a plain PyTorch loop, and says what it did.

    python examples/plain_loop.py

The model is a transformer encoder of torch's own parts; the task, counting brackets, needs attention: is a sequence of
opening and closing brackets balanced? Everything is made here: no download, well under a minute on two cores.
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pinscher

LENGTH, WIDTH, LAYERS = 16, 64, 2
STEPS, BATCH, EVALUATE_EVERY = 600, 64, 50


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(2, WIDTH), nn.Embedding(LENGTH, WIDTH)
        block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.05, batch_first=True)
        self.encoder = nn.TransformerEncoder(block, LAYERS)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.encoder(self.tokens(input_ids) + self.places.weight)
        outputs = {"logits": self.head(x.mean(1))}
        if labels is not None:
            outputs["loss"] = F.cross_entropy(outputs["logits"], labels)
        return outputs


def brackets(rows: int, generator: torch.Generator) -> dict[str, Tensor]:
    """As many opening as closing brackets; half of the rows are balanced, half are not."""
    half = torch.tensor([1] * (LENGTH // 2) + [-1] * (LENGTH // 2))
    steps = torch.stack([half[torch.randperm(LENGTH, generator=generator)] for _ in range(rows)])
    for row in range(0, rows, 2):  # every second row becomes balanced: what would close too early opens instead
        depth = 0
        for i in range(LENGTH):
            if depth + int(steps[row, i]) < 0 or depth + int(steps[row, i]) > LENGTH - i - 1:
                steps[row, i] *= -1
            depth += int(steps[row, i])
    labels = (steps.cumsum(1).amin(1) >= 0).long()
    return {"input_ids": (steps > 0).long(), "labels": labels}


def accuracy(model: nn.Module, data: dict[str, Tensor]) -> float:
    model.eval()
    with torch.no_grad():
        right = (model(data["input_ids"])["logits"].argmax(1) == data["labels"]).float().mean()
    model.train()
    return float(right)


def run(sparsity: float, data: dict[str, Tensor], validation: dict[str, Tensor]) -> tuple[nn.Module, pinscher.Pruner]:
    torch.manual_seed(0)
    model = Classifier()
    pruner = pinscher.Pruner(model, pinscher.PruningConfig(method="pins", sparsity=sparsity, total_steps=STEPS))
    optimizer = torch.optim.AdamW(pruner.param_groups(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=STEPS)
    pruner.attach(optimizer)  # that is all a plain loop needs
    teacher = pinscher.Teacher(model)  # and this, to learn from the best student so far
    for t in range(STEPS):
        if t % EVALUATE_EVERY == 0:
            score = accuracy(model, validation)
            teacher.consider(score)
            if t % (3 * EVALUATE_EVERY) == 0:
                print(f"  step {t:4d}  kept {pruner.kept / pruner.total:6.1%}  validation accuracy {score:.3f}")
        rows = torch.randint(0, len(data["labels"]), (BATCH,))
        batch = {name: values[rows] for name, values in data.items()}
        outputs = model(**batch)
        loss = outputs["loss"] + teacher.loss(batch, outputs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    pruner.finish()
    return model, pruner


def main() -> None:
    generator = torch.Generator().manual_seed(7)
    data, validation, test = (brackets(rows, generator) for rows in (4096, 512, 1024))
    scores = {}
    for name, sparsity in (("dense", 0.0), ("pruned", 0.8)):
        print(f"{name}:")
        started = time.perf_counter()
        model, pruner = run(sparsity, data, validation)
        scores[name] = accuracy(model, test)
        print(f"  done in {time.perf_counter() - started:.0f} s, test accuracy {scores[name]:.3f}\n")
    pruner.summary()
    print(
        f"\nThe pruned model keeps {pruner.kept:,} of {pruner.total:,} weights in its blocks and "
        f"{scores['pruned'] / scores['dense']:.1%} of the dense accuracy."
    )


if __name__ == "__main__":
    main()
