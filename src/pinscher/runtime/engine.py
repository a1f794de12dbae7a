"""Engine: a stored model that runs without torch, from texts to answers.

    engine = pinscher.Engine("runs/demo/export")
    engine.classify("a gripping, funny film")

It needs numpy, safetensors, tokenizers and the native extension. Its numbers are those of `pinscher.load`, to the last
bit: both stand on core.py. Texts are batched without padding, and safe to give from several threads at once.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, overload

import numpy as np

from pinscher import native
from pinscher.errors import InputError
from pinscher.models import hub
from pinscher.models.families import max_positions
from pinscher.registry import unknown
from pinscher.runtime import answers, choice, kernels, packing, reading, sentences
from pinscher.runtime.answers import Answer, Label, Rank, Span
from pinscher.runtime.core import Tail
from pinscher.runtime.kernels import Array
from pinscher.runtime.sentences import Embedder
from pinscher.runtime.tokens import Encoded, Text, Tokenizer, TooLongError

TOGETHER = 1 << 13  # tokens that are computed at once: more do not make it faster
NEEDS = {
    "classify": ("classification", "a classifier of texts"),
    "rerank": ("classification", "a classifier of texts"),
    "tokens": ("tokens", "a classifier of tokens"),
    "answer": ("answers", "a model that answers questions"),
}
DOES = {
    "classification": "classify or rerank",
    "embeddings": "encode",
    "tokens": "tokens",
    "answers": "answer",
}
IDENTITY, SIGMOID = "Identity", "Sigmoid"  # what a cross-encoder may do with its scores


class Engine:
    """A stored model without torch.

    Args:
        model: a folder that `pinscher.save_pretrained` or `pinscher export` wrote, or its name on the hub.
        mode: see `pinscher.accelerate`.
        threads: how many to use; as many as there are CPUs if not given.

    Raises:
        InputError: for a folder that is not one of ours or is damaged, and for models that need torch: those of other
            families than BERT's, and heads other than classifiers of texts or tokens and answers to questions.
    """

    def __init__(self, model: str | Path, *, mode: str = "auto", threads: int | None = None) -> None:
        if mode not in choice.MODES:
            raise InputError(unknown("mode", mode, choice.MODES) + ".")
        if native.core() is None:
            raise InputError(
                "an Engine needs pinscher's native code: install a wheel, or a C++ compiler and reinstall."
            )
        self.folder = hub.stored_folder(model)
        self.threads = kernels.threads_of(threads)
        self._model = reading.read(self.folder, mode, self.threads)
        self.config = self._model.config
        self.task: str = self.config.task
        self.labels = [] if self.task in ("embeddings", "answers") else self.config.labels
        self.longest = max_positions(self.config)
        is_embedder = self.task == "embeddings"
        self._embedder = sentences.read(self.folder, self.config.width, self.threads) if is_embedder else None
        self._reading = threading.Lock()

    def __repr__(self) -> str:
        core = self._model.core
        return f"Engine({str(self.folder)!r}: {self.config.family_name}, {self.task}, {core.count} x {core.width})"

    def __reduce_ex__(self, _: Any) -> Any:
        raise InputError("an Engine cannot be pickled: make one of the same folder in every process that needs it.")

    def __copy__(self) -> Engine:
        return self  # nothing in it is ever changed: copies may share it

    def __deepcopy__(self, _: Any) -> Engine:
        return self

    @property
    def tokenizer(self) -> Tokenizer:
        """What texts are read with.

        Raises:
            InputError: if the folder has none that fits.
        """
        with self._reading:
            return self._tokenizer

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        limit = None if self._embedder is None else self._embedder.told.max_length
        longest = self.longest if limit is None else min(limit, self.longest)
        return Tokenizer(self.folder, self.config.family, self.config.vocab_size, longest)

    @property
    def dimensions(self) -> int:
        """How many numbers an embedding has."""
        return self._embedding("dimensions").tails[False].features

    @property
    def prompts(self) -> dict[str, str]:
        """What `encode` may put before texts, by name."""
        return {} if self._embedder is None else dict(self._embedder.told.prompts)

    @property
    def mode_of_matrices(self) -> dict[str, int]:
        """How many matrices run in which kind of kernel."""
        kinds = [matrix.kind for layer in self._model.core.packed for matrix in layer]
        return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}

    # ------------------------------------------------------------ texts

    @overload
    def classify(self, texts: Text, *, truncate: bool = True) -> Label: ...
    @overload
    def classify(self, texts: list[Any], *, truncate: bool = True) -> list[Label]: ...

    def classify(self, texts: Text | list[Any], *, truncate: bool = True) -> Label | list[Label]:
        """The label and the probabilities of texts, or of pairs of texts.

        Args:
            texts: one, or several; a pair is a tuple.
            truncate: cut texts that are too long for the model, with a warning; else they are an error.
        """
        self._check("classify")
        one, some = _listed(texts)
        logits = self.logits(some, truncate=truncate)
        found = answers.labels(logits, self.labels, getattr(self.config, "problem_type", None))
        return found[0] if one else found

    def logits(self, texts: Sequence[Text], *, truncate: bool = True) -> Array:
        """What a classifier gives for texts or pairs, before it is made probabilities: [texts, labels]."""
        self._check("classify")
        encoded = self._encoded(texts, truncate)
        return self._vectors(encoded.ids, encoded.types, self._model.head)

    def encode(
        self,
        texts: str | Sequence[str],
        *,
        prompt: str | None = None,
        prompt_name: str | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        truncate: bool = True,
    ) -> Array:
        """The embeddings of texts, float32 [texts, dimensions]; [dimensions] of a single one.

        Args:
            texts: one, or several.
            prompt: what to put before each; the model's own default if not given.
            prompt_name: one of the model's prompts instead.
            normalize: scale embeddings to unit length; by default as the model's sentence-transformers files say.
            dimensions: keep only so many of the first numbers, for models that were trained for it.
            truncate: cut texts that are too long for the model, with a warning; else they are an error.
        """
        told, tails = self._embedding("encode")
        one, some = _listed(texts)
        if not all(isinstance(text, str) for text in some):
            raise InputError("embeddings are made of single texts: give strings.")
        encoded = self._encoded(self.prompted(some, prompt, prompt_name), truncate)
        wanted = told.normalizes if normalize is None else bool(normalize)
        found = self._vectors(encoded.ids, encoded.types, tails[wanted])
        if dimensions is not None:
            found = shortened(found, dimensions, wanted)
        return found[0] if one else found

    @property
    def normalizes(self) -> bool:
        """Whether the model's embeddings have unit length by default."""
        return self._embedding("normalizes").told.normalizes

    def prompted(self, texts: Sequence[str], prompt: str | None, prompt_name: str | None) -> list[str]:
        """Texts as an embedding model reads them, behind a prompt; for the arguments see `encode`."""
        told = self._embedding("encode").told
        if prompt_name is not None:
            if prompt is not None or prompt_name not in told.prompts:
                named = ", ".join(told.prompts) or "none"
                raise InputError(f"prompt_name {prompt_name!r}: give it alone; the model's prompts: {named}.")
            prompt = told.prompts[prompt_name]
        before = told.prompt_for("") if prompt is None else prompt
        return [before + (text.lower() if told.lowers else text) for text in texts]

    def rerank(self, query: str, texts: Sequence[str], *, raw: bool = False, truncate: bool = True) -> list[Rank]:
        """Texts by how well they fit a query, the best one first.

        Args:
            query: the query.
            texts: to rank.
            raw: the model's own scores, not between 0 and 1.
            truncate: cut texts that are too long for the model, with a warning; else they are an error.
        """
        self._check("rerank")
        if len(self.labels) != 1:
            raise InputError(f"{self.folder} has {len(self.labels)} labels: rerank needs a model that gives one score.")
        return self.ranked(self.logits([(query, text) for text in _list_of(texts)], truncate=truncate), raw=raw)

    def ranked(self, logits: Array, *, raw: bool = False) -> list[Rank]:
        """The order of texts by their logits [texts, 1]; see `rerank`."""
        scores = logits[:, 0].astype(np.float64)
        if not raw and not self._is_raw():
            scores = answers.sigmoid(scores)
        order = np.argsort(-scores, kind="stable")
        return [Rank(int(number), float(scores[number])) for number in order]

    def _is_raw(self) -> bool:
        """Whether a cross-encoder's config says that its scores are used as they are.

        Raises:
            InputError: if it says something else than that, or a sigmoid.
        """
        told = self.config.__dict__.get("sentence_transformers")
        named = told.get("activation_fn") if isinstance(told, dict) else None
        named = named or self.config.__dict__.get("sbert_ce_default_activation_function")
        if named is not None and (not isinstance(named, str) or named.rpartition(".")[2] not in (IDENTITY, SIGMOID)):
            raise InputError(
                f"{self.folder} puts scores through {str(named)[:80]}: rerank knows {SIGMOID} and {IDENTITY}; ask for "
                "raw scores."
            )
        return named is not None and named.endswith(IDENTITY)

    @overload
    def tokens(self, texts: str) -> list[Span]: ...
    @overload
    def tokens(self, texts: list[str]) -> list[list[Span]]: ...

    def tokens(self, texts: str | list[str]) -> list[Span] | list[list[Span]]:
        """The named parts of texts of any length."""
        self._check("tokens")
        one, some = _listed(texts)
        found = [self._spans(text) for text in some]
        return found[0] if one else found

    def _spans(self, text: Any) -> list[Span]:
        if not isinstance(text, str):
            raise InputError(f"spans are found in single texts, not in {type(text).__name__}: give strings.")
        tokenizer = self.tokenizer
        encoded = tokenizer.windows(text, overlap=(tokenizer.longest - tokenizer.frame) // 4)
        rows = [answers.softmax(logits) for logits in self._token_logits(encoded)]
        return answers.spans(text, encoded.encodings, rows, self.labels)

    def answer(self, question: str, context: str, *, overlap: int = 128) -> Answer:
        """The part of a context that answers a question best.

        Args:
            question: the question.
            context: of any length: one that is too long for the model is read in windows.
            overlap: tokens that a window has in common with the next one, at most half of it.
        """
        self._check("answer")
        if not isinstance(question, str) or not isinstance(context, str):
            raise InputError("question and context must be texts.")
        if type(overlap) is not int or overlap < 0:
            raise InputError(f"an overlap of {overlap} tokens is not possible: give a number from 0 on.")
        tokenizer = self.tokenizer
        asked = len(tokenizer([question]).ids[0])
        room = tokenizer.longest - asked - tokenizer.frame
        if room < 1:
            raise TooLongError(f"the question has {asked} tokens, which leaves no room for a context: shorten it.")
        encoded = tokenizer.windows((question, context), overlap=min(overlap, room // 2))
        return answers.answer(context, encoded.encodings, self._token_logits(encoded))

    def _token_logits(self, encoded: Encoded) -> list[Array]:
        """What the head gives for each token, row by row."""
        found = self._vectors(encoded.ids, encoded.types, self._model.head)
        ends = np.cumsum([len(row) for row in encoded.ids])
        return np.split(found, ends[:-1])

    def _encoded(self, texts: Sequence[Text], truncate: bool) -> Encoded:
        encoded = self.tokenizer(_list_of(texts), truncate=truncate)
        if encoded.cut:
            warnings.warn(
                f"{len(encoded.cut)} of {len(encoded.ids)} texts have more than {self.tokenizer.longest} tokens: the "
                "rest of each was cut off.",
                stacklevel=4,
            )
        return encoded

    # ------------------------------------------------------------ tokens

    def check_rows(self, ids: list[list[int]]) -> None:
        """Refuses rows of tokens that the model cannot read: too long, empty, or with tokens that it does not know."""
        for number, row in enumerate(ids):
            if not 0 < len(row) <= self.longest:
                raise TooLongError(f"row {number} has {len(row)} tokens: the model takes 1 to {self.longest}.")
            _check_range("input_ids", np.asarray(row), self.config.vocab_size)

    def vectors(
        self, ids: list[list[int]], types: list[list[int]] | None = None, normalize: bool | None = None
    ) -> Array:
        """What the model gives for rows of tokens of any lengths, one vector for each.

        Args:
            ids: the tokens of each row.
            types: their types, for models that read them.
            normalize: for embeddings, see `encode`.
        """
        if not isinstance(ids, list | tuple | np.ndarray) or not isinstance(types, list | tuple | np.ndarray | None):
            raise InputError("rows of tokens are lists of lists of token ids.")
        if self.task not in ("classification", "embeddings"):
            raise InputError(f"{self.folder} gives vectors for tokens, not for texts: use {DOES[self.task]}.")
        if self._embedder is None:
            return self._vectors(ids, types, self._model.head)
        wanted = self._embedder.told.normalizes if normalize is None else bool(normalize)
        return self._vectors(ids, types, self._embedder.tails[wanted])

    def _vectors(self, ids: list[list[int]], types: list[list[int]] | None, tail: Tail | None) -> Array:
        assert tail is not None
        self._check_rows(ids, types)
        core, parts = self._model.core, []
        for start, end in _chunks([len(row) for row in ids]):
            some = None if types is None else types[start:end]
            rows = packing.ragged([len(row) for row in ids[start:end]])
            indices = core.ragged_indices(ids[start:end], some)
            _check_range("input_ids", indices[0], self.config.vocab_size)
            parts.append(core.run(None, indices, rows, first=tail.pooling == "first", tail=tail).last)
        return np.concatenate(parts) if parts else np.empty((0, tail.features), np.float32)

    def _check_rows(self, ids: list[list[int]], types: list[list[int]] | None) -> None:
        """The core reads as many tokens as rows say they have, and trusts it."""
        for number, row in enumerate(ids):
            _check_row(f"row {number}", row)
            if not 0 < len(row) <= self.longest:
                raise InputError(f"row {number} has {len(row)} tokens: the model takes 1 to {self.longest}.")
        if types is None:
            return
        if len(types) != len(ids):
            raise InputError(f"there are {len(ids)} rows, and types for {len(types)}: give one list for each.")
        for number, (row, kinds) in enumerate(zip(ids, types, strict=True)):
            _check_row(f"types of row {number}", kinds)
            if len(kinds) != len(row):
                raise InputError(f"row {number} has {len(row)} tokens and {len(kinds)} types: give one for each.")
            if self.config.family.has_token_types:
                _check_range("token types", np.asarray(kinds), self.config.type_vocab_size)

    def run(
        self, input_ids: Any, attention_mask: Any = None, token_type_ids: Any = None, position_ids: None = None
    ) -> dict[str, Array]:
        """The model's outputs for arrays [rows, tokens], under the names that transformers gives them.

        Args:
            input_ids: token ids.
            attention_mask: 1 for tokens that count; those that do not are not computed.
            token_type_ids: which part of a pair a token is of, for models that read it.
            position_ids: not possible.
        """
        if position_ids is not None:
            raise InputError("an Engine counts positions itself: leave position_ids out.")
        ids = _integers("input_ids", input_ids)
        shape = (ids.shape[0], ids.shape[1])
        if not 0 < shape[1] <= self.longest:
            raise InputError(f"{shape[1]} tokens in a row: the model takes 1 to {self.longest}.")
        mask = None if attention_mask is None else _mask(attention_mask, shape)
        if mask is not None and self.config.family.relative_bias:
            _check_without_holes(mask)
        types = None
        if token_type_ids is not None and self.config.family.has_token_types:
            types = _integers("token_type_ids", token_type_ids, shape)
            _check_range("token_type_ids", types, self.config.type_vocab_size)
        _check_range("input_ids", ids, self.config.vocab_size)
        rows, core = packing.visible(mask, shape), self._model.core
        first = self.task == "classification"
        last = core.run(None, core.indices(ids, types), rows, first=first).last
        if first and len(last) == shape[0] and len(last) != rows.tokens:
            return {"logits": self._headed(last)}
        hidden = rows.placed(last)
        if self.task == "embeddings":
            pooler = self._model.pooler
            pooled = {} if pooler is None else {"pooler_output": pooler.run(hidden[:, 0])}
            return {"last_hidden_state": hidden} | pooled
        logits = self._headed(hidden[:, 0] if first else hidden.reshape(-1, core.width))
        if first:
            return {"logits": logits}
        logits = logits.reshape(*shape, -1) if len(logits) else logits.reshape(*shape, logits.shape[1])
        if self.task == "tokens":
            return {"logits": logits}
        return {"start_logits": logits[..., 0], "end_logits": logits[..., 1]}

    def _headed(self, hidden: Array) -> Array:
        assert self._model.head is not None
        return self._model.head.run(hidden)

    def _embedding(self, asked: str) -> Embedder:
        if self._embedder is None:
            raise InputError(f"{asked} needs a base model; {self.folder} is for {self.task}: use {DOES[self.task]}.")
        return self._embedder

    def _check(self, asked: str) -> None:
        task, needed = NEEDS[asked]
        if self.task != task:
            raise InputError(f"{asked} needs {needed}; {self.folder} is for {self.task}: use {DOES[self.task]}.")


def _listed(texts: Any) -> tuple[bool, list[Any]]:
    """Whether there is only one text or pair, and a list in any case."""
    if isinstance(texts, str | tuple):
        return True, [texts]
    return False, _list_of(texts)


def _list_of(texts: Any) -> list[Any]:
    if isinstance(texts, str | bytes | Mapping | Set) or not hasattr(texts, "__iter__"):  # which have no texts in order
        raise InputError(f"{type(texts).__name__} is no list of texts: give a list.")
    return list(texts)


def _chunks(lengths: list[int]) -> Iterator[tuple[int, int]]:
    """Ranges of rows with about TOGETHER tokens."""
    start = held = 0
    for number, length in enumerate(lengths):
        if held and held + length > TOGETHER:
            yield start, number
            start, held = number, 0
        held += length
    if lengths:
        yield start, len(lengths)


def shortened(found: Array, dimensions: Any, normalised: bool) -> Array:
    """The first numbers of embeddings, of unit length again if they were."""
    if type(dimensions) is not int or not 0 < dimensions <= found.shape[1]:
        raise InputError(f"{dimensions} dimensions are not possible: the model has {found.shape[1]}.")
    short = found[:, :dimensions]
    if not normalised:
        return np.ascontiguousarray(short)
    length = np.maximum(np.linalg.norm(short, axis=1, keepdims=True), 1e-12)
    return np.asarray(short / length, np.float32)


def _check_row(name: str, row: Any) -> None:
    try:
        found = np.asarray(row)
    except (TypeError, ValueError, OverflowError):
        found = np.empty((0, 0))
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise InputError(f"{name}: give a list of token ids, which are whole numbers.")


def _integers(name: str, given: Any, shape: tuple[int, int] | None = None) -> Array:
    try:
        made = np.asarray(given)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name} are no array of numbers: {error}.") from None
    if made.ndim != 2 or made.dtype.kind not in "iu" or (shape is not None and made.shape != shape):
        wanted = "[rows, tokens]" if shape is None else str(list(shape))
        raise InputError(
            f"{name} have shape {list(made.shape)} and type {made.dtype}; they must be integers, {wanted}."
        )
    return made.astype(np.int64, copy=False)


def _mask(given: Any, shape: tuple[int, int]) -> Array:
    try:
        made = np.asarray(given)
    except (TypeError, ValueError) as error:
        raise InputError(f"attention_mask is no array of numbers: {error}.") from None
    if made.shape != shape or made.dtype.kind not in "biuf":
        raise InputError(
            f"attention_mask has shape {list(made.shape)}; it takes one number for each token, {list(shape)}."
        )
    return np.asarray(made != 0)


def _check_without_holes(mask: Array) -> None:
    starts = np.diff(mask.astype(np.int8), axis=1, prepend=np.int8(0)) > 0
    if (starts.sum(1) > 1).any():
        raise InputError(
            "this model knows how far tokens are apart: the mask may hide the ends of a row, not its inside."
        )


def _check_range(name: str, index: Array, count: int) -> None:
    wrong = index[(index < 0) | (index >= count)]
    if wrong.size:
        raise kernels.OutOfRangeError(f"{name} contain {wrong.flat[0]}: the model has 0 to {count - 1}.")
