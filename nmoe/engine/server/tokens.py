"""The routes of tokens, which change no weights: vLLM's `POST /inference/v1/generate` and `/abort_requests`, and `/score`, which is
nmoe's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from starlette.requests import Request as Asked
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from nmoe.engine.api import Delta, Request
from nmoe.engine.native.engine import NativeEngine
from nmoe.engine.remote.wire import GENERATE, encode_deltas, encode_samples, error_body, event
from nmoe.engine.server.http import body_of, json_reply, unless_gone
from nmoe.engine.server.requests import check_names, decode_request, take, take_ids
from nmoe.errors import UserError

R = TypeVar("R")
# Beyond these, the records of a request's samples alone fill the memory.
_MOST_SAMPLES = 4096
_PREFIX = "generate-tokens-"  # by which vLLM names requests that are to be aborted


class TokenRoutes:
    """The routes of an engine. `admit` returns once a request may run, or raises what refuses it; `version` returns the
    weights' version. Bodies have at most `most_bytes` bytes, if there is a limit.

    `running` has the ids of the requests that run; `idle` is set while there are none.
    """

    def __init__(
        self,
        engine: NativeEngine,
        admit: Callable[[], Awaitable[None]],
        version: Callable[[], int],
        most_bytes: int | None = None,
    ) -> None:
        self._engine, self._admit, self._version, self._most_bytes = engine, admit, version, most_bytes
        self.running: dict[object, str] = {}
        self.idle = asyncio.Event()
        self.idle.set()

    def routes(self) -> list[Route]:
        posts = {GENERATE: self.generate, "/score": self.score, "/abort_requests": self.abort}
        return [Route(path, endpoint, methods=["POST"]) for path, endpoint in posts.items()]

    async def generate(self, asked: Asked) -> Response:
        request, streamed = decode_request(await body_of(asked, self._most_bytes), self._engine.adapters)
        if request.samples > _MOST_SAMPLES:
            raise UserError(f"n = {request.samples}: must be at most {_MOST_SAMPLES}")
        await self._admit()
        if not streamed:
            samples = await unless_gone(asked, self._held(request.request_id, self._engine.generate(request)))
            return json_reply(encode_samples(request, samples))
        deltas = self._engine.stream(request)
        # A refusal comes before the first token, and so before the status of the reply.
        first = await unless_gone(asked, self._held(request.request_id, _next(deltas)))
        return StreamingResponse(self._events(request, first, deltas), media_type="text/event-stream")

    async def _events(
        self, request: Request, first: list[Delta], deltas: AsyncGenerator[list[Delta], None]
    ) -> AsyncGenerator[bytes, None]:
        with self._counted(request.request_id):
            try:
                while first:
                    yield encode_deltas(request, first)
                    first = await _next(deltas)
            except (UserError, RuntimeError) as error:
                yield event(error_body(500, str(error)))
            finally:
                await deltas.aclose()
            yield event(None)

    async def score(self, asked: Asked) -> Response:
        body = await body_of(asked, self._most_bytes)
        check_names(body, "the body", ("token_ids", "temperature"))
        token_ids, temperature = take_ids(body, "token_ids"), take(body, "temperature", (int, float), 1.0)
        await self._admit()
        scores = await unless_gone(asked, self._held("", self._engine.score(token_ids, temperature)))
        return json_reply({"logprobs": scores, "weight_version": str(self._version())})

    async def abort(self, asked: Asked) -> Response:
        """Ends the named requests, or all if none is named. Their callers get the tokens sampled so far."""
        named = take(await body_of(asked, self._most_bytes), "request_ids", list, [])
        ids = [str(one).removeprefix(_PREFIX) for one in named] or list(self.running.values())
        for request_id in ids:
            self._engine.abort(request_id)
        return json_reply({"status": "aborted", "aborted": len(ids)})

    async def _held(self, request_id: str, work: Awaitable[R]) -> R:
        with self._counted(request_id):
            return await work

    @contextmanager
    def _counted(self, request_id: str) -> Iterator[None]:
        """Keeps a request among those that run."""
        token = object()
        self.running[token] = request_id
        self.idle.clear()
        try:
            yield
        finally:
            del self.running[token]
            if not self.running:
                self.idle.set()


async def _next(deltas: AsyncGenerator[list[Delta], None]) -> list[Delta]:
    return await anext(deltas, [])
