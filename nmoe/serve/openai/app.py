"""The routes of `nmoe serve`, and what every request passes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as Asking
from starlette.responses import Response
from starlette.routing import Route

from nmoe.engine.server.events import DONE, EventStream
from nmoe.engine.server.http import TooLargeError, body_of, json_reply, status_of, unless_gone
from nmoe.engine.server.requests import UnknownModelError
from nmoe.engine.server.tokens import TokenLimits, TokenRoutes
from nmoe.errors import UserError
from nmoe.serve.openai.chat import read_chat
from nmoe.serve.openai.chat_job import ChatJob
from nmoe.serve.openai.completions import TextJob, read_completions
from nmoe.serve.openai.limits import Admission
from nmoe.serve.openai.metrics import Metrics
from nmoe.serve.openai.model import Served
from nmoe.serve.openai.reading import Addition
from nmoe.serve.openai.runs import Steps, end
from nmoe.serve.openai.tokenizing import detokenize, tokenize, tokenizer_info
from nmoe.serve.page import PAGE
from nmoe.web.guard import Refusal
from nmoe.web.openai.errors import ApiError
from nmoe.web.openai.fields import IGNORED, Fields

Job = ChatJob | TextJob
Endpoint = Callable[[Asking], Awaitable[Response]]


class Server:
    """OpenAI's routes over one model."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._admission = Admission(served.limits.requests)
        self._jobs = set[Job]()
        limits = served.limits
        of_tokens = TokenLimits(limits.samples, limits.prompt_tokens or None, limits.request_s, limits.stalled_s)
        self._tokens = TokenRoutes(served.engine, self._admit_tokens, lambda: 0, self._body, of_tokens, served.models)
        self.metrics = Metrics()

    def routes(self) -> list[Route]:
        gets: dict[str, Endpoint] = {
            "/health": self.health,
            "/metrics": self.figures,
            "/v1/models": self.models,
            "/v1/models/{model:path}": self.model,
            "/tokenizer_info": self.tokenizer_info,
            "/nmoe/page": self.about,
        }
        posts: dict[str, Endpoint] = {
            "/v1/chat/completions": self.chat,
            "/v1/completions": self.completions,
            "/tokenize": self.tokenize,
            "/detokenize": self.detokenize,
        }
        return [
            *(Route(path, self._counted(path, endpoint), methods=["GET"]) for path, endpoint in gets.items()),
            *(Route(path, self._counted(path, endpoint), methods=["POST"]) for path, endpoint in posts.items()),
            *(
                Route(route.path, self._counted(route.path, route.endpoint), methods=["POST"])
                for route in self._tokens.routes()
            ),
            *PAGE.routes(),
        ]

    def _counted(self, path: str, endpoint: Endpoint) -> Endpoint:
        async def answered(asking: Asking) -> Response:
            asking.state.route = path
            reply = await endpoint(asking)
            self.metrics.requests[path, reply.status_code] += 1
            return reply

        return answered

    def refuse(self, refusal: Refusal) -> Response:
        """Counts a request that never came to a route, and refuses it."""
        self.metrics.requests["other", refusal.status] += 1
        return ApiError(refusal.message, code=refusal.code, status=refusal.status, headers=refusal.headers).reply()

    async def health(self, asking: Asking) -> Response:
        if (fault := next(iter(self._served.engine.diverged.values()), None)) is not None:
            return json_reply({"status": "diverged", "message": fault}, 503)
        return json_reply({"status": "ok"})

    async def figures(self, asking: Asking) -> Response:
        text = self.metrics.text(self._served.engine.stats(), self._admission.admitted + len(self._tokens.running))
        return Response(text, media_type="text/plain; version=0.0.4")

    async def models(self, asking: Asking) -> Response:
        return json_reply(
            {"object": "list", "data": [self._model(name) for name in (*self._served.models, *self._served.adapters)]}
        )

    async def model(self, asking: Asking) -> Response:
        return json_reply(self._model(self._served.named(asking.path_params["model"])))

    def _model(self, name: str) -> dict[str, Any]:
        served = self._served
        about = {"id": name, "object": "model", "created": served.created, "owned_by": "nmoe"}
        about |= {"root": served.models[0], "max_model_len": served.context_tokens}
        return about | ({"parent": served.models[0]} if served.adapter(name) else {})

    async def about(self, asking: Asking) -> Response:
        """What the page has to know of the model."""
        served = self._served
        defaults = {"temperature": served.defaults.temperature, "top_p": served.defaults.top_p, "max_tokens": None}
        return json_reply(
            {
                "model": served.models[0],
                "context_tokens": served.context_tokens,
                "format": served.format.name,
                "has_experts": served.experts > 0,
                "layers": served.layers,
                "experts": served.experts,
                "reasoning": served.format.has_reasoning,
                "tools": served.format.name != "text",
                "defaults": defaults,
            }
        )

    async def tokenize(self, asking: Asking) -> Response:
        return json_reply(await asyncio.to_thread(tokenize, self._served, await self._fields(asking)))

    async def detokenize(self, asking: Asking) -> Response:
        return json_reply(await asyncio.to_thread(detokenize, self._served, await self._fields(asking)))

    async def tokenizer_info(self, asking: Asking) -> Response:
        return json_reply(tokenizer_info(self._served))

    async def chat(self, asking: Asking) -> Response:
        fields = await self._fields(asking)
        return await self._answer(asking, read_chat, fields)

    async def completions(self, asking: Asking) -> Response:
        fields = await self._fields(asking)
        return await self._answer(asking, read_completions, fields)

    async def _fields(self, asking: Asking) -> Fields:
        return Fields(await self._body(asking), self._served.strict)

    async def _body(self, asking: Asking) -> dict[str, Any]:
        limits = self._served.limits
        try:
            async with asyncio.timeout(limits.body_s):
                return await body_of(asking, limits.body_bytes)
        except TooLargeError as error:
            raise ApiError(str(error), status=413, headers={"Connection": "close"}) from None
        except TimeoutError:
            raise ApiError("the body did not come in time", status=408, headers={"Connection": "close"}) from None

    async def _admit_tokens(self) -> None:
        with self._admission.admit(len(self._tokens.running)):
            pass

    async def _answer(self, asking: Asking, read: Callable[[Served, Fields], Job], fields: Fields) -> Response:
        async with AsyncExitStack() as held:
            held.enter_context(self._admission.admit(len(self._tokens.running)))
            # A prompt of megabytes takes seconds to encode, in which the others' streams go on.
            job = await asyncio.to_thread(read, self._served, fields)
            headers = {IGNORED: ", ".join(fields.ignored)} if fields.ignored else {}
            held.enter_context(self._listed(job))
            if not job.asked.streamed:
                return json_reply(job.whole(await unless_gone(asking, self._whole(job))), headers=headers)
            # A refusal comes before the first token, and so before the status of the reply.
            first, steps = await unless_gone(asking, self._begin(job))
            held.push_async_callback(steps.close)
            events = self._events(job, first, steps)
            stream = EventStream(events, held.pop_all(), self._served.limits.stalled_s, headers)
            steps.push_into(stream, job.chunks)
            return stream

    async def _begin(self, job: Job) -> tuple[list[Addition], Steps]:
        """Returns what the first step of the engine adds to a reply, and the later steps."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(job.asked.seconds):
                await job.prepare()
        except TimeoutError:
            raise ApiError("the deadline came before the first token", code="deadline", status=504) from None
        steps = Steps(self._served.engine, job.runs, job.asked.seconds)
        if not job.runs:
            return job.unsampled(), steps
        try:
            first = await steps.take()
        except BaseException:
            await steps.close()
            raise
        self.metrics.first_token.observe(time.monotonic() - began)
        return first, steps

    async def _whole(self, job: Job) -> list[Addition]:
        additions, steps = await self._begin(job)
        try:
            while added := await steps.take():
                additions += added
        finally:
            await steps.close()
        return additions

    def end_all(self, why: str) -> None:
        """Ends all requests with the tokens so far."""
        for job in self._jobs:
            end(self._served.engine, job.runs, why)
        self._tokens.end_all()
        self._tokens.end_scorings()

    @contextmanager
    def _listed(self, job: Job) -> Iterator[None]:
        began = time.monotonic()
        self._jobs.add(job)
        try:
            yield
        finally:
            self._jobs.remove(job)
            self.metrics.whole.observe(time.monotonic() - began)
            self.metrics.prompt_tokens += job.usage()["prompt_tokens"]

    async def _events(self, job: Job, first: list[Addition], steps: Steps) -> AsyncGenerator[bytes, None]:
        try:
            yield job.opening() + job.chunks(first)
            while added := await steps.take():
                if chunks := job.chunks(added):
                    yield chunks
            yield job.closing() + DONE
        except (UserError, RuntimeError) as error:
            yield b"data: " + bytes(ApiError(str(error), status=500).reply().body) + b"\n\n" + DONE


def application(server: Server) -> Starlette:
    """Returns the server's ASGI application. Every refusal has OpenAI's form."""

    def handler(refusal: Callable[[Asking, Any], ApiError]) -> Callable[[Asking, Exception], Awaitable[Response]]:
        async def handle(asking: Asking, error: Exception) -> Response:
            refused = refusal(asking, error)
            server.metrics.requests[getattr(asking.state, "route", "other"), refused.status] += 1
            return refused.reply()

        return handle

    handlers: Any = {
        ApiError: handler(lambda _, error: error),
        UnknownModelError: handler(lambda _, error: ApiError(str(error), "model", "model_not_found", 404)),
        UserError: handler(lambda _, error: ApiError(str(error), status=status_of(error))),
        HTTPException: handler(_no_route),
        ClientDisconnect: handler(lambda _, error: ApiError("the client is gone", status=499)),
        Exception: handler(_failed),
    }
    return Starlette(routes=server.routes(), exception_handlers=handlers)


def _failed(asking: Asking, error: Exception) -> ApiError:
    # uvicorn closes the connection after these, and a client that did not know would send its next request into it.
    return ApiError(f"{type(error).__name__}: {error}", status=500, headers={"Connection": "close"})


def _no_route(asking: Asking, error: HTTPException) -> ApiError:
    message = f"{asking.method} {asking.url.path}: {error.detail}"
    return ApiError(message, status=error.status_code, headers=dict(error.headers or {}))
