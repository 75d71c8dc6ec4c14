"""Live episodes: the contract by which an environment that makes its own observations and rewards takes part in a rollout.

    open(record, seed)                          step(turn)                       close()
        -> the prompt          the policy's turn    -> messages, reward, done
                               is sampled               (the next turn, or the end)

An episode may hold sockets, processes and threads, since nothing of it is copied, saved or played again. Its words are recorded
with every turn, and a replay takes them from the record.

Who is at fault decides what becomes of a sample. A call that takes too long, a lost connection and an InfrastructureError lose the
sample: it is masked, because they say nothing about the policy. Once an episode has ended, its grade stands, and a `close` that is
lost is only reported. Any other exception, a reward that is not a finite number and a message by an unknown role are mistakes of
the environment: the run stops.
"""

from __future__ import annotations

import asyncio
import errno
import json
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar

from nmoe.envs.tasks.conversation import AnsweringTask, AssistantTurn, plain_json
from nmoe.envs.tasks.own import OwnTask, Prompt, Record, TaskError, as_json, of_the_user, said_and_paid
from nmoe.envs.tasks.task import Attempt, Posed
from nmoe.errors import InfrastructureError, UserError
from nmoe.types import Exchange, Problem, Verdict
from nmoe.work import WORK

R = TypeVar("R")

# Seconds that closing an episode may take, since its group waits for it, also while a run ends.
CLOSE_S = 10.0
# Exceptions by which libraries report a lost connection, and which are no ConnectionError.
_LOST = {
    "asyncio": ("IncompleteReadError",),
    "aiohttp": ("ClientConnectionError", "ClientPayloadError"),
    "http.client": ("IncompleteRead",),
    "httpx": ("NetworkError", "ProxyError", "RemoteProtocolError", "TimeoutException"),
    "httpx2": ("NetworkError", "ProxyError", "RemoteProtocolError", "TimeoutException"),
    "openai": ("APIConnectionError",),
    "ssl": ("SSLEOFError", "SSLZeroReturnError"),
    "requests.exceptions": ("ChunkedEncodingError", "ConnectionError", "Timeout"),
    "urllib3.exceptions": ("NewConnectionError", "ProtocolError", "TimeoutError"),
    "websockets.exceptions": ("ConnectionClosed",),
}
_NO_ROUTE = {errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETRESET, errno.ENETUNREACH, errno.ENOTCONN}


class LiveEpisode(ABC):
    """An episode of an environment that runs beside the policy, such as a game in another process.

        >>> import asyncio, nmoe
        >>> class Counting(nmoe.LiveEpisode):
        ...     async def open(self, record, seed):
        ...         self.left = record["from"]
        ...         return f"Count down from {self.left}."
        ...     async def step(self, turn):
        ...         self.left -= 1
        ...         if turn.answer != str(self.left):
        ...             return None, 0.0, True
        ...         return "go on", 1.0 if self.left == 0 else 0.0, self.left == 0
        >>> episode = Counting()
        >>> asyncio.run(episode.open({"from": 3}, seed=0))
        'Count down from 3.'

    Each sample has its own instance, made without arguments. The samples of a group are opened with the same record and seed, and
    have to be asked the same: their rewards are compared. No method may block the event loop. `info` is an optional JSON object,
    recorded after every step.
    """

    info: Mapping[str, Any] = MappingProxyType({})

    @abstractmethod
    async def open(self, record: Record, seed: int) -> Prompt:
        """Begins the episode and returns its prompt: a text, or messages such as {"role": "user", "content": "..."}. `record` is
        the object of the task pool."""

    @abstractmethod
    async def step(self, turn: AssistantTurn) -> tuple[Prompt | None, float, bool]:
        """Answers a turn of the policy. Returns the user's next messages, the reward of this turn, and whether the episode is
        done. Rewards add up to the score; from 1 on the episode counts as solved."""

    async def close(self) -> None:
        """Releases what the episode holds. It is called once, also after an open or a step that failed."""
        return

    @classmethod
    def check_record(cls, record: Record) -> None:
        """Raises UserError for a record that cannot be opened. It is called when the task pool is read."""
        return

    @classmethod
    def gold(cls, record: Record) -> str:
        """Returns a turn that earns the whole reward, "" if none is known; `nmoe env certify` plays it."""
        return ""


class EnvironmentLostError(InfrastructureError):
    """A live environment hung or was lost, so that the sample is masked."""


