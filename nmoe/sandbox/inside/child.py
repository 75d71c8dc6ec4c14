"""The actions that a call's child process may run: a command, or Python code in the interpreter's initial state."""

from __future__ import annotations

import builtins
import errno
import os
import sys
from _signal import SIG_DFL, SIGPIPE, SIGXFSZ, signal  # type: ignore[import-not-found]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

CHANNEL, STATUS = 3, 4
_NAME = "<python>"
# The directory where a workspace's bootstrap installs (nmoe.sandbox.workspaces.prepare). It is on the child's import path
# only: the agent must not import code that a policy can write.
_PACKAGES = "/workspace/.packages"
_DENIED = {errno.EACCES: "sandbox_denied", errno.EPERM: "sandbox_denied", errno.EROFS: "sandbox_denied"}
_FULL = {errno.ENOSPC: "disk_full", errno.EDQUOT: "disk_full", errno.EFBIG: "disk_full"}


def nothing() -> None:
    """Does nothing, so that the child ends at once."""


def state(failure_or_directory: str) -> None:
    """Reports a line to the agent: the reason for this child's end, or its last directory."""
    os.write(STATUS, f"{failure_or_directory}\n".encode())


def state_error(error: BaseException) -> None:
    """Reports to the agent which limit an exception means (memory, disk or access), if any."""
    if isinstance(error, MemoryError):
        state("out_of_memory")
    elif isinstance(error, OSError):
        name = (_DENIED | _FULL).get(error.errno or 0)
        if name:
            state(name)


def end_by(error: BaseException) -> NoReturn:
    """Ends a child whose action raised: reports the error and exits with code 1."""
    try:
        state_error(error)
        os.write(2, f"{type(error).__name__}: {error}\n".encode(errors="replace"))
    finally:
        os._exit(1)


def command(argv: list[str], keeps_status: bool = False) -> Callable[[], None]:
    """Returns a function that replaces this process by a command (exec).

    With `keeps_status`, the command inherits the file descriptor for status lines, to report the directory where it
    ended.
    """

    def act() -> None:
        for number in (SIGPIPE, SIGXFSZ):
            signal(number, SIG_DFL)
        os.set_inheritable(STATUS, keeps_status)
        if os.path.isdir(_PACKAGES):
            os.environ["PYTHONPATH"] = _PACKAGES
        try:
            os.execvp(argv[0], argv)
        except FileNotFoundError:
            os.set_inheritable(STATUS, False)
            state("command_not_found")
            os.write(2, f"{argv[0]}: command not found\n".encode(errors="replace"))
            os._exit(127)
        except (OSError, ValueError) as error:
            os.write(2, f"{argv[0]}: {error}\n".encode(errors="replace"))
            os._exit(126)

    return act


def python(code: str) -> Callable[[], None]:
    def act() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "nmoe"]:
            del sys.modules[name]
        # The interpreter was started without the module site, which defines these two, and its standard input was another one.
        builtins.__dict__.update({name: _Quitter(name) for name in ("exit", "quit")})
        sys.stdin = os.fdopen(0, closefd=False)
        main = type(sys)("__main__")
        main.__dict__["__builtins__"] = __builtins__
        sys.modules["__main__"] = main
        sys.argv, sys.path[:0] = [""], ["", _PACKAGES] if os.path.isdir(_PACKAGES) else [""]
        exit_code = 0
        try:
            exec(compile(code, _NAME, "exec"), main.__dict__)
        except SystemExit as end:
            exit_code = _exit_code(end.code)
        except BaseException as error:
            exit_code = 1
            _show(error, code)
            state_error(error)
        os._exit(_finish(exit_code))

    return act


class _Quitter:
    """The functions `exit` and `quit` of an interactive interpreter."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"Use {self._name}() to exit"

    def __call__(self, code: object = None) -> NoReturn:
        raise SystemExit(code)


def _show(error: BaseException, code: str) -> None:
    """Prints a traceback that starts at the sandboxed code's first frame."""
    import linecache
    import traceback

    linecache.cache[_NAME] = (len(code), None, code.splitlines(keepends=True), _NAME)
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != _NAME:
        frames = frames.tb_next
    traceback.print_exception(type(error), error, frames)


def _exit_code(value: object) -> int:
    if value is None:
        return 0
    if isinstance(value, int):
        return value & 0xFF
    print(value, file=sys.stderr)
    return 1


def _finish(exit_code: int) -> int:
    """Does the last steps of an interpreter: waits for threads, runs exit functions, flushes. The sandboxed code may have broken
    any of them."""
    try:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        import atexit

        atexit._run_exitfuncs()
        state(os.getcwd())
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException as error:
        state_error(error)
        return exit_code or 120
    return exit_code
