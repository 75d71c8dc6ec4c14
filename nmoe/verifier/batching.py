"""Concurrent questions to a model, answered in one forward pass."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

# The number of cached answers; an entry is a few hundred bytes.
REMEMBERED = 2**16

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Together(Generic[K, V]):
    """Batches concurrent calls of a function of many keys, which runs in its own thread, and caches recent answers.

    An answer must depend on its key alone.
    """

    def __init__(self, answer: Callable[[Sequence[K]], Sequence[V]]) -> None:
        self._answer_all = answer
        self._known: OrderedDict[K, V] = OrderedDict()
        self._pass = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked: dict[K, asyncio.Future[V]] = {}
        self._next: list[K] = []

    async def ask(self, key: K) -> V:
        """Returns the answer. An exception of the function is raised for all keys of that pass."""
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # callers in another loop ended with it
            self._loop, self._asked, self._next = loop, {}, []
        if key not in self._asked:
            self._asked[key] = loop.create_future()
            self._next.append(key)
            if len(self._next) == 1:
                # Runs after everything that is ready now, so that all concurrent callers are waiting by then.
                loop.call_soon(lambda: loop.create_task(self._answer()))
        return await asyncio.shield(self._asked[key])

    async def _answer(self) -> None:
        """Answers all waiting keys in one pass."""
        taken, self._next = self._next, []
        waiting = {key: self._asked[key] for key in taken}
        try:
            answers = await asyncio.to_thread(self._run, taken)
        except BaseException as error:
            for future in waiting.values():
                if isinstance(error, Exception):
                    future.set_exception(error)
                else:
                    future.cancel()
            if not isinstance(error, Exception):
                raise
        else:
            for (key, future), value in zip(waiting.items(), answers, strict=True):
                self._known[key] = value
                future.set_result(value)
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        finally:
            for key in taken:
                self._asked.pop(key, None)

    def _run(self, keys: Sequence[K]) -> Sequence[V]:
        with self._pass:
            return self._answer_all(keys)
