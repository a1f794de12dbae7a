"""Prunes a sentence encoder in sentence-transformers' own Trainer, with a loss of its own, and stores it small.

    python examples/sentence_trainer.py MODEL pairs.jsonl small

Each line of the file is {"anchor": …, "positive": …}: two texts that belong together. The callback works with any loss
of sentence-transformers and any further steps of the model. To prune without pairs, from texts alone, there is
`pinscher prune --task embeddings`.
"""

from __future__ import annotations

import argparse
import tempfile

from datasets import load_dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.util import cos_sim

import pinscher

try:  # where it is from version 6 on
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
except ImportError:
    from sentence_transformers.losses import MultipleNegativesRankingLoss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("pairs")
    parser.add_argument("output")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--sparsity", type=float, default=0.8)
    args = parser.parse_args()

    model = SentenceTransformer(args.model, device="cpu")
    pairs = load_dataset("json", data_files=args.pairs, split="train").select_columns(["anchor", "positive"])
    pruning = pinscher.PruningConfig(sparsity=args.sparsity, interval=max(1, min(10, args.steps // 20)))
    with tempfile.TemporaryDirectory() as checkpoints:
        trainer = SentenceTransformerTrainer(
            model=model,
            args=SentenceTransformerTrainingArguments(
                output_dir=checkpoints,
                max_steps=args.steps,
                per_device_train_batch_size=32,
                learning_rate=1e-4,
                save_strategy="no",
                report_to="none",
                use_cpu=True,
            ),
            train_dataset=pairs,
            loss=MultipleNegativesRankingLoss(model),
            callbacks=[pinscher.PruningCallback(pruning)],  # that is all
        )
        trainer.train()
    print(f"{pinscher.sparsity(model):.1%} of the weights of the blocks are zero")

    pinscher.save_pretrained(model, args.output, embeddings="int8")
    fast = SentenceTransformer(args.output, device="cpu")  # the sparse runtime
    texts = [pairs[0]["anchor"], pairs[0]["positive"]]
    likeness = cos_sim(fast.encode(texts), model.encode(texts)).diagonal()
    print(f"as stored, embeddings have a cosine of {float(likeness.min()):.4f} to those in PyTorch")


if __name__ == "__main__":
    main()
