"""What requests hold: OpenAI's and text-embeddings-inference's fields, of the right types."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

Texts = StrictStr | list[StrictStr]
Pair = list[StrictStr]


class Asked(BaseModel):
    """What every request may say."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    model: StrictStr | None = Field(None, description="Name of the model; the first one if not given.")
    truncate: StrictBool = Field(False, description="Cut texts that are too long; else they are an error (413).")


class Embed(Asked):
    """Texts to embed, as text-embeddings-inference takes them."""

    inputs: Texts
    normalize: StrictBool | None = Field(None, description="Scale to unit length; by default as the model says.")
    prompt_name: StrictStr | None = Field(None, description="One of the model's prompts, put before each text.")
    dimensions: StrictInt | None = Field(None, ge=1, description="Keep only so many of the first numbers.")


class OpenAI(Asked):
    """Texts to embed, as OpenAI takes them."""

    input: StrictStr | list[StrictStr] | list[StrictInt] | list[list[StrictInt]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: StrictInt | None = Field(None, ge=1)
    user: StrictStr | None = None


class Rerank(Asked):
    """Texts to rank by a query."""

    query: StrictStr
    texts: list[StrictStr]
    raw_scores: StrictBool = False
    return_text: StrictBool = False


class Predict(Asked):
    """Texts to classify: one, a pair, or a list of lists of one or two."""

    inputs: StrictStr | Pair | list[Pair]
    raw_scores: StrictBool = False
