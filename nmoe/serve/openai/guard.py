"""Who may ask: the key, and no page of another site."""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from nmoe.engine.server.events import CONNECTION
from nmoe.engine.server.listening import LOCAL
from nmoe.serve.openai.errors import ApiError
from nmoe.serve.openai.metrics import Metrics

_OPEN = ("/health", "/")


def _name(host: bytes) -> str:
    """Returns the name in a `Host` header, without brackets and port."""
    text = host.decode("latin-1").lower()
    address, closed, rest = text[1:].partition("]")
    if text.startswith("[") and closed and rest[:1] in ("", ":"):
        return address
    return text.partition(":")[0]


def guarded(app: ASGIApp, key: str, bound: str, metrics: Metrics) -> ASGIApp:
    """Returns an application that wants the key, if there is one, for all routes but the open ones: health, and the files of the
    page. It refuses the requests that a page of another site sends through somebody's browser.

    Without a key a request must name this machine or the `bound` address as its host: a site may have its name resolve to this
    machine, and its pages then count as the server's.
    """
    wanted = f"Bearer {key}".encode()
    own = {*LOCAL, bound}

    def refusal(path: str, headers: dict[bytes, bytes]) -> ApiError | None:
        if (origin := headers.get(b"origin")) is not None and origin.partition(b"://")[2] != headers.get(b"host"):
            return ApiError("requests from the pages of other sites are refused", code="cross_origin", status=403)
        if not key and _name(headers.get(b"host", b"")) not in own:
            message = f"this server has no key, and answers requests to {', '.join(sorted(own))} alone"
            return ApiError(message, code="unknown_host", status=403)
        open_to_all = not key or path in _OPEN or path.startswith("/page/")
        if open_to_all or hmac.compare_digest(headers.get(b"authorization", b""), wanted):
            return None
        message = "the key is missing or wrong: send `Authorization: Bearer KEY`, with the NMOE_SERVE_KEY of the server"
        return ApiError(message, code="invalid_api_key", status=401, headers={"WWW-Authenticate": "Bearer"})

    async def asked(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refused := refusal(scope["path"], dict(scope["headers"]))) is not None:
            metrics.requests["other", refused.status] += 1
            await refused.reply()(scope, receive, send)
            return
        scope[CONNECTION] = send
        await app(scope, receive, send)

    return asked
