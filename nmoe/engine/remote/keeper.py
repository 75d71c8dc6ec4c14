"""Runs a command until this process's standard input closes, then ends all that the command started:

    python keeper.py COMMAND ARGUMENT...

The process that holds the other end of the pipe is its parent. The kernel closes it even where the parent was killed, so that no
engine server outlives its run and keeps a GPU. A parent that writes `t` asks the command to end, and one that writes `k` kills it.
It imports nothing of nmoe, which would take a second.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

_GRACE_S = 10.0
_PR_SET_PDEATHSIG = 1


def _end_with_the_keeper() -> None:
    """Has the kernel kill this process when the keeper itself is killed; on Linux alone."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> int:
    process = subprocess.Popen(
        sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_end_with_the_keeper
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent decides

    def watch() -> None:
        while wish := os.read(0, 1):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL if wish == b"k" else signal.SIGTERM)
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(_GRACE_S)
        end()

    def end() -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    code = process.wait()
    end()  # what the command left running
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
