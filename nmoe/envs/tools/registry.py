"""The tools of an environment by name: built-in ones, and user functions, which are imported only here."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path

from nmoe.config.registry import TOOLS
from nmoe.config.tables.rollout import BudgetSettings
from nmoe.envs.tools.builtin import builtin_tools
from nmoe.envs.tools.tool import Tool
from nmoe.envs.user_code import find_definition, load_function
from nmoe.errors import UserError


def load_tools(names: Sequence[str], budget: BudgetSettings, *, user_code: bool = True) -> dict[str, Tool]:
    """Loads the tools that `[tools] use` names, in order. Without `user_code`, the user's own are left out and not imported.

    Raises UserError for a function that does not exist or cannot be a tool.
    """
    builtin = builtin_tools(budget)
    tools = [
        builtin[name] if name in builtin else Tool(load_function(TOOLS, name))
        for name in names
        if user_code or name in builtin
    ]
    return {tool.name: tool for tool in tools}


def check_source(name: str) -> Path:
    """Checks a user's tool without importing it and returns the file that defines `package.module:function`.

    Raises UserError if the file or the function does not exist, and for whatever the source alone shows to be invalid: a
    missing docstring or hint, arguments without a JSON form.
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
