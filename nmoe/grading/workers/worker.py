"""A grading worker: a process that calls one function for its parent, under limits that are enforced by ending the process.

    python -m nmoe.grading.workers.worker MODULE:FUNCTION DEADLINE_S MEMORY_MB

It imports the function, calls the module's `warm_up` if there is one, and forks a process that makes the calls. When that
process dies it forks another, which takes milliseconds and starts warm. It reads lines of JSON, each a list of argument lists,
and writes lines of JSON:

    ["ready", null]             once, after the warm-up
    ["value", VALUE]            for each call
    ["exhausted", REASON]       for a call that ran out of memory or stack; its process is then replaced
    ["raised", TRACEBACK]       for a call that raised
    ["died", SIGNAL]            for the first unanswered call, whose process a signal ended; the rest of its line is lost

A call that takes DEADLINE_S seconds of CPU time ends its process by SIGPROF. The kernel's clock starts with the call and
stands still while the machine is busy with other work.
"""

from __future__ import annotations

import ctypes
import gc
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
    """Serves calls from standard input until the input ends or the parent process dies."""
    _die_with_parent()
    named, deadline_s, memory_mb = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    # What a library prints must not mix with the replies.
    replies = os.dup(1)
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # other systems refuse it
        resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    module_name, _, name = named.partition(":")
    module = importlib.import_module(module_name)
    function = getattr(module, name)
    getattr(module, "warm_up", lambda: None)()
    gc.freeze()  # the objects so far stay alive, and forked processes share their pages
    _reply(replies, "ready", None)
    while True:
        child = os.fork()
        if child == 0:
            _die_with_parent()
            os._exit(_serve(function, deadline_s, replies))
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            _reply(replies, "died", os.WTERMSIG(status))
        elif os.WEXITSTATUS(status) != _EXHAUSTED:
            return


_EXHAUSTED = 3


def _serve(function: Callable[..., Any], deadline_s: float, replies: int) -> int:
    """Answers calls in the forked process; returns its exit code."""
    for line in sys.stdin.buffer:
        for arguments in json.loads(line):
            status, value = _call(function, arguments, deadline_s)
            _reply(replies, status, value)
            if status == "exhausted":
                return _EXHAUSTED
    return 0


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


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
