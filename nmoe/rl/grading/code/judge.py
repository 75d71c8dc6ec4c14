"""The judge's side: runs the tests on stand-ins for what the solution defines, and says in one line how they ended.

Runs inside a sandbox of its own. No code of the solution comes here: its functions are calls over a channel, and what they
return are values of exact builtin types that the tests compare here. An object that is no plain data stays with the
candidate; it can be given back, called, and its methods called, but it equals nothing and is neither true nor false, so that
no `__eq__` of the solution's decides a test.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from nmoe.rl.grading.code.wire import WireError, decode, encode, receive, send


class LostError(BaseException):
    """The candidate is gone or sends what is no message. Not an Exception: no test may take it for an outcome."""


class Channel:
    """Calls to the candidate. `lost` says why there will be no more, `calls` how many were answered."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.calls = 0
        self.lost = ""

    def ask(self, do: str, target: Sequence[Any], arguments: Any = (), named: Any = None) -> Any:
        """What the candidate answers. Raises what it says was raised, by the name of a builtin exception."""
        if self.lost:
            raise LostError(self.lost)
        request = {
            "do": do,
            "target": list(target),
            "arguments": encode(list(arguments), _no_handle),
            "named": encode(named or {}, _no_handle),
        }
        try:
            send(self._connection, request)
            return self.answer()
        except (EOFError, OSError):
            self.lost = "the solution's process ended"
        except WireError as error:
            self.lost = f"the solution's process sent no plain data: {error}"
        raise LostError(self.lost)

    def answer(self) -> Any:
        message = receive(self._connection)
        if type(message) is not dict:
            raise WireError("no answer")
        if set(message) == {"value"}:
            value = decode(message["value"], lambda number: Handle(self, number))
            self.calls += 1
            return value
        if set(message) != {"raised", "message"} or type(message["raised"]) is not list:
            raise WireError("no answer")
        raise _exception(message["raised"], str(message["message"]))


def _refuse(*_: Any) -> Any:
    raise TypeError("the solution gave an object that is no plain data, which nothing here can be compared with")


class Handle:
    """An object that stays with the candidate."""

    def __init__(self, channel: Channel, number: int) -> None:
        self.__dict__["_channel"] = channel
        self.__dict__["_number"] = number

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._channel.ask("get", [self._number, name])

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._channel.ask("call", [self._number], arguments, named)

    def __len__(self) -> int:
        return int(self._channel.ask("call", [self._number, "__len__"]))

    def __getitem__(self, key: Any) -> Any:
        return self._channel.ask("call", [self._number, "__getitem__"], [key])

    def __iter__(self) -> Iterator[Any]:
        return iter(self._channel.ask("call", [self._number, "__iter__"]))

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __bool__ = _refuse
    __contains__ = _refuse
    __hash__ = _refuse


