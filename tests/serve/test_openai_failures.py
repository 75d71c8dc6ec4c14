"""A fault of the server itself, behind uvicorn's connections that are used again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
import torch
from starlette.types import ASGIApp, Message

from nmoe.engine.native.engine import NativeEngine
from nmoe.engine.server.app import Service
from nmoe.engine.server.app import application as engine_application
from nmoe.errors import DivergenceError, StorageError
from nmoe.model.checkpoint import load_model
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


def test_a_request_whose_numbers_are_not_finite_ends_alone(checkpoint: Path, tokenizer: Tokenizer) -> None:
    model = load_model(checkpoint).requires_grad_(False)
    with torch.no_grad():
        model.embedding.weight[80] = torch.nan
    form = chat_format(tokenizer, "auto")
    engine = NativeEngine(model, 2, survives=True)
    served = Served(engine, tokenizer, form, ("tiny",), 4096, tokenizer.vocab_size, 2, 0, "fp")
    transport = httpx2.ASGITransport(application(Server(served)))

    async def ask() -> list[int]:
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:

            async def of(token: int, path: str = "/v1/completions", **more: object) -> httpx2.Response:
                return await client.post(path, json={"prompt": [token], "max_tokens": 3, "seed": 1} | more)

            async def health() -> int:
                return (await client.get("/health")).status_code

            right = (await of(70)).json()["choices"]
            found = [await health(), (bad := await of(80)).status_code, await health()]
            assert "not finite" in bad.json()["error"]["message"]
            assert "not finite" in (await client.get("/health")).json()["message"]
            streamed = await of(80, stream=True)
            assert "not finite" in streamed.text
            tokens = {"request_id": "r", "token_ids": [80], "sampling_params": {"max_tokens": 2, "seed": 1}}
            found += [(await client.post("/inference/v1/generate", json=tokens)).status_code]
            found += [(await client.post("/score", json={"token_ids": [80, 70]})).status_code]
            assert (await of(70)).json()["choices"] == right
            return [*found, await health()]

    assert engine.run(ask()) == [200, 500, 503, 500, 500, 200]


def test_a_full_disk_is_no_fault_of_the_request(
    model: Transformer, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients try again after 507, and not after 400."""

    async def full(*_: object) -> None:
        raise StorageError("/disk: cannot be written: No space left on device (0 bytes free)")

    monkeypatch.setattr(Server, "models", full)
    monkeypatch.setattr(Service, "info", full)
    engine, form = NativeEngine(model, 1), chat_format(tokenizer, "auto")
    served = Served(engine, tokenizer, form, ("tiny",), 4096, tokenizer.vocab_size, 2, 0, "fp")
    weights: Any = SimpleNamespace(id="", version=0)
    apps: dict[str, ASGIApp] = {
        "/v1/models": application(Server(served)),
        "/nmoe/info": engine_application(Service(engine, weights, {}), ""),
    }

    async def asked(path: str, app: ASGIApp) -> tuple[int, str]:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://127.0.0.1") as client:
            reply = await client.get(path)
            return reply.status_code, reply.json()["error"]["message"]

    for path, app in apps.items():
        assert asyncio.run(asked(path, app)) == (
            507,
            "/disk: cannot be written: No space left on device (0 bytes free)",
        )


def test_an_engine_that_does_not_survive_stops(checkpoint: Path) -> None:
    model = load_model(checkpoint).requires_grad_(False)
    with torch.no_grad():
        model.embedding.weight[80] = torch.nan
    with pytest.raises(DivergenceError):
        (engine := NativeEngine(model, 2)).run(engine.score([80, 70]))
