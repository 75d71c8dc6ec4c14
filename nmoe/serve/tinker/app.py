"""The routes of Tinker's protocol."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from packaging.version import InvalidVersion, Version
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as Asking
from starlette.responses import Response
from starlette.routing import Route

from nmoe.engine.server.http import TooLargeError, bytes_of, json_reply, status_of
from nmoe.errors import UserError, cut
from nmoe.serve.tinker.errors import TinkerError
from nmoe.serve.tinker.fields import MOST_BYTES, Fields, fields_of
from nmoe.serve.tinker.listing import listing_routes
from nmoe.serve.tinker.service import Service, metadata_of

Endpoint = Callable[[Asking], Awaitable[Response]]

# Versions of the SDK that this server has been tried with, from the first to the last.
OLDEST, NEWEST = Version("0.25"), Version("0.38")
_MOST_PASS_BYTES = 256 * 2**20
_PREFIX = "/api/v1"


class Server:
    """Tinker's routes over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        gets: dict[str, Endpoint] = {
            "/healthz": self.health,
            "/get_server_capabilities": self.capabilities,
            "/samplers/{sampler_id:path}": self.sampler,
        }
        posts: dict[str, Endpoint] = {
            "/client/config": self.config,
            "/client/dynamic_config": self.dynamic_config,
            "/telemetry": self.telemetry,
            "/create_session": self.create_session,
            "/session_heartbeat": self.heartbeat,
            "/sessions/{session_id}/finish": self.finish,
            "/create_model": self._started(self._service.create_model),
            "/forward_backward": self.forward_backward,
            "/optim_step": self._started(self._service.optim_step),
            "/save_weights": self._started(self._service.save_weights),
            "/save_weights_for_sampler": self._started(self._service.save_weights_for_sampler),
            "/load_weights": self._started(self._service.load_weights),
            "/unload_model": self._started(self._service.unload_model),
            "/get_info": self.info,
            "/create_sampling_session": self.create_sampling_session,
            "/asample": self.asample,
            "/retrieve_future": self.retrieve,
            "/cancel_future": self.cancel,
        }
        return [
            *(Route(_PREFIX + path, endpoint, methods=["GET"]) for path, endpoint in gets.items()),
            *(Route(_PREFIX + path, endpoint, methods=["POST"]) for path, endpoint in posts.items()),
            *listing_routes(_PREFIX, self._service),
        ]

    async def _fields(self, asking: Asking) -> tuple[bytes, Fields]:
        body = await bytes_of(asking, MOST_BYTES)
        return body, fields_of(body)

    async def _promised(self, reply: dict[str, Any]) -> Response:
        """Returns the reply to a training request once that is on the disk."""
        await self._service.futures.promised(reply["request_id"])
        return json_reply(reply)

    def _started(self, begin: Callable[[bytes, Fields], dict[str, Any]]) -> Endpoint:
        async def answered(asking: Asking) -> Response:
            return await self._promised(begin(*await self._fields(asking)))

        return answered

    async def health(self, asking: Asking) -> Response:
        # An adapter's fault is its client's.
        if (fault := self._service.engine.diverged.get(None)) is not None:
            return json_reply({"status": "diverged", "message": fault}, 503)
        return json_reply({"status": "ok"})

    async def capabilities(self, asking: Asking) -> Response:
        about = {"max_context_length": self._service.context_tokens, "trainable": True, "sampleable": True}
        return json_reply({"supported_models": [{"model_name": name, **about} for name in self._service.names]})

    async def config(self, asking: Asking) -> Response:
        """The SDK's flags, all with the SDK's own defaults but compression, which would be a library more."""
        _, fields = await self._fields(asking)
        _check_version(fields.text("sdk_version", None))
        return json_reply({"pjwt_auth_enabled": False, "proto_compress_fwdbwd": False, "parallel_fwdbwd_chunks": True})

    async def dynamic_config(self, asking: Asking) -> Response:
        """The flags that the SDK asks for again and again. Only with this one it ends samples whose futures are cancelled."""
        await bytes_of(asking, MOST_BYTES)
        return json_reply({"sample_cancel_enabled": True})

    async def telemetry(self, asking: Asking) -> Response:
        """Takes the SDK's reports on itself, and keeps none."""
        await bytes_of(asking, MOST_BYTES)
        return json_reply({"status": "accepted"})

    async def create_session(self, asking: Asking) -> Response:
        _, fields = await self._fields(asking)
        warning = _check_version(fields.text("sdk_version", None))
        self._service.sweep()
        self._service.store.expire()
        about = {
            "user_metadata": metadata_of(fields),
            "display_name": cut(fields.text("display_name", None) or "") or None,
        }
        session = await self._service.begin(about)
        reply = {"type": "create_session", "session_id": session.session_id}
        return json_reply(reply | ({"warning_message": warning} if warning else {}))

    async def heartbeat(self, asking: Asking) -> Response:
        _, fields = await self._fields(asking)
        self._service.heard(fields.text("session_id"))
        self._service.sweep()
        await self._service.journal.flush()
        return json_reply({"type": "session_heartbeat"})

    async def finish(self, asking: Asking) -> Response:
        _, fields = await self._fields(asking)
        session = self._service.sessions.all.get(asking.path_params["session_id"])
        if session is None:
            raise TinkerError(f"there is no session {asking.path_params['session_id']!r}", 404)
        self._service.end(session, cut(fields.table("reason", None).text("type", "success")))
        await self._service.journal.flush()
        return json_reply({})

    async def info(self, asking: Asking) -> Response:
        _, fields = await self._fields(asking)
        run = self._service.sessions.run(fields.text("model_id"))
        service = self._service
        about = {"model_name": service.names[0]}
        return json_reply(
            {
                "type": "get_info",
                "model_id": run.model_id,
                "model_name": service.names[0],
                "model_data": about | {"tokenizer_id": str(service.tokenizer_directory.resolve())},
                **({} if run.shape is None else run.shape.about),
            }
        )

    async def sampler(self, asking: Asking) -> Response:
        sampler_id = asking.path_params["sampler_id"]
        sampler = self._service.sessions.sampler(sampler_id)
        name = self._service.names[0]
        return json_reply({"sampler_id": sampler_id, "base_model": name, "model_path": sampler.path})

    async def create_sampling_session(self, asking: Asking) -> Response:
        _, fields = await self._fields(asking)
        return json_reply(await self._service.create_sampling_session(fields))

    async def forward_backward(self, asking: Asking) -> Response:
        return await self._promised(await self._service.forward_backward(await bytes_of(asking, _MOST_PASS_BYTES)))

    async def asample(self, asking: Asking) -> Response:
        return json_reply(await self._service.asample(*await self._fields(asking)))

    async def retrieve(self, asking: Asking) -> Response:
        _, fields = await self._fields(asking)
        return await self._service.futures.retrieve(fields.text("request_id"))

    async def cancel(self, asking: Asking) -> Response:
        _, fields = await self._fields(asking)
        self._service.futures.cancel(fields.text("request_id"))
        return json_reply({})


