"""nmoe's side of a process that plays episodes in another interpreter (`host.py`). The process is started again after it ended.

Answers are read by a thread, because the engine's event loop may change between batches, and the process does not.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

from nmoe.engine.remote.process import KEY
from nmoe.envs.tasks.live import EnvironmentLostError
from nmoe.errors import UserError

HOST = Path(__file__).with_name("host.py")
# Seconds for an interpreter that imports much on a busy machine, and for the tasks of an environment.
_START_S, _LIST_S = 900.0, 900.0
# Seconds in which a process has to give an episode up, lest all its episodes hang.
_GIVE_UP_S = 10.0
# Characters of its last words that are shown.
_MOST_SHOWN = 400
Answer = dict[str, Any]


class Running:
    """One process from its start to its end."""

    def __init__(self, command: list[str], env: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(env),
            start_new_session=True,
        )
        self._first: Future[Answer] = Future()
        self._waiting = {0: self._first}
        self._lock, self._numbers = threading.Lock(), count(1)
        self._asked: SimpleQueue[bytes | None] = SimpleQueue()
        self._words: deque[str] = deque(maxlen=20)
        self.ended = False
        self._listening = threading.Thread(target=self._listen, daemon=True)
        self._listening.start()
        for work in (self._write, self._read, self._bury):
            threading.Thread(target=work, daemon=True).start()

    def first(self, seconds: float) -> Answer:
        """Returns its first line. Raises TimeoutError, and EnvironmentLostError if it ended before."""
        return self._first.result(seconds)

    def ask(self, asked: Answer) -> tuple[int, Future[Answer]]:
        number, answer = next(self._numbers), Future[Answer]()
        answer.set_running_or_notify_cancel()  # from here on it cannot be cancelled, so that `_read` may set it
        with self._lock:
            if self.ended:
                raise EnvironmentLostError(self._last())
            self._waiting[number] = answer
        self._asked.put(json.dumps({"id": number, **asked}).encode() + b"\n")
        return number, answer

    def give_up(self, number: int) -> None:
        """Has an episode given up. The process is ended if it does not answer."""
        self._asked.put(json.dumps({"cancel": number}).encode() + b"\n")

        def end() -> None:
            if number in self._waiting:
                self.kill()

        timer = threading.Timer(_GIVE_UP_S, end)
        timer.daemon = True
        timer.start()

    def close(self) -> None:
        self._asked.put(None)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _write(self) -> None:
        pipe = _open(self._process.stdin)
        with suppress(OSError):
            while (line := self._asked.get()) is not None:
                pipe.write(line)
                pipe.flush()
            pipe.close()

    def _read(self) -> None:
        for line in _open(self._process.stdout):
            try:
                answer = json.loads(line)
            except ValueError:  # it ended while it wrote
                break
            with self._lock:
                future = self._waiting.pop(answer.get("id", 0), None)
            if future is not None:
                future.set_result(answer)
        self.kill()
        self._process.wait()
        self._listening.join(1.0)  # not longer: a process that it started may hold the pipe
        with self._lock:
            self.ended = True
            left, self._waiting = self._waiting, {}
        for future in left.values():
            future.set_exception(EnvironmentLostError(self._last()))

    def _bury(self) -> None:
        """Ends what the process started once it has ended: one that holds its pipes would hide the end."""
        self._process.wait()
        self.kill()

    def _listen(self) -> None:
        for line in _open(self._process.stderr):
            self._words.append(line.decode(errors="replace"))

    def _last(self) -> str:
        words = " ".join("".join(self._words).split())[-_MOST_SHOWN:]
        return f"its process ended with code {self._process.returncode}" + (f": {words}" if words else "")


def _open(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None, "all three are pipes"
    return pipe


class Host:
    """Plays episodes of an environment in the interpreter of `venv`. `settings` are what its adapter reads."""

    def __init__(self, venv: str, settings: Mapping[str, Any], name: str) -> None:
        self._python, self._settings, self.name = Path(venv) / "bin" / "python", settings, name
        self._lock = threading.Lock()
        self._runs: list[Running] = []
        weakref.finalize(self, _end, self._runs)

    def tasks(self, most: int) -> tuple[list[Answer], bool]:
        """Returns the first tasks of the environment, and whether there are more. Raises UserError if it cannot be played."""
        try:
            _, answer = self._running().ask({"list": most})
            found = answer.result(_LIST_S)
        except TimeoutError:
            raise UserError(f"{self.name}: its tasks were not there within {_LIST_S:g} s") from None
        except EnvironmentLostError as error:
            raise UserError(f"{self.name}: {error}") from None
        if "tasks" not in found:
            raise UserError(f"{self.name}: {found.get('broken') or found.get('lost')}")
        return found["tasks"], found["more"]

    async def started(self) -> Running:
        """Returns the process, started again if it has ended. Raises UserError if it cannot be."""
        return await asyncio.to_thread(self._running)

    async def play(self, running: Running, index: int, key: str, url: str, session: str) -> Answer:
        """Plays an episode, and returns what the host answers. One that is cancelled is given up. Raises EnvironmentLostError if
        the process ends."""
        number, answer = running.ask({"play": index, "key": key, "url": url, "session": session})
        try:
            return await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            running.give_up(number)
            raise

    def _running(self) -> Running:
        with self._lock:
            if self._runs and not self._runs[-1].ended:
                return self._runs[-1]
            self._runs[:] = [self._started()]
            return self._runs[-1]

    def _started(self) -> Running:
        # Not the key of the engines; and the policy is asked on this machine.
        env = {name: value for name, value in os.environ.items() if name != KEY}
        env["NO_PROXY"] = env["no_proxy"] = ",".join(filter(None, [env.get("NO_PROXY"), "127.0.0.1"]))
        try:
            running = Running([str(self._python), "-u", str(HOST), json.dumps(self._settings)], env)
            first = running.first(_START_S)
        except TimeoutError:
            running.kill()
            raise UserError(
                f"{self.name}: {self._python} did not have verifiers imported within {_START_S:g} s"
            ) from None
        except OSError as error:
            raise UserError(
                f"{self.name}: {self._python} cannot be started: {error.strerror}; make a venv with verifiers"
            ) from None
        except EnvironmentLostError as error:
            raise UserError(f"{self.name}: {error}") from None
        if "refused" in first:
            raise UserError(f"{self.name}: {self._python}: {first['refused']}")
        return running


def _end(runs: list[Running]) -> None:
    for one in runs:
        one.close()
