"""The routes of `nmoe serve`."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as Asking
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from nmoe.engine.server.http import TooLargeError, body_of, json_reply, unless_gone
from nmoe.errors import UserError
from nmoe.serve.openai.chat import ChatJob, read_chat
from nmoe.serve.openai.completions import TextJob, read_completions
from nmoe.serve.openai.errors import ApiError
from nmoe.serve.openai.events import DONE, EventStream
from nmoe.serve.openai.fields import IGNORED, Fields
from nmoe.serve.openai.limits import Admission
from nmoe.serve.openai.model import Served
from nmoe.serve.openai.reading import Addition
from nmoe.serve.openai.runs import end, steps

Job = ChatJob | TextJob


class Server:
    """OpenAI's routes over one model."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._admission = Admission(served.limits.requests)
        self._jobs = set[Job]()

    def routes(self) -> list[Route]:
        return [
            Route("/health", self.health, methods=["GET"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{model:path}", self.model, methods=["GET"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
        ]

    async def health(self, asking: Asking) -> Response:
        return json_reply({"status": "ok"})

    async def models(self, asking: Asking) -> Response:
        return json_reply({"object": "list", "data": [self._model(name) for name in self._served.models]})

    async def model(self, asking: Asking) -> Response:
        return json_reply(self._model(self._served.named(asking.path_params["model"])))

    def _model(self, name: str) -> dict[str, Any]:
        served = self._served
        about = {"id": name, "object": "model", "created": served.created, "owned_by": "nmoe"}
        return about | {"root": served.models[0], "max_model_len": served.context_tokens}

    async def chat(self, asking: Asking) -> Response:
        fields = await self._fields(asking)
        return await self._answer(asking, read_chat(self._served, fields), fields.ignored)

    async def completions(self, asking: Asking) -> Response:
        fields = await self._fields(asking)
        return await self._answer(asking, read_completions(self._served, fields), fields.ignored)

    async def _fields(self, asking: Asking) -> Fields:
        limits = self._served.limits
        try:
            async with asyncio.timeout(limits.body_s):
                body = await body_of(asking, limits.body_bytes)
        except TooLargeError as error:
            raise ApiError(str(error), status=413, headers={"Connection": "close"}) from None
        except TimeoutError:
            raise ApiError("the body did not come in time", status=408, headers={"Connection": "close"}) from None
        return Fields(body, self._served.strict)

    async def _answer(self, asking: Asking, job: Job, ignored: Sequence[str]) -> Response:
        headers = {IGNORED: ", ".join(ignored)} if ignored else {}
        with ExitStack() as held:
            held.enter_context(self._admission.admit())
            held.enter_context(self._listed(job))
            added = steps(self._served.engine, job.runs, job.asked.seconds)
            if not job.asked.streamed:
                return json_reply(job.whole(await unless_gone(asking, _all(added))), headers=headers)
            # A refusal comes before the first token, and so before the status of the reply.
            first = await unless_gone(asking, _next(added))
            events = self._events(job, first, added, held.pop_all())
            return EventStream(events, self._served.limits.stalled_s, headers)

    def end_all(self, why: str) -> None:
        """Ends all requests with the tokens so far."""
        for job in self._jobs:
            end(self._served.engine, job.runs, why)

    @contextmanager
    def _listed(self, job: Job) -> Iterator[None]:
        self._jobs.add(job)
        try:
            yield
        finally:
            self._jobs.remove(job)

    async def _events(
        self, job: Job, first: list[Addition] | None, added: AsyncGenerator[list[Addition], None], held: ExitStack
    ) -> AsyncGenerator[bytes, None]:
        with held:
            try:
                opening = job.opening()
                while first is not None:
                    if chunks := opening + job.chunks(first):
                        yield chunks
                    opening = b""
                    first = await _next(added)
                yield job.closing() + DONE
            except (UserError, RuntimeError) as error:
                yield b"data: " + ApiError(str(error), status=500).reply().body + b"\n\n" + DONE
            finally:
                await added.aclose()


async def _next(added: AsyncGenerator[list[Addition], None]) -> list[Addition] | None:
    return await anext(added, None)


async def _all(added: AsyncGenerator[list[Addition], None]) -> list[Addition]:
    try:
        return [one async for of_step in added for one in of_step]
    finally:
        await added.aclose()


_OPEN = ("/health",)


def guarded(app: ASGIApp, key: str) -> ASGIApp:
    """Returns an application that wants the key, if there is one, for all routes but the open ones; and that refuses what another
    site's page sends through the browser of somebody who may reach this server."""
    wanted = f"Bearer {key}".encode()

    async def asked(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            refusal = None
            if key and scope["path"] not in _OPEN:
                if not hmac.compare_digest(headers.get(b"authorization", b""), wanted):
                    message = "the key is missing or wrong: send `Authorization: Bearer KEY`, with the NMOE_SERVE_KEY of the server"
                    refusal = ApiError(
                        message, code="invalid_api_key", status=401, headers={"WWW-Authenticate": "Bearer"}
                    )
            elif (origin := headers.get(b"origin")) is not None and origin.partition(b"://")[2] != headers.get(b"host"):
                refusal = ApiError(
                    "requests from the pages of other sites are refused", code="cross_origin", status=403
                )
            if refusal is not None:
                await refusal.reply()(scope, receive, send)
                return
        await app(scope, receive, send)

    return asked


def application(server: Server) -> Starlette:
    """Returns the server's ASGI application. Every refusal has OpenAI's form."""
    handlers: Any = {
        ApiError: _refused,
        UserError: _wrong,
        HTTPException: _no_route,
        ClientDisconnect: _gone,
        Exception: _failed,
    }
    return Starlette(routes=server.routes(), exception_handlers=handlers)


async def _refused(asking: Asking, error: Exception) -> Response:
    assert isinstance(error, ApiError), "the handler of these"
    return error.reply()


async def _wrong(asking: Asking, error: Exception) -> Response:
    assert isinstance(error, UserError), "the handler of these"
    return ApiError(str(error), status=400 if error.exit_code == 2 else 500).reply()


async def _no_route(asking: Asking, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "the handler of these"
    message = f"{asking.method} {asking.url.path}: {error.detail}"
    return ApiError(message, status=error.status_code, headers=dict(error.headers or {})).reply()


async def _gone(asking: Asking, error: Exception) -> Response:
    return Response(status_code=499)  # the client is gone


async def _failed(asking: Asking, error: Exception) -> Response:
    return ApiError(f"{type(error).__name__}: {error}", status=500).reply()
