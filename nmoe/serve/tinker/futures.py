"""Requests that are under way or done, by their ids: a client asks for their results again and again."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from nmoe.engine.server.http import json_reply, status_of
from nmoe.errors import StorageError, UserError
from nmoe.serve.tinker.errors import Category, TinkerError

# The SDK gives up a poll after 45 s.
POLL_S = 30.0
# Results that were fetched are kept, for clients whose connection broke off meanwhile: so many bytes of them, each counted as at
# least a thousand.
_KEPT_BYTES, _LEAST_BYTES = 64 * 2**20, 1000
# Results that are not fetched are kept for so long.
_UNFETCHED_S = 3600.0

PROTOBUF = "application/x-protobuf"

Result = dict[str, Any] | bytes
"""Bytes are a message of protobuf."""

Record = Callable[[bytes, str], Awaitable[None]]
"""Notes a reply and its media type on the disk."""


@dataclass(frozen=True)
class _Outcome:
    """A reply, without the exception that it may come from, whose traceback would hold all that the request was made of."""

    content: bytes
    media_type: str = "application/json"

    @property
    def size(self) -> int:
        return max(_LEAST_BYTES, len(self.content))


@dataclass
class _Entry:
    task: asyncio.Future[_Outcome]
    session_id: str
    digest: bytes
    ordered: bool
    ended: float = math.inf
    fetched: bool = False


class Futures:
    """The requests of all sessions. Used on the event loop's thread only."""

    def __init__(self, forget: Callable[[str], None]) -> None:
        """`forget` is called with the id of each training request whose result is dropped."""
        self._forgotten = forget
        self._entries: dict[str, _Entry] = {}
        self._fetched = dict[str, int]()  # the sizes of results that were fetched, the oldest first
        self._size = 0

    def known(self, request_id: str, digest: bytes) -> bool:
        """Returns whether a request of this id came before. Raises TinkerError if it had another body."""
        if (entry := self._entries.get(request_id)) is None:
            return False
        if entry.digest != digest:
            raise TinkerError(f"request {request_id}: came before, with another body")
        return True

    def start(
        self,
        request_id: str,
        session_id: str,
        digest: bytes,
        work: Coroutine[Any, Any, Result],
        record: Record | None = None,
    ) -> None:
        """Begins a request. Its digest is of its body. The result of a training request is handed out once `record` has it on the
        disk."""
        task = asyncio.get_running_loop().create_task(_outcome(work, record))
        entry = self._entries[request_id] = _Entry(task, session_id, digest, record is not None)

        def ends(_: object) -> None:
            entry.ended = time.monotonic()
            work.close()  # has not begun if it was cancelled at once

        task.add_done_callback(ends)

    def put_back(self, request_id: str, session_id: str, digest: bytes, content: bytes, media_type: str) -> None:
        """Takes the result of a training request that ended before this process."""
        done: asyncio.Future[_Outcome] = asyncio.get_running_loop().create_future()
        done.set_result(_Outcome(content, media_type))
        self._entries[request_id] = _Entry(done, session_id, digest, True, time.monotonic())

    async def retrieve(self, request_id: str) -> Response:
        """Returns the reply to a poll: the result or the failure if it comes in time, else that the client should ask again.
        Raises TinkerError (410) for an unknown request, which the SDK sends once more."""
        if (entry := self._entries.get(request_id)) is None:
            raise TinkerError(f"request {request_id}: this server knows no such request, or no longer", 410)
        await asyncio.wait([entry.task], timeout=POLL_S)
        if not entry.task.done():
            return json_reply({"type": "try_again", "request_id": request_id, "queue_state": "active"}, 408)
        if entry.task.cancelled():
            outcome = _Outcome(_json(TinkerError(f"request {request_id} was cancelled").body()))
        else:
            outcome = entry.task.result()
        if not entry.fetched and self._entries.get(request_id) is entry:
            entry.fetched = True
            self._fetched[request_id] = outcome.size
            self._size += outcome.size
            while self._size > _KEPT_BYTES:
                self._forget(next(iter(self._fetched)))
        return Response(outcome.content, media_type=outcome.media_type)

    def _forget(self, request_id: str) -> None:
        if self._entries.pop(request_id).ordered:
            self._forgotten(request_id)
        self._size -= self._fetched.pop(request_id, 0)

    def cancel(self, request_id: str) -> None:
        """Ends a request for samples, if it still runs. One of training keeps its turn."""
        if (entry := self._entries.get(request_id)) is not None and not entry.ordered:
            entry.task.cancel()

    def end(self, session_id: str) -> None:
        """Ends and forgets the requests of a session."""
        for request_id, entry in list(self._entries.items()):
            if entry.session_id == session_id:
                entry.task.cancel()
                self._forget(request_id)

    def forget(self) -> None:
        """Drops the results that were not fetched for a long time."""
        before = time.monotonic() - _UNFETCHED_S
        for request_id in [one for one, entry in self._entries.items() if not entry.fetched and entry.ended < before]:
            self._forget(request_id)


async def _outcome(work: Coroutine[Any, Any, Result], record: Record | None) -> _Outcome:
    try:
        outcome = _reply(await work)
        if record is not None:
            await record(outcome.content, outcome.media_type)
        return outcome
    except Exception as error:
        outcome = _failure(error)
    if record is not None:
        with suppress(StorageError):  # the request runs again after a kill, and fails again
            await record(outcome.content, outcome.media_type)
    return outcome


def _reply(result: Result) -> _Outcome:
    return _Outcome(_json(result)) if isinstance(result, dict) else _Outcome(result, PROTOBUF)


def _failure(error: Exception) -> _Outcome:
    if isinstance(error, TinkerError):
        return _Outcome(_json(error.body()))
    if isinstance(error, UserError):
        category: Category = "server" if status_of(error) >= 500 else "user"
        return _Outcome(_json(TinkerError(str(error), category=category).body()))
    return _Outcome(_json(TinkerError(f"{type(error).__name__}: {error}", category="server").body()))


def _json(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()
