"""Plays episodes of the package verifiers for nmoe, in the interpreter that has it: VENV/bin/python host.py SETTINGS

A line of JSON on standard input asks, and lines on standard output answer. It imports nothing of nmoe, and names its version first:

    -> {"version": "0.4.0"}                                      or {"refused": "why"}
    <- {"id": 1, "list": 100}
    -> {"id": 1, "tasks": [{"key": ..., "prompt": [...]}, ...], "more": false}
    <- {"id": 2, "play": 7, "key": ..., "url": ..., "session": ...}       or {"cancel": 2}
    -> {"id": 2, "reward": 0.5, "rewards": {...}, "metrics": {...}, "said": [...]}

An episode that has no reward answers why: `ended` where it could not go on because the policy's session had ended, `lost` where
its infrastructure failed, and `broken` where its code did. The environment asks the policy at `url`, and names its session in the
header X-Session-ID. The end of standard input ends the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.metadata
import json
import os
import signal
import sys
import threading
import time
import traceback
from typing import Any

ADAPTERS = {"0.3.1": "verifiers_v0", "0.4.0": "verifiers_v1"}
# How the names of exceptions begin or end by which libraries report that a connection was lost or that no reply came.
_LOST = (
    "Timeout", "TimeoutError", "TimeoutException", "ConnectionError", "ConnectError", "ReadError", "WriteError", "CloseError",
    "ConnectionResetError", "ConnectionRefusedError", "ConnectionAbortedError", "BrokenPipeError", "gaierror",
    "IncompleteReadError", "RemoteProtocolError", "ServerDisconnectedError", "ConnectionClosed", "ConnectionClosedError",
    "InternalServerError", "RateLimitError", "BrokenProcessPool",
)  # fmt: skip


def chain(error: BaseException) -> list[BaseException]:
    """Returns an exception and its causes, the last one first."""
    found: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in found:
        found.append(cause)
        cause = cause.__cause__ or cause.__context__
    return found


def failed(error: BaseException, session: str, lost: tuple[type[BaseException], ...] = ()) -> dict[str, str]:
    """Returns the answer of an episode that raised. `lost` are more exceptions by which the infrastructure failed."""
    first = chain(error)[-1]
    frames = traceback.extract_tb(first.__traceback__)
    where = f", at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return {_kind(error, session, lost): f"{type(error).__name__}: {error}{where}"}


def _kind(error: BaseException, session: str, lost: tuple[type[BaseException], ...]) -> str:
    # From the last one on: a connection may be lost while an earlier failure is handled.
    for one in chain(error):
        if session and says_ended(str(one), session):
            return "ended"
        if isinstance(one, lost) or is_lost(type(one).__name__):
            return "lost"
        if isinstance(one, BaseExceptionGroup):
            kinds = {_kind(part, session, lost) for part in one.exceptions}
            return next(kind for kind in ("broken", "lost", "ended") if kind in kinds)
    return "broken"


def says_ended(text: str, session: str) -> bool:
    """Returns whether a text has the policy's refusal of a further turn (`nmoe.rollout.session_routes`). No other server, and no
    turn of the policy, knows the session's name."""
    return f"session {session} has ended" in text


def is_lost(name: str) -> bool:
    """Returns whether an exception of this name is a lost connection or a reply that did not come."""
    return name.rpartition(".")[2].endswith(_LOST)


def text_of(content: Any) -> str:
    """Returns the text of a message's content, which may be a list of parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [one.get("text") if isinstance(one, dict) else getattr(one, "text", None) for one in parts]
    return "\n".join(one for one in texts if one)


# Seconds that the environment has to end in.
_END_S = 10.0


def end_with(parent: int) -> None:
    """Ends this process when its parent has ended, also while an environment keeps the event loop."""
    while os.getppid() == parent:
        time.sleep(2)
    end()


def end() -> None:
    """Ends this process with the ones that the environment started, which may wait for it for ever."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


class Host:
    def __init__(self, adapter: Any, answers: Any) -> None:
        self._adapter, self._answers = adapter, answers
        self._playing: dict[int, asyncio.Task[None]] = {}

    def say(self, line: str) -> None:
        self._answers.write(line + "\n")
        self._answers.flush()

    async def serve(self) -> None:
        """Answers until standard input ends."""
        asked = asyncio.StreamReader(limit=2**26)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(asked), sys.stdin)
        async with self._adapter.serving():
            while line := await asked.readline():
                self._take(json.loads(line))
            threading.Timer(_END_S, end).start()
            for one in self._playing.values():
                one.cancel()
            if self._playing:
                await asyncio.wait(self._playing.values())
        end()

    def _take(self, asked: dict[str, Any]) -> None:
        if "cancel" in asked:
            if (task := self._playing.get(asked["cancel"])) is not None:
                task.cancel()
            return
        number = asked["id"]
        task = asyncio.ensure_future(self._answer(number, asked))
        self._playing[number] = task
        task.add_done_callback(lambda _: self._playing.pop(number))

    async def _answer(self, number: int, asked: dict[str, Any]) -> None:
        line = json.dumps({"id": number, "lost": "it was given up"})
        try:
            # Numbers of numpy and torch are no floats to JSON.
            line = json.dumps({"id": number, **await self._asked(asked)}, default=float)
        except Exception as error:
            line = json.dumps({"id": number, **failed(error, asked.get("session", ""), self._adapter.LOST)})
        finally:
            self.say(line)

    async def _asked(self, asked: dict[str, Any]) -> dict[str, Any]:
        if "list" in asked:
            tasks, more = self._adapter.tasks(asked["list"])
            return {"tasks": tasks, "more": more}
        key = self._adapter.key(asked["play"])
        if key != asked["key"]:
            return {
                "broken": f"task {asked['play']} is another one than when the run began: its tasks have to be the same each time"
            }
        answer: dict[str, Any] = await self._adapter.play(asked["play"], asked["url"], asked["session"])
        return answer


def adapter_of(version: str | None, settings: dict[str, Any]) -> Any:
    """Returns the adapter of an installed version. Raises ValueError for a version that nmoe does not know."""
    if version not in ADAPTERS:
        found = "no package verifiers" if version is None else f"verifiers {version}"
        raise ValueError(f"it has {found}, and nmoe plays environments of {' and '.join(ADAPTERS)}")
    return importlib.import_module(ADAPTERS[version]).Adapter(settings)


def main() -> None:
    threading.Thread(target=end_with, args=[os.getppid()], daemon=True).start()
    # What the environment prints goes to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path += [os.getcwd(), sys.path.pop(0)]
    version = None
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version("verifiers")
    try:
        adapter = adapter_of(version, json.loads(sys.argv[1]))
        first = {"version": version}
    except Exception as error:
        adapter, first = (
            None,
            {"refused": str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"},
        )
    answers.write(json.dumps(first) + "\n")
    answers.flush()
    if adapter is not None:
        asyncio.run(Host(adapter, answers).serve())


if __name__ == "__main__":
    main()
