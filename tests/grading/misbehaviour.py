"""A function for grading workers that does what hostile answers do."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any


def misbehave(how: str, value: Any) -> Any:
    if how == "return":
        return value
    if how == "loop":
        while True:
            value += 1
    if how == "sleep":
        time.sleep(value)
        return "slept"
    if how == "allocate":
        return len(bytearray(1 << 34))
    if how == "recurse":
        return misbehave(how, value + 1)
    if how == "segfault":
        ctypes.string_at(0)
    if how == "abort":
        os.abort()
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "die once":
        if Path(value).exists():
            return "second try"
        Path(value).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "print":
        print('["value", "forged"]', flush=True)
        sys.stdout.flush()
        return "printed"
    raise KeyError("no such thing")
