"""The tools of an environment by name: those that come with nmoe, and functions of the user's own, imported here and
nowhere else."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nmoe.config.environment import BudgetSettings
from nmoe.errors import UserError
from nmoe.rl.tools.builtin import builtin_tools
from nmoe.rl.tools.tool import Tool


def load_tools(names: Sequence[str], budget: BudgetSettings, *, user_code: bool = True) -> dict[str, Tool]:
    """The tools that `[tools] use` names, by name and in its order. Without `user_code` those of the user are left out,
    and nothing is imported for them. Raises UserError for a function that is not there or can not be a tool."""
    builtin = builtin_tools(budget)
    tools = [Tool(_function(name)) if ":" in name else builtin[name] for name in names if user_code or ":" not in name]
    return {tool.name: tool for tool in tools}


def _function(name: str) -> Callable[..., Any]:
    """The function `package.module:function`, looked for as Python does, in the working directory first."""
    module_name, _, attribute = name.partition(":")
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the module may raise anything while it is imported
        raise UserError(f"tool {name}: importing {module_name} failed: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(here)
    function = getattr(module, attribute, None)
    if not callable(function):
        raise UserError(f"tool {name}: {module.__file__} has no function {attribute!r}")
    return function
