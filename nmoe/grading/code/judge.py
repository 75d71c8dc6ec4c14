"""The judge process: runs the tests against proxies for the solution, and reports the verdict in one line.

It runs in its own sandbox, and no code of the solution runs here. Calling a function of the solution sends a request over
a channel. Its result is a value of exact builtin types, which the tests compare here. Any other object stays with the
candidate. It can be passed back and called, but comparing it or testing its truth raises TypeError, so that no `__eq__` of the
solution decides a test. Nor does such an object see expected values: its methods and operators receive values of the tests only if
the record's own solution defines a method of that name.
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
    """Raised if the candidate process (which runs the solution) ended or sent a malformed message.

    It is not an Exception, so that no test can catch it as an outcome.
    """


class Channel:
    """Sends calls to the candidate process, which runs the solution.

    `lost` is the reason why no more calls are possible, or empty; `calls` counts the answered ones.
    """

    def __init__(self, connection: socket.socket, methods: Sequence[str]) -> None:
        """Makes a channel over a connected socket.

        `methods` are the names of methods and attributes that classes of the record's own solution define.
        """
        self._connection = connection
        self.methods = frozenset(methods)
        self.calls = 0
        self.lost = ""
        self._exceptions: dict[str, type[Exception]] = {}

    def ask(self, do: str, target: Sequence[Any], arguments: Any = (), named: Any = None) -> Any:
        """Sends a request and returns the candidate's answer. Raises the exception that the candidate reports, as the tests' class
        for it or the builtin one of that name, and LostError if the candidate is lost.
        """
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
        """Receives the candidate's next value and returns it. Raises the exception that the candidate reports, and LostError for a
        malformed message.

        A failure of the channel must not look like an error of the solution, which may itself be an OSError.
        """
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
        """Returns a local proxy for an object that exists in the candidate process: a handle or, for an exception
        class, a class of the same name."""
        if kind == "handle":
            return Handle(self, int(body))
        if kind == "exception" and type(body) is list and all(type(name) is str for name in body):
            return self.exception_class(body)
        raise WireError("no object")

    def exception_class(self, kinds: list[str]) -> type[Exception]:
        """Returns a local class for the solution's exception class named `kinds[0]`; the other names are its
        base classes.

        A builtin class such as TypeError is replaced by a new class of the same name. The builtin itself, in a test's
        `except`, would also catch and so hide what the tests raise, and what this process raises to refuse a
        comparison.
        """
        if not kinds or not kinds[0].isidentifier():
            raise WireError("no class of exceptions")
        if kinds[0] not in self._exceptions:
            known = _builtin_exception(kinds[0])
            own = [] if known is None or issubclass(AssertionError, known) else [known]
            bases = [*own, *(self._exceptions.get(name) or _builtin_exception(name) for name in kinds[1:])]
            base = next((one for one in bases if one is not None), Exception)
            self._exceptions[kinds[0]] = type(kinds[0], (base,), {})
        return self._exceptions[kinds[0]]

    def _exception(self, kinds: list[Any], message: str) -> Exception:
        """Returns an exception of the most specific known class among `kinds`: a class that the tests took from the solution, or a
        builtin one. It also inherits from any of its base classes that the tests took.
        """
        names = [name for name in kinds if type(name) is str]
        taken = next((self._exceptions[name] for name in names if name in self._exceptions), Exception)
        for name in names:
            kind = self._exceptions.get(name) or _builtin_exception(name)
            if kind is not None:
                try:
                    return (kind if issubclass(kind, taken) else type(name, (kind, taken), {}))(message)
                except TypeError:  # UnicodeDecodeError and some others take more arguments
                    continue
        return RuntimeError(message)


def _refuse(*_: Any) -> Any:
    raise TypeError("the solution gave an object that is not plain data, which nothing here can be compared with")


def _operator(name: str) -> tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]:
    """Returns the methods for `handle + other` and `other + handle`, or another operator; the candidate computes them with its
    `operator` module.

    In `abs(f(x) - 0.5) < 1e-6` an object that learns 0.5 could give the difference that the test wants. So there is an operator
    only if the record's own solution defines it, and of an object and a value of the tests it makes an object, never a value.
    """

    def computed(self: Handle, arguments: list[Any]) -> Any:
        if not {f"__{name}__", f"__r{name}__"} & self._channel.methods:
            _refuse()
        result = self._channel.ask("operate", [name], arguments)
        if not all(isinstance(one, Handle) for one in arguments) and not isinstance(result, Handle):
            _refuse()
        return result

    return lambda self, other: computed(self, [self, other]), lambda self, other: computed(self, [other, self])


class Handle:
    """A local proxy for an object that exists in the candidate process."""

    def __init__(self, channel: Channel, number: int) -> None:
        self.__dict__["_channel"] = channel
        self.__dict__["_number"] = number
        self.__dict__["_member"] = ""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _member(name, self._channel.ask("get", [self._number, name]))

    def __setattr__(self, name: str, value: Any) -> None:
        self._channel.ask("set", [self._number, name], [value])

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if (arguments or named) and self._member and self._member not in self._channel.methods:
            raise TypeError(f"no method {self._member} of the record's own solution, so that it is given no argument")
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


def _member(name: str, value: Any) -> Any:
    """Returns a value read from an object of the solution; a handle, which may be a method, remembers the name it was read by."""
    if isinstance(value, Handle):
        value.__dict__["_member"] = name
    return value


class Remote:
    """A proxy for a name of the solution that is not plain data, usually a function or a class."""

    def __init__(self, channel: Channel, target: Sequence[Any]) -> None:
        self._channel = channel
        self._target = target
        self.__name__ = str(target[-1])

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._channel.ask("call", self._target, arguments, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _member(name, self._channel.ask("get", [*self._target, name]))

    __eq__ = __ne__ = _refuse
    __bool__ = _refuse
    __hash__ = object.__hash__


class RemoteModule(ModuleType):
    """A proxy for a module of the workspace: its data are copied here, its functions and classes become proxies.

    A protected submodule is loaded from the judge's own copy.
    """

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
    """Imports the workspace's modules as proxies, except for `protected` ones (module name -> file), which the judge loads itself.

    A solution cannot change what protected modules say.
    """

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
    """Runs HumanEval's `check(candidate)`, with the other functions that the prompt defines."""
    namespace: dict[str, Any] = {"__name__": "tests"}
    exec(spec["setup"], namespace)
    namespace[spec["names"][0]] = stand_in(spec["names"][0])
    exec(spec["tests"][0], namespace)
    namespace["check"](namespace[spec["names"][0]])


