"""Counters in Prometheus' text format."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class Metrics:
    """What a server has done so far; safe from several threads at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, int]] = Counter()
        self._buckets: Counter[tuple[str, float]] = Counter()
        self._seconds: Counter[str] = Counter()
        self._totals: Counter[str] = Counter()
        self.gauges: dict[str, tuple[str, Callable[[], float]]] = {}

    def count_request(self, route: str, status: int, seconds: float) -> None:
        with self._lock:
            self._requests[route, status] += 1
            self._seconds[route] += seconds  # type: ignore[assignment]
            for most in SECONDS:
                self._buckets[route, most] += seconds <= most

    def count_batch(self, texts: int, tokens: int, seconds: float) -> None:
        with self._lock:
            self._totals["batches"] += 1
            self._totals["texts"] += texts
            self._totals["tokens"] += tokens
            self._totals["compute_seconds"] += seconds  # type: ignore[assignment]

    def text(self) -> str:
        """All of them."""
        with self._lock:
            lines = _header("requests_total", "counter", "Requests by route and status.")
            for (route, status), count in sorted(self._requests.items()):
                lines.append(_line("requests_total", {"route": route, "status": str(status)}, count))
            lines += _header("request_seconds", "histogram", "Time to answer a request.")
            for route in sorted(self._seconds):
                count = sum(n for (name, _), n in self._requests.items() if name == route)
                for most in SECONDS:
                    told = {"route": route, "le": f"{most:g}"}
                    lines.append(_line("request_seconds_bucket", told, self._buckets[route, most]))
                lines.append(_line("request_seconds_bucket", {"route": route, "le": "+Inf"}, count))
                lines.append(_line("request_seconds_sum", {"route": route}, self._seconds[route]))
                lines.append(_line("request_seconds_count", {"route": route}, count))
            for name, help in (
                ("batches", "Batches computed."),
                ("texts", "Texts computed."),
                ("tokens", "Tokens computed."),
                ("compute_seconds", "Time spent computing."),
            ):
                lines += [*_header(f"{name}_total", "counter", help), _line(f"{name}_total", {}, self._totals[name])]
        for name, (help, read) in self.gauges.items():
            lines += [*_header(name, "gauge", help), _line(name, {}, read())]
        return "\n".join(lines) + "\n"


def _header(name: str, kind: str, help: str) -> list[str]:
    return [f"# HELP pinscher_{name} {help}", f"# TYPE pinscher_{name} {kind}"]


def _line(name: str, told: Mapping[str, str], value: float) -> str:
    inside = ",".join(f'{key}="{text.translate(ESCAPED)}"' for key, text in told.items())
    return f"pinscher_{name}{{{inside}}} {value:g}" if inside else f"pinscher_{name} {value:g}"
