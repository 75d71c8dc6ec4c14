"""The executor runs the calls of a turn concurrently, each under its deadline, and turns the results into events.

It handles everything that a policy can write and a tool can do: every call ends in one event with one failure name and a text
for the policy, which may then go on. Only the cancellation of the trajectory itself propagates.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from nmoe.config.tables.rollout import BudgetSettings
from nmoe.cores import usable_cores
from nmoe.envs.tools.servers import LostError, ServerTool
from nmoe.envs.tools.session import ToolSession
from nmoe.envs.tools.tool import ArgumentsError, Tool, ToolOutput, as_output, shortened
from nmoe.envs.user_code import in_thread
from nmoe.errors import UserError
from nmoe.sandbox.api import SandboxFileError, SandboxSetupError
from nmoe.sandbox.workspaces.sources import WorkspaceError
from nmoe.types import ToolCall, ToolEvent
from nmoe.work import WORK

# The sandbox stops a tool at its deadline and stays usable. The executor's own deadline is later by this much and catches tools
# that do not stop.
GRACE_S = 2.0
# Calls that run in sandboxes at once, for each core. Hundreds of episodes often call in the same moment; if all their interpreters
# started together, every call would exceed its deadline for want of a CPU: of 800 on two busy cores 750 did.
CALLS_PER_CORE = 4


class AsyncToolExecutor:
    """Runs tool calls of trajectories within the limits of a budget."""

    def __init__(self, tools: Mapping[str, Tool], budget: BudgetSettings) -> None:
        self.tools = tools
        self._budget = budget
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots = asyncio.Semaphore(0)

    async def run(self, calls: Sequence[ToolCall], session: ToolSession) -> list[ToolEvent]:
        """Runs all calls concurrently and returns their events in order."""
        if len(calls) == 1:
            return [await self._run(calls[0], session)]
        try:
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(self._run(call, session)) for call in calls]
        except* UserError as found:  # of a server that cannot be used
            raise found.exceptions[0] from None
        return [task.result() for task in running]

    def asks_server(self, calls: Sequence[ToolCall]) -> bool:
        """Returns whether one of the calls is answered by a server."""
        return any(isinstance(self.tools.get(call.name), ServerTool) for call in calls)

    async def _run(self, call: ToolCall, session: ToolSession) -> ToolEvent:
        tool = self.tools.get(call.name)
        async with self._free() if tool is not None and tool.sandbox_parameter is not None else nullcontext():
            began = time.perf_counter()
            output = await self._output(call, tool, session)
            wall_s = time.perf_counter() - began
            WORK.pieces += 1
        failure, text, reason = _text(output, self._budget.tool_output_chars)
        if failure != "ok":
            text = f"{text}\n" if text and not text.endswith("\n") else text
            text += f"error ({failure}): {reason}" if reason else f"error ({failure})"
        return ToolEvent(call, failure, text, reason, began - session.began, wall_s)

    def _free(self) -> asyncio.Semaphore:
        """Returns the semaphore that limits how many calls run in sandboxes at once. Each batch of episodes has its own event loop
        and therefore its own semaphore.
        """
        if self._loop is not (loop := asyncio.get_running_loop()):
            self._loop, self._slots = loop, asyncio.Semaphore(CALLS_PER_CORE * usable_cores())
        return self._slots

    async def _output(self, call: ToolCall, tool: Tool | None, session: ToolSession) -> ToolOutput:
        if call.fault:
            return ToolOutput("", "parse_error", call.fault)
        if tool is None:
            return ToolOutput("", "unknown_tool", f"there is no tool {call.name!r}; there are {', '.join(self.tools)}")
        try:
            arguments = tool.parse(call.arguments)
        except ArgumentsError as error:
            return ToolOutput("", "parse_error", f"the arguments are not what {call.name} takes: {error}")
        if isinstance(tool, ServerTool):
            try:
                return await tool.server.call(session.servers, tool, arguments, self._budget.tool_s)
            except LostError as error:
                return ToolOutput("", "environment_error", shortened(str(error)))
        deadline_s = self._budget.tool_s + (GRACE_S if tool.sandbox_parameter else 0.0)
        clock = None
        try:
            if tool.sandbox_parameter is not None:
                # Before the call's time begins: opening has its own deadline, and is no fault of the policy's.
                arguments[tool.sandbox_parameter] = await session.sandbox()
            async with asyncio.timeout(deadline_s) as clock:
                if tool.is_async:
                    return as_output(await tool.function(**arguments))
                return as_output(await in_thread(tool.function, arguments))
        except SandboxSetupError as error:
            return ToolOutput("", "sandbox_setup_failed", shortened(str(error)))
        except WorkspaceError as error:
            return ToolOutput("", "workspace_failed", shortened(str(error)))
        except SandboxFileError as error:
            return ToolOutput("", error.failure, shortened(str(error)))
        except (Exception, SystemExit) as error:  # a tool may raise anything; the policy sees the error and may go on
            if isinstance(error, TimeoutError) and clock is not None and clock.expired():
                session.lost = session.lost or tool.sandbox_parameter is not None
                return ToolOutput("", "timeout", f"{call.name} took longer than {self._budget.tool_s:g} s")
            return ToolOutput("", "tool_error", shortened(f"{type(error).__name__}: {error}"))


def _text(output: ToolOutput, limit: int) -> tuple[Any, str, str]:
    """Returns the failure name, the text and the reason of a tool's output; a text longer than `limit` characters loses its middle,
    and binary output is left out."""
    if isinstance(output.content, bytes):
        try:
            text = output.content.decode()
        except UnicodeDecodeError as error:
            size = len(output.content)
            reason = f"binary output: of {size} bytes that at {error.start} is not UTF-8"
            # An earlier failure says more than the unreadable bytes.
            return (output.failure, "", output.reason) if output.failure != "ok" else ("tool_error", "", reason)
    else:
        # A lone surrogate is not a character and has no tokens.
        text = output.content.encode("utf-8", "replace").decode()
    if "\0" in text and output.failure == "ok":
        return "tool_error", "", f"binary output: a null byte among {len(text)} characters"
    if len(text) <= limit:
        return output.failure, text, output.reason
    half = limit // 2
    shown = f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
    if output.failure != "ok":
        return output.failure, shown, output.reason
    return "output_limit", shown, f"{len(text)} characters are more than the {limit} that are shown"