def run_asserts(spec: dict[str, Any], stand_in: Callable[[str], Any]) -> None:
    """Runs MBPP's statements, which name the solution's functions."""
    namespace: dict[str, Any] = {"__name__": "tests"}
    # Set before the setup, which may instantiate the solution's classes, and again after it, because names that the setup
    # redefines must still mean the solution's.
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
    """Runs test files that import the workspace's modules: functions test_* without parameters, and unittest classes."""
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
    """Runs the tests and prints the nonce and the verdict as the last line: `{"passed": false, "reason": "AssertionError: test 2
    of 3"}`.
    """
    channel = Channel(socket.socket(fileno=3), spec["methods"])
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
    """Returns the judge's substitute for a name of the solution: a class if it is an exception class, so that `except` can name it,
    else a proxy.
    """
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
    """Returns the builtin exception class of this name; None for another name, and for StopIteration and StopAsyncIteration, which
    would change the control flow of the tests.
    """
    kind: Any = getattr(builtins, name, None)
    if not isinstance(kind, type) or not issubclass(kind, Exception):
        return None
    return None if issubclass(kind, (StopIteration, StopAsyncIteration)) else kind


def _given(value: Any) -> dict[str, Any]:
    """Encodes an argument that is not plain data: an object of the solution by its number, a builtin type by its name. Raises
    TypeError for other objects.
    """
    if isinstance(value, Handle):
        return {"handle": int(value.__dict__["_number"])}
    if isinstance(value, type):
        name = value.__name__
        known = getattr(builtins, name, None)
        # The solution's alias of a builtin exception is a subclass of the same name here.
        if isinstance(known, type) and issubclass(value, known):
            return {"builtin": name}
    raise TypeError(f"a {type(value).__name__} cannot be given to the solution: only plain data and builtin types can")
