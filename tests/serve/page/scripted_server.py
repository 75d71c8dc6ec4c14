"""A server that says what a test wants the page to hear: markup, calls, failures. It sends the page's files as they are."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from nmoe.serve.page import PAGE

Chunk = dict[str, Any]
HANG, BREAK = {"hang": True}, {"break": True}
"""Chunks after which nothing comes until the client goes, and after which the connection breaks off."""

ABOUT: dict[str, Any] = {
    "model": "scripted", "context_tokens": 4096, "format": "text", "has_experts": True, "layers": 2, "experts": 6,
    "reasoning": True, "tools": True, "defaults": {"temperature": 1.0, "top_p": 1.0, "max_tokens": None},
}  # fmt: skip


def chunk(**choice: Any) -> Chunk:
    return {"object": "chat.completion.chunk", "model": "scripted", "choices": [{"index": 0, "delta": {}} | choice]}


def entry(text: str, logprob: float = -0.1, **more: Any) -> dict[str, Any]:
    return {"token": text, "token_id": number(text), "bytes": [*text.encode()], "logprob": logprob} | more


def number(text: str) -> int:
    """The id of a token of the scripted model."""
    return sum((place + 1) * ord(sign) for place, sign in enumerate(text)) % 50_000


def said(
    *tokens: str, kind: str = "content", logprob: float = -0.1, others: Sequence[tuple[str, float]] = ()
) -> list[Chunk]:
    """Chunks of one token each, each with the alternatives `others` beside it."""
    return [
        chunk(
            delta={kind: token},
            token_ids=[number(token)],
            logprobs={
                "content": [
                    entry(token, logprob, top_logprobs=[entry(token, logprob), *(entry(*other) for other in others)])
                ]
            },
        )
        for token in tokens
    ]


def called(index: int, name: str, *arguments: str) -> list[Chunk]:
    first = {"index": index, "id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": ""}}
    rest = [{"index": index, "function": {"arguments": part}} for part in arguments]
    return [chunk(delta={"tool_calls": [call]}) for call in (first, *rest)]


def ended(reason: str = "stop", prompt: int = 11, sampled: int = 3, **choice: Any) -> list[Chunk]:
    usage = {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
    return [chunk(finish_reason=reason, **choice), {"choices": [], "usage": usage}]


@dataclass
class Refusal:
    """An answer with a status instead of a stream."""

    status: int
    message: str
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def reply(self) -> Response:
        error = {"message": self.message, "type": "x", "param": self.param, "code": None}
        return JSONResponse({"error": error}, self.status, self.headers)


class Scripted:
    """What the server will say, in turn, and what it was asked."""

    def __init__(self) -> None:
        self.url = ""
        self.forget()

    def forget(self) -> None:
        self.replies: list[list[Chunk] | Refusal] = []
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.key = ""
        self.about = ABOUT
        self.models = ["scripted"]
        self.left = threading.Event()  # a client left a stream that was not at its end
        self.shown = threading.Event()  # the page shows what came before BREAK

    def say(self, *replies: list[Chunk] | Refusal) -> None:
        self.replies += replies

    def refusal(self, asking: Request) -> Response | None:
        given = asking.headers.get("authorization", "")
        self.keys.append(given)
        if self.key and given != f"Bearer {self.key}":
            return Refusal(401, "the key is missing or wrong").reply()
        return None

    async def page(self, asking: Request) -> Response:
        return self.refusal(asking) or JSONResponse(self.about)

    async def named(self, asking: Request) -> Response:
        return self.refusal(asking) or JSONResponse({"data": [{"id": name} for name in self.models]})

    async def chat(self, asking: Request) -> Response:
        if (refused := self.refusal(asking)) is not None:
            return refused
        self.bodies.append(json.loads(await asking.body()))
        reply = self.replies.pop(0)
        if isinstance(reply, Refusal):
            return reply.reply()
        return StreamingResponse(self._events(reply), media_type="text/event-stream")

    async def _events(self, chunks: list[Chunk]) -> AsyncGenerator[bytes, None]:
        done = False
        try:
            for one in chunks:
                if one is HANG:
                    await asyncio.sleep(60)
                if one is BREAK:
                    # What the page has not read yet is lost with the connection.
                    await asyncio.to_thread(self.shown.wait, 60)
                    done = True
                    raise ConnectionResetError
                yield f"data: {json.dumps(one)}\n\n".encode()
                await asyncio.sleep(0)
            done = True
            yield b"data: [DONE]\n\n"
        finally:
            if not done:
                self.left.set()


@contextmanager
def scripted() -> Iterator[Scripted]:
    script = Scripted()
    app = Starlette(
        routes=[
            *PAGE.routes(),
            Route("/nmoe/page", script.page),
            Route("/v1/models", script.named),
            Route("/v1/chat/completions", script.chat, methods=["POST"]),
        ]
    )
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])), daemon=True)
    thread.start()
    script.url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
    while not server.started:
        time.sleep(0.01)
    try:
        yield script
    finally:
        server.should_exit = True
        thread.join(10)
