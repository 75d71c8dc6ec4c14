"""The process that forks launchers (processes that build a sandbox), so that the interpreter and this package are
loaded only once.

The host runs it as

    PYTHON -S -s -P -c "import sys; sys.path.insert(0, ROOT); from nmoe.sandbox.inside import server; server.main()"

with its socket as standard input. A request is the description of a sandbox (a plan), sent with two file descriptors:
the sandbox's control socket and a pipe for errors. The answer is a pidfd of the launcher. The process has one thread,
keeps no resources of any sandbox, and ends when the host's end of the socket closes.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]
import _socket as socket
import os
import struct

from nmoe.sandbox.inside import kernel, launch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

_MOST_BYTES = 1 << 16
_DESCRIPTORS = struct.Struct("ii")


def main() -> NoReturn:
    requests = socket.socket(fileno=os.dup(0))
    # Ended launchers leave no zombies, and their CPU time counts as this process's children's; the host waits for one by its pidfd.
    signal.signal(signal.SIGCHLD, _reap)
    while True:
        plan, ancillary, _, _ = requests.recvmsg(
            _MOST_BYTES, socket.CMSG_SPACE(_DESCRIPTORS.size), kernel.MSG_CMSG_CLOEXEC
        )
        if not plan:
            os._exit(0)
        control, errors = _DESCRIPTORS.unpack(ancillary[0][2])
        pid = os.fork()
        if pid == 0:
            _become_launcher(plan, control, errors)
        os.close(control)
        os.close(errors)
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            requests.send(b"ended")
            continue
        requests.sendmsg([b"started"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", pidfd))])
        os.close(pidfd)


def _reap(*_: object) -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _become_launcher(plan: bytes, control: int, errors: int) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.dup2(control, 0)
    os.dup2(errors, 2)
    os.closerange(3, 1024)
    launch.main(eval(plan))
