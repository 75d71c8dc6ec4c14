"""Ctrl-C as a request: the step under way ends, a checkpoint is saved, and the command ends with the usual exit code."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType


class Interruptible:
    """Within it, the first SIGINT or SIGTERM sets `requested`; a second SIGINT interrupts at once."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> Interruptible:
        self._previous = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
