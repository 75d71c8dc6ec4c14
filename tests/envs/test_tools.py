"""Tools: what a policy is told of a function, what it may write as arguments, and the one failure that every call ends in."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tool_cases
from fake_sandbox import FakeSandbox, FakeSandboxes
from hypothesis import given
from hypothesis import strategies as st

from nmoe.config.tables.rollout import BudgetSettings, ToolsSettings
from nmoe.envs.tools import executor as executor_module
from nmoe.envs.tools.builtin import builtin_tools, load_tools, sandbox_limits
from nmoe.envs.tools.executor import AsyncToolExecutor
from nmoe.envs.tools.session import ToolSession
from nmoe.envs.tools.tool import ArgumentsError, Tool
from nmoe.errors import UserError
from nmoe.sandbox.api import Limits, Result, SandboxFileError
from nmoe.types import FAILURES, ToolCall, ToolEvent
from nmoe.work import WORK

BUDGET = BudgetSettings(tool_s=0.2, tool_output_chars=256)
PATIENT = BudgetSettings(tool_s=2.0)
ALL = (
    "add",
    "echo",
    "sleep",
    "block",
    "fail",
    "quit_process",
    "binary",
    "nul",
    "flood",
    "surrogate",
    "structured",
    "missing",
)
NAMES = [*(f"tool_cases:{name}" for name in ALL), "python", "bash", "read", "write", "edit", "search"]


def run(
    calls: Sequence[tuple[str, str]],
    sandbox: FakeSandbox | None = None,
    names: list[str] = NAMES,
    budget: BudgetSettings = BUDGET,
) -> list[ToolEvent]:
    async def within() -> list[ToolEvent]:
        executor = AsyncToolExecutor(load_tools(ToolsSettings(use=names), budget), budget)
        made = [ToolCall(name, arguments, f"0/{place}") for place, (name, arguments) in enumerate(calls)]
        async with ToolSession(FakeSandboxes(sandbox or FakeSandbox())) as session:
            return await executor.run(made, session)

    return asyncio.run(within())


def test_what_the_policy_is_told_comes_from_hints_and_docstring() -> None:
    tool = Tool(tool_cases.rich)
    point = {"type": "object", "properties": {"x": {"type": "number"}, "y": {"default": 0.0, "type": "number"}}}
    assert (tool.definition.name, tool.definition.description) == ("rich", "Takes all kinds of things.")
    assert tool.definition.parameters == {
        "type": "object",
        "properties": {
            "points": {"type": "array", "items": point | {"required": ["x"], "additionalProperties": False}},
            "kind": {"type": "string", "enum": ["line", "area"], "default": "line"},
            "label": {"type": "string", "nullable": True, "default": None},
            "sizes": {"type": "array", "items": {"type": "integer"}, "default": [1]},
        },
        "required": ["points"],
        "additionalProperties": False,
    }
    # What the sandbox gives is nothing that a policy could say.
    assert Tool(tool_cases.files).definition.parameters is not None
    assert list(Tool(tool_cases.files).definition.parameters["properties"]) == ["path"]  # type: ignore[index]
    assert Tool(tool_cases.forge).definition.parameters is None


def test_arguments_arrive_as_the_hints_say() -> None:
    parsed = Tool(tool_cases.rich).parse('{"points": [{"x": 1}], "label": "é"}')
    assert parsed == {"points": [tool_cases.Point(1.0, 0.0)], "label": "é"}
    assert Tool(tool_cases.add).parse('{"x": "3"}') == {"x": 3}  # as lenient as pydantic is
    assert Tool(tool_cases.forge).parse(" ") == {}


@given(st.text() | st.from_regex(r'\{"x": ?[^a]{0,20}\}', fullmatch=True))
def test_any_text_is_arguments_or_an_error_of_them(text: str) -> None:
    tool = Tool(tool_cases.add)
    try:
        parsed = tool.parse(text)
    except ArgumentsError:
        return
    assert set(parsed) <= {"x", "y"}
    assert isinstance(parsed["x"], int)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (tool_cases.untyped, "parameter 'x' has no type hint"),
        (tool_cases.silent, "has no docstring; the policy reads it"),
        (tool_cases.variadic, r"takes \*args"),
        (tool_cases.unwritable, "a hint has no JSON form"),
        (lambda: None, "a tool's name is letters, digits and _"),
    ],
)
def test_functions_that_can_not_be_tools(function: Any, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        Tool(function)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no_such_module:f", "importing no_such_module failed: ModuleNotFoundError"),
        ("tool_cases:no_such_function", "tool_cases.py has no 'no_such_function'"),
        ("tool_cases:FORGERY", "is not a function"),
    ],
)
def test_functions_that_are_not_there(name: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        load_tools(ToolsSettings(use=[name]), BUDGET)


def test_without_user_code_nothing_is_imported() -> None:
    assert list(load_tools(ToolsSettings(use=["no_such_module:f", "bash"]), BUDGET, user_code=False)) == ["bash"]


@pytest.mark.parametrize(
    ("call", "failure", "output"),
    [
        (("add", '{"x": 40, "y": 2}'), "ok", "42"),
        (("structured", ""), "ok", '{"é": [1, null]}'),
        (("surrogate", "{}"), "ok", "a?b"),
        (
            ("add", '{"x": 40'),
            "parse_error",
            "error (parse_error): the arguments are not what add takes: Invalid JSON: EOF",
        ),
        (("add", '{"x": 1, "z": 2}'), "parse_error", "z: Extra inputs are not permitted"),
        (("add", "[1]"), "parse_error", "should be an object"),
        (("multiply", "{}"), "unknown_tool", "error (unknown_tool): there is no tool 'multiply'; there are add, echo"),
        (("fail", ""), "tool_error", "error (tool_error): LookupError: no such word"),
        (("quit_process", ""), "tool_error", "error (tool_error): SystemExit: 3"),
        (("binary", ""), "tool_error", "error (tool_error): binary output: of 5 bytes that at 0 is not UTF-8"),
        (("nul", ""), "tool_error", "error (tool_error): binary output: a null byte among 3 characters"),
        (("flood", ""), "output_limit", "[99744 characters left out]"),
        (("missing", ""), "command_not_found", "looked\nerror (command_not_found): gcc: not here"),
        (("sleep", '{"seconds": 9}'), "timeout", "error (timeout): sleep took longer than 0.2 s"),
        (("block", '{"seconds": 0.5}'), "timeout", "error (timeout): block took longer than 0.2 s"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_every_call_has_its_own_named_end(call: tuple[str, str], failure: str, output: str) -> None:
    (event,) = run([call])
    assert event.failure == failure
    assert output in event.output
    assert len(event.output) < 256 + 600
    assert event.call == ToolCall(*call, "0/0")
    assert (event.reason == "") == (failure == "ok")
    assert event.record()["name"] == call[0]


def test_a_call_whose_form_is_broken_is_answered_with_its_fault() -> None:
    executor = AsyncToolExecutor(load_tools(ToolsSettings(use=NAMES), BUDGET), BUDGET)

    async def within() -> list[ToolEvent]:
        async with ToolSession(None) as session:
            return await executor.run([ToolCall("", "{", "1/0", fault="no JSON")], session)

    (event,) = asyncio.run(within())
    assert (event.failure, event.output) == ("parse_error", "error (parse_error): no JSON")


def test_calls_of_one_turn_run_at_the_same_time_and_keep_their_order() -> None:
    began = time.perf_counter()
    pieces, events = (
        WORK.pieces,
        run([("sleep", '{"seconds": 0.1}'), ("block", '{"seconds": 0.05}')] * 8, budget=PATIENT),
    )
    assert time.perf_counter() - began < 1.0  # 1.2 s one after another
    assert WORK.pieces - pieces == 16
    assert [event.output for event in events] == ["slept 0.1", "blocked 0.05"] * 8
    assert [event.call.call_id for event in events] == [f"0/{place}" for place in range(16)]
    assert all(0.04 < event.wall_s < 0.6 for event in events)


def test_a_tool_that_never_ends_does_not_keep_the_process() -> None:
    run([("block", '{"seconds": 0.4}')])
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "nmoe-user-code")


# --- tools that come with nmoe, over a sandbox -------------------------------------------------------------------------


def test_built_in_tools_pass_the_budget_on() -> None:
    budget = BudgetSettings(tool_s=3, memory_mb=100, processes=7, disk_mb=9, tool_output_chars=100_000)
    limits = sandbox_limits(budget)
    assert (limits.wall_s, limits.cpu_s, limits.memory_mb, limits.processes) == (3, 3, 100, 7)
    assert (limits.disk_mb, limits.file_mb, limits.output_kb) == (9, 9, 195)
    assert set(builtin_tools(budget)) == {"python", "bash", "read", "write", "edit", "search"}


def test_files_stay_from_call_to_call() -> None:
    sandbox = FakeSandbox()
    calls = [
        ("write", '{"path": "a.txt", "content": "one\\ntwo\\nthree\\n"}'),
        ("edit", '{"path": "a.txt", "old": "two", "new": "2"}'),
        ("read", '{"path": "a.txt", "first_line": 2, "lines": 1}'),
        ("edit", '{"path": "a.txt", "old": "zwei", "new": "2"}'),
        ("edit", '{"path": "a.txt", "old": "e", "new": "E"}'),
        ("read", '{"path": "b.txt"}'),
    ]
    events = [run([call], sandbox)[0] for call in calls]
    assert sandbox.contents == {"a.txt": b"one\n2\nthree\n"}
    assert [event.output for event in events] == [
        "wrote 14 bytes to a.txt",
        "edited a.txt",
        "2\n",
        "error (tool_error): the text stands 0 times in a.txt, not once",
        "error (tool_error): the text stands 3 times in a.txt, not once",
        "error (tool_error): b.txt: no such file",
    ]


@pytest.mark.parametrize(
    ("result", "failure", "output"),
    [
        (Result("ok", 0, b"42\n", b"", 0.1), "ok", "42\n"),
        (Result("nonzero_exit", 1, b"", b"boom\n", 0.1), "nonzero_exit", "boom\nerror (nonzero_exit): exit code 1"),
        (Result("nonzero_exit", -11, b"", b"", 0.1), "nonzero_exit", "error (nonzero_exit): ended by signal 11"),
        (Result("timeout", None, b"so far", b"", 0.2), "timeout", "so far\nerror (timeout): stopped after 0.2 s"),
        (Result("out_of_memory", None, b"", b"", 0.1), "out_of_memory", "error (out_of_memory): used more than 512 MB"),
        (
            Result("disk_full", None, b"", b"", 0.1),
            "disk_full",
            "error (disk_full): the workspace and temporary files are full",
        ),
        (
            Result("output_limit", None, b"y\n", b"", 0.1),
            "output_limit",
            "y\nerror (output_limit): wrote more than 64 KB",
        ),
        (
            Result("sandbox_denied", None, b"", b"", 0.1),
            "sandbox_denied",
            "error (sandbox_denied): the sandbox does not allow",
        ),
        (Result("ok", 0, b"\xff\xfe", b"", 0.1), "tool_error", "error (tool_error): binary output"),
        (Result("nonzero_exit", 2, b"\xff", b"", 0.1), "nonzero_exit", "error (nonzero_exit): exit code 2"),
    ],
)
def test_how_a_command_ended_is_how_the_call_ended(result: Result, failure: str, output: str) -> None:
    for name, arguments in (("python", '{"code": "x"}'), ("bash", '{"script": "x"}'), ("search", '{"pattern": "x"}')):
        sandbox = FakeSandbox(answers=[result])
        (event,) = run([(name, arguments)], sandbox)
        assert event.failure == failure
        assert event.output.startswith(output)
        assert sandbox.limits == [sandbox_limits(BUDGET)]


def test_output_that_was_cut_within_a_character_is_shown() -> None:
    cut = Result("output_limit", None, "né".encode()[:-1], b"", 0.1)
    (event,) = run([("bash", '{"script": "x"}')], FakeSandbox(answers=[cut]))
    assert event.output == "n\nerror (output_limit): wrote more than 64 KB"


def test_a_search_without_a_match_is_no_failure() -> None:
    sandbox = FakeSandbox(answers=[Result("nonzero_exit", 1, b"", b"", 0.1)])
    (event,) = run([("search", '{"pattern": "-x", "path": "-r"}')], sandbox)
    assert (event.failure, event.output) == ("ok", "no line matches")
    # A pattern or a path that looks like an option stays what it is.
    assert sandbox.commands == [["grep", "-rnEI", "-e", "-x", "--", "-r"]]


def test_a_file_that_the_sandbox_denies() -> None:
    class Denies(FakeSandbox):
        async def read_lines(self, path: str, first: int, count: int, *, limits: Limits | None = None) -> Result:
            raise SandboxFileError("sandbox_denied", f"{path}: outside the workspace")

    (event,) = run([("read", '{"path": "/etc/passwd"}')], Denies())
    assert (event.failure, event.output) == (
        "sandbox_denied",
        "error (sandbox_denied): /etc/passwd: outside the workspace",
    )


def test_the_sandbox_is_opened_once_and_only_when_asked_for() -> None:
    sandboxes = FakeSandboxes(FakeSandbox())
    executor = AsyncToolExecutor(load_tools(ToolsSettings(use=NAMES), BUDGET), BUDGET)

    async def within() -> None:
        async with ToolSession(sandboxes) as session:
            await executor.run([ToolCall("add", '{"x": 1}', "0/0")], session)
            assert sandboxes.opened == 0
            both = [ToolCall("bash", '{"script": "x"}', f"1/{place}") for place in range(2)]
            await executor.run(both, session)
            assert (sandboxes.opened, sandboxes.sandbox.closed) == (1, 0)

    asyncio.run(within())
    assert (sandboxes.opened, sandboxes.sandbox.closed) == (1, 1)


@given(st.lists(st.tuples(st.sampled_from([*ALL[:2], *ALL[4:], "?"]), st.text(max_size=8)), min_size=1, max_size=4))
def test_every_event_has_exactly_one_known_failure(calls: list[tuple[str, str]]) -> None:
    events = run(calls)
    assert len(events) == len(calls)
    assert all(event.failure in FAILURES for event in events)
    for event in events:
        event.output.encode()  # it can be tokenized


class CrowdedSandbox(FakeSandbox):
    """Of one machine with all others: each call needs a moment, and all of them far too long where too many run at once."""

    running = most = 0

    async def python(
        self, code: str, *, stdin: bytes = b"", limits: Limits | None = None, channel: socket.socket | None = None
    ) -> Result:
        CrowdedSandbox.running += 1
        CrowdedSandbox.most = max(CrowdedSandbox.most, CrowdedSandbox.running)
        try:
            await asyncio.sleep(0.02 if CrowdedSandbox.running <= 4 else 5.0)
            return await super().python(code, limits=limits)
        finally:
            CrowdedSandbox.running -= 1


def test_calls_of_many_episodes_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Together they take longer than a call's deadline; no call is late for having waited for others, or for its sandbox."""
    monkeypatch.setattr(executor_module, "usable_cores", lambda: 1)
    monkeypatch.setattr(executor_module, "GRACE_S", 0.0)

    class Slow(FakeSandboxes):
        async def open(self, workspace: Path | None = None) -> FakeSandbox:
            await asyncio.sleep(0.3)
            return CrowdedSandbox()

    budget = BudgetSettings(tool_s=0.5)
    runner = AsyncToolExecutor(load_tools(ToolsSettings(use=["python"]), budget), budget)

    async def episode(number: int) -> ToolEvent:
        async with ToolSession(Slow(FakeSandbox())) as session:
            (event,) = await runner.run([ToolCall("python", '{"code": "print(1)"}', f"{number}/0")], session)
            assert not session.lost
            return event

    async def all_of_them() -> list[ToolEvent]:
        return await asyncio.gather(*(episode(number) for number in range(8)))

    for _ in range(2):  # in an event loop each, as batches are
        events = asyncio.run(all_of_them())
        assert [event.failure for event in events] == ["ok"] * 8
    assert CrowdedSandbox.most == 4
