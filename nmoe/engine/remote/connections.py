"""HTTP/1.1 to engine servers, over connections that are kept.

httpx, which other clients here use, looks at all open connections for each request and each reply: with a thousand samples under
way that was three fifths of the CPU time of a run's side of the fleet.
"""

from __future__ import annotations

import asyncio
import json as json_text
import select
import ssl
from base64 import b64encode
from collections import deque
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_to_bytes, urlencode, urlsplit

# Seconds after which an unused connection is closed: uvicorn closes it after five, and none may be used at that moment.
_UNUSED_S = 4.0
# Bytes of the longest head of a reply, and of a line before a piece of its body.
_HEAD_BYTES, _LINE_BYTES = 2**16, 2**10


@dataclass(frozen=True)
class Reply:
    """A reply of HTTP. `headers` has lower-case names."""

    status_code: int
    headers: Mapping[str, str]
    content: bytes


class Connections:
    """Connections to servers, kept for later requests. They belong to the event loop that asks. `key` goes with each request;
    without one, a user name and password that the URL has (RFC 7617).

    A connection has one request at a time. It is kept if its reply was whole, and nothing has come after it: bytes that no request
    waits for, such as a reply that is sent twice, would be the reply to the next one. Once one connection to a server breaks, the
    unused ones are closed, so that the request is tried again over a new one.
    """

    def __init__(self, key: str) -> None:
        self._headers = f"authorization: Bearer {key}\r\n" if key else ""
        self._unused: dict[tuple[str, str], deque[_Connection]] = {}
        self._open: set[_Connection] = set()

    async def request(
        self, method: str, url: str, *, json: Mapping[str, Any] | None = None, params: Mapping[str, str] | None = None
    ) -> Reply:
        """Returns the server's reply, of any status. Raises OSError where there is none, or not a whole one."""
        parts = urlsplit(url)
        user, _, host = parts.netloc.rpartition("@")
        target = (parts.path or "/") + (f"?{urlencode(params)}" if params else "")
        headers = self._headers
        if user and not headers:
            headers = f"authorization: Basic {b64encode(unquote_to_bytes(user)).decode()}\r\n"
        head, body = f"{method} {target} HTTP/1.1\r\nhost: {host}\r\naccept: */*\r\n{headers}", b""
        if json is not None:
            body = json_text.dumps(json, separators=(",", ":"), allow_nan=False).encode()
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        unused = self._unused.setdefault((parts.scheme, host), deque())
        connection = self._kept(unused) or await self._new(parts.scheme, parts.hostname or "", parts.port)
        try:
            reply = await connection.ask(f"{head}\r\n".encode() + body)
        except OSError:
            while unused:
                unused.pop().close()
            raise
        if connection.kept:
            connection.unused_since = asyncio.get_running_loop().time()
            unused.append(connection)
            while connection.unused_since - unused[0].unused_since > _UNUSED_S:
                unused.popleft().close()
        return reply

    async def aclose(self) -> None:
        """Closes all connections; requests that wait for a reply raise OSError."""
        for connection in [*self._open]:
            connection.close()

    def _kept(self, unused: deque[_Connection]) -> _Connection | None:
        """Returns the connection that was used last, unless that is too long ago."""
        now = asyncio.get_running_loop().time()
        while unused:
            connection = unused.pop()
            if now - connection.unused_since < _UNUSED_S and connection.is_quiet():
                return connection
            connection.close()
        return None

    async def _new(self, scheme: str, host: str, port: int | None) -> _Connection:
        secure = ssl.create_default_context() if scheme == "https" else None
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: _Connection(self._open), host, port or (443 if secure else 80), ssl=secure
            )
        except UnicodeError as error:  # of the name service, before it asks
            raise ConnectionError(f"{host!r} is no name of a host: {error}") from None
        return connection


