"""The routes: FastAPI over Engine."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException

from pinscher import __version__
from pinscher.errors import InputError
from pinscher.runtime import answers
from pinscher.runtime.engine import Engine, shortened
from pinscher.runtime.kernels import Array
from pinscher.runtime.tokens import Encoded, Text, TooLongError
from pinscher.serve import guard, shapes
from pinscher.serve.batching import QUEUE, Batcher, BusyError
from pinscher.serve.metrics import Metrics

ENVIRONMENT = "PINSCHER_SERVE"  # settings, for the processes that uvicorn starts
QUICK = 20_000  # characters that are split into tokens without a thread of their own
PAGE = Path(__file__).with_name("page.html")


@dataclass(frozen=True)
class Settings:
    """What a server serves.

    Args:
        models: folders by name; the first is the default.
        mode: see `pinscher.accelerate`.
        threads: of each process.
        queue: texts that may wait.
        most_texts: of a request.
        most_bytes: of a request's body.
        patience: seconds in which a body must be there.
        api_key: what clients must give, if anything.
    """

    models: dict[str, str]
    mode: str = "auto"
    threads: int | None = None
    queue: int = QUEUE
    most_texts: int = 1024
    most_bytes: int = 16 << 20
    patience: float = 30.0
    api_key: str | None = None


class TooManyError(InputError):
    """More texts in a request than are allowed."""


class UnknownModelError(InputError):
    """A model that is not served."""


STATUS: dict[type[InputError], int] = {BusyError: 429, TooLongError: 413, TooManyError: 413, UnknownModelError: 404}


class Server:
    """The models and what they share."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.metrics = settings, Metrics()
        self.engines = {
            name: Engine(folder, mode=settings.mode, threads=settings.threads)
            for name, folder in settings.models.items()
        }
        for name, engine in self.engines.items():
            if engine.task not in ("classification", "embeddings"):
                raise InputError(f"{name} is for {engine.task}: embedders, rerankers and classifiers are served.")
            _ = engine.tokenizer  # read now: the folder may be replaced later
        self.batcher = Batcher(self.metrics, settings.queue)
        self.metrics.gauges["queue_texts"] = "Texts that wait.", lambda: self.batcher.waiting

    def engine(self, name: str | None, task: str) -> tuple[str, Engine]:
        """The model of that name, or the first one for a task."""
        if name is None:
            fitting = [one for one, engine in self.engines.items() if engine.task == task]
            name = next(iter(fitting), next(iter(self.engines)))
        if name not in self.engines:
            raise UnknownModelError(f"there is no model {name[:80]!r}: there are {', '.join(self.engines)}.")
        engine = self.engines[name]
        if engine.task != task:
            raise InputError(f"{name} is for {engine.task}, not for {task}.")
        return name, engine

    async def encoded(self, engine: Engine, texts: Sequence[Text], truncate: bool) -> Encoded:
        self.check_count(len(texts))
        if sum(len(part) for text in texts for part in ((text,) if isinstance(text, str) else text)) < QUICK:
            return engine.tokenizer(texts, truncate=truncate)
        return await asyncio.to_thread(engine.tokenizer, texts, truncate=truncate)

    def check_count(self, count: int) -> None:
        if not count:
            raise InputError("there are no texts: give at least one.")
        most = min(self.settings.most_texts, self.settings.queue)
        if count > most:
            raise TooManyError(f"{count} texts in a request: at most {most}.")

    async def vectors(self, engine: Engine, rows: Encoded, normalize: bool | None = None) -> Array:
        return await asyncio.wrap_future(self.batcher.submit(engine, rows.ids, rows.types, normalize))

    async def embeddings(
        self, engine: Engine, rows: Encoded, normalize: bool | None = None, dimensions: int | None = None
    ) -> Array:
        found = await self.vectors(engine, rows, normalize)
        if dimensions is None:
            return found
        return shortened(found, dimensions, engine.normalizes if normalize is None else normalize)


