"""The routes of the engine server: of tokens, and of its weights. They are vLLM's, so that one client drives both; `/nmoe/info` is
its own."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as Asked
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nmoe.engine.native.engine import NativeEngine
from nmoe.engine.remote.wire import WEIGHTS_ID, error_body
from nmoe.engine.server.http import body_of, json_reply, status_of
from nmoe.engine.server.requests import UnknownModelError, take
from nmoe.engine.server.tokens import TokenRoutes
from nmoe.engine.server.weights import StateError, Weights
from nmoe.errors import UserError


class Service:
    """An engine with its weights, behind HTTP. `described` is what `/nmoe/info` says of the model."""

    def __init__(self, engine: NativeEngine, weights: Weights, described: dict[str, Any]) -> None:
        self._engine, self._weights, self._described = engine, weights, described
        self._paused = False
        self._tokens = TokenRoutes(engine, self._admit, lambda: weights.version)
        self._control = asyncio.Lock()
        self._open = asyncio.Event()
        self._open.set()

    @property
    def weights_id(self) -> str:
        return self._weights.id

    def routes(self) -> list[Route]:
        posts: dict[str, Callable[[Asked], Awaitable[Response]]] = {
            "/pause": self.pause,
            "/resume": self.resume,
            "/reset_prefix_cache": self.forget_prefixes,
            "/init_weight_transfer_engine": self.join,
            "/start_weight_update": self.start_update,
            "/update_weights": self.update,
            "/finish_weight_update": self.finish_update,
        }
        gets = {
            "/health": self.health,
            "/is_paused": self.is_paused,
            "/weight_info": self.version,
            "/nmoe/info": self.info,
        }
        return [
            *self._tokens.routes(),
            *(Route(path, endpoint, methods=["POST"]) for path, endpoint in posts.items()),
            *(Route(path, endpoint, methods=["GET"]) for path, endpoint in gets.items()),
        ]

    async def pause(self, asked: Asked) -> Response:
        """Stops the engine between two steps. Running requests stay where they are ("keep"), end with the tokens that they have
        ("abort", the default), or are waited for ("wait"); later ones wait until /resume."""
        mode, clear = asked.query_params.get("mode", "abort"), asked.query_params.get("clear_cache", "true")
        if mode not in ("keep", "abort", "wait") or clear not in ("true", "false"):
            raise UserError(f"mode = {mode!r}, clear_cache = {clear!r}: must be keep, abort or wait, and true or false")
        async with self._control:
            if mode == "wait" and not self._paused:
                self._open.clear()
                await self._tokens.idle.wait()
            if mode == "abort":
                self._tokens.end_all()
            await self._engine.pause()
            self._paused = True
            self._open.set()
            if clear == "true":
                await self._engine.between_steps(self._engine.forget_prefixes)
        return json_reply({"status": "paused"})

    async def resume(self, asked: Asked) -> Response:
        async with self._control:
            await self._engine.resume()
            self._paused = False
        return json_reply({"status": "resumed"})

    async def forget_prefixes(self, asked: Asked) -> Response:
        await self._engine.between_steps(self._engine.forget_prefixes)
        return json_reply({"status": "forgotten"})

    async def join(self, asked: Asked) -> Response:
        info = take(await body_of(asked), "init_info", dict)
        async with self._control:
            await self._weights.join(info)
        return json_reply({"message": "ready for updates"})

    async def start_update(self, asked: Asked) -> Response:
        async with self._control:
            self._weights.start()
        return json_reply({"message": "an update has begun"})

    async def update(self, asked: Asked) -> Response:
        info = take(await body_of(asked), "update_info", dict)
        async with self._control:
            await self._weights.update(info)
        return json_reply({"message": "the weights have arrived"})

    async def finish_update(self, asked: Asked) -> Response:
        body = await body_of(asked)
        version, keep = take(body, "weight_version", str), take(body, "keep_cache", bool, False)
        async with self._control:
            await self._weights.finish(version, keep)
        return json_reply({"message": f"the weights have version {version}"})

    async def health(self, asked: Asked) -> Response:
        return json_reply({"status": "ok"})

    async def is_paused(self, asked: Asked) -> Response:
        return json_reply({"is_paused": self._paused})

    async def version(self, asked: Asked) -> Response:
        return json_reply({"weight_version": str(self._weights.version)})

    async def info(self, asked: Asked) -> Response:
        state = {
            "weight_version": str(self._weights.version),
            "paused": self._paused,
            "unusable": self._weights.unusable,
        }
        return json_reply(self._described | state | {"stats": asdict(self._engine.stats())})

    async def _admit(self) -> None:
        await self._open.wait()
        self._weights.check_usable()


def application(service: Service, key: str) -> ASGIApp:
    """Returns the server's ASGI application. All routes but /health want the key, if there is one."""
    handlers: Any = {UserError: _refused, ClientDisconnect: _gone, Exception: _failed}
    app = Starlette(routes=service.routes(), exception_handlers=handlers)
    wanted = f"Bearer {key}".encode()

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (WEIGHTS_ID.encode(), service.weights_id.encode())]
            await send(message)

        if scope["type"] == "http" and key and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, wanted):
                message = "the key is missing or wrong: send `Authorization: Bearer KEY`, with the NMOE_ENGINE_KEY of the server"
                await json_reply(error_body(401, message), 401)(scope, receive, named)
                return
        await app(scope, receive, named)

    return guarded


async def _refused(asked: Asked, error: Exception) -> Response:
    assert isinstance(error, UserError), "the handler of these"
    unknown = 404 if isinstance(error, UnknownModelError) else status_of(error)
    status = 409 if isinstance(error, StateError) else unknown
    return json_reply(error_body(status, str(error)), status)


async def _failed(asked: Asked, error: Exception) -> Response:
    return json_reply(error_body(500, f"{type(error).__name__}: {error}"), 500)


async def _gone(asked: Asked, error: Exception) -> Response:
    return Response(status_code=499)  # the client is gone
