"""The first that sees a request: its size, its pace and its key; and the last: how long it took."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import time
from typing import Any

from pinscher.serve.metrics import Metrics

OPEN = ("/health", "/")  # without a key
# How long, and how much of, a body that is refused is read all the same: clients look for an answer once all is sent,
# and lose it if the connection is closed before.
LINGER, MOST_LINGERED = 2.0, 16 << 20
KNOWN = ("/v1/embeddings", "/v1/models", "/embed", "/rerank", "/predict", "/health", "/metrics", "/info", "/")


class Guard:
    """ASGI middleware.

    Args:
        app: the application.
        metrics: where requests are counted.
        most: bytes of a body.
        patience: seconds in which a body must be there.
        key: what clients must give as a bearer token, if anything.
    """

    def __init__(self, app: Any, metrics: Metrics, most: int, patience: float, key: str | None) -> None:
        self.app, self.metrics, self.most, self.patience, self.key = app, metrics, most, patience, key

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status = time.perf_counter(), 499  # as nginx calls it: the client went away

        async def watched(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._answer(scope, receive, watched)
        finally:
            path = scope["path"] if scope["path"] in KNOWN else "other"
            self.metrics.count_request(path, status, time.perf_counter() - start)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope["headers"])
        if self.key is not None and scope["path"] not in OPEN and not self._is_known(headers):
            await discard(receive, headers)
            return await refuse(send, scope["path"], 401, "give the API key: Authorization: Bearer KEY.")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self.most:
            await discard(receive, headers)
            return await refuse(send, scope["path"], 413, f"the body is too large: at most {self.most:,} bytes.")
        try:
            body, more = await asyncio.wait_for(self._body(receive), self.patience)
        except TimeoutError:
            return await refuse(send, scope["path"], 408, f"the body was not there after {self.patience:g} seconds.")
        if body is None:
            return None
        if len(body) > self.most:
            if more:
                await discard(receive, headers)
            return await refuse(send, scope["path"], 413, f"the body is too large: at most {self.most:,} bytes.")
        sent = False

        async def replayed() -> Any:
            nonlocal sent
            if sent:
                return await receive()
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, replayed, send)
        return None

    async def _body(self, receive: Any) -> tuple[bytes | None, bool]:
        """The whole body, or as much as is too much, and whether there is more; None if the client went away."""
        parts, held = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None, False
            parts.append(message.get("body", b""))
            held += len(parts[-1])
            more = message.get("more_body", False)
            if held > self.most or not more:
                return b"".join(parts), more

    def _is_known(self, headers: dict[bytes, bytes]) -> bool:
        assert self.key is not None
        return hmac.compare_digest(headers.get(b"authorization", b""), f"Bearer {self.key}".encode())


def told(path: str, status: int, message: str) -> dict[str, Any]:
    """An error in the shape that clients of a route know."""
    if path.startswith("/v1/"):
        kind = "server_error" if status >= 500 else "invalid_request_error"
        return {"error": {"message": message, "type": kind, "param": None, "code": None}}
    kind = {429: "Overloaded", 404: "NotFound", 401: "Unauthorized", 500: "Backend"}.get(status, "Validation")
    return {"error": message, "error_type": kind}


async def discard(receive: Any, headers: dict[bytes, bytes]) -> None:
    """Reads what a client still sends, within bounds; nothing if it asked first whether it should (Expect)."""
    held, more = 0, b"expect" not in headers
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER):
            while more and held < MOST_LINGERED:
                message = await receive()
                held += len(message.get("body", b""))
                more = message.get("more_body", False)  # a client that went away sends no more


async def refuse(send: Any, path: str, status: int, message: str) -> None:
    """Sends an error, and closes the connection: the rest of the body was not read."""
    body = json.dumps(told(path, status, message)).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
