"""The tools of an environment by name: those that come with nmoe, and functions of the user's own, imported here and
nowhere else."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path

from nmoe.config.tables.tools import BudgetSettings
from nmoe.envs.tools.builtin import builtin_tools
from nmoe.envs.tools.tool import Tool
from nmoe.envs.user_code import find_definition, load_function
from nmoe.errors import UserError


def load_tools(names: Sequence[str], budget: BudgetSettings, *, user_code: bool = True) -> dict[str, Tool]:
    """The tools that `[tools] use` names, by name and in its order. Without `user_code` those of the user are left out,
    and nothing is imported for them. Raises UserError for a function that is not there or cannot be a tool."""
    builtin = builtin_tools(budget)
    tools = [
        Tool(load_function("tool", name)) if ":" in name else builtin[name]
        for name in names
        if user_code or ":" not in name
    ]
    return {tool.name: tool for tool in tools}


def check_source(name: str) -> Path:
    """Checks a tool of the user's own without importing it. Returns the file that `package.module:function` is defined in.

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
