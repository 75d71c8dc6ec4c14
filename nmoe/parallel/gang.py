"""Lets one process, rank 0, control all ranks of a distributed run, so that training code needs no code for other ranks.

The ranks, which torchrun starts, form a gang. Rank 0 is the controller: it runs the recipe, and sends the other ranks
(the members) numbered commands, which are functions that all ranks then call together, each with its own arguments.
Objects that such a function returns stay on their ranks; in later commands the controller's object stands for the
object of each rank:

    learner = everywhere(make_learner, config)      # one learner on each rank, each with its shard
    parts = collect(learner.score, shares)          # learner.score(shares[r]) on rank r; a list of all results

Without other ranks, both simply call their function.

Commands are sent over a socket. They are pickled, and anyone who can send one runs code; so both ends prove that they
know a secret, which the ranks exchange over their process group. Tensors between ranks go through the process group.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import signal
import socket
import sys
import time
import traceback
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from multiprocessing.connection import Connection
from typing import Any, Concatenate, Literal, NoReturn, ParamSpec, TypeVar

import dill
import torch.distributed as dist

from nmoe.errors import UserError

# gloo's messages where another rank has left a collective.
_LEFT = re.compile(r"[Cc]onnection (closed|reset)|[Tt]imed out|Broken pipe|peer", re.ASCII)


@dataclass(frozen=True)
class Command:
    """A message from rank 0: a function for another rank to call, the use of its result, and old results that may be deleted."""

    number: int
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Literal["keep", "send", "drop"]
    dropped: tuple[int, ...]


@dataclass(frozen=True)
class End:
    exit_code: int


@dataclass(frozen=True)
class Failure:
    """An error that was raised on another rank than 0; the kind "peer" is torch's error for a lost connection to a rank."""

    kind: Literal["user", "peer", "defect"]
    message: str
    exit_code: int = 1

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        if isinstance(error, UserError):
            return cls("user", str(error), error.exit_code)
        peer = isinstance(error, RuntimeError) and (isinstance(error, dist.DistError) or bool(_LEFT.search(str(error))))
        return cls("peer" if peer else "defect", "".join(traceback.format_exception(error)))

    def error(self, rank: int) -> Exception:
        if self.kind == "user":
            error = UserError(f"rank {rank}: {self.message}")
            error.exit_code = self.exit_code
            return error
        return RuntimeError(f"rank {rank} raised:\n{self.message}")


class Pickler(pickle.Pickler):
    """Pickles a command for another rank.

    An object that an earlier command returned is written as that command's number, because each rank has its own
    object. Functions defined inside functions, such as the losses of recipes, are pickled by value.
    """

    def __init__(self, file: io.BytesIO, numbers: Mapping[int, int]) -> None:
        super().__init__(file, protocol=5)
        self._numbers = numbers

    def persistent_id(self, obj: Any) -> int | None:
        return self._numbers.get(id(obj))

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.FunctionType) and "<" in obj.__qualname__:
            return dill.loads, (dill.dumps(obj),)
        return NotImplemented


class Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, made: Mapping[int, Any]) -> None:
        super().__init__(file)
        self._made = made

    def persistent_load(self, pid: int) -> Any:
        return self._made[pid]


Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
T = TypeVar("T")
S = TypeVar("S")
P = ParamSpec("P")

# How long the other ranks may take longer than the first one that is done with a command.
DEADLINE = timedelta(minutes=10)
# How long the controller listens for the reason why a member left it.
_REASON_S = 5.0
# How long a member that is done waits for the controller to end.
_LAST_WORDS_S = 10.0
# How long a process takes to end after its connections have.
_ENDING_S = 1.0


class LostRankError(UserError):
    """Raised if a rank ended or does not answer. The exit code is 1, because the input is not wrong."""

    exit_code = 1


