"""A server of a tiny checkpoint, in a process of its own, and what a client does with it."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from forked import Forked

CONTEXT = 4096


@dataclass
class Client:
    """A server that runs, and its client."""

    http: httpx2.Client
    process: Forked

    def post(self, path: str, **body: Any) -> httpx2.Response:
        return self.http.post(path, json=body)

    def ask(self, path: str, **body: Any) -> dict[str, Any]:
        reply = self.post(path, **body)
        assert reply.status_code == 200, f"{path}: {reply.status_code} {reply.text}"
        return reply.json()

    def chat(self, text: str = "hi", **body: Any) -> dict[str, Any]:
        return self.ask("/v1/chat/completions", **({"messages": [{"role": "user", "content": text}]} | body))

    def refusal(self, path: str, status: int = 400, **body: Any) -> dict[str, Any]:
        """Returns the error of a request that is refused with a status."""
        reply = self.post(path, **body)
        assert reply.status_code == status, f"{reply.status_code} {reply.text}"
        return reply.json()["error"]

    def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """Returns the chunks of a stream."""
        with self.http.stream("POST", path, json=body | {"stream": True}) as reply:
            assert reply.status_code == 200, reply.read()
            assert reply.headers["content-type"].startswith("text/event-stream")
            lines = [line for line in reply.iter_lines() if line]
        assert lines.pop() == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines]

    def metric(self, name: str) -> float:
        found = re.search(rf"^{re.escape(name)} (\S+)$", self.http.get("/metrics").text, re.MULTILINE)
        assert found is not None, f"{name} is no metric"
        return float(found[1])


@contextmanager
def serving(checkpoint: Path, *arguments: str, key: str = "", ends: bool = True) -> Iterator[Client]:
    """Serves a checkpoint for a `with` block, after which a signal ends the server, unless it `ends` otherwise."""
    address = ("--host", "127.0.0.1", "--port", "0", "--served-model-name", "tiny")
    process = Forked(Path.cwd(), "serve", checkpoint, *address, *arguments, environment={"NMOE_SERVE_KEY": key})
    try:
        url = process.line().rpartition(" ")[2].strip()
        assert url.startswith("http://"), "it says where it listens"
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        with httpx2.Client(base_url=url, headers=headers, timeout=60, trust_env=False) as http:
            yield Client(http, process)
        if ends:
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0, "it ends well"
    finally:
        process.kill()