class Remote:
    """What the solution has under a name and is no plain data: a function or a class, as a rule."""

    def __init__(self, channel: Channel, target: Sequence[Any]) -> None:
        self._channel = channel
        self._target = target
        self.__name__ = str(target[-1])

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._channel.ask("call", self._target, arguments, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._channel.ask("get", [*self._target, name])

    __eq__ = __ne__ = _refuse
    __bool__ = _refuse
    __hash__ = object.__hash__


class RemoteModule(ModuleType):
    """A module of the workspace: its data are copies, its functions and classes stand-ins. A protected module below it is the
    judge's own."""

    def __init__(self, channel: Channel, name: str, protected: Mapping[str, str]) -> None:
        super().__init__(name)
        self.__dict__["_channel"] = channel
        self.__dict__["_protected"] = protected
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if f"{self.__name__}.{name}" in self._protected:
            return importlib.import_module(f"{self.__name__}.{name}")
        value = self._channel.ask("get", [self.__name__, name])
        return Remote(self._channel, [self.__name__, name]) if isinstance(value, Handle) else value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports of the workspace's modules give stand-ins, but for those of `protected` (name -> file here), which are loaded here:
    what they say is no solution's to change."""

    def __init__(self, channel: Channel, modules: Sequence[str], protected: Mapping[str, str]) -> None:
        self._channel = channel
        self._modules = modules
        self._protected = protected

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name in self._protected:
            file = self._protected[name]
            below: list[str] | None = [] if file.endswith("/__init__.py") else None
            return importlib.util.spec_from_file_location(name, file, submodule_search_locations=below)
        if name.partition(".")[0] not in self._modules:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return RemoteModule(self._channel, spec.name, self._protected)

    def exec_module(self, module: ModuleType) -> None:
        pass


def run_check(spec: dict[str, Any], stand_in: Callable[[str], Any]) -> None:
    """HumanEval: `check(candidate)`, beside the other functions that the prompt defines."""
    namespace: dict[str, Any] = {"__name__": "tests"}
    exec(spec["setup"], namespace)
    namespace[spec["names"][0]] = stand_in(spec["names"][0])
    exec(spec["tests"][0], namespace)
    namespace["check"](namespace[spec["names"][0]])


def run_asserts(spec: dict[str, Any], stand_in: Callable[[str], Any]) -> None:
    """MBPP: statements that name the solution's functions."""
    namespace: dict[str, Any] = {"__name__": "tests"}
    exec(spec["setup"], namespace)
    namespace.update((name, stand_in(name)) for name in spec["names"])
    for number, test in enumerate(spec["tests"], start=1):
        try:
            exec(test, namespace)
        except Exception as error:
            error.add_note(f"test {number} of {len(spec['tests'])}")
            raise


def run_files(spec: dict[str, Any], stand_in: Callable[[str], Any]) -> None:
    """Files of tests that import the workspace's modules: functions test_* without parameters, and unittest's classes."""
    import unittest

    ran = 0
    for index, source in enumerate(spec["tests"]):
        module = sys.modules[f"tests_{index}"] = ModuleType(f"tests_{index}")
        exec(compile(source, f"tests_{index}.py", "exec"), module.__dict__)
        for name, value in list(vars(module).items()):
            if isinstance(value, type) and issubclass(value, unittest.TestCase):
                suite = unittest.defaultTestLoader.loadTestsFromTestCase(value)
                result = unittest.TestResult()
                suite.run(result)
                for test, text in [*result.failures, *result.errors]:
                    raise AssertionError(f"{test}: {text.strip().splitlines()[-1]}")
                ran += result.testsRun - len(result.skipped)
            elif name.startswith("test_") and callable(value):
                try:
                    value()
                except Exception as error:
                    error.add_note(name)
                    raise
                ran += 1
    if not ran:
        raise RuntimeError("the files hold no test")


_RUNNERS = {"check": run_check, "asserts": run_asserts, "files": run_files}


def main(spec: dict[str, Any], nonce: str) -> None:
    """Prints the nonce and the verdict as the last line: `{"passed": false, "reason": "AssertionError: test 2 of 3"}`."""
    channel = Channel(socket.socket(fileno=3))
    passed, reason = False, ""
    try:
        channel.answer()
        channel.calls = 0
        if "modules" in spec:
            sys.meta_path.insert(0, _Finder(channel, spec["modules"], spec["protected"]))
        _RUNNERS[spec["kind"]](spec, lambda name: Remote(channel, [name]))
        passed, reason = True, "all tests pass"
    except (EOFError, WireError, OSError) as error:
        reason = f"the solution did not load: {str(error) or 'its process ended'}"
    except BaseException as error:
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", []))
        reason = f"{type(error).__name__}: {error}{notes}"
    if passed and (channel.lost or not channel.calls):
        passed, reason = False, channel.lost or "no test called the solution"
    if passed and "modules" not in spec and _passes_without_a_solution(spec):
        passed, reason = False, "the tests pass with functions that do nothing, so that they prove nothing"
    sys.stdout.flush()
    os.write(1, f"\n{nonce} {json.dumps({'passed': passed, 'reason': reason[:500]})}\n".encode())
    os._exit(0)


def _passes_without_a_solution(spec: dict[str, Any]) -> bool:
    try:
        _RUNNERS[spec["kind"]](spec, lambda name: lambda *_, **__: None)
    except BaseException:
        return False
    return True


def _exception(kinds: list[Any], message: str) -> Exception:
    """An exception of the most special builtin kind among `kinds`; none that would steer the tests' own control flow."""
    for name in kinds:
        kind = getattr(builtins, name, None) if type(name) is str else None
        if (
            isinstance(kind, type)
            and issubclass(kind, Exception)
            and not issubclass(kind, (StopIteration, StopAsyncIteration))
        ):
            try:
                return kind(message)
            except TypeError:  # UnicodeDecodeError and the like want more
                continue
    return RuntimeError(message)


def _no_handle(value: Any) -> int:
    if isinstance(value, Handle):
        return int(value.__dict__["_number"])
    raise WireError(f"a {type(value).__name__} can not be given to the solution: only plain data can")
