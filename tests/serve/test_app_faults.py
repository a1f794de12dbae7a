"""Clients that leave, dawdle or send too much, folders that are replaced, full queues: the server goes on."""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest

import pinscher
from pinscher.serve.app import Settings, make
from tiny_engine import TEXTS, store
from tiny_server import serving


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return store(tmp_path_factory.mktemp("served") / "small", "bert", "embeddings")


@pytest.fixture(scope="module")
def server(folder):
    with serving(str(folder), "--queue", "500", "--max-megabytes", "1") as running:
        yield running


HEAD = "POST /embed HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n"


def connected(server, text: bytes) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", server.port))
    made.sendall(text)
    return made


def test_clients_that_are_gone(server):
    """Closed at once, without a word of goodbye, in the middle of a request and while it is computed."""
    body = b'{"inputs": ["' + b"film " * 30 + b'"]}'
    for part in (b"", HEAD.format(len(body)).encode(), HEAD.format(len(body)).encode() + body):
        for _ in range(30):
            one = connected(server, part[:-3] if part and not part.endswith(b"}") else part)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # as by kill -9
            one.close()
    assert server.ask("/embed", {"inputs": "a film"})[0] == 200


def test_many_idle_connections(server):
    some = [connected(server, b"POST /embed HTTP/1.1\r\nhost:") for _ in range(300)]
    assert server.ask("/embed", {"inputs": "a film"})[0] == 200
    for one in some:
        one.close()


def test_who_sends_too_much_is_told(server):
    """An answer before the client has sent all would be lost with the connection."""
    status, told = server.ask("/embed", b"a" * (8 << 20))
    assert (status, told["error"].partition(":")[0]) == (413, "the body is too large")


def test_a_body_without_end(server):
    """Sent in chunks, without a length: read up to the limit, and no further."""
    one = connected(server, HEAD.format(0).replace("content-length: 0", "transfer-encoding: chunked").encode())
    chunk = b"10000\r\n" + b"a" * 65536 + b"\r\n"
    try:
        for _ in range(1000):
            one.sendall(chunk)
        pytest.fail("65 MB were read")
    except OSError:
        pass
    finally:
        one.close()
    told = connected(server, HEAD.format(1 << 30).encode())
    assert b"413" in told.recv(100)
    told.close()
    assert server.ask("/health")[0] == 200


def test_a_body_that_does_not_come(folder):
    app = make(Settings({"x": str(folder)}, patience=0.2))
    sent: list[dict] = []

    async def run() -> None:
        async def receive():
            await asyncio.sleep(30)

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/embed", "raw_path": b"/embed", "query_string": b""}
        await app({**scope, "headers": [], "http_version": "1.1", "scheme": "http"}, receive, send)

    asyncio.run(run())
    assert sent[0]["status"] == 408
    app.state.server.batcher.close()


def test_a_full_queue_is_answered_with_429(server):
    texts = [" ".join(TEXTS) * 3] * 400

    def ask(_):
        return server.ask("/embed", {"inputs": texts, "truncate": True})

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(16)))
    assert {status for status, _ in found} == {200, 429}
    told = next(told for status, told in found if status == 429)
    assert told["error_type"] == "Overloaded"
    assert "texts are waiting, and there is room for 500" in told["error"]
    assert server.ask("/embed", {"inputs": texts})[0] == 200


def test_a_folder_that_is_replaced(folder, tmp_path):
    """What is served is what was there when the server started."""
    own = Path(shutil.copytree(folder, tmp_path / "own"))
    wanted = pinscher.Engine(own).encode(TEXTS)
    with serving(str(own)) as running:
        for path in own.iterdir():
            path.write_bytes(b"x" * 10)  # in place: the worst that can be done to files that are mapped
        assert np.array_equal(np.array(running.ask("/embed", {"inputs": TEXTS})[1], np.float32), wanted)
        shutil.rmtree(own)
        assert np.array_equal(np.array(running.ask("/embed", {"inputs": TEXTS})[1], np.float32), wanted)
        assert running.stop(signal.SIGTERM) in (0, -signal.SIGTERM)


def test_memory_stays_where_it_is(server):
    process = psutil.Process(server.process.pid)

    def load():
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda n: server.ask("/embed", {"inputs": TEXTS[: 1 + n % 3]}), range(300)))

    load()
    before = process.memory_info().rss
    load()
    time.sleep(0.1)
    assert process.memory_info().rss < 1.03 * before
