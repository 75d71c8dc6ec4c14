"""Asks for the server's key on every route. vLLM's own check leaves out the routes that pause, take weights or execute code."""

from __future__ import annotations

import hmac
import os

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send


class Guard:
    """Lets a request pass that has the key in VLLM_API_KEY, or that asks for /health. Raises ValueError if the variable
    is not set or blank."""

    def __init__(self, app: ASGIApp) -> None:
        key = os.environ.get("VLLM_API_KEY", "")
        if not key.strip():
            raise ValueError(
                "VLLM_API_KEY is missing or empty: set it to a secret key, which every request has to send"
            )
        self._app, self._wanted = app, b"Bearer " + key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] == "lifespan" or scope["path"] == "/health" or hmac.compare_digest(given, self._wanted):
            await self._app(scope, receive, send)
        else:
            await JSONResponse({"error": "the key is missing or wrong"}, 401)(scope, receive, send)
