"""Texts as token ids, by the tokenizer.json of a folder and without transformers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pinscher.errors import InputError, first_line
from pinscher.models import folders
from pinscher.models.families import LEAST_KNOWN, Family

FILE, SETTINGS = "tokenizer.json", "tokenizer_config.json"
MOST = 1 << 28  # bytes of a tokenizer
UNLIMITED = 1 << 30  # what transformers writes where a tokenizer knows no limit is larger
PLAIN = ("PreTrainedTokenizerFast", "TokenizersBackend")  # classes of any model's, which give no types unless told to
Text = str | tuple[str, str]


class Encoded(NamedTuple):
    """Some texts as rows of tokens."""

    ids: list[list[int]]
    types: list[list[int]] | None  # None where the model reads none
    encodings: list[Any]  # the tokenizer's own

    @property
    def cut(self) -> list[int]:
        """The numbers of the texts that were too long."""
        return [number for number, encoding in enumerate(self.encodings) if encoding.overflowing]


class Tokenizer:
    """A folder's tokenizer; safe from several threads at once.

    Args:
        folder: which has a tokenizer.json.
        family: of the model.
        vocabulary: how many tokens the model knows.
        longest: how many tokens of a text, special ones included, the model takes.

    Raises:
        InputError: if there is none, it cannot be read, or does not fit the model.
    """

    def __init__(self, folder: Path, family: Family, vocabulary: int, longest: int) -> None:
        path = folder / FILE
        if not path.is_file():
            raise InputError(
                f"{folder} has no {FILE}, which texts are read with: save the model's fast tokenizer beside it "
                "(AutoTokenizer.from_pretrained(...).save_pretrained(folder)), or pass token ids to run()."
            )
        made = _parsed(path)
        size = made.get_vocab_size(with_added_tokens=True)
        if size > vocabulary:
            raise InputError(f"{path} has {size} tokens, the model only {vocabulary}: it is another model's tokenizer.")
        if size < LEAST_KNOWN * vocabulary:
            raise InputError(
                f"{path} knows {size} tokens, the model {vocabulary}: it is another model's tokenizer, or damaged."
            )
        settings = folders.read_object(folder / SETTINGS, MOST)
        told, inputs = settings.get("model_max_length"), settings.get("model_input_names")
        limited = isinstance(told, int | float) and not isinstance(told, bool) and 0 < told < UNLIMITED
        self.longest = min(longest, int(told)) if limited else longest  # type: ignore[arg-type]
        named = "token_type_ids" in inputs if isinstance(inputs, list) else settings.get("tokenizer_class") not in PLAIN
        self.has_types = family.has_token_types and family.tokenizer_gives_types and named
        self.frame = made.num_special_tokens_to_add(True)
        if self.longest <= self.frame:
            raise InputError(f"{folder} allows {self.longest} tokens a text: there is no room for any of the text's.")
        made.enable_truncation(self.longest, strategy="longest_first")
        self._lock = threading.Lock()
        self._made = {("longest_first", 0): made}

    def __call__(self, texts: Sequence[Text], *, truncate: bool = True) -> Encoded:
        """The tokens of texts or pairs, special ones included.

        Raises:
            InputError: for anything that is no text.
            TooLongError: for a text that is too long, if they are not to be truncated.
        """
        found = self._encoded(texts, "longest_first", 0)
        if not truncate and found.cut:
            number = found.cut[0]
            raise TooLongError(
                f"text {number} has more than the {self.longest} tokens that the model takes: shorten it, or ask for "
                "truncation."
            )
        return found

    def windows(self, text: Text, *, overlap: int) -> Encoded:
        """One text, or the second of a pair beside the whole first one, in as many rows as it takes.

        Raises:
            InputError: for anything that is no text, and where the first text leaves no room for the second.
        """
        strategy = "only_second" if isinstance(text, tuple) else "only_first"
        found = self._encoded([text], strategy, overlap).encodings[0]
        every = [found, *found.overflowing]
        return Encoded([one.ids for one in every], [one.type_ids for one in every] if self.has_types else None, every)

    def _encoded(self, texts: Sequence[Text], strategy: str, stride: int) -> Encoded:
        for number, text in enumerate(texts):
            parts = text if isinstance(text, tuple) else (text,)
            if len(parts) not in (1, 2) or not all(isinstance(part, str) for part in parts):
                raise InputError(f"text {number} is no text: give a string, or a pair of strings as a tuple.")
            if not all(_is_unicode(part) for part in parts):
                raise InputError(f"text {number} is not valid Unicode: it holds half of a character, a lone surrogate.")
        try:
            found: list[Any] = self._tokenizer(strategy, stride).encode_batch(list(texts))
        except Exception as error:
            raise InputError(f"a text cannot be read: {first_line(error)}.") from None
        types = [encoding.type_ids for encoding in found] if self.has_types else None
        return Encoded([encoding.ids for encoding in found], types, found)

    def _tokenizer(self, strategy: str, stride: int) -> Any:
        """A tokenizer of its own for each way of cutting: it is part of a tokenizer's state."""
        key = strategy, stride
        with self._lock:
            if key not in self._made:
                from tokenizers import Tokenizer as Fast

                made = Fast.from_str(self._made["longest_first", 0].to_str())
                made.enable_truncation(self.longest, strategy=strategy, stride=stride)
                self._made[key] = made
            return self._made[key]


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _parsed(path: Path) -> Any:
    from tokenizers import Tokenizer as Fast

    try:
        if path.stat().st_size > MOST:
            raise InputError(f"it has more than {MOST >> 20} MB")
        made = Fast.from_str(path.read_text(encoding="utf-8"))
    except BaseException as error:  # a panic in Rust is not an Exception
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        raise InputError(f"cannot read {path}: {first_line(error)}.") from None
    made.no_padding()
    made.no_truncation()
    return made


class TooLongError(InputError):
    """A text with more tokens than the model takes."""