def _check_version(given: str | None) -> str | None:
    """Returns a warning for an SDK that is newer than those tried. Raises TinkerError for one whose requests are of another
    form."""
    if given is None:
        return None
    try:
        version = Version(given)
    except InvalidVersion:
        raise TinkerError(f"sdk_version = {given!r}: is no version") from None
    if version < OLDEST:
        raise TinkerError(f"sdk_version = {given}: sends requests of another form; install tinker {OLDEST} to {NEWEST}")
    if version.release[:2] > NEWEST.release[:2]:
        return f"tinker {given} is newer than {NEWEST}, the last version that this server has been tried with"
    return None


def application(server: Server) -> Starlette:
    """Returns the server's ASGI application. Every refusal has the protocol's form."""

    def handler(refusal: Callable[[Any], TinkerError]) -> Callable[[Asking, Exception], Awaitable[Response]]:
        async def handle(asking: Asking, error: Exception) -> Response:
            return refusal(error).reply()

        return handle

    handlers: Any = {
        TinkerError: handler(lambda error: error),
        TooLargeError: handler(lambda error: TinkerError(str(error), 413)),
        UserError: handler(lambda error: TinkerError(str(error), status_of(error))),
        HTTPException: handler(lambda error: TinkerError(error.detail, error.status_code)),
        ClientDisconnect: handler(lambda _: TinkerError("the client is gone", 499)),
        Exception: handler(lambda error: TinkerError(f"{type(error).__name__}: {error}", 500, "server")),
    }
    return Starlette(routes=server.routes(), exception_handlers=handlers)
