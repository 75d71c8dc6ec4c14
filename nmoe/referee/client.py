"""HTTP to a server that may do anything: each call ends at its deadline, with the whole reply or the reason why there is none."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nmoe.errors import cut
from nmoe.parsing import json_of

if TYPE_CHECKING:
    import httpx2

_MOST_BYTES = 2**26
# Events of a connection: it was made for the call, or the head of a reply has come.
_FRESH_OR_ANSWERED = ("connection.connect_tcp.started", "http11.receive_response_headers.complete")


class UnansweredError(Exception):
    """A call got no reply that can be used. `lost` says that nothing listens there any more, `late` that the deadline passed."""

    def __init__(self, reason: str, *, lost: bool = False, late: bool = False) -> None:
        super().__init__(reason)
        self.lost, self.late = lost, late


@dataclass(frozen=True)
class Exchange:
    """One call and its reply, as a reproduction repeats it."""

    method: str
    path: str
    body: Mapping[str, Any] | None
    status: int
    reply: bytes
    seconds: float

    def json(self) -> dict[str, Any]:
        """Returns the reply's JSON object. Raises UnansweredError for any other reply."""
        try:
            value = json_of(self.reply)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise UnansweredError(
                f"{self.method} {self.path} answered with status {self.status} and no JSON object: {shown_bytes(self.reply)}"
            )
        return value

    def value(self, name: str) -> Any:
        """Returns a value of the reply's JSON object, None without any."""
        try:
            return self.json().get(name)
        except UnansweredError:
            return None


class Client:
    """Calls one server. `exchanges` has the calls since it was emptied last. A call may take `deadline_s`."""

    def __init__(self, url: str, key: str, deadline_s: float) -> None:
        self.url, self._key, self.deadline_s = url.rstrip("/"), key, deadline_s
        self.exchanges: list[Exchange] = []
        self._http: httpx2.AsyncClient | None = None
        self._fresh: httpx2.AsyncClient | None = None

    async def __aenter__(self) -> Client:
        import httpx2

        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        # Reading all authorities' certificates takes as long as ten calls; without TLS none is looked at.
        secured = not self.url.lower().startswith("http://")

        def pool(kept: int | None) -> httpx2.AsyncClient:
            # A server on this machine is not behind the proxy that the environment names; a redirection would reach another server.
            # A server ends idle connections, uvicorn after five seconds: none may be used at that moment.
            limits = httpx2.Limits(max_connections=None, max_keepalive_connections=kept, keepalive_expiry=1.0)
            return httpx2.AsyncClient(
                headers=headers, timeout=None, limits=limits, trust_env=False, follow_redirects=False, verify=secured
            )

        self._http, self._fresh = pool(None), pool(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        for pool in (self._http, self._fresh):
            assert pool is not None, "it was entered"
            await pool.aclose()

    async def call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, deadline_s: float | None = None
    ) -> Exchange:
        """Returns the reply, of any status. Raises UnansweredError if none has come by the deadline."""
        import httpx2

        kept, fresh = self._http, self._fresh
        assert kept is not None, "it is used inside its context"
        assert fresh is not None, "it is used inside its context"
        began, limit = time.monotonic(), deadline_s or self.deadline_s
        content = None if body is None else json.dumps(body).encode()
        headers = {} if body is None else {"Content-Type": "application/json"}
        parts, heard, size = list[bytes](), list[str](), 0

        async def noted(event: str, _: Mapping[str, Any]) -> None:
            heard.append(event)

        async def answer(pool: httpx2.AsyncClient) -> httpx2.Response:
            nonlocal size
            extensions = {"trace": noted}
            async with pool.stream(
                method, self.url + path, content=content, headers=headers, extensions=extensions
            ) as reply:
                async for part in reply.aiter_bytes():
                    parts.append(part)
                    size += len(part)
                    if size > _MOST_BYTES:
                        raise UnansweredError(
                            f"{method} {path}: the reply does not end, and has more than {_MOST_BYTES} bytes"
                        )
            return reply

        try:
            # The client's own limits count from the last byte: a server that trickles would never be late.
            async with asyncio.timeout(limit):
                try:
                    reply = await answer(kept)
                except (httpx2.NetworkError, httpx2.RemoteProtocolError):
                    # A server may end a kept connection after any reply, such as uvicorn after an error that an application raises:
                    # a call that meets this moment was never read. On a connection made for this call it is a fault.
                    if any(event in _FRESH_OR_ANSWERED for event in heard):
                        raise
                    reply = await answer(fresh)
        except TimeoutError:
            so_far = f", after {size} bytes of it" if size else ""
            raise UnansweredError(
                f"{method} {path} gave no whole reply within {limit:.3g} s{so_far}", late=True
            ) from None
        except httpx2.ConnectError as error:
            raise UnansweredError(f"{method} {path}: nothing answers at {self.url} ({error})", lost=True) from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise UnansweredError(f"{method} {path}: {type(error).__name__} {error}".strip()) from None
        done = Exchange(method, path, body, reply.status_code, b"".join(parts), time.monotonic() - began)
        self.exchanges.append(done)
        if done.status in (401, 403):
            raise UnansweredError(f"{method} {path} needs a key, or another one: {shown_bytes(done.reply)}")
        return done


def shown_bytes(reply: bytes) -> str:
    """Returns the start of a reply, for a message."""
    return plain(cut(" ".join(reply[:2000].decode("utf-8", "replace").split()), 160))


def plain(text: str) -> str:
    """Returns a server's text in printable ASCII: it can neither move a terminal's cursor nor fail to be written."""
    return "".join(one if " " <= one <= "~" else ascii(one)[1:-1] for one in text)