class _Connection(asyncio.Protocol):
    """A connection. It is among the `open` ones until it ends, and `kept` while it can have another request."""

    _transport: asyncio.Transport
    unused_since = 0.0

    def __init__(self, open_: set[_Connection]) -> None:
        self.kept = False
        self._open, self._bytes, self._ended = open_, bytearray(), False
        self._reply: asyncio.Future[Reply] | None = None

    async def ask(self, request: bytes) -> Reply:
        """Returns the reply to a request. Raises OSError where none comes, or not a whole one."""
        self._reply, self.kept = asyncio.get_running_loop().create_future(), False
        self._reading = self._read()
        self._transport.write(request)
        try:
            return await self._reply
        finally:
            if not self.kept:
                self.close()

    def is_quiet(self) -> bool:
        """Whether the connection is open and nothing has come, not even an end that the event loop has not yet seen."""
        if not self.kept:
            return False
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket"), select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        self.kept = False
        self._transport.abort()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._open.add(self)

    def data_received(self, data: bytes) -> None:
        self._bytes += data
        if self._reply is None or self._reply.done():
            self.close()  # no request waits for it
        else:
            self._read_on()

    def connection_lost(self, error: Exception | None) -> None:
        self._open.discard(self)
        self.kept, self._ended = False, True
        if self._reply is not None and not self._reply.done():
            self._read_on()
            if not self._reply.done():
                self._reply.set_exception(
                    error or ConnectionError("it closed the connection before its reply was whole")
                )

    def _read_on(self) -> None:
        assert self._reply is not None, "somebody has asked"
        try:
            next(self._reading)
        except StopIteration as read:
            reply, keeps = read.value
            self.kept = keeps and not self._bytes and not self._ended
            self._reply.set_result(reply)
        except ValueError as error:
            self._reply.set_exception(ConnectionError(f"its reply is not of HTTP: {error}"))

    def _read(self) -> Generator[None, None, tuple[Reply, bool]]:
        """Reads a reply from the bytes that have come, and yields while it needs more. Returns it, and whether the server keeps the
        connection. Raises ValueError for a reply that is not of HTTP."""
        status = "1"
        while status.startswith("1"):  # an interim reply
            first, *lines = (yield from self._until(b"\r\n\r\n", _HEAD_BYTES)).decode("latin-1").split("\r\n")
            protocol, status, *_ = [*first.split(" "), ""]
            if protocol not in ("HTTP/1.0", "HTTP/1.1") or not (len(status) == 3 and status.isdecimal()):
                raise ValueError(repr(first[:80]))
        named = (line.partition(":") for line in lines)
        headers = {name.strip().lower(): value.strip() for name, _, value in named}
        keeps = protocol == "HTTP/1.1" and headers.get("connection", "").lower() != "close"
        if headers.get("transfer-encoding", "").lower() == "chunked":
            pieces = list[bytes]()
            while size := int((yield from self._until(b"\r\n", _LINE_BYTES)).partition(b";")[0], 16):
                pieces.append((yield from self._exactly(size)))
                if (yield from self._exactly(2)) != b"\r\n":
                    raise ValueError("a piece of its body is longer than it says")
            while (yield from self._until(b"\r\n", _LINE_BYTES)):
                pass  # headers that follow the body
            content = b"".join(pieces)
        elif "content-length" in headers or status in ("204", "304"):
            content = yield from self._exactly(int(headers.get("content-length", "0")))
        else:
            while not self._ended:
                yield
            content, keeps = bytes(self._bytes), False
            self._bytes.clear()
        return Reply(int(status), headers, content), keeps

    def _until(self, end: bytes, most: int) -> Generator[None, None, bytes]:
        while (at := self._bytes.find(end)) < 0:
            if len(self._bytes) > most:
                raise ValueError(f"it has no {end!r} in {most} bytes")
            yield
        found = bytes(self._bytes[:at])
        del self._bytes[: at + len(end)]
        return found

    def _exactly(self, size: int) -> Generator[None, None, bytes]:
        if size < 0:
            raise ValueError(f"it has {size} bytes")
        while len(self._bytes) < size:
            yield
        found = bytes(self._bytes[:size])
        del self._bytes[:size]
        return found
