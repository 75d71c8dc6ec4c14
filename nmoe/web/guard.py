"""Who may ask: the key, and no page of another site."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from nmoe.engine.server.events import CONNECTION
from nmoe.engine.server.listening import LOCAL

_OPEN = ("/health", "/")


@dataclass(frozen=True)
class Refusal:
    """Why a request is refused: for people, for programs (`code`), and the status and headers of the reply."""

    message: str
    code: str
    status: int
    headers: dict[str, str] = field(default_factory=dict)


def _name(host: bytes) -> str:
    """Returns the name in a `Host` header, without brackets and port."""
    text = host.decode("latin-1").lower()
    address, closed, rest = text[1:].partition("]")
    if text.startswith("[") and closed and rest[:1] in ("", ":"):
        return address
    return text.partition(":")[0]


def guarded(
    app: ASGIApp,
    key: str,
    bound: str,
    variable: str,
    refuse: Callable[[Refusal], Response],
    sent: tuple[str, str] = ("Authorization", "Bearer "),
) -> ASGIApp:
    """Returns an application that wants the key, if there is one, for all routes but the open ones: health, and the files of the
    page. It refuses the requests that a page of another site sends through somebody's browser. A refusal names the `variable` of
    the environment that has the key, and `refuse` makes its reply. `sent` is the header that has the key, and what stands before
    it there.

    Without a key a request must name this machine or the `bound` address as its host: a site may have its name resolve to this
    machine, and its pages then count as the server's.
    """
    header, before = sent
    name, wanted = header.lower().encode(), f"{before}{key}".encode()
    own = {*LOCAL, bound}

    def refusal(path: str, headers: dict[bytes, bytes]) -> Refusal | None:
        if (origin := headers.get(b"origin")) is not None and origin.partition(b"://")[2] != headers.get(b"host"):
            return Refusal("requests from the pages of other sites are refused", "cross_origin", 403)
        if not key and _name(headers.get(b"host", b"")) not in own:
            message = f"this server has no key, and answers requests to {', '.join(sorted(own))} alone"
            return Refusal(message, "unknown_host", 403)
        open_to_all = not key or path in _OPEN or path.startswith("/page/")
        if open_to_all or hmac.compare_digest(headers.get(name, b""), wanted):
            return None
        message = f"the key is missing or wrong: send `{header}: {before}KEY`, with the {variable} of the server"
        return Refusal(message, "invalid_api_key", 401, {"WWW-Authenticate": "Bearer"})

    async def asked(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refused := refusal(scope["path"], dict(scope["headers"]))) is not None:
            await refuse(refused)(scope, receive, send)
            return
        scope[CONNECTION] = send
        try:
            await app(scope, receive, send)
        finally:
            del scope[CONNECTION]  # uvicorn's `send` holds the scope: a cycle

    return asked
