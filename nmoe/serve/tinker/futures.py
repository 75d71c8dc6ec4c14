"""Requests that are under way or done, by their ids: a client asks for their results again and again."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine
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
# Results that are not fetched are kept for so long, and so many bytes of a session: a client that lives fetches them at once.
_UNFETCHED_S, _UNFETCHED_BYTES = 3600.0, 512 * 2**20

PROTOBUF = "application/x-protobuf"

Result = dict[str, Any] | bytes
"""Bytes are a message of protobuf."""

Taken = Callable[[], Awaitable[None]]
"""Returns once a request is on the disk. Raises StorageError if the disk refuses it."""
Record = Callable[[bytes, str], Awaitable[None]]
"""Notes a reply and its media type on the disk, however long that has no room."""


class ServerEndsError(Exception):
    """Raised if a request breaks off because the server does: it has no result, and the next server runs it."""


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
    taken: Taken | None
    ended: float = math.inf
    fetched: bool = False


class _Sizes:
    """The sizes of results by their requests, the oldest first."""

    def __init__(self) -> None:
        self._of = dict[str, int]()
        self.total = 0

    @property
    def oldest(self) -> str:
        return next(iter(self._of))

    def add(self, request_id: str, size: int) -> None:
        self._of[request_id] = size
        self.total += size

    def drop(self, request_id: str) -> None:
        self.total -= self._of.pop(request_id, 0)


class Futures:
    """The requests of all sessions. Used on the event loop's thread only."""

    def __init__(self, forget: Callable[[str, str], None]) -> None:
        """`forget` is called with the ids of each training request whose result is dropped, and of its session."""
        self._forgotten = forget
        self._entries: dict[str, _Entry] = {}
        self._fetched = _Sizes()
        self._unfetched = defaultdict[str, _Sizes](_Sizes)  # by session

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
        taken: Taken | None = None,
        record: Record | None = None,
    ) -> None:
        """Begins a request. Its digest is of its body. A training request begins once it is `taken`, and its result is handed out
        once `record` has it on the disk. One that the disk refuses never was there."""
        task = asyncio.get_running_loop().create_task(self._run(request_id, work, taken, record))
        entry = self._entries[request_id] = _Entry(task, session_id, digest, taken)

        def ends(_: object) -> None:
            entry.ended = time.monotonic()
            work.close()  # has not begun if it was cancelled at once
            if self._entries.get(request_id) is entry and not (task.cancelled() or task.exception()):
                self._ended(request_id, session_id, task.result().size)

        task.add_done_callback(ends)

    def _ended(self, request_id: str, session_id: str, size: int) -> None:
        """Counts a result that waits to be fetched, and drops the oldest of its session that are too much."""
        waiting = self._unfetched[session_id]
        waiting.add(request_id, size)
        while waiting.total > _UNFETCHED_BYTES and waiting.oldest != request_id:
            self._forget(waiting.oldest)

    async def _run(
        self, request_id: str, work: Coroutine[Any, Any, Result], taken: Taken | None, record: Record | None
    ) -> _Outcome:
        if taken is not None:
            try:
                await taken()
            except StorageError as error:
                work.close()
                self._entries.pop(request_id, None)
                return _failure(error)
        outcome = await _outcome(work)
        if record is not None:
            await record(outcome.content, outcome.media_type)
        return outcome

    async def promised(self, request_id: str) -> None:
        """Returns once a request is taken. Raises StorageError if it could not be."""
        if (entry := self._entries.get(request_id)) is None:
            raise StorageError(f"request {request_id}: cannot be written; send it again")
        if entry.taken is not None:
            await entry.taken()

    def put_back(self, request_id: str, session_id: str, digest: bytes, content: bytes, media_type: str) -> None:
        """Takes the result of a training request that ended before this process."""
        done: asyncio.Future[_Outcome] = asyncio.get_running_loop().create_future()
        done.set_result(_Outcome(content, media_type))
        self._entries[request_id] = _Entry(done, session_id, digest, _there, time.monotonic())

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
            self._drop_unfetched(request_id, entry.session_id)
            self._fetched.add(request_id, outcome.size)
            while self._fetched.total > _KEPT_BYTES:
                self._forget(self._fetched.oldest)
        return Response(outcome.content, media_type=outcome.media_type)

    def _forget(self, request_id: str) -> None:
        entry = self._entries.pop(request_id)
        if entry.taken is not None:
            self._forgotten(request_id, entry.session_id)
        self._fetched.drop(request_id)
        self._drop_unfetched(request_id, entry.session_id)

    def _drop_unfetched(self, request_id: str, session_id: str) -> None:
        if (waiting := self._unfetched.get(session_id)) is not None:
            waiting.drop(request_id)
            if not waiting.total:
                del self._unfetched[session_id]

    def cancel(self, request_id: str) -> None:
        """Ends a request for samples, if it still runs. One of training keeps its turn."""
        if (entry := self._entries.get(request_id)) is not None and entry.taken is None:
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


async def _there() -> None:
    """Is `taken` for a request of the server before."""


async def _outcome(work: Coroutine[Any, Any, Result]) -> _Outcome:
    try:
        return _reply(await work)
    except ServerEndsError:
        pass
    except Exception as error:
        return _failure(error)
    # Polls find it under way until the process has ended.
    await asyncio.get_running_loop().create_future()
    raise AssertionError("nothing ends it")


def content_of(result: Result) -> bytes:
    """Returns the content of a reply."""
    return _reply(result).content


def failed(error: Exception) -> tuple[bytes, str]:
    """Returns the content of a reply that has a failure, and its media type."""
    outcome = _failure(error)
    return outcome.content, outcome.media_type


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
