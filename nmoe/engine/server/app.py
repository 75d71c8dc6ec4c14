"""The routes of the engine server. They are vLLM's, so that one client drives both; /score and /nmoe/info are its own."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as Asked
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nmoe.engine.api import Delta, Request
from nmoe.engine.native.engine import NativeEngine
from nmoe.engine.remote.wire import GENERATE, WEIGHTS_ID, encode_delta, encode_samples, error_body, event
from nmoe.engine.server.requests import check_names, decode_request, take, take_ids
from nmoe.engine.server.weights import StateError, Weights
from nmoe.errors import UserError
from nmoe.parsing import json_of

R = TypeVar("R")
# Beyond these, the records of a request's samples alone fill the memory.
_MOST_SAMPLES = 4096
_PREFIX = "generate-tokens-"  # by which vLLM names requests that are to be aborted


class Service:
    """An engine with its weights, behind HTTP. `described` is what `/nmoe/info` says of the model."""

    def __init__(self, engine: NativeEngine, weights: Weights, described: dict[str, Any]) -> None:
        self._engine, self._weights, self._described = engine, weights, described
        self._paused = False
        self._running: dict[object, str] = {}  # ids of requests
        self._control = asyncio.Lock()
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()

    @property
    def weights_id(self) -> str:
        return self._weights.id

    def routes(self) -> list[Route]:
        posts: dict[str, Callable[[Asked], Awaitable[Response]]] = {
            GENERATE: self.generate,
            "/score": self.score,
            "/abort_requests": self.abort,
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
            *(Route(path, endpoint, methods=["POST"]) for path, endpoint in posts.items()),
            *(Route(path, endpoint, methods=["GET"]) for path, endpoint in gets.items()),
        ]

    async def generate(self, asked: Asked) -> Response:
        request, streamed = decode_request(await _body(asked))
        most = 1 if streamed else _MOST_SAMPLES
        if request.samples > most:
            raise UserError(f"n = {request.samples}: must be at most {most}{' with stream = true' if streamed else ''}")
        await self._admit()
        if not streamed:
            samples = await _unless_gone(asked, self._held(request.request_id, self._engine.generate(request)))
            return _json(encode_samples(request, samples))
        deltas = self._engine.stream(request)
        # A refusal comes before the first token, and so before the status of the reply.
        first = await _unless_gone(asked, self._held(request.request_id, _next(deltas)))
        return StreamingResponse(self._events(request, first, deltas), media_type="text/event-stream")

    async def _events(
        self, request: Request, first: Delta | None, deltas: AsyncIterator[Delta]
    ) -> AsyncGenerator[bytes, None]:
        with self._counted(request.request_id):
            try:
                while first is not None:
                    yield encode_delta(request, first)
                    first = await _next(deltas)
            except (UserError, RuntimeError) as error:
                yield event(error_body(500, str(error)))
            finally:
                await deltas.aclose()  # type: ignore[attr-defined]
            yield event(None)

    async def score(self, asked: Asked) -> Response:
        body = await _body(asked)
        check_names(body, "the body", ("token_ids", "temperature"))
        token_ids, temperature = take_ids(body, "token_ids"), take(body, "temperature", (int, float), 1.0)
        await self._admit()
        scores = await _unless_gone(asked, self._held("", self._engine.score(token_ids, temperature)))
        return _json({"logprobs": scores, "weight_version": str(self._weights.version)})

    async def abort(self, asked: Asked) -> Response:
        """Ends the named requests, or all if none is named. Their callers get the tokens sampled so far."""
        named = take(await _body(asked), "request_ids", list, [])
        ids = [str(one).removeprefix(_PREFIX) for one in named] or list(self._running.values())
        for request_id in ids:
            self._engine.abort(request_id)
        return _json({"status": "aborted", "aborted": len(ids)})

    async def pause(self, asked: Asked) -> Response:
        """Stops the engine between two steps. Running requests stay where they are ("keep"), end with the tokens that they have
        ("abort", the default), or are waited for ("wait"); later ones wait until /resume."""
        mode, clear = asked.query_params.get("mode", "abort"), asked.query_params.get("clear_cache", "true")
        if mode not in ("keep", "abort", "wait") or clear not in ("true", "false"):
            raise UserError(f"mode = {mode!r}, clear_cache = {clear!r}: must be keep, abort or wait, and true or false")
        async with self._control:
            if mode == "wait" and not self._paused:
                self._open.clear()
                await self._idle.wait()
            if mode == "abort":
                for request_id in self._running.values():
                    self._engine.abort(request_id)
            await self._engine.pause()
            self._paused = True
            self._open.set()
            if clear == "true":
                await self._engine.between_steps(self._engine.forget_prefixes)
        return _json({"status": "paused"})

    async def resume(self, asked: Asked) -> Response:
        async with self._control:
            await self._engine.resume()
            self._paused = False
        return _json({"status": "resumed"})

    async def forget_prefixes(self, asked: Asked) -> Response:
        await self._engine.between_steps(self._engine.forget_prefixes)
        return _json({"status": "forgotten"})

    async def join(self, asked: Asked) -> Response:
        info = take(await _body(asked), "init_info", dict)
        async with self._control:
            await self._weights.join(info)
        return _json({"message": "ready for updates"})

    async def start_update(self, asked: Asked) -> Response:
        async with self._control:
            self._weights.start()
        return _json({"message": "an update has begun"})

    async def update(self, asked: Asked) -> Response:
        info = take(await _body(asked), "update_info", dict)
        async with self._control:
            await self._weights.update(info)
        return _json({"message": "the weights have arrived"})

    async def finish_update(self, asked: Asked) -> Response:
        version = take(await _body(asked), "weight_version", str)
        async with self._control:
            await self._weights.finish(version)
        return _json({"message": f"the weights have version {version}"})

    async def health(self, asked: Asked) -> Response:
        return _json({"status": "ok"})

    async def is_paused(self, asked: Asked) -> Response:
        return _json({"is_paused": self._paused})

    async def version(self, asked: Asked) -> Response:
        return _json({"weight_version": str(self._weights.version)})

    async def info(self, asked: Asked) -> Response:
        state = {
            "weight_version": str(self._weights.version),
            "paused": self._paused,
            "unusable": self._weights.unusable,
        }
        return _json(self._described | state | {"stats": asdict(self._engine.stats())})

    async def _admit(self) -> None:
        await self._open.wait()
        self._weights.check_usable()

    async def _held(self, request_id: str, work: Awaitable[R]) -> R:
        with self._counted(request_id):
            return await work

    @contextmanager
    def _counted(self, request_id: str) -> Iterator[None]:
        """Keeps a request among those that run."""
        token = object()
        self._running[token] = request_id
        self._idle.clear()
        try:
            yield
        finally:
            del self._running[token]
            if not self._running:
                self._idle.set()


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
                await _json(error_body(401, message), 401)(scope, receive, named)
                return
        await app(scope, receive, named)

    return guarded


async def _refused(asked: Asked, error: Exception) -> Response:
    assert isinstance(error, UserError), "the handler of these"
    status = 409 if isinstance(error, StateError) else 400 if error.exit_code == 2 else 500
    return _json(error_body(status, str(error)), status)


async def _failed(asked: Asked, error: Exception) -> Response:
    return _json(error_body(500, f"{type(error).__name__}: {error}"), 500)


async def _gone(asked: Asked, error: Exception) -> Response:
    return Response(status_code=499)  # the client is gone


def _json(body: dict[str, Any], status: int = 200) -> Response:
    return Response(json.dumps(body, separators=(",", ":")), status, media_type="application/json")


async def _body(asked: Asked) -> dict[str, Any]:
    try:
        body = json_of(await asked.body())
    except ValueError as error:
        raise UserError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise UserError("the body is not a JSON object")
    return body


async def _next(deltas: AsyncIterator[Delta]) -> Delta | None:
    return await anext(deltas, None)


async def _unless_gone(asked: Asked, work: Coroutine[Any, Any, R]) -> R:
    """Returns the result of the work. If the client closes its connection before, cancels it and raises ClientDisconnect."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_closed(asked))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _closed(asked: Asked) -> None:
    while (await asked.receive())["type"] != "http.disconnect":
        pass
