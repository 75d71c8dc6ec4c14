"""The tools of an environment by name: those that come with nmoe, and functions of the user's own, imported here and
nowhere else."""

from __future__ import annotations

from collections.abc import Sequence

from nmoe.config.tables.tools import BudgetSettings
from nmoe.envs.tools.builtin import builtin_tools
from nmoe.envs.tools.tool import Tool
from nmoe.envs.user_code import load_function


def load_tools(names: Sequence[str], budget: BudgetSettings, *, user_code: bool = True) -> dict[str, Tool]:
    """The tools that `[tools] use` names, by name and in its order. Without `user_code` those of the user are left out,
    and nothing is imported for them. Raises UserError for a function that is not there or can not be a tool."""
    builtin = builtin_tools(budget)
    tools = [
        Tool(load_function("tool", name)) if ":" in name else builtin[name]
        for name in names
        if user_code or ":" not in name
    ]
    return {tool.name: tool for tool in tools}
