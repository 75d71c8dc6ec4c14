"""Imports users' functions named as `package.module:function`, or finds their source without importing them."""

from __future__ import annotations

import ast
import asyncio
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nmoe.config.registry import Registry
from nmoe.errors import MissingInputError, UserError, cut, shown

# Values whose source alone shows that they cannot be called.
_NO_FUNCTION = (
    ast.Constant,
    ast.List,
    ast.Dict,
    ast.Set,
    ast.JoinedStr,
    ast.ListComp,
    ast.DictComp,
    ast.SetComp,
    ast.BinOp,
)


def load_function(registry: Registry, name: str) -> Callable[..., Any]:
    """Returns the function that the registry knows, or imports, under `name`. Raises UserError if there is none."""
    function: Callable[..., Any] = registry.get(name)
    if not callable(function):
        raise MissingInputError(f"{registry.kind} {name}: {shown(function)} is not a function", name)
    return function


async def in_thread(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Runs the function in a new thread; returns its value or raises its exception.

    Each call gets its own thread, so that slow calls never delay one another. It is a daemon, so that a call that never ends
    does not keep the process alive.
    """
    run, done = _settling(function, arguments)
    _started(run)
    return await done


class OneThread:
    """Runs calls one after the other in one thread, a daemon as in `in_thread`, until `end`. A call waits for the one before, also
    if the caller of that one has given up."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._begun = False

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Returns the function's value or raises its exception."""
        if not self._begun:
            self._begun = True
            _started(self._work)
        call, done = _settling(partial(function, *arguments), {})
        self._calls.put(call)
        return await done

    def end(self) -> None:
        """Ends the thread after the calls that were made."""
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


def _started(run: Callable[[], None]) -> None:
    threading.Thread(target=run, name="nmoe-user-code", daemon=True).start()


def _settling(
    function: Callable[..., Any], arguments: Mapping[str, Any]
) -> tuple[Callable[[], None], asyncio.Future[Any]]:
    """Returns a call for another thread, and the future that gets its outcome."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(set_outcome: Callable[[Any], None], outcome: Any) -> None:
        if not done.done():
            set_outcome(outcome)
            done.exception()  # counts as seen, also where the caller is cancelled before it wakes

    def run() -> None:
        set_outcome: Callable[[Any], None]
        try:
            set_outcome, outcome = done.set_result, function(**arguments)
        except BaseException as error:
            # A future does not accept StopIteration.
            set_outcome = done.set_exception
            outcome = RuntimeError(repr(error)) if isinstance(error, StopIteration) else error
        try:
            loop.call_soon_threadsafe(settle, set_outcome, outcome)
        except RuntimeError:
            return  # the loop has closed: no caller is waiting

    return run, done


def find_definition(kind: str, name: str) -> tuple[Path, ast.stmt]:
    """Finds the file and the statement that define `package.module:function`, without importing anything.

    Raises UserError if the file or the function does not exist, or is a value that cannot be called.
    """
    module, _, function = name.partition(":")
    try:
        file = _file_of(module, f"{kind} {name}")
    except UserError as error:
        raise MissingInputError(str(error), name) from None
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except (SyntaxError, ValueError) as error:
        raise MissingInputError(f"{kind} {name}: {file} is no Python: {error}", name) from error
    definition = _top_level(tree, function)
    if definition is None:
        known = ", ".join(sorted(_functions(tree))) or "none"
        raise MissingInputError(f"{kind} {name}: {file} has no function {function!r}; its functions are {known}", name)
    if (
        isinstance(definition, ast.Assign | ast.AnnAssign)
        and definition.value
        and _is_no_function(definition, function)
    ):
        value = cut(ast.unparse(definition.value))
        raise MissingInputError(f"{kind} {name}: {value} is not a function ({file}:{definition.lineno})", name)
    return file, definition


def _is_no_function(assignment: ast.Assign | ast.AnnAssign, name: str) -> bool:
    """Returns whether the source alone shows that the value of `name` cannot be called: in `f = [one]` it does, in `f, g =
    [one, two]` it does not."""
    targets = assignment.targets if isinstance(assignment, ast.Assign) else [assignment.target]
    plain = any(isinstance(target, ast.Name) and target.id == name for target in targets)
    return plain and isinstance(assignment.value, _NO_FUNCTION)


def _file_of(module: str, what: str) -> Path:
    """Finds a module's source file as an import would, starting with the working directory.

    Only the first part of a dotted name is given to Python's finders, because they import the parents of the rest.
    """
    top, *below = module.split(".")
    spec: ModuleSpec | None = PathFinder.find_spec(top, [str(Path.cwd()), *sys.path])
    if spec is None:
        try:
            spec = find_spec(top)
        except (ImportError, ValueError):
            spec = None
    if spec is None:
        raise UserError(f"{what}: there is no module {top!r}, in the working directory or installed")
    if not below and spec.origin is not None:
        candidates = [Path(spec.origin)]
    else:
        candidates = [
            path
            for location in spec.submodule_search_locations or []
            for path in (Path(location, *below).with_suffix(".py"), Path(location, *below, "__init__.py"))
        ]
    for path in candidates:
        if path.suffix == ".py" and path.is_file():
            return path
    raise UserError(f"{what}: there is no source of the module {module!r}")


def _top_level(tree: ast.Module, name: str) -> ast.stmt | None:
    """Returns the last statement that binds a name at the module's top level; None if there is none."""
    found = None
    for statement in tree.body:
        if name in _bound(statement):
            found = statement
    return found


def _functions(tree: ast.Module) -> Iterator[str]:
    return (one.name for one in tree.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))


def _bound(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name for alias in statement.names}
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
