"""Requests that are under way or done, by their ids: a client asks for their results again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from nmoe.engine.server.http import json_reply
from nmoe.errors import UserError
from nmoe.serve.tinker.errors import TinkerError

# The SDK gives up a poll after 45 s.
POLL_S = 30.0
# Results that were fetched are kept, for clients whose connection broke off meanwhile.
_KEPT = 4096

PROTOBUF = "application/x-protobuf"

Result = dict[str, Any] | bytes
"""Bytes are a message of protobuf."""


@dataclass
class _Entry:
    task: asyncio.Task[Result]
    session_id: str
    digest: bytes
    fetched: bool = False


class Futures:
    """The requests of all sessions. Used on the event loop's thread only."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def known(self, request_id: str, digest: bytes) -> bool:
        """Returns whether a request of this id came before. Raises TinkerError (409) if it had another body."""
        if (entry := self._entries.get(request_id)) is None:
            return False
        if entry.digest != digest:
            raise TinkerError(f"request {request_id}: came before, with another body", 409)
        return True

    def start(self, request_id: str, session_id: str, digest: bytes, work: Coroutine[Any, Any, Result]) -> None:
        """Begins a request. Its digest is of its body."""
        task = asyncio.get_running_loop().create_task(work)
        # Counts as seen: the client of a request that fails may never ask for it.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._entries[request_id] = _Entry(task, session_id, digest)

    async def retrieve(self, request_id: str) -> Response:
        """Returns the reply to a poll: the result or the failure if it comes in time, else that the client should ask again.
        Raises TinkerError (410) for an unknown request, which the SDK sends once more."""
        if (entry := self._entries.get(request_id)) is None:
            raise TinkerError(f"request {request_id}: this server knows no such request, or no longer", 410)
        await asyncio.wait([entry.task], timeout=POLL_S)
        if not entry.task.done():
            return json_reply({"type": "try_again", "request_id": request_id, "queue_state": "active"}, 408)
        self._fetched(request_id, entry)
        try:
            result = entry.task.result()
        except asyncio.CancelledError:
            return json_reply(TinkerError(f"request {request_id} was cancelled").body())
        except TinkerError as error:
            return json_reply(error.body())
        except UserError as error:
            return json_reply(TinkerError(str(error)).body())
        except Exception as error:
            return json_reply(TinkerError(f"{type(error).__name__}: {error}", category="server").body())
        return json_reply(result) if isinstance(result, dict) else Response(result, media_type=PROTOBUF)

    def _fetched(self, request_id: str, entry: _Entry) -> None:
        if not entry.fetched:
            entry.fetched = True
            # The oldest go first: a dict keeps the order in which its entries came.
            self._entries[request_id] = self._entries.pop(request_id)
            fetched = [one for one, other in self._entries.items() if other.fetched]
            for one in fetched[: max(0, len(fetched) - _KEPT)]:
                del self._entries[one]

    def cancel(self, request_id: str) -> None:
        """Ends a request, if it still runs."""
        if (entry := self._entries.get(request_id)) is not None:
            entry.task.cancel()

    def end(self, session_id: str) -> None:
        """Ends and forgets the requests of a session."""
        for request_id, entry in list(self._entries.items()):
            if entry.session_id == session_id:
                entry.task.cancel()
                del self._entries[request_id]
