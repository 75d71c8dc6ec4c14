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

from nmoe.grading.code.wire import WireError, decode, encode, receive, send


class LostError(BaseException):
    """The candidate is gone or sends what is no message. Not an Exception: no test may take it for an outcome."""


class Channel:
    """Calls to the candidate. `lost` says why there will be no more, `calls` how many were answered."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.calls = 0
        self.lost = ""
        self._exceptions: dict[str, type[Exception]] = {}

    def ask(self, do: str, target: Sequence[Any], arguments: Any = (), named: Any = None) -> Any:
        """What the candidate answers. Raises what it says was raised, by the name of a builtin exception."""
        if self.lost:
            raise LostError(self.lost)
        request = {
            "do": do,
            "target": list(target),
            "arguments": encode(list(arguments), _given),
            "named": encode(named or {}, _given),
        }
        try:
            send(self._connection, request)
        except OSError:
            self.lost = "the solution's process ended"
            raise LostError(self.lost) from None
        return self.answer()

    def answer(self) -> Any:
        """The value that the candidate sends next. Raises what it says was raised, and LostError where it says nothing sensible:
        that the channel failed must not be taken for an error of the solution's, which may be an OSError, too."""
        try:
            value, raised = self._received()
        except (EOFError, OSError):
            self.lost = "the solution's process ended"
        except WireError as error:
            self.lost = f"the solution's process sent no plain data: {error}"
        else:
            if raised is not None:
                raise raised
            return value
        raise LostError(self.lost)

    def _received(self) -> tuple[Any, Exception | None]:
        message = receive(self._connection)
        if type(message) is not dict:
            raise WireError("no answer")
        if set(message) == {"value"}:
            value = decode(message["value"], self._object)
            self.calls += 1
            return value, None
        if set(message) != {"raised", "message"} or type(message["raised"]) is not list:
            raise WireError("no answer")
        self.calls += 1
        return None, self._exception(message["raised"], str(message["message"]))

    def _object(self, kind: str, body: Any) -> Any:
        """What stands here for an object of the candidate's: a handle, or of a class of exceptions one of the same name."""
        if kind == "handle":
            return Handle(self, int(body))
        if kind == "exception" and type(body) is list and all(type(name) is str for name in body):
            return self.exception_class(body)
        raise WireError("no object")

    def exception_class(self, kinds: list[str]) -> type[Exception]:
        """A class for the exceptions that the solution calls by the first of these names; the others are the bases of its own. A
        builtin one that would catch the failures of the tests themselves gets a class of its own, too."""
        if not kinds or not kinds[0].isidentifier():
            raise WireError("no class of exceptions")
        known = _builtin_exception(kinds[0])
        if known is not None and not issubclass(AssertionError, known):
            return known
        if kinds[0] not in self._exceptions:
            bases = [self._exceptions.get(name) or _builtin_exception(name) for name in kinds[1:]]
            base = next((one for one in bases if one is not None), Exception)
            self._exceptions[kinds[0]] = type(kinds[0], (base,), {})
        return self._exceptions[kinds[0]]

    def _exception(self, kinds: list[Any], message: str) -> Exception:
        """An exception of the most special known kind: one that the tests took from the solution, or a builtin one."""
        for name in kinds:
            kind = (self._exceptions.get(name) or _builtin_exception(name)) if type(name) is str else None
            if kind is not None:
                try:
                    return kind(message)
                except TypeError:  # UnicodeDecodeError and the like want more
                    continue
        return RuntimeError(message)


def _refuse(*_: Any) -> Any:
    raise TypeError("the solution gave an object that is no plain data, which nothing here can be compared with")


def _operator(name: str) -> tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]:
    """The methods for `handle + other` and `other + handle`, which the candidate computes by its `operator` module."""
    return (
        lambda self, other: self._channel.ask("operate", [name], [self, other]),
        lambda self, other: self._channel.ask("operate", [name], [other, self]),
    )


class Handle:
    """An object that stays with the candidate."""

    def __init__(self, channel: Channel, number: int) -> None:
        self.__dict__["_channel"] = channel
        self.__dict__["_number"] = number

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._channel.ask("get", [self._number, name])

    def __setattr__(self, name: str, value: Any) -> None:
        self._channel.ask("set", [self._number, name], [value])

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

    __add__, __radd__ = _operator("add")
    __sub__, __rsub__ = _operator("sub")
    __mul__, __rmul__ = _operator("mul")
    __truediv__, __rtruediv__ = _operator("truediv")
    __floordiv__, __rfloordiv__ = _operator("floordiv")
    __mod__, __rmod__ = _operator("mod")
    __pow__, __rpow__ = _operator("pow")
    __matmul__, __rmatmul__ = _operator("matmul")

    def __neg__(self) -> Any:
        return self._channel.ask("operate", ["neg"], [self])


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
    # The set-up may make objects of the solution's classes, and what it defines itself under one of the names is not tested.
    namespace.update((name, stand_in(name)) for name in spec["names"])
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
        reason = "the solution did not load: "
        channel.answer()
        reason = ""
        if "modules" in spec:
            sys.meta_path.insert(0, _Finder(channel, spec["modules"], spec["protected"]))
        stand_ins = {name: _stand_in(channel, name) for name in spec["names"]}
        channel.calls = 0
        _RUNNERS[spec["kind"]](spec, stand_ins.__getitem__)
        passed, reason = True, "all tests pass"
    except BaseException as error:
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", []))
        reason += str(error) if isinstance(error, LostError) else f"{type(error).__name__}: {error}{notes}"
    if passed and (channel.lost or not channel.calls):
        passed, reason = False, channel.lost or "no test called the solution"
    if passed and "modules" not in spec and _passes_without_a_solution(spec):
        passed, reason = False, "the tests pass with functions that do nothing, so that they prove nothing"
    sys.stdout.flush()
    os.write(1, f"\n{nonce} {json.dumps({'passed': passed, 'reason': reason[:500]})}\n".encode())
    os._exit(0)


def _stand_in(channel: Channel, name: str) -> Any:
    """What the tests have under a name of the solution's: a class for its exceptions, which `except` can name, or a stand-in."""
    try:
        found = channel.ask("get", [name])
    except Exception:
        found = None
    return found if isinstance(found, type) else Remote(channel, [name])


def _passes_without_a_solution(spec: dict[str, Any]) -> bool:
    try:
        _RUNNERS[spec["kind"]](spec, lambda name: lambda *_, **__: None)
    except BaseException:
        return False
    return True


def _builtin_exception(name: str) -> type[Exception] | None:
    """The builtin class of this name; none that would steer the tests' own control flow."""
    kind: Any = getattr(builtins, name, None)
    if not isinstance(kind, type) or not issubclass(kind, Exception):
        return None
    return None if issubclass(kind, (StopIteration, StopAsyncIteration)) else kind


def _given(value: Any) -> dict[str, Any]:
    """How an object that is no plain data is given to the solution: one of its own by its number, a builtin type by its name."""
    if isinstance(value, Handle):
        return {"handle": int(value.__dict__["_number"])}
    if isinstance(value, type):
        name = value.__name__
        if getattr(builtins, name, None) is value:
            return {"builtin": name}
    raise TypeError(f"a {type(value).__name__} cannot be given to the solution: only plain data and builtin types can")