class LiveTask(OwnTask, AnsweringTask):
    """Adapts a `LiveEpisode` to a task. Before an episode is opened, a problem shows the prompt of its record, if that has one."""

    reads_message = True

    def __init__(self, episode: type[LiveEpisode], name: str) -> None:
        self._episode, self._name = episode, name

    def read_record(self, record: Record) -> Posed:
        kept = as_json(record, f"task {self._name}")
        with of_the_user(f"task {self._name}: check_record"):
            self._episode.check_record(record)
        return self._posed(record.get("prompt") or "(The environment asks when it is opened.)", "", given=kept)

    def knows_answer(self, problem: Problem) -> bool:
        return False

    def right_turn(self, problem: Problem) -> str:
        """Returns a turn that earns the whole reward, "" if none is known."""
        with of_the_user(f"task {self._name}: gold"):
            return str(self._episode.gold(json.loads(str(problem.metadata["given"]))))

    async def verify(self, problem: Problem, attempt: Attempt) -> Verdict:
        return self.earned(attempt)

    def opened(self, problem: Problem, prompt: Prompt) -> Problem:
        """Returns the problem with the prompt that its episode was opened with."""
        question, _, asked = self._posed(prompt, "", given=str(problem.metadata["given"]))
        before = {name: value for name, value in problem.metadata.items() if name != "messages"}
        return replace(problem, question=question, metadata={**before, **asked})

    def begin(self, seconds: float) -> Live:
        """Makes an episode, of which no call may take longer than so many seconds. Raises TaskError if its class raises."""
        with of_the_user(f"task {self._name}: {self._episode.__name__}(), which is called without arguments,"):
            return Live(self, self._episode(), self._name, seconds)


class Live:
    """An episode while it is played. `open` and `step` raise EnvironmentLostError if the environment was lost. Every call
    raises TaskError if it raises or answers what cannot be recorded."""

    def __init__(self, task: LiveTask, episode: LiveEpisode, name: str, seconds: float) -> None:
        self._task, self._episode, self._name, self._seconds = task, episode, name, seconds
        self._closed = False

    async def open(self, problem: Problem, seed: int) -> Problem:
        """Opens the episode, and returns the problem with the prompt that it asks."""
        record = json.loads(str(problem.metadata["given"]))
        return self._task.opened(problem, await self._call("open", self._episode.open(record, seed), self._seconds))

    async def step(self, said: AssistantTurn, turn: int) -> Exchange:
        """Returns the record of the environment's answer to the policy's turn of this index."""
        answered = await self._call("step", self._episode.step(said), self._seconds)
        user, reward = said_and_paid(answered, f"task {self._name}: step")
        try:
            info = plain_json(self._episode.info)
        except TypeError as error:
            raise TaskError(f"task {self._name}: `info` after step(): {error}") from None
        return Exchange(turn, info, user, reward)

    async def close(self) -> None:
        """Closes the episode, if that was not done before. A loss is only reported on stderr."""
        if not self._closed:
            self._closed = True
            try:
                await self._call("close", self._episode.close(), min(self._seconds, CLOSE_S))
            except EnvironmentLostError as error:
                print(f"warning: {error}", file=sys.stderr, flush=True)

    async def _call(self, what: str, call: Coroutine[Any, Any, R], seconds: float) -> R:
        try:
            async with asyncio.timeout(seconds):
                with of_the_user(f"task {self._name}: {what}"):
                    return await call
        except TimeoutError:
            said = f"took longer than {seconds:g} s" + (" (budget.wall_s)" if seconds == self._seconds else "")
        except InfrastructureError as error:
            said = f"{type(error).__name__}: {error}"
        except TaskError as error:
            cause = error.__cause__
            if not _is_loss(cause):
                raise
            said = f"{type(cause).__name__}: {cause}"
        except UserError as error:
            raise TaskError(f"task {self._name}: {what}: {error}") from error
        finally:
            WORK.pieces += 1
        raise EnvironmentLostError(f"task {self._name}: {what}: {said}")


def _is_loss(error: BaseException | None) -> bool:
    """Returns whether an exception reports that a connection was lost or could not be made, or that no reply came."""
    if isinstance(error, ConnectionError | TimeoutError | socket.gaierror):
        return True
    if isinstance(error, OSError) and error.errno in _NO_ROUTE:
        return True
    if isinstance(reason := getattr(error, "reason", None), BaseException):  # of urllib and urllib3
        return _is_loss(reason)
    # A library that raised it has been imported.
    known = ((sys.modules[name], classes) for name, classes in _LOST.items() if name in sys.modules)
    return any(isinstance(error, getattr(module, one, ())) for module, classes in known for one in classes)
