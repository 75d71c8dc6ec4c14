"""A grading worker: a process that calls one function for its parent, under limits that end it rather than be broken.

    python -m nmoe.rl.grading.worker MODULE:FUNCTION DEADLINE_S MEMORY_MB

Reads lines of JSON, each a list of argument lists, and writes one line for each call: `["value", VALUE]`,
`["exhausted", REASON]` for a call that ran out of memory or stack, `["raised", TRACEBACK]`. Its first line is
`["ready", null]`, once the function is imported. A call that takes DEADLINE_S seconds of CPU time ends the process by
SIGPROF: the clock starts with the call, runs in the kernel, and stands still while the machine is busy with something else.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serves until its input ends or its parent dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    named, deadline_s, memory_mb = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    # What a library prints must not get between the replies.
    replies = os.dup(1)
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    module, _, name = named.partition(":")
    function = getattr(importlib.import_module(module), name)
    _reply(replies, "ready", None)
    for line in sys.stdin.buffer:
        for arguments in json.loads(line):
            _reply(replies, *_call(function, arguments, deadline_s))


def _call(function: Callable[..., Any], arguments: list[Any], deadline_s: float) -> tuple[str, Any]:
    signal.setitimer(signal.ITIMER_PROF, deadline_s)
    try:
        return "value", function(*arguments)
    except (MemoryError, RecursionError) as error:
        return "exhausted", type(error).__name__
    except Exception:
        return "raised", traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _reply(replies: int, status: str, value: Any) -> None:
    os.write(replies, json.dumps([status, value]).encode() + b"\n")


if __name__ == "__main__":
    main()
