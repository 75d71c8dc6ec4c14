"""The candidate process: loads the solution and answers the judge's requests until the judge closes the channel.

It runs in the candidate's sandbox, in the same process as the solution, which may change anything here. It has no tests: it
sees the arguments of one call at a time, and its answers are data that the judge compares.
"""

from __future__ import annotations

import builtins
import importlib
import operator
import os
import socket
import sys
from types import ModuleType
from typing import Any

from nmoe.grading.code.wire import WireError, decode, encode, receive, send


class Candidate:
    def __init__(self, connection: socket.socket, solution: ModuleType | None) -> None:
        """Makes the server of the judge's requests for names in the module `solution`.

        Without a module, the first name of a request is a module to import.
        """
        self._connection = connection
        self._solution = solution
        self._kept: list[Any] = []

    def serve(self) -> None:
        while True:
            try:
                request = receive(self._connection)
            except EOFError:
                return
            try:
                answer = {"value": encode(self._do(request), self._keep)}
            except BaseException as error:
                kinds = [kind.__name__ for kind in type(error).__mro__]
                answer = {"raised": kinds, "message": str(error)[:500]}
            try:
                send(self._connection, answer)
            except WireError as error:
                send(self._connection, {"raised": ["ValueError"], "message": str(error)})

    def _do(self, request: dict[str, Any]) -> Any:
        arguments = decode(request["arguments"], self._object)
        named = decode(request["named"], self._object)
        if request["do"] == "operate":
            return getattr(operator, request["target"][0])(*arguments)
        if request["do"] == "set":
            *target, name = request["target"]
            return setattr(self._target(target), name, *arguments)
        target = self._target(request["target"])
        return target if request["do"] == "get" else target(*arguments, **named)

    def _target(self, target: list[Any]) -> Any:
        """Returns the object that a request names: ["f"] in the solution, ["package.module", "f"] in a module, [3, "method"] on the
        kept object 3.
        """
        first, *names = target
        if isinstance(first, int):
            found = self._kept[first]
        elif self._solution is not None:
            found, names = self._solution, [first, *names]
        else:
            found = importlib.import_module(first)
        for name in names:
            found = getattr(found, name)
        return found

    def _object(self, kind: str, body: Any) -> Any:
        return getattr(builtins, body) if kind == "builtin" else self._kept[body]

    def _keep(self, value: Any) -> dict[str, Any]:
        if isinstance(value, type) and issubclass(value, Exception):
            return {"exception": [kind.__name__ for kind in value.__mro__]}
        self._kept.append(value)
        return {"handle": len(self._kept) - 1}


def main(source: str | None) -> None:
    """Loads the solution's code and serves the judge's requests. Without `source`, the solution's modules lie in the workspace."""
    connection = socket.socket(fileno=3)
    # The output is not used, and a large one must not hit the output limit.
    silence = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(silence, stream)
    solution = None
    if source is None:
        os.chdir("/workspace")
    else:
        solution = sys.modules["solution"] = ModuleType("solution")
        try:
            exec(compile(source, "solution.py", "exec"), solution.__dict__)
        except BaseException as error:
            send(connection, {"raised": [type(error).__name__], "message": str(error)[:500]})
            return
    send(connection, {"value": None})
    Candidate(connection, solution).serve()
