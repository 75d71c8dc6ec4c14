"""A tool of the user's own as its source shows it, without importing anything: is it there, and can it be a tool?"""

from __future__ import annotations

import ast
from pathlib import Path

from nmoe.envs.user_code import find_definition
from nmoe.errors import UserError


def check_source(name: str) -> Path:
    """The file that `package.module:function` is defined in.

    Raises UserError where the file or the function is not there, and for what the loading of the tool would refuse as far as
    the source alone shows it: a docstring or a hint that is missing, arguments without a JSON form.
    """
    file, definition = find_definition("tool", name)
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