def make(settings: Settings) -> FastAPI:
    """The application."""
    server = Server(settings)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(server.batcher.close)

    app = FastAPI(title="pinscher", version=__version__, lifespan=lifespan)
    app.state.server = server
    _add_errors_(app)
    _add_embeddings_(app, server)
    _add_classifiers_(app, server)
    _add_facts_(app, server)
    app.add_middleware(
        guard.Guard,
        metrics=server.metrics,
        most=settings.most_bytes,
        patience=settings.patience,
        key=settings.api_key,
    )
    return app


def from_environment() -> FastAPI:
    """The application of a process that uvicorn has started."""
    return make(Settings(**json.loads(os.environ[ENVIRONMENT])))


def as_environment(settings: Settings) -> str:
    return json.dumps(asdict(settings))


def _add_errors_(app: FastAPI) -> None:
    @app.exception_handler(InputError)
    async def refused(request: Request, error: InputError) -> JSONResponse:
        status = STATUS.get(type(error), 422)
        waits = {"retry-after": "1"} if status == 429 else None
        return JSONResponse(guard.told(request.url.path, status, str(error)), status, headers=waits)

    @app.exception_handler(RequestValidationError)
    async def misshapen(request: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse(guard.told(request.url.path, 422, _misshape(error.errors()[0])), 422)

    @app.exception_handler(HTTPException)
    async def impossible(request: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse(guard.told(request.url.path, error.status_code, str(error.detail)), error.status_code)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse(guard.told(request.url.path, 500, f"{type(error).__name__} inside of the server."), 500)


def _misshape(error: Mapping[str, Any]) -> str:
    """What is wrong with the body of a request, by FastAPI's account of it."""
    place = ".".join(str(part) for part in error["loc"][1:])
    if error["type"] == "json_invalid":
        return f"the body is not JSON: {error['ctx']['error']} at character {place}."
    if not place:
        return "the body is not an object in JSON: send one, with the header content-type: application/json."
    return f"{place}: {error['msg']}"


def _add_embeddings_(app: FastAPI, server: Server) -> None:
    @app.post("/embed", summary="Embed texts (text-embeddings-inference)")
    async def embed(asked: shapes.Embed) -> Response:
        _, engine = server.engine(asked.model, "embeddings")
        texts = engine.prompted(_several(asked.inputs), None, asked.prompt_name)
        rows = await server.encoded(engine, texts, asked.truncate)
        found = await server.embeddings(engine, rows, asked.normalize, asked.dimensions)
        return _json(found.tolist())

    @app.post("/v1/embeddings", summary="Embed texts (OpenAI)")
    async def openai(asked: shapes.OpenAI) -> Response:
        name, engine = server.engine(_default(asked.model, server), "embeddings")
        rows = await _rows(server, engine, asked)
        found = await server.embeddings(engine, rows, None, asked.dimensions)
        if asked.encoding_format == "base64":
            listed: list[Any] = [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in found]
        else:
            listed = found.tolist()
        tokens = sum(map(len, rows.ids))
        return _json(
            {
                "object": "list",
                "data": [{"object": "embedding", "index": i, "embedding": row} for i, row in enumerate(listed)],
                "model": name,
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            }
        )


def _default(model: str | None, server: Server) -> str | None:
    """OpenAI's clients must name a model: with one model, any name will do."""
    return None if len(server.engines) == 1 else model


async def _rows(server: Server, engine: Engine, asked: shapes.OpenAI) -> Encoded:
    """The tokens of texts; OpenAI's clients may send tokens, too."""
    given: list[Any] = [asked.input] if isinstance(asked.input, str) else asked.input
    if given and isinstance(given[0], int):
        given = [given]
    if not given or isinstance(given[0], str):
        return await server.encoded(engine, engine.prompted(given, None, None), asked.truncate)
    server.check_count(len(given))
    ids = [row[: engine.tokenizer.longest] if asked.truncate else row for row in given]
    engine.check_rows(ids)
    return Encoded(ids, [[0] * len(row) for row in ids] if engine.tokenizer.has_types else None, [])


def _add_classifiers_(app: FastAPI, server: Server) -> None:
    @app.post("/rerank", summary="Rank texts by a query (text-embeddings-inference)")
    async def rerank(asked: shapes.Rerank) -> Response:
        name, engine = server.engine(asked.model, "classification")
        if len(engine.labels) != 1:
            raise InputError(f"{name} has {len(engine.labels)} labels: a reranker gives one score.")
        rows = await server.encoded(engine, [(asked.query, text) for text in asked.texts], asked.truncate)
        ranks = engine.ranked(await server.vectors(engine, rows), raw=asked.raw_scores)
        texts = [{"text": asked.texts[rank.index]} if asked.return_text else {} for rank in ranks]
        return _json([asdict(rank) | text for rank, text in zip(ranks, texts, strict=True)])

    @app.post("/predict", summary="Classify texts (text-embeddings-inference)")
    async def predict(asked: shapes.Predict) -> Response:
        _, engine = server.engine(asked.model, "classification")
        one, texts = _pairs(asked.inputs)
        rows = await server.encoded(engine, texts, asked.truncate)
        logits = await server.vectors(engine, rows)
        if asked.raw_scores:
            scores = [dict(zip(engine.labels, map(float, row), strict=True)) for row in logits]
        else:
            problem = getattr(engine.config, "problem_type", None)
            scores = [label.scores for label in answers.labels(logits, engine.labels, problem)]
        found = [
            [{"label": label, "score": score} for label, score in sorted(row.items(), key=lambda pair: -pair[1])]
            for row in scores
        ]
        return _json(found[0] if one else found)


def _several(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def _pairs(inputs: str | list[str] | list[list[str]]) -> tuple[bool, list[Text]]:
    """Whether there is only one text or pair, and a list in any case; a flat list of two is a pair."""
    if isinstance(inputs, str):
        return True, [inputs]
    if inputs and isinstance(inputs[0], str):
        return True, [_text(inputs)]
    return False, [_text(one) for one in inputs]


def _text(parts: Any) -> Text:
    if len(parts) not in (1, 2):
        raise InputError("inputs: give a text, a pair of texts, or a list of lists of one text or two.")
    return parts[0] if len(parts) == 1 else (parts[0], parts[1])


def _add_facts_(app: FastAPI, server: Server) -> None:
    @app.get("/v1/models", summary="Models (OpenAI)")
    async def models() -> dict[str, Any]:
        listed = [
            {"id": name, "object": "model", "created": 0, "owned_by": "pinscher", "task": engine.task}
            for name, engine in server.engines.items()
        ]
        return {"object": "list", "data": listed}

    @app.get("/info", summary="The first model and its limits (text-embeddings-inference)")
    async def info() -> dict[str, Any]:
        name, engine = next(iter(server.engines.items()))
        return {
            "model_id": name,
            "model_type": engine.task,
            "max_input_length": engine.tokenizer.longest,
            "max_client_batch_size": server.settings.most_texts,
            "max_concurrent_requests": server.settings.queue,
            "version": __version__,
        }

    @app.get("/health", summary="Whether the server answers")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics", summary="Counters (Prometheus)", response_class=PlainTextResponse)
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(server.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        told = [{"name": name, **_facts(engine)} for name, engine in server.engines.items()]
        data = json.dumps(told).replace("<", "\\u003c")
        return HTMLResponse(PAGE.read_text(encoding="utf-8").replace("/*MODELS*/[]", data))


def _facts(engine: Engine) -> dict[str, Any]:
    return {"task": "rerank" if len(engine.labels) == 1 else engine.task, "prompts": list(engine.prompts)}


def _json(content: Any) -> Response:
    return Response(json.dumps(content, separators=(",", ":"), allow_nan=False), media_type="application/json")


__all__ = ["ENVIRONMENT", "Settings", "as_environment", "from_environment", "make"]
