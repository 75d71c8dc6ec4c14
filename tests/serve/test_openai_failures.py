"""A fault of the server itself, behind uvicorn's connections that are used again."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from nmoe.engine.native.engine import NativeEngine
from nmoe.model.transformer import Transformer
from nmoe.serve.openai.app import Server, application
from nmoe.serve.openai.model import Served
from nmoe.text.tokenizer import Tokenizer
from nmoe.text.turns import chat_format


def test_a_fault_says_that_its_connection_ends(
    model: Transformer, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(self: Server, asking: object) -> None:
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr(Server, "models", broken)
    form = chat_format(tokenizer, "auto")
    served = Served(NativeEngine(model, 1), tokenizer, form, ("tiny",), 4096, tokenizer.vocab_size, 2, 0, "fp")
    app, sent = application(Server(served)), list[Message]()

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/v1/models", "headers": [], "query_string": b""}
    with pytest.raises(ZeroDivisionError):
        asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == 500
    assert dict(sent[0]["headers"])[b"connection"] == b"close"
    assert b"ZeroDivisionError: by nothing" in sent[1]["body"]
