"""A server on this machine that answers by script, to be reached as any service is."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, str | bytes | dict[str, Any]] | tuple[int, str | bytes | dict[str, Any], dict[str, str]]
"""Status, body and headers."""


@dataclass
class Asked:
    """What the server was asked, and the most requests that it had at once."""

    url: str = ""
    contents: list[Any] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    most_at_once: int = 0
    _now: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def arrived(self, content: Any, headers: dict[str, str]) -> int:
        with self._lock:
            self.contents.append(content)
            self.headers.append(headers)
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
            return len(self.contents) - 1

    def left(self) -> None:
        with self._lock:
            self._now -= 1


@contextmanager
def serving(answer: Callable[[int, Any], Answer], delay_s: float = 0.0) -> Iterator[Asked]:
    """Answers request number `n` with `answer(n, content)`, after `delay_s`."""
    asked = Asked()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            content = json.loads(self.rfile.read(int(self.headers["content-length"])))
            number = asked.arrived(content, {name.lower(): value for name, value in self.headers.items()})
            try:
                time.sleep(delay_s)
                status, body, *more = answer(number, content)
            finally:
                asked.left()
            raw = body if isinstance(body, bytes) else (body if isinstance(body, str) else json.dumps(body)).encode()
            try:
                self.send_response(status)
                for name, value in (more[0] if more else {}).items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)
            except OSError:
                return  # whoever asked has left

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    asked.url = f"http://127.0.0.1:{server.server_address[1]}/score"
    try:
        yield asked
    finally:
        server.shutdown()
        server.server_close()
