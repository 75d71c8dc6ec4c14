"""What the servers of nmoe do alike: replies in JSON, bodies up to a size, and an end of the work for clients that have gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.requests import Request as Asked
from starlette.responses import Response
from starlette.types import Receive

from nmoe.errors import StorageError, UserError
from nmoe.parsing import json_of

R = TypeVar("R")


class TooLargeError(UserError):
    """A body has more bytes than the server reads."""


def status_of(error: UserError) -> int:
    """Returns the status of a refusal. A full disk is the server's fault, although a command that meets one ends with 2, as for
    bad input: a client may try again."""
    return 507 if isinstance(error, StorageError) else 400 if error.exit_code == UserError.exit_code else 500


def json_reply(body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(body, separators=(",", ":")), status, headers, "application/json")


async def body_of(asked: Asked, most_bytes: int | None = None) -> dict[str, Any]:
    """Reads a body, a JSON object. Raises UserError for any other, and TooLargeError for one of more than `most_bytes`
    bytes."""
    try:
        body = json_of(await bytes_of(asked, most_bytes))
    except ValueError as error:
        raise UserError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise UserError("the body is not a JSON object")
    return body


async def bytes_of(asked: Asked, most: int | None) -> bytes:
    """Reads a body. Raises TooLargeError for one of more than `most` bytes."""
    if most is None:
        return await asked.body()
    parts, size = list[bytes](), 0
    async for part in asked.stream():
        parts.append(part)
        size += len(part)
        if size > most:
            raise TooLargeError(f"the body has more than {most:,} bytes")
    return b"".join(parts)


async def unless_gone(asked: Asked, work: Coroutine[Any, Any, R]) -> R:
    """Returns the result of the work. If the client closes its connection before, cancels it and raises ClientDisconnect."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(closed(asked.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def closed(receive: Receive) -> None:
    """Returns once the client has closed its connection, or has the whole reply."""
    while (await receive())["type"] != "http.disconnect":
        pass