class Gang:
    """Access to all ranks of the run, from this process; this class is for a single process without other ranks."""

    size, rank, local_size = 1, 0, 1

    @property
    def leads(self) -> bool:
        """Whether a command has to be sent to other ranks: true only on rank 0 of several, outside of another command."""
        return False

    def everywhere(self, make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return make(*args, **kwargs)

    def collect(self, function: Callable[[S], T], shares: Sequence[S]) -> list[T]:
        return [function(share) for share in shares]

    @contextmanager
    def meanwhile(self, function: Callable[[], Any]) -> Iterator[None]:
        """Has the members call a function while the block runs on the controller, for collectives that both take part in."""
        yield


class Member(Gang):
    """Any rank but 0 (a member): executes the commands of rank 0 (the controller) until it ends the run."""

    def __init__(self, rank: int, size: int, local_size: int, connection: Connection) -> None:
        self.rank, self.size, self.local_size, self.connection = rank, size, local_size, connection
        self._made: dict[int, Any] = {}

    def collect(self, function: Callable[[S], T], shares: Sequence[S]) -> list[T]:
        raise AssertionError("results are collected by the controller")

    def serve(self) -> int:
        """Executes commands until the last one, and returns the exit code.

        Ignores Ctrl-C, because rank 0 handles it: it saves a checkpoint with the help of all ranks.
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        while True:
            try:
                command = self.receive()
            except (EOFError, ConnectionError):
                return 1  # the controller is gone, and says why
            if isinstance(command, End):
                return command.exit_code
            try:
                answer = self._follow(command)
            except BaseException as error:
                self.send(Failure.of(error))
                self._desert(getattr(error, "exit_code", 1))
            if not self.send(answer):
                return 1

    def _desert(self, exit_code: int) -> NoReturn:
        """Ends this process in the middle of a command, such that the other ranks notice it at once.

        Its connections are shut down explicitly: torch keeps process groups after they are destroyed, and rank 0 waited
        for this rank until torchrun ended it without a message.
        """
        for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
            if int(name) != self.connection.fileno():
                with suppress(OSError):
                    _shut(int(name))
        self.outlast()
        sys.stdout.flush()
        # Without the usual end of a process, at which gloo's threads would miss what they use.
        os._exit(exit_code)

    def outlast(self) -> None:
        """Waits a while until rank 0 has ended: torchrun stops all ranks as soon as one fails, which would cut off rank
        0's messages."""
        until = time.monotonic() + _LAST_WORDS_S
        with suppress(EOFError, OSError):
            while self.connection.poll(max(0.0, until - time.monotonic())):
                self.connection.recv_bytes()
        time.sleep(_ENDING_S)

    def receive(self) -> Any:
        """Returns the next message from rank 0."""
        return Unpickler(io.BytesIO(self.connection.recv_bytes()), self._made).load()

    def _follow(self, command: Command) -> Any:
        for number in command.dropped:
            del self._made[number]
        result = command.function(*command.args, **command.kwargs)
        if command.result == "keep":
            self._made[command.number] = result
        return result if command.result == "send" else None

    def send(self, answer: Any) -> bool:
        try:
            self.connection.send_bytes(pickle.dumps(answer, protocol=5))
        except (BrokenPipeError, ConnectionError):
            return False
        return True


def _shut(descriptor: int) -> None:
    """Shuts down the connection of a file descriptor if it is a TCP connection.

    Listening sockets are left alone, because gloo aborts the process if one is shut down.
    """
    with socket.socket(fileno=descriptor) as one:
        try:
            is_tcp = one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM
            if is_tcp and not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                one.shutdown(socket.SHUT_RDWR)
        finally:
            one.detach()


class Controller(Gang):
    """Rank 0 of several. `connections` are its connections to the other ranks, in their order."""

    def __init__(self, size: int, local_size: int, connections: Sequence[Connection]) -> None:
        self.rank, self.size, self.local_size, self.connections = 0, size, local_size, connections
        self._commands, self._inside = 0, False
        self._numbers: dict[int, int] = {}  # id(object) -> the number of the command that made it
        self._dropped: list[int] = []

    @property
    def leads(self) -> bool:
        return not self._inside

    def everywhere(self, make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        if self._inside:
            return make(*args, **kwargs)
        self._send([(make, args, kwargs)] * self.size, "keep")
        number = self._commands
        made = self._run(make, args, kwargs)
        self._answers()
        if made is not None:
            self._numbers[id(made)] = number
            weakref.finalize(made, self._drop, id(made), number)
        return made

    def command(self, target: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a method of `target` on all ranks, each on its own object; returns the result of rank 0."""
        self._send([(_call, (target, method, args, kwargs), {})] * self.size, "drop")
        result = self._run(_call, (target, method, args, kwargs), {})
        self._answers()
        return result

    def collect(self, function: Callable[[S], T], shares: Sequence[S]) -> list[T]:
        if self._inside:
            raise AssertionError("a command of all ranks cannot collect from all ranks")
        assert len(shares) == self.size, "each rank has one share"
        self._send([(function, (share,), {}) for share in shares], "send")
        own = self._run(function, (shares[0],), {})
        return [own, *self._answers()]

    def begin(self, function: Callable[..., Any], *args: Any) -> None:
        """Makes the other ranks call a function, and returns at once, so that `send` and `answer` can exchange messages
        with it.

        The last answer of each rank is the function's result.
        """
        self._send([(function, args, {})] * self.size, "send")

    @contextmanager
    def meanwhile(self, function: Callable[[], Any]) -> Iterator[None]:
        if not self.leads:
            yield
            return
        self.begin(function)
        yield
        self._answers()

    def send(self, rank: int, message: Any) -> None:
        """Sends a message to a rank, on which a function runs that `begin` started."""
        self.connections[rank - 1].send_bytes(self._pickled(message))

    def close(self, exit_code: int) -> None:
        """Ends the other ranks with this exit code."""
        for connection in self.connections:
            try:
                connection.send_bytes(self._pickled(End(exit_code)))
            except (BrokenPipeError, ConnectionError):
                continue

    def _drop(self, identity: int, number: int) -> None:
        self._numbers.pop(identity, None)
        self._dropped.append(number)

    def _pickled(self, value: Any) -> bytes:
        buffer = io.BytesIO()
        Pickler(buffer, self._numbers).dump(value)
        return buffer.getvalue()

    def _send(
        self,
        calls: Sequence[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]],
        result: Literal["keep", "send", "drop"],
    ) -> None:
        self._commands += 1
        dropped, self._dropped = tuple(self._dropped), []
        sent: tuple[Any, bytes] | None = None
        for rank, call in enumerate(calls[1:], 1):
            if sent is None or sent[0] is not call:  # what all get alike is pickled once
                sent = call, self._pickled(Command(self._commands, *call, result, dropped))
            try:
                self.connections[rank - 1].send_bytes(sent[1])
            except (BrokenPipeError, ConnectionError):
                raise self._lost(rank) from None

    def _run(self, function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        self._inside = True
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:  # as torch raises where another rank has left a collective
            raise self.explained(error) from error
        finally:
            self._inside = False

    def _answers(self) -> list[Any]:
        return [self.answer(rank) for rank in range(1, self.size)]

    def answer(self, rank: int) -> Any:
        """Returns the next answer of a rank. Raises the error that the rank reports, and LostRankError if no answer comes."""
        connection = self.connections[rank - 1]
        try:
            if not connection.poll(DEADLINE.total_seconds()):
                raise LostRankError(f"rank {rank} gave no answer within {DEADLINE}: it hangs, or its machine is lost")
            answer = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            raise self._lost(rank) from None
        if isinstance(answer, Failure):
            raise (self._reason() if answer.kind == "peer" else None) or answer.error(rank)
        return answer

    def _lost(self, rank: int) -> Exception:
        return self._reason() or LostRankError(f"rank {rank} has ended without a word: it was killed, or out of memory")

    def explained(self, error: RuntimeError) -> Exception:
        """Returns the error that ended other ranks in place of torch's own, which says only that they are gone."""
        return self._reason() or error

    def _reason(self) -> Exception | None:
        """Returns the error because of which other ranks ended: one that a rank raised by itself, else LostRankError;
        None if all are running."""
        lost: Exception | None = None
        until, ranks = time.monotonic() + _REASON_S, set(range(1, self.size))
        while ranks and time.monotonic() < until:
            for rank in sorted(ranks):
                connection = self.connections[rank - 1]
                try:
                    if not connection.poll(0.05):
                        continue
                    answer = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    ranks.discard(rank)
                    lost = LostRankError(f"rank {rank} has ended without a word: it was killed, or out of memory")
                    until = min(until, time.monotonic() + 1)
                    continue
                if isinstance(answer, Failure) and answer.kind != "peer":
                    return answer.error(rank)
                if isinstance(answer, Failure):
                    ranks.discard(rank)  # it lost another rank, too
        return lost


_gang = Gang()


def use(new: Gang) -> None:
    """Sets the gang of this process, which `everywhere` and `collect` use."""
    global _gang
    _gang = new


def gang() -> Gang:
    """Returns the gang of this process: its access to all ranks."""
    return _gang


def everywhere(make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls a module's function, or a class, on every rank; returns this rank's result.

    If rank 0 passes this result to `collect` or to a later call, every other rank uses its own result instead.
    """
    return _gang.everywhere(make, *args, **kwargs)


def collect(function: Callable[[S], T], shares: Sequence[S]) -> list[T]:
    """Calls a function, or a method of an object that `everywhere` made, on rank r with `shares[r]`; returns the
    results of all ranks."""
    return _gang.collect(function, shares)


def command(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Decorates a method so that a call on rank 0 calls it on all ranks, each on its own object; the call returns rank
    0's result."""

    @wraps(method)
    def call(self: S, *args: P.args, **kwargs: P.kwargs) -> T:
        if isinstance(_gang, Controller) and _gang.leads:
            result: T = _gang.command(self, method.__name__, args, kwargs)
            return result
        return method(self, *args, **kwargs)

    return call


def _call(target: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return getattr(target, method)(*args, **kwargs)
