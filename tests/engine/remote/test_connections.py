"""Replies of HTTP over connections that are kept, against a server that sends given bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from nmoe.engine.remote import connections
from nmoe.engine.remote.connections import Connections, Reply

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nX-Name: a: b\r\n\r\n{}"


class Scripted:
    """Sends the next of the given replies for each request, in pieces; an empty piece closes the connection."""

    def __init__(self, *replies: list[bytes]) -> None:
        self.replies, self.requests, self.connections, self.open = list(replies), list[bytes](), 0, 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections, self.open = self.connections + 1, self.open + 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
                self.requests.append(head + await reader.readexactly(int(length or b"0")))
                for piece in self.replies.pop(0):
                    if not piece:
                        return
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.01)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open -= 1
            writer.close()


def asked(server: Scripted, use: Callable[[Connections, str], Awaitable[Any]], key: str = "") -> Any:
    async def main() -> Any:
        async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
            client = Connections(key)
            try:
                return await use(client, f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
            finally:
                await client.aclose()
                while server.open:
                    await asyncio.sleep(0.001)

    return asyncio.run(asyncio.wait_for(main(), 20))


async def twice(client: Connections, url: str) -> list[Reply]:
    return [await client.request("GET", url), await client.request("GET", url)]


def test_a_request_has_its_parts_and_the_connection_is_kept() -> None:
    server = Scripted([OK], [OK])

    async def use(client: Connections, url: str) -> list[Reply]:
        first = await client.request("POST", f"{url}/a/b", json={"ids": [1, 2], "é": None}, params={"mode": "keep it"})
        return [first, await client.request("GET", url)]

    first, second = asked(server, use, "secret")
    assert first == second == Reply(200, {"content-length": "2", "x-name": "a: b"}, b"{}")
    head, _, body = server.requests[0].partition(b"\r\n\r\n")
    line, *headers = head.split(b"\r\n")
    assert line == b"POST /a/b?mode=keep+it HTTP/1.1"
    assert {b"authorization: Bearer secret", b"content-type: application/json", b"content-length: 27"} <= {*headers}
    assert body == rb'{"ids":[1,2],"\u00e9":null}'
    assert server.requests[1].startswith(b"GET / HTTP/1.1\r\nhost: 127.0.0.1:")
    assert server.connections == 1


@pytest.mark.parametrize(
    ("key", "header"),
    [("", b"authorization: Basic YWxhZGRpbjpvcGVuIHNlc2FtZQ=="), ("secret", b"authorization: Bearer secret")],
)
def test_a_user_of_the_url_goes_with_a_request_that_has_no_key(key: str, header: bytes) -> None:
    server = Scripted([OK])

    async def use(client: Connections, url: str) -> Reply:
        return await client.request("GET", url.replace("://", "://aladdin:open%20sesame@"))

    assert asked(server, use, key).content == b"{}"
    lines = server.requests[0].split(b"\r\n")
    assert [line for line in lines if line.startswith(b"authorization")] == [header]
    assert lines[1].startswith(b"host: 127.0.0.1:")


@pytest.mark.parametrize(
    ("pieces", "content", "connections_"),
    [
        ([OK[:9], OK[9:40], OK[40:-1], OK[-1:]], b"{}", 1),
        ([b"HTTP/1.1 100 Continue\r\n\r\n", OK], b"{}", 1),
        (
            [
                b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n{"a',
                b'\r\n4;x=y\r\n": 1\r\n1\r\n}\r\n0\r\nlate: 1\r\n\r\n',
            ],
            b'{"a": 1}',
            1,
        ),
        ([b"HTTP/1.1 200 OK\r\nconnection: Close\r\ncontent-length: 2\r\n\r\n{}"], b"{}", 2),
        ([b"HTTP/1.0 200 OK\r\n\r\n{", b"}", b""], b"{}", 2),
        ([b"HTTP/1.1 204 None\r\n\r\n"], b"", 1),
        # Two replies, at once and one after the other: the second is not the reply to the next request.
        ([OK + OK.replace(b"{}", b"[]")], b"{}", 2),
        ([OK, OK.replace(b"{}", b"[]")], b"{}", 2),
        ([OK, b""], b"{}", 2),
    ],
)  # fmt: skip
def test_each_request_has_its_own_whole_reply(pieces: list[bytes], content: bytes, connections_: int) -> None:
    server = Scripted(pieces, [OK.replace(b"{}", b"42")])

    async def use(client: Connections, url: str) -> list[bytes]:
        first = await client.request("GET", url)
        await asyncio.sleep(0.05)
        return [first.content, (await client.request("GET", url)).content]

    assert asked(server, use) == [content, b"42"]
    assert server.connections == connections_


def test_a_reply_that_came_before_its_request_was_sent_is_not_taken() -> None:
    """The event loop has not yet seen the second reply when the next request takes a connection."""
    server = Scripted([OK, OK], [OK.replace(b"{}", b"42")])

    async def use(client: Connections, url: str) -> bytes:
        await client.request("GET", url)
        (connection,) = client._open
        connection._transport.pause_reading()  # as a loop that is busy
        await asyncio.sleep(0.05)
        return (await client.request("GET", url)).content

    assert asked(server, use) == b"42"
    assert server.connections == 2


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        ([b""], "closed the connection before its reply was whole"),
        ([OK[:-1], b""], "closed the connection before its reply was whole"),
        ([b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n", b""], "closed the connection"),
        ([b"SSH-2.0-OpenSSH\r\n\r\n"], "not of HTTP"),
        ([b"HTTP/1.1 2xx OK\r\n\r\n"], "not of HTTP"),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: two\r\n\r\n{}"], "not of HTTP"),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: -2\r\n\r\n{}"], "not of HTTP"),
        ([b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{}\r\n"], "longer than it says"),
        ([b"x" * 70000], "no b'\\r\\n\\r\\n' in 65536 bytes"),
    ],
)
def test_a_reply_that_is_not_whole_is_an_error_and_the_next_request_has_a_new_connection(
    pieces: list[bytes], says: str
) -> None:
    server = Scripted(pieces, [OK])

    async def use(client: Connections, url: str) -> Reply:
        with pytest.raises(OSError, match=says.replace("\\", "\\\\")):
            await client.request("GET", url)
        return await client.request("GET", url)

    assert asked(server, use).content == b"{}"
    assert server.connections == 2


def test_a_request_that_is_given_up_ends_its_connection() -> None:
    server = Scripted([], [OK])

    async def use(client: Connections, url: str) -> Reply:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await client.request("GET", url)
        while server.open:  # the server sees it
            await asyncio.sleep(0.001)
        return await client.request("GET", url)

    assert asked(server, use).content == b"{}"


def test_unused_connections_are_closed_once_one_breaks_and_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Scripted([OK], [OK], [b""], [OK], [OK], [OK])

    async def use(client: Connections, url: str) -> None:
        await asyncio.gather(*(client.request("GET", url) for _ in range(2)))
        assert server.open == 2
        with pytest.raises(OSError, match="closed the connection"):
            await client.request("GET", url)
        while server.open:
            await asyncio.sleep(0.001)
        await twice(client, url)
        assert server.connections == 3
        monkeypatch.setattr(connections, "_UNUSED_S", 0.05)
        await asyncio.sleep(0.1)
        await client.request("GET", url)
        assert server.connections == 4

    asked(server, use)


def test_a_server_that_is_not_there_is_an_error() -> None:
    async def refused(url: str) -> None:
        await Connections("").request("GET", url)

    with pytest.raises(ConnectionRefusedError):
        asyncio.run(refused("http://127.0.0.1:9"))
    with pytest.raises(ConnectionError, match=r"'a..b' is no name of a host"):
        asyncio.run(refused("http://a..b:9"))
