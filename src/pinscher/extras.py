"""Which extra brings which library, for those who installed pinscher without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pinscher.errors import InputError

# The extra of pyproject.toml by the module that is missing.
EXTRAS = {
    "accelerate": "train",
    "datasets": "train",
    "rouge_score": "train",
    "sacrebleu": "train",
    "scipy": "train",
    "seqeval": "train",
    "sklearn": "train",
    "torch": "train",
    "transformers": "train",
    "matplotlib": "report",
    "fastapi": "serve",
    "uvicorn": "serve",
    "onnx": "onnx",
    "onnxruntime": "onnx",
    "onnxscript": "onnx",
    "peft": "lora",
    "ray": "ray",
    "sentence_transformers": "embeddings",
}


class MissingExtraError(InputError, ImportError):
    """A library is not installed, and which extra brings it; an ImportError too, since that is what it was."""


@contextmanager
def naming_extras(what: str) -> Iterator[None]:
    """Turns the import of a library that is not installed into a sentence with the command that installs it.

    Args:
        what: what was asked for, the start of that sentence.

    Raises:
        MissingExtraError: for a library of EXTRAS; any other error stays as it is.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in EXTRAS:
            raise
        raise MissingExtraError(
            f"{what} needs {library}, which is not installed: pip install 'pinscher[{EXTRAS[library]}]'."
        ) from None
