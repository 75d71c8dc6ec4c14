"""The routes of tokens, which change no weights: vLLM's `POST /inference/v1/generate` and `/abort_requests`, and `/score`, which is
nmoe's own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request as Asked
from starlette.responses import Response
from starlette.routing import Route

from nmoe.engine.api import Delta, Request
from nmoe.engine.native.engine import NativeEngine
from nmoe.engine.remote.wire import GENERATE, encode_deltas, encode_samples, error_body, event
from nmoe.engine.server.events import EventStream
from nmoe.engine.server.http import body_of, json_reply, unless_gone
from nmoe.engine.server.requests import check_names, decode_request, take, take_ids
from nmoe.errors import UserError

R = TypeVar("R")
_PREFIX = "generate-tokens-"  # by which vLLM names requests that are to be aborted


@dataclass(frozen=True)
class TokenLimits:
    """Limits of a request of tokens; `None` is none. After `seconds` its samples end with the tokens so far, and so they do if
    its client takes nothing of a stream for `stalled_s`."""

    samples: int = 4096  # beyond these, the records of a request's samples alone fill the memory
    prompt_tokens: int | None = None
    seconds: float | None = None
    stalled_s: float | None = None


class TokenRoutes:
    """The routes of an engine. `admit` returns once a request may run, or raises what refuses it; `version` returns the
    weights' version; `read` reads a body; the base model has the `names`.

    `running` has the ids of the requests that run; `idle` is set while there are none.
    """

    def __init__(
        self,
        engine: NativeEngine,
        admit: Callable[[], Awaitable[None]],
        version: Callable[[], int],
        read: Callable[[Asked], Awaitable[dict[str, Any]]] = body_of,
        limits: TokenLimits | None = None,
        names: Collection[str] = (),
    ) -> None:
        self._engine, self._admit, self._version, self._read = engine, admit, version, read
        self._limits, self._names = limits or TokenLimits(), names
        self._scorings = set[asyncio.Task[list[float]]]()
        self.running: dict[object, str] = {}
        self.idle = asyncio.Event()
        self.idle.set()

    def routes(self) -> list[Route]:
        posts = {GENERATE: self.generate, "/score": self.score, "/abort_requests": self.abort}
        return [Route(path, endpoint, methods=["POST"]) for path, endpoint in posts.items()]

    async def generate(self, asked: Asked) -> Response:
        request, streamed = decode_request(await self._read(asked), self._engine.adapters, self._names)
        if request.samples > self._limits.samples:
            raise UserError(f"n = {request.samples}: must be at most {self._limits.samples}")
        self._check_length(request.prompt_ids)
        await self._admit()
        began = time.monotonic()
        if not streamed:
            samples = await unless_gone(asked, self._held(request.request_id, self._engine.generate(request), began))
            return json_reply(encode_samples(request, samples))
        async with AsyncExitStack() as held:
            held.enter_context(self._counted(request.request_id, began))
            deltas = self._engine.stream(request)
            # A refusal comes before the first token, and so before the status of the reply.
            first = await unless_gone(asked, _next(deltas))
            held.push_async_callback(deltas.aclose)
            return EventStream(_events(request, first, deltas), held.pop_all(), self._limits.stalled_s)

    async def score(self, asked: Asked) -> Response:
        body = await self._read(asked)
        check_names(body, "the body", ("token_ids", "temperature"))
        token_ids, temperature = take_ids(body, "token_ids"), take(body, "temperature", (int, float), 1.0)
        self._check_length(token_ids)
        await self._admit()
        try:
            async with asyncio.timeout(self._limits.seconds):
                scores = await unless_gone(asked, self._held("", self._scored(token_ids, temperature)))
        except TimeoutError:
            raise HTTPException(504, "the deadline came before the scores") from None
        return json_reply({"logprobs": scores, "weight_version": str(self._version())})

    async def abort(self, asked: Asked) -> Response:
        """Ends the named requests, or all if none is named. Their callers get the tokens sampled so far."""
        named = take(await self._read(asked), "request_ids", list, [])
        ids = [str(one).removeprefix(_PREFIX) for one in named] or list(self.running.values())
        for request_id in ids:
            self._engine.abort(request_id)
        return json_reply({"status": "aborted", "aborted": len(ids)})

    async def _scored(self, token_ids: Sequence[int], temperature: float) -> list[float]:
        scoring = asyncio.create_task(self._engine.score(token_ids, temperature))
        self._scorings.add(scoring)
        try:
            await asyncio.wait((scoring,))
            if scoring.cancelled():
                raise HTTPException(503, "the server ends, and the scores are not there yet")
            return scoring.result()
        finally:
            self._scorings.remove(scoring)
            scoring.cancel()

    def end_scorings(self) -> None:
        """Ends all scorings without scores."""
        for scoring in self._scorings:
            scoring.cancel()

    def end_all(self) -> None:
        """Ends all requests with the tokens so far."""
        for request_id in self.running.values():
            self._engine.abort(request_id)

    def _check_length(self, token_ids: Sequence[int]) -> None:
        if self._limits.prompt_tokens is not None and len(token_ids) > self._limits.prompt_tokens:
            raise UserError(f"token_ids has {len(token_ids)} tokens: at most {self._limits.prompt_tokens}")

    async def _held(self, request_id: str, work: Awaitable[R], began: float | None = None) -> R:
        with self._counted(request_id, began):
            return await work

    @contextmanager
    def _counted(self, request_id: str, began: float | None) -> Iterator[None]:
        """Keeps a request among those that run, and ends it at its deadline if it samples, since `began`."""
        token = object()
        self.running[token] = request_id
        self.idle.clear()
        timer = None
        if began is not None and self._limits.seconds is not None:
            left = began + self._limits.seconds - time.monotonic()
            timer = asyncio.get_running_loop().call_later(left, self._engine.abort, request_id)
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
            del self.running[token]
            if not self.running:
                self.idle.set()


async def _events(
    request: Request, first: list[Delta], deltas: AsyncGenerator[list[Delta], None]
) -> AsyncGenerator[bytes, None]:
    try:
        while first:
            yield encode_deltas(request, first)
            first = await _next(deltas)
    except (UserError, RuntimeError) as error:
        yield event(error_body(500, str(error)))
    yield event(None)


async def _next(deltas: AsyncGenerator[list[Delta], None]) -> list[Delta]:
    return await anext(deltas, [])
