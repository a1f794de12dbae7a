"""What int8 activations cost a fine-tuned classifier in answers: the runtime's modes, and other scales, simulated.

    python benchmarks/activations.py MODEL … --texts rows.jsonl --output benchmarks/results/activations.txt

Every line of the texts is an object with `sentence` and `label`. "same" is the share of answers that are those of the
model in fp32. "hidden" says how far the last hidden states of some of the sentences are off, "sample" the same for the
random tokens that mode `auto` looks at. "all groups" has every matrix by groups with int8 activations, faster or not.
A simulation rounds in PyTorch, on as many sentences as hidden states are compared for.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import pinscher
from pinscher.runtime import choice

BATCH = 64
COMPARED = 8  # batches whose hidden states are compared
SMOOTHING = (0.35, 0.5)  # how much of a feature's range is moved into the weights
Round = Callable[[Tensor], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.texts.read_text().splitlines()[: args.rows]]
    models = " ".join(f"{path.parent.name}/{path.name}" for path in args.models)
    lines = [f"$ python benchmarks/activations.py {models} --texts rows.jsonl"]
    lines += ["", f"{len(rows)} sentences, {COMPARED * BATCH} for hidden states and simulations", ""]
    lines.append(f"{'':52}{'same':>9}{'score':>8}{'hidden':>9}{'sample':>9}")
    for path in args.models:
        for line in Trial(path, rows).lines():
            print(line, flush=True)
            lines.append(line)
    if args.output:
        args.output.write_text("\n".join(lines) + "\n")


class Trial:
    """A model in fp32, its answers, and what others make of the same sentences."""

    def __init__(self, path: Path, rows: list[dict[str, Any]]) -> None:
        self.name = path.parent.name
        self.model = AutoModelForSequenceClassification.from_pretrained(path).float().eval()
        tokenizer = AutoTokenizer.from_pretrained(path)
        texts = [row["sentence"] for row in rows]
        parts = [texts[start : start + BATCH] for start in range(0, len(texts), BATCH)]
        self.batches = [tokenizer(part, padding=True, truncation=True, return_tensors="pt") for part in parts]
        self.labels = torch.tensor([row["label"] for row in rows])
        self.sample = {"input_ids": choice._sample(self.model.base_model)}
        self.wanted = self.run(self.model, self.batches)
        linears = ((name, m) for name, m in self.model.named_modules() if ".layer." in name)
        self.linears = {name: module for name, module in linears if isinstance(module, nn.Linear)}

    def run(self, model: Any, batches: list[Any]) -> tuple[Tensor, Tensor, Tensor]:
        """Answers, hidden states of the first batches, and of the sample."""
        with torch.no_grad():
            answers = [model(**batch).logits.argmax(1) for batch in batches]
            some = [(batch, batch["attention_mask"].bool()) for batch in batches[:COMPARED]]
            hidden = [model.base_model(**batch).last_hidden_state[seen] for batch, seen in some]
            return torch.cat(answers), torch.cat(hidden), model.base_model(**self.sample).last_hidden_state

    def lines(self) -> Iterator[str]:
        yield self.line("fp32", self.model, self.batches)
        for mode in ("int8", "auto", "w8a8"):
            yield self.line(mode, pinscher.accelerate(self.model, mode=mode), self.batches)
        with all_as("groups"):
            yield self.line("all groups", pinscher.accelerate(self.model, mode="w8a8"), self.batches)
        tries: list[tuple[str, Round | None, float | None]] = [
            ("weights only", None, None),
            ("a range for each token", by_range, None),
            ("symmetric", symmetric, None),
            *((f"a range for each token, smoothed {share}", by_range, share) for share in SMOOTHING),
        ]
        for name, rounded, share in tries:
            with self.rounding(rounded, share):
                yield self.line(f"simulated: {name}", self.model, self.batches[:COMPARED])

    def line(self, title: str, model: Any, batches: list[Any]) -> str:
        answers, *states = self.run(model, batches)
        count = len(answers)
        same = (answers == self.wanted[0][:count]).float().mean()
        score = 100 * (answers == self.labels[:count]).float().mean()
        off = [
            float((found - wanted).norm() / wanted.norm())
            for found, wanted in zip(states, self.wanted[1:], strict=True)
        ]
        return f"{f'{self.name}: {title}':52}{same:9.2%}{score:8.2f}{off[0]:9.2%}{off[1]:9.2%}"

    @contextmanager
    def rounding(self, rounded: Round | None, share: float | None) -> Iterator[None]:
        """Rounds weights by rows and what they multiply by `rounded`, with features scaled if there is a share."""
        factors = {name: self.smoothing(name, share) for name in self.linears}
        before = {name: module.weight.data for name, module in self.linears.items()}
        with ExitStack() as stack:
            for name, module in self.linears.items():
                factor = factors[name]
                module.weight.data = symmetric(before[name] * factor) / factor
                if rounded is not None:
                    hook = module.register_forward_pre_hook(
                        lambda _, given, factor=factor: (rounded(given[0] / factor) * factor,)
                    )
                    stack.callback(hook.remove)
            yield
        for name, module in self.linears.items():
            module.weight.data = before[name]

    def smoothing(self, name: str, share: float | None) -> Tensor:
        """What each input is divided by, from the largest it has in the sample."""
        module = self.linears[name]
        if share is None:
            return torch.ones(module.in_features)
        seen: list[Tensor] = []
        hook = module.register_forward_pre_hook(lambda _, given: seen.append(given[0].abs().amax((0, 1))))
        with torch.no_grad():
            self.model.base_model(**self.sample)
        hook.remove()
        heights = module.weight.data.abs().amax(0).clamp(min=1e-6)
        factor = seen[0].clamp(min=1e-6) ** share / heights ** (1 - share)
        return (factor / factor.mean()).clamp(min=1e-3)


def symmetric(x: Tensor) -> Tensor:
    unit = (x.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-30)
    return (x / unit).round() * unit


def by_range(x: Tensor) -> Tensor:
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    middle, unit = (low + high) / 2, ((high - low) / 254).clamp(min=1e-30)
    return ((x - middle) / unit).round() * unit + middle


@contextmanager
def all_as(kind: str) -> Iterator[None]:
    usual = choice.kind_of
    choice.kind_of = lambda _, __: kind
    try:
        yield
    finally:
        choice.kind_of = usual


if __name__ == "__main__":
    main()
