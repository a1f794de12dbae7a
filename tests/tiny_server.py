"""`pinscher serve` in a process of its own, in which torch and transformers cannot be imported."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

BLOCK = "import sys\nfor name in ('torch', 'transformers', 'accelerate', 'datasets'): sys.modules[name] = None\n"
RUN = "sys.argv = ['pinscher', 'serve', *sys.argv[1:]]\nfrom pinscher.commands.app import main\nmain()"


class Running:
    """A server."""

    def __init__(self, *words: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", BLOCK + RUN, "--port", "0", *words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )
        self.said: list[str] = []
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)
            if found := re.search(r"running on (http://127\.0\.0\.1:(\d+))", line):
                self.url, self.port = found[1], int(found[2])
                break
        else:
            raise AssertionError("".join(self.said))
        self._rest = threading.Thread(target=lambda: self.said.extend(self.process.stderr or ()), daemon=True)
        self._rest.start()

    def ask(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Status and content of an answer; `body` is JSON, or bytes as they are."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json"} | {key.replace("_", "-"): text for key, text in headers.items()}
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                content, status = answer.read(), answer.status
        except urllib.error.HTTPError as error:
            content, status = error.read(), error.code
        try:
            return status, json.loads(content)
        except ValueError:
            return status, content.decode()

    def stop(self, how: int = signal.SIGTERM) -> int:
        """Ends it, and gives its exit code."""
        self.process.send_signal(how)
        try:
            return self.process.wait(60)
        finally:
            self._rest.join(5)


@contextmanager
def serving(*words: str, **environment: str) -> Iterator[Running]:
    running = Running(*words, **environment)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.kill()
            running.process.wait()
