"""The thread and the bounded queue between a run and one of its sinks."""

import threading
from collections import deque
from collections.abc import Callable

from nmoe.runs.sinks.sink import Sink

# Records that may wait. A step is one.
QUEUE_LIMIT = 1000


class Feed:
    """Feeds one sink from its own thread, so that a slow sink, or one that is down, costs the run nothing.

    A record is dropped where the queue is full, and lost where the sink raises; both are counted.

    name: of the sink. connect: makes it, on the thread, since that may take seconds. Where it raises, the sink is down.
    """

    def __init__(self, name: str, connect: Callable[[], Sink], limit: int = QUEUE_LIMIT) -> None:
        self.name = name
        self._connect, self._limit = connect, limit
        self._waiting: deque[Callable[[Sink], None]] = deque()
        self._change = threading.Condition()
        self._closing = False
        self._offered = self._written = 0
        self._reasons: list[str] = []
        # A daemon: a sink that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._serve, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def offer(self, record: Callable[[Sink], None]) -> None:
        """Queues a call of the sink, or drops it where the queue is full, and returns at once."""
        with self._change:
            self._offered += 1
            if not self._thread.is_alive():
                return  # it is down, which is said already
            if len(self._waiting) < self._limit:
                self._waiting.append(record)
                self._change.notify()
            else:
                self._fail("its queue was full")

    def close(self) -> None:
        """Has the thread write what is queued and end; `join` waits for it."""
        with self._change:
            self._closing = True
            self._change.notify()

    def join(self, seconds: float) -> None:
        """Waits until the thread has ended, or for so long."""
        self._thread.join(seconds)

    def trouble(self) -> str | None:
        """One line: how many records were not written, and the first and the last reason. None if nothing went wrong."""
        with self._change:
            reasons = [*self._reasons, *(["it did not end in time"] if self._thread.is_alive() else [])]
            if not reasons:
                return None
            lost = self._offered - self._written
            shown = "; ".join(dict.fromkeys((reasons[0], reasons[-1])))
            return f"sink {self.name}: {lost} of {self._offered} records were not written: {shown}"

    def _serve(self) -> None:
        try:
            sink = self._connect()
        except BaseException as error:  # whatever a sink's package raises, SystemExit too: the run goes on
            self._fail(f"could not be opened: {_shown(error)}")
            return
        while (record := self._next()) is not None:
            try:
                record(sink)
                self._written += 1
            except Exception as error:
                self._fail(_shown(error))
        try:
            sink.close()
        except Exception as error:
            self._fail(f"could not be closed: {_shown(error)}")

    def _next(self) -> Callable[[Sink], None] | None:
        """The next record, as soon as there is one; None if the run is over."""
        with self._change:
            self._change.wait_for(lambda: self._waiting or self._closing)
            return self._waiting.popleft() if self._waiting else None

    def _fail(self, reason: str) -> None:
        if len(self._reasons) < 2:
            self._reasons.append(reason)
        else:
            self._reasons[1] = reason


def _shown(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:200]
