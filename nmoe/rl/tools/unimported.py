"""A tool of the user's own as its source shows it, without importing anything: is it there, and can it be a tool?"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

from nmoe.errors import UserError


def check_source(name: str) -> Path:
    """The file that `package.module:function` is defined in.

    Raises UserError where the file or the function is not there, and for what the loading of the tool would refuse as far as
    the source alone shows it: a docstring or a hint that is missing, arguments without a JSON form.
    """
    module, _, function = name.partition(":")
    file = _file_of(module, name)
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except (SyntaxError, ValueError) as error:
        raise UserError(f"tool {name}: {file} is no Python: {error}") from error
    definition = _top_level(tree, function)
    if definition is None:
        known = ", ".join(sorted(_functions(tree))) or "none"
        raise UserError(f"tool {name}: {file} has no function {function!r}; its functions are {known}")
    if isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef):
        where = f"tool {name} ({file}:{definition.lineno})"
        if not ast.get_docstring(definition):
            raise UserError(f"{where}: has no docstring; the policy reads it to know what the tool does")
        parameters = definition.args
        if parameters.vararg or parameters.kwarg or parameters.posonlyargs:
            raise UserError(f"{where}: takes *args, **kwargs or positional-only arguments, which have no JSON form")
        for parameter in (*parameters.args, *parameters.kwonlyargs):
            if parameter.annotation is None:
                raise UserError(f"{where}: parameter {parameter.arg!r} has no type hint")
    return file


def _file_of(module: str, name: str) -> Path:
    """Where a module lies, looked for as an import would, in the working directory first; only the first name is given to
    Python's finders, because they import the parents of a dotted one."""
    top, *below = module.split(".")
    spec: ModuleSpec | None = PathFinder.find_spec(top, [str(Path.cwd()), *sys.path])
    if spec is None:
        try:
            spec = find_spec(top)
        except (ImportError, ValueError):
            spec = None
    if spec is None:
        raise UserError(f"tool {name}: there is no module {top!r}, in the working directory or installed")
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
    raise UserError(f"tool {name}: there is no source of the module {module!r}")


def _top_level(tree: ast.Module, name: str) -> ast.stmt | None:
    """The statement that binds a name at the module's top level, the last one if there are several."""
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
