"""Loads the tools of an environment by name: built-in tools, and users' functions, which are imported only here.

Built-in tools work in the trajectory's sandbox, whose files persist from call to call.
"""

from __future__ import annotations

import ast
import codecs
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from nmoe.config.registry import TOOLS
from nmoe.config.tables.rollout import BudgetSettings, ToolsSettings
from nmoe.envs.tools.servers import server_tools
from nmoe.envs.tools.tool import Tool, ToolOutput
from nmoe.envs.user_code import find_definition, load_function
from nmoe.errors import UserError
from nmoe.sandbox.api import Limits, Result, Sandbox

_Path = Annotated[str, Field(description="path of the file, from the workspace")]


def sandbox_limits(budget: BudgetSettings) -> Limits:
    """Returns the sandbox limits of one tool call, from the environment's budget.

    The output limit is above the number of characters shown to the policy, so that a call with long output is shortened and not
    stopped.
    """
    return Limits(
        wall_s=budget.tool_s,
        cpu_s=budget.tool_s,
        memory_mb=budget.memory_mb,
        processes=budget.processes,
        file_mb=budget.disk_mb,
        disk_mb=budget.disk_mb,
        output_kb=max(64, 2 * budget.tool_output_chars // 1024),
    )


def builtin_tools(budget: BudgetSettings) -> dict[str, Tool]:
    """Returns the built-in tools by name; the budget limits each of their calls."""
    limits = sandbox_limits(budget)

    async def python(
        code: Annotated[str, Field(description="the program; print what you want to see")], sandbox: Sandbox
    ) -> ToolOutput:
        """Runs a Python program from its start and returns what it prints. Files stay between calls, variables do not."""
        return _output(await sandbox.python(code, limits=limits), limits)

    async def bash(
        script: Annotated[str, Field(description="the script, of any number of lines")], sandbox: Sandbox
    ) -> ToolOutput:
        """Runs a bash script and returns what it writes. Files and the working directory stay between calls."""
        return _output(await sandbox.bash(script, limits=limits), limits)

    async def read(
        path: _Path,
        sandbox: Sandbox,
        first_line: Annotated[int, Field(ge=1, description="the first line to show, counted from 1")] = 1,
        lines: Annotated[int, Field(ge=1, description="how many lines to show")] = 200,
    ) -> ToolOutput:
        """Shows lines of a text file."""
        return _output(await sandbox.read_lines(path, first_line, lines, limits=limits), limits)

    async def write(
        path: _Path, content: Annotated[str, Field(description="the whole content")], sandbox: Sandbox
    ) -> str:
        """Writes a text file, in place of one that is there."""
        data = content.encode("utf-8", "replace")
        await sandbox.write(path, data)
        return f"wrote {len(data)} bytes to {path}"

    async def edit(
        path: _Path,
        old: Annotated[
            str, Field(min_length=1, description="the text to replace; it must stand in the file exactly once")
        ],
        new: Annotated[str, Field(description="the text to put in its place")],
        sandbox: Sandbox,
    ) -> str:
        """Replaces a piece of a text file."""
        await sandbox.edit(path, old.encode("utf-8", "replace"), new.encode("utf-8", "replace"))
        return f"edited {path}"

    async def search(
        pattern: Annotated[str, Field(min_length=1, description="an extended regular expression, as grep -E takes it")],
        sandbox: Sandbox,
        path: Annotated[str, Field(description="file or directory to search, from the workspace")] = ".",
    ) -> ToolOutput:
        """Lists the lines of text files that match a pattern, as path:line:text."""
        result = await sandbox.run(["grep", "-rnEI", "-e", pattern, "--", path], limits=limits)
        if (result.failure, result.exit_code, result.stderr) == ("nonzero_exit", 1, b""):
            return ToolOutput("no line matches")
        return _output(result, limits)

    functions: list[Callable[..., Any]] = [python, bash, read, write, edit, search]
    return {tool.name: tool for tool in [Tool(one) for one in functions]}


def _output(result: Result, limits: Limits) -> ToolOutput:
    reasons = {
        "nonzero_exit": _exit_reason(result.exit_code),
        "timeout": f"stopped after {limits.wall_s:g} s",
        "out_of_memory": f"used more than {limits.memory_mb} MB",
        "output_limit": f"wrote more than {limits.output_kb} KB",
        "disk_full": f"the workspace and temporary files are full, at {limits.disk_mb} MB",
        "sandbox_denied": "the sandbox does not allow that",
        "internal_error": "the sandbox was lost",
    }
    reason = reasons.get(result.failure, "")
    said = result.stdout + result.stderr
    if result.failure == "output_limit":
        said = _whole_characters(said)
    return ToolOutput(said, result.failure, reason)


def _whole_characters(cut: bytes) -> bytes:
    """Removes an incomplete UTF-8 character from the end of truncated bytes."""
    try:
        return cut[: codecs.utf_8_decode(cut, "strict", False)[1]]
    except UnicodeDecodeError:
        return cut


def _exit_reason(code: int | None) -> str:
    if code is None:
        return ""
    return f"exit code {code}" if code >= 0 else f"ended by signal {-code}"


def load_tools(settings: ToolsSettings, budget: BudgetSettings, *, user_code: bool = True) -> dict[str, Tool]:
    """Loads the tools of `[tools]`: what `use` names, in order, and then the tools of servers, which have been `pinned`. Without
    `user_code`, the user's functions are left out and not imported.

    Raises UserError for a function that does not exist or cannot be a tool, and for two tools of one name.
    """
    builtin = builtin_tools(budget)
    loaded = [
        builtin[name] if name in builtin else Tool(load_function(TOOLS, name))
        for name in settings.use
        if user_code or name in builtin
    ]
    tools = {tool.name: tool for tool in loaded}
    for tool in server_tools(settings):
        if tool.name in tools:
            raise UserError(
                f"tool {tool.name!r} of the server {tool.server.settings.name!r}: another tool has that name; give it another one "
                "in `rename`"
            )
        tools[tool.name] = tool
    return tools


def check_source(name: str) -> Path:
    """Checks a user's tool `package.module:function` without importing it, and returns the path of its source file.

    Raises UserError if the file or the function does not exist, and for faults that the source alone shows: a
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
